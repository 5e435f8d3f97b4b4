"""M3 as an optimizer of torch: matrices by two memories of their gradients, all else by AdamW."""

from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from laconic.errors import UsageError
from laconic.nested.optim.m3_equations import M3Hyperparameters, M3State, algorithm1, algorithm1_ema, newton_schulz
from laconic.nested.optim.param_groups import (
    ParamGroup,
    call_closure,
    check_choice,
    check_fraction,
    check_group,
    describe_parameter,
    split_groups_by_rule,
    step_adamw,
)


class M3(torch.optim.Optimizer):
    """The paper's multi-scale momentum Muon: Algorithm 1 as printed, or as running means, on matrices.

    `mode="ema"` (Eq. 75e, ours) moves a matrix by the same size whatever the loss is multiplied by; "literal" (Eq. 75)
    is the print, whose steps shrink like 1/sqrt(t). What `betas`, `alpha` and `slow_every` are not given is .95, .999,
    .9, .5 and 10, in "literal" .9, .999, .9, 1 and 100; the paper prints none of them. `second="elementwise"` has "ema"
    divide by the root of the mean square too; `decay` is decoupled, and "literal" has none.

    What is no matrix is moved by AdamW (`adam_betas`, `adam_decay`, the same lr), as is a group with rule="adamw":
    `M3.groups(model)` puts tables and heads there, which parameters alone do not tell from matrices. State: M1, M2, A,
    O2, V where it is used, and step, in the type of the parameter. Sharded matrices (FSDP2) are gathered for
    Newton-Schulz, everything else stays in shards.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2e-3,
        *,
        mode: Literal["ema", "literal"] = "ema",
        betas: tuple[float, float, float] | None = None,
        alpha: float | None = None,
        slow_every: int | None = None,
        ns_steps: int = 5,
        eps: float = 1e-8,
        decay: float = 0.0,
        second: Literal["none", "elementwise"] = "none",
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_decay: float = 0.0,
    ) -> None:
        check_choice("M3", "mode", mode, ("ema", "literal"))
        check_choice("M3", "second", second, ("none", "elementwise"))
        usual = M3Hyperparameters() if mode == "ema" else M3Hyperparameters((0.9, 0.999, 0.9), 1.0, 100)
        betas = usual.betas if betas is None else betas
        slow_every = usual.slow_every if slow_every is None else slow_every
        if mode == "ema":
            for name, value in zip(("betas[0]", "betas[1]", "betas[2]"), betas, strict=True):
                check_fraction("M3", name, value)
        elif decay or second != "none":
            raise UsageError(
                f"M3: decay {decay}, second {second!r}: Algorithm 1 has neither; take mode='ema', or leave them"
            )
        if slow_every < 1 or ns_steps < 1:
            raise UsageError(f"M3: slow_every {slow_every}, ns_steps {ns_steps}; both count from 1")
        self.mode = mode
        settings: ParamGroup = {
            "lr": lr, "betas": betas, "alpha": usual.alpha if alpha is None else alpha, "slow_every": slow_every,
            "ns_steps": ns_steps, "eps": eps, "decay": decay, "second": second, "adam_betas": adam_betas,
            "adam_decay": adam_decay, "rule": "m3",
        }  # fmt: skip
        super().__init__(split_groups_by_rule(params, m3_rule, {}), settings)

    @staticmethod
    def build_param_groups(model: nn.Module) -> list[ParamGroup]:
        """The parameters of a model that need a gradient: matrices; and for AdamW tables, heads and what is no matrix.

        A head is a map with as many outputs as some table has rows.
        """
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        words = {table.num_embeddings for table in tables}
        heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in words]
        apart = {id(m.weight) for m in (*tables, *heads)}
        found: dict[str, list[tuple[str, Tensor]]] = {"m3": [], "adamw": []}
        for name, p in model.named_parameters():
            if p.requires_grad:
                found["adamw" if id(p) in apart else m3_rule(name, p)].append((name, p))
        return [{"params": members, "rule": rule} for rule, members in found.items() if members]

    def add_param_group(self, param_group: ParamGroup) -> None:
        """A further group, rule "m3" unless it says another."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_group("M3", group, ("m3", "adamw"))
        for p in group["params"] if group["rule"] == "m3" else ():
            if p.ndim != 2:
                raise UsageError(f"M3: {describe_parameter(p)} is no matrix; give its group rule='adamw'")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update; gives the closure's loss."""
        loss = call_closure(closure)
        for group in self.param_groups:
            if group["rule"] == "adamw":
                step_adamw(self.state, group)
                continue
            for p in cast("list[Tensor]", group["params"]):
                if p.grad is not None:
                    self.update_parameter(p, p.grad, group)
        return loss

    def update_parameter(self, p: Tensor, g: Tensor, group: ParamGroup) -> None:
        """One matrix and its memory."""
        state = self.state[p]
        if not state:
            state.update({name: torch.zeros_like(p) for name in ("M1", "M2", "A", "O2")}, step=torch.zeros(()))
        held = M3State(int(state["step"]), state["M1"], state["M2"], state["A"], state["O2"], state.get("V"))
        how = M3Hyperparameters(tuple(group["betas"]), group["alpha"], group["slow_every"], group["eps"])
        NS = partial(orthogonalize, steps=group["ns_steps"])
        if self.mode == "literal":
            moved, held = algorithm1(p, g, held, group["lr"], how, NS)
        else:
            moved, held = algorithm1_ema(
                p, g, held, group["lr"], how, NS, group["decay"], group["second"] == "elementwise"
            )
        p.copy_(moved)
        state.update(M1=held.M1, M2=held.M2, A=held.A, O2=held.O2)
        if held.V is not None:
            state["V"] = held.V
        state["step"] += 1


def m3_rule(name: str, p: Tensor) -> str:
    """Matrices by M3, all else by AdamW."""
    return "m3" if p.ndim == 2 else "adamw"


def orthogonalize(m: Tensor, steps: int) -> Tensor:
    """Newton-Schulz of a matrix, gathered first where it lies in shards; the result lies as m does."""
    if not hasattr(m, "full_tensor"):
        return newton_schulz(m, steps=steps)
    from torch.distributed.tensor import DTensor, Replicate  # slow to import, as all of the package

    sharded = cast(DTensor, m)
    whole, mesh = newton_schulz(sharded.full_tensor(), steps=steps), sharded.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=sharded.placements)
