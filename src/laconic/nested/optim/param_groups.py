"""Split parameters into groups by the rule that updates them; AdamW (arXiv:1711.05101) for those without one."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from laconic.errors import UsageError

ParamGroup = dict[str, Any]
SCHEDULER_KEYS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")  # of torch's schedulers
RULE_SETTINGS = "rule_settings"  # key of a group for the optimizer's settings that the group's rule needs


def split_groups_by_rule(
    params: ParamsT, rule: Callable[[str, Tensor], str], adamw_defaults: Mapping[str, Any]
) -> list[ParamGroup]:
    """Split each group whose parameters have two rules; a group with a key `rule` is taken as it is.

    `adamw_defaults` are further settings of AdamW groups, such as the learning rate.
    """
    if isinstance(params, Tensor):
        raise UsageError("optimizer: give several parameters, such as model.parameters(), not one tensor")
    entries = list(cast("list[Any]", params))
    if not entries:
        raise UsageError("optimizer: no parameters given; pass model.parameters()")
    groups: list[ParamGroup] = entries if isinstance(entries[0], dict) else [{"params": entries}]
    split: list[ParamGroup] = []
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        by_rule: dict[str, list[Any]] = {}
        for entry in members:
            named = cast(Any, entry if isinstance(entry, tuple) else (describe_parameter(entry), entry))
            name, p = cast("tuple[str, Tensor]", named)
            by_rule.setdefault(group.get("rule") or rule(name, p), []).append(entry)
        for kind, some in by_rule.items():
            defaults = dict(adamw_defaults) if kind == "adamw" else dict[str, Any]()
            split.append({**defaults, **group, "params": some, "rule": kind})
    return split


def describe_parameter(p: Tensor) -> str:
    """Return a description of a parameter without a name."""
    return f"a parameter {list(p.shape)}"


def check_settings(optimizer: str, settings: ParamGroup, rules: tuple[str, ...]) -> None:
    """Raise `UsageError` for an unknown rule and for invalid settings that both optimizers have."""
    check_choice(optimizer, "rule", settings["rule"], rules)
    check_not_negative(optimizer, "lr", settings["lr"])
    check_not_negative(optimizer, "weight_decay", settings["weight_decay"])
    check_length(optimizer, "adam_betas", settings["adam_betas"], 2)
    for n, beta in enumerate(settings["adam_betas"]):
        check_fraction(optimizer, f"adam_betas[{n}]", beta)


def check_options(optimizer: str, group: ParamGroup, defaults: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an option of a group that the optimizer does not have."""
    known = {*defaults, "params", "param_names", *SCHEDULER_KEYS, RULE_SETTINGS}
    unknown = next((key for key in group if key not in known), None)
    if unknown is not None:
        raise UsageError(
            f"{optimizer}: a group has {unknown}, which is not an option; use {', '.join(sorted(defaults))}"
        )


def check_choice(owner: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `UsageError` for an argument of an optimizer or level whose value is not among the choices."""
    if value not in choices:
        raise UsageError(f"{owner}: {name} {value!r} is unknown; use one of {', '.join(map(repr, choices))}")


def check_fraction(optimizer: str, name: str, value: object) -> None:
    """Raise `UsageError` for a value that is not a number in [0, 1)."""
    if not (isinstance(value, Real | Tensor) and 0 <= cast(float, value) < 1):
        raise UsageError(f"{optimizer}: {name} {value!r} must be a number in [0, 1)")


def check_not_negative(optimizer: str, name: str, value: object) -> None:
    """Raise `UsageError` for a value that is not a finite number of 0 or more."""
    if not (isinstance(value, Real | Tensor) and 0 <= cast(float, value) < math.inf):
        raise UsageError(f"{optimizer}: {name} {value!r} must be a number of 0 or more, and finite")


def check_length(optimizer: str, name: str, values: object, length: int) -> None:
    """Raise `UsageError` for a value that is not a sequence of this length."""
    if not (isinstance(values, Sequence) and len(cast("Sequence[object]", values)) == length):
        raise UsageError(f"{optimizer}: {name} {values!r}: give {length} numbers")


def check_state_dict(name: str, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise `UsageError` if the groups of a state dict have other rules than those of an optimizer."""
    saved_rules = [group.get("rule") for group in state_dict["param_groups"]]
    rules = [group["rule"] for group in optimizer.param_groups]
    if saved_rules != rules:
        raise UsageError(
            f"{name}: the state has groups with the rules {saved_rules}, not {rules}; load it as it was saved"
        )


def iter_saved_states(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    """Yield each parameter with its state in a state dict that was loaded."""
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        for index, p in zip(saved["params"], cast("list[Tensor]", group["params"]), strict=True):
            yield p, state_dict["state"].get(index, {})


def call_closure(closure: Callable[[], float] | None) -> float | None:
    """Return the loss of a closure, as `torch.optim` calls it."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def step_adamw(state: Mapping[Tensor, dict[str, Any]], group: ParamGroup) -> None:
    """Take one step of PyTorch's AdamW on a group, with `lr`, `adam_betas` and `weight_decay`."""
    params = [p for p in cast("list[Tensor]", group["params"]) if p.grad is not None]
    for p in params:
        if not state[p]:
            state[p].update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    states, is_mixed = [state[p] for p in params], len({type(p) for p in params}) > 1  # sharded tensors, whole scalars
    adamw(
        params,
        [cast(Tensor, p.grad) for p in params],
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        [],
        [s["step"] for s in states],
        foreach=False if is_mixed else None,
        amsgrad=False,
        beta1=group["adam_betas"][0],
        beta2=group["adam_betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=1e-8,
        maximize=False,
    )
