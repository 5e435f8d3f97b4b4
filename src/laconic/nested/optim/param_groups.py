"""Groups of parameters by the rule that moves them, and AdamW (arXiv:1711.05101) for those that have none."""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from laconic.errors import UsageError

ParamGroup = dict[str, Any]


def split_groups_by_rule(
    params: ParamsT, rule: Callable[[str, Tensor], str], adamw_defaults: Mapping[str, Any]
) -> list[ParamGroup]:
    """The groups given, each in two where its parameters have two rules; a group that says its `rule` is taken whole.

    Parameters may come with names. `adam` is what the groups of AdamW have besides, lr among it.
    """
    given = list(cast("list[Any]", params))
    if not given:
        raise UsageError("optimizer: no parameter was given; hand over model.parameters()")
    groups: list[ParamGroup] = given if isinstance(given[0], dict) else [{"params": given}]
    found: list[ParamGroup] = []
    for group in groups:
        entries = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        own: dict[str, list[Any]] = {}
        for entry in entries:
            name, p = cast(
                "tuple[str, Tensor]", entry if isinstance(entry, tuple) else (describe_parameter(entry), entry)
            )
            own.setdefault(group.get("rule") or rule(name, p), []).append(entry)
        for kind, members in own.items():
            besides = dict(adamw_defaults) if kind == "adamw" else dict[str, Any]()
            found.append({**besides, **group, "params": members, "rule": kind})
    return found


def describe_parameter(p: Tensor) -> str:
    """What a parameter without a name is called."""
    return f"a parameter {list(p.shape)}"


def check_group(optimizer: str, group: ParamGroup, rules: tuple[str, ...]) -> None:
    """Raises `Usage` (2) for a group's rule that there is not, and a rate no step can be taken by."""
    if group.get("rule") not in rules:
        raise UsageError(f"{optimizer}: rule {group.get('rule')!r}; there are {', '.join(rules)}")
    if not (0 < group["lr"] < math.inf):
        raise UsageError(f"{optimizer}: lr {group['lr']}; a step is larger than 0 and finite")


def check_choice(optimizer: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises `Usage` (2) for a word that there is not."""
    if value not in choices:
        raise UsageError(f"{optimizer}: {name} {value!r}; there are {', '.join(map(repr, choices))}")


def check_fraction(optimizer: str, name: str, value: float) -> None:
    """Raises `Usage` (2) for what is no share of the old that stays."""
    if not 0 <= value < 1:
        raise UsageError(f"{optimizer}: {name} {value}; a share that stays lies in [0, 1)")


def call_closure(closure: Callable[[], float] | None) -> float | None:
    """The loss of a closure, as `torch.optim` calls it."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def step_adamw(state: Mapping[Tensor, dict[str, Any]], group: ParamGroup) -> None:
    """One step of PyTorch's AdamW on a group: `lr`, `adam_betas`, `adam_decay`."""
    moved = [p for p in cast("list[Tensor]", group["params"]) if p.grad is not None]
    for p in moved:
        if not state[p]:
            state[p].update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    kept = [state[p] for p in moved]
    adamw(
        moved,
        [cast(Tensor, p.grad) for p in moved],
        [s["exp_avg"] for s in kept],
        [s["exp_avg_sq"] for s in kept],
        [],
        [s["step"] for s in kept],
        amsgrad=False,
        beta1=group["adam_betas"][0],
        beta2=group["adam_betas"][1],
        lr=group["lr"],
        weight_decay=group["adam_decay"],
        eps=1e-8,
        maximize=False,
    )
