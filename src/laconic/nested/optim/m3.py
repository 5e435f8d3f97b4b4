"""M3 as a torch optimizer: matrices by two memories of their gradients, everything else by AdamW."""

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
    """Multi-scale momentum Muon (Nested Learning, Algorithm 1), as printed or with running means.

    Parameters that are no matrices are updated by AdamW with the same learning rate, as are groups with
    `rule="adamw"`; `M3.build_param_groups(model)` puts embeddings and output heads there, which parameters alone do
    not tell from matrices. The state of a matrix is M1, M2, A, O2 and step, and V if it is used, in its own type.
    Sharded matrices (FSDP2) are gathered for Newton-Schulz only.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate.
        mode: "ema" (Eq. 75e, ours) updates a matrix by the same size whatever the scale of the loss; "literal"
            (Eq. 75) follows the paper, and its updates shrink like 1/sqrt(t).
        betas: factors of the fast memory, the squares and the slow memory. By default (.95, .999, .9), in "literal"
            (.9, .999, .9); the paper gives none of these numbers.
        alpha: weight of the slow memory, by default .5, in "literal" 1.
        slow_every: gradients per slow update, by default 10, in "literal" 100.
        ns_steps: Newton-Schulz iterations.
        eps: added to the root of the squares.
        decay: decoupled weight decay, for "ema".
        second: "elementwise" divides by the root of the mean square, for "ema".
        adam_betas, adam_decay: settings of AdamW.

    Raises:
        UsageError: for invalid settings, and for a group with rule "m3" that is no matrix.

    Example:
        >>> import torch, laconic
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = laconic.M3(laconic.M3.build_param_groups(model), lr=0.01)
        >>> model(torch.randn(4, 3)).square().mean().backward()
        >>> optimizer.step()
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
        defaults = M3Hyperparameters() if mode == "ema" else M3Hyperparameters((0.9, 0.999, 0.9), 1.0, 100)
        betas = defaults.betas if betas is None else betas
        slow_every = defaults.slow_every if slow_every is None else slow_every
        if mode == "ema":
            for n, beta in enumerate(betas):
                check_fraction("M3", f"betas[{n}]", beta)
        elif decay or second != "none":
            raise UsageError(f"M3: decay {decay} and second {second!r} need mode='ema'; Algorithm 1 has neither")
        if slow_every < 1 or ns_steps < 1:
            raise UsageError(f"M3: slow_every {slow_every} and ns_steps {ns_steps} must be 1 or more")
        self.mode = mode
        settings: ParamGroup = {
            "lr": lr, "betas": betas, "alpha": defaults.alpha if alpha is None else alpha, "slow_every": slow_every,
            "ns_steps": ns_steps, "eps": eps, "decay": decay, "second": second, "adam_betas": adam_betas,
            "adam_decay": adam_decay, "rule": "m3",
        }  # fmt: skip
        super().__init__(split_groups_by_rule(params, m3_rule, {}), settings)

    @staticmethod
    def build_param_groups(model: nn.Module) -> list[ParamGroup]:
        """Return groups of the trainable parameters of a model.

        Matrices are updated by M3; embeddings, output heads and everything else by AdamW. A head is a linear map with
        as many outputs as an embedding has rows.
        """
        embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        vocab_sizes = {embedding.num_embeddings for embedding in embeddings}
        heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in vocab_sizes]
        excluded = {id(m.weight) for m in (*embeddings, *heads)}
        members: dict[str, list[tuple[str, Tensor]]] = {"m3": [], "adamw": []}
        for name, p in model.named_parameters():
            if p.requires_grad:
                members["adamw" if id(p) in excluded else m3_rule(name, p)].append((name, p))
        return [{"params": params, "rule": rule} for rule, params in members.items() if params]

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group, with rule "m3" unless it names another."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_group("M3", group, ("m3", "adamw"))
        for p in group["params"] if group["rule"] == "m3" else ():
            if p.ndim != 2:
                raise UsageError(f"M3: {describe_parameter(p)} is no matrix; set rule='adamw' for its group")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters; return the closure's loss."""
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
        """Update one matrix and its state."""
        state = self.state[p]
        if not state:
            state.update({name: torch.zeros_like(p) for name in ("M1", "M2", "A", "O2")}, step=torch.zeros(()))
        old = M3State(int(state["step"]), state["M1"], state["M2"], state["A"], state["O2"], state.get("V"))
        hyperparameters = M3Hyperparameters(tuple(group["betas"]), group["alpha"], group["slow_every"], group["eps"])
        NS = partial(orthogonalize, steps=group["ns_steps"])
        if self.mode == "literal":
            updated, new = algorithm1(p, g, old, group["lr"], hyperparameters, NS)
        else:
            has_second = group["second"] == "elementwise"
            updated, new = algorithm1_ema(p, g, old, group["lr"], hyperparameters, NS, group["decay"], has_second)
        p.copy_(updated)
        state.update(M1=new.M1, M2=new.M2, A=new.A, O2=new.O2)
        if new.V is not None:
            state["V"] = new.V
        state["step"] += 1


def m3_rule(name: str, p: Tensor) -> str:
    """Return the rule of a parameter: "m3" for matrices, else "adamw"."""
    return "m3" if p.ndim == 2 else "adamw"


def orthogonalize(m: Tensor, steps: int) -> Tensor:
    """Apply Newton-Schulz to a matrix; a sharded one is gathered, and the result sharded like it."""
    if not hasattr(m, "full_tensor"):
        return newton_schulz(m, steps=steps)
    from torch.distributed.tensor import DTensor, Replicate  # slow to import

    sharded = cast(DTensor, m)
    full, mesh = newton_schulz(sharded.full_tensor(), steps=steps), sharded.device_mesh
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=sharded.placements)
