"""The base of DGD and M3: groups with the rule of the optimizer, the others updated by AdamW (arXiv:1711.05101)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from laconic.errors import UsageError

ParamGroup = dict[str, Any]
SCHEDULER_KEYS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")  # of torch's schedulers
RULE_SETTINGS = "rule_settings"  # key of a group for the optimizer's settings that the group's rule needs


class RuleOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer whose groups have the key "rule": its own rule, or "adamw".

    Attributes:
        rule: Name of its own rule.
        settings: Names of attributes that a copy needs; a state records them, and who loads it must agree.
        state_name: The part of a state whose type torch would change to that of the parameter.
        adamw_settings: Settings of AdamW groups that do not name them.
    """

    rule: str
    settings: tuple[str, ...]
    state_name: str
    adamw_settings: ParamGroup

    def __init__(self, params: ParamsT, defaults: ParamGroup) -> None:
        super().__init__(params, {**defaults, "rule": self.rule})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in ("adamw_settings", *self.settings)}}

    @abstractmethod
    def _find_rule(self, name: str, p: Tensor) -> str:
        """Return the rule of a parameter whose group has none."""

    def _check_group(self, group: ParamGroup) -> None:
        """Raise `UsageError` for invalid settings of a group."""
        name = type(self).__name__
        if group["rule"] not in (self.rule, "adamw"):
            raise UsageError(f"{name}: rule {group['rule']!r} is unknown; use {self.rule!r} or 'adamw'")
        check_number(name, "lr", group["lr"])
        check_number(name, "weight_decay", group["weight_decay"])
        check_numbers(name, "adam_betas", group["adam_betas"], 2, below=1.0)
        known = {*self.defaults, "params", "param_names", *SCHEDULER_KEYS, RULE_SETTINGS}
        unknown = next((key for key in group if key not in known), None)
        if unknown is not None:
            options = ", ".join(sorted(self.defaults))
            raise UsageError(f"{name}: a group has {unknown}, which is not an option; use {options}")

    @abstractmethod
    def _prepare_group(self, group: ParamGroup) -> None:
        """Check and prepare the parameters of a group that was added."""

    @abstractmethod
    def _step_group(self, group: ParamGroup) -> None:
        """Update a group by the optimizer's own rule."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group, `params` and options of the constructor, or two if its parameters have two rules."""
        members = param_group["params"]
        entries: list[Any] = [members] if isinstance(members, Tensor) else list(members)
        by_rule: dict[str, list[Any]] = {}
        for entry in entries:
            named = cast(Any, entry if isinstance(entry, tuple) else (describe_parameter(entry), entry))
            rule = param_group.get("rule") or self._find_rule(*named)
            by_rule.setdefault(rule, []).append(entry)
        for rule, params in by_rule.items():
            group = {**param_group, "params": params, "rule": rule}
            if rule == "adamw":
                group = {**self.adamw_settings, **group}
            self._check_group({**self.defaults, **group})
            super().add_param_group(group)
            added = self.param_groups[-1]
            if rule == self.rule:
                self._prepare_group(added)
            added[RULE_SETTINGS] = {name: getattr(self, name) for name in self.settings} | {
                "base_lr": float(added["lr"]), "adamw": self.adamw_settings
            }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of an optimizer with the same options. Raises `UsageError` for another.

        The conversion by which torch gives a part of the state its parameter's type is undone.
        """
        name = type(self).__name__
        saved_groups = state_dict["param_groups"]
        saved_rules = [group.get("rule") for group in saved_groups]
        rules = [group["rule"] for group in self.param_groups]
        if saved_rules != rules:
            raise UsageError(
                f"{name}: the state has groups with the rules {saved_rules}, not {rules}; load it as it was saved"
            )
        for key in self.settings:
            ours = getattr(self, key)
            theirs = next((g[RULE_SETTINGS][key] for g in saved_groups if key in g.get(RULE_SETTINGS, {})), ours)
            if theirs != ours:
                raise UsageError(
                    f"{name}: the state is of {key}={theirs!r}, not {ours!r}; build {name}({key}={theirs!r})"
                )
        own_settings = [group[RULE_SETTINGS] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for saved, group, settings in zip(saved_groups, self.param_groups, own_settings, strict=True):
            group[RULE_SETTINGS] = settings | group.get(RULE_SETTINGS, {})  # those of an earlier version are fewer
            for index, p in zip(saved["params"], cast("list[Tensor]", group["params"]), strict=True):
                state = state_dict["state"].get(index, {})
                if self.state_name in state:
                    self.state[p][self.state_name] = state[self.state_name].to(p.device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters; return the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if any(p.grad is not None and p.grad.is_sparse for p in group["params"]):
                raise UsageError(f"{type(self).__name__}: a gradient is sparse; use nn.Embedding(sparse=False)")
            if group["rule"] == "adamw":
                step_adamw(self.state, group)
            else:
                self._step_group(group)
        return loss


def group_parameters(model: nn.Module, rule: str, has_rule: Callable[[Tensor], bool]) -> list[ParamGroup]:
    """Return the trainable parameters of a model in a group with this rule and one with "adamw"."""
    members: dict[str, list[tuple[str, Tensor]]] = {rule: [], "adamw": []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            members[rule if has_rule(p) else "adamw"].append((name, p))
    return [{"params": params, "rule": rule} for rule, params in members.items() if params]


def describe_parameter(p: Tensor) -> str:
    return f"a parameter {list(p.shape)}"


def check_number(optimizer: str, name: str, value: object, below: float = math.inf) -> None:
    """Raise `UsageError` for a value that is not a number in [0, below)."""
    if not (isinstance(value, Real | Tensor) and 0 <= cast(float, value) < below):
        raise UsageError(f"{optimizer}: {name} {value!r} must be a number in [0, {below:g})")


def check_numbers(optimizer: str, name: str, values: object, length: int, below: float) -> None:
    """Raise `UsageError` for a value that is not a sequence of this length of numbers in [0, below)."""
    if not (isinstance(values, Sequence) and len(cast("Sequence[object]", values)) == length):
        raise UsageError(f"{optimizer}: {name} {values!r}: give {length} numbers")
    for n, value in enumerate(cast("Sequence[object]", values)):
        check_number(optimizer, f"{name}[{n}]", value, below)


def step_adamw(state: Mapping[Tensor, dict[str, Any]], group: ParamGroup) -> None:
    """Take one step of PyTorch's AdamW on a group, with `lr`, `adam_betas` and `weight_decay`."""
    params = [p for p in cast("list[Tensor]", group["params"]) if p.grad is not None]
    for p in params:
        if not state[p]:
            state[p].update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    states = [state[p] for p in params]
    has_shards_and_scalars = len({type(p) for p in params}) > 1  # FSDP shards all but scalars; one call cannot mix them
    adamw(
        params,
        [cast(Tensor, p.grad) for p in params],
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        [],
        [s["step"] for s in states],
        foreach=False if has_shards_and_scalars else None,
        amsgrad=False,
        beta1=group["adam_betas"][0],
        beta2=group["adam_betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=1e-8,
        maximize=False,
    )
