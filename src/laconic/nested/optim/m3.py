"""M3 as a torch optimizer: matrices by two memories of their gradients, everything else by AdamW."""

import math
import re
from collections.abc import Iterable
from functools import partial
from numbers import Integral
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from laconic.errors import UsageError
from laconic.generation.config import check_choices
from laconic.models.attention import accumulation_dtype
from laconic.models.checkpoints.weights import has_fast_bfloat16
from laconic.nested.optim.m3_equations import QUINTIC, M3Hyperparameters, M3Memories, algorithm1, algorithm1_ema
from laconic.nested.optim.rule_optimizer import (
    ParamGroup,
    RuleOptimizer,
    check_number,
    check_numbers,
    describe_parameter,
    group_parameters,
)

Mode = Literal["ema", "literal"]
IN_BLOCK = re.compile(r"(^|\.)\d+\.")  # matches the name of a module inside a numbered block


class M3(RuleOptimizer):
    """Multi-scale momentum Muon (Nested Learning, Algorithm 1), as printed or with running means.

    Parameters that are not matrices are updated by AdamW with the same learning rate, as are groups with
    `rule="adamw"`; `M3.build_param_groups(model)` puts embeddings and output heads there, which without the model look
    like any other matrix. Newton-Schulz runs in bfloat16, as in torch.optim.Muon, and in float64 for float64 matrices;
    on a CPU that is slow at bfloat16, its products run in float32. The state of a matrix is M1, M2 and step, V for
    "literal", and O2 in the type of Newton-Schulz's result: 10 bytes for each number of a float32 matrix. Sharded
    matrices (FSDP2) are gathered for Newton-Schulz only. `torch.compile` the model, not `step`, which torch cannot
    trace.

    Args:
        params: Parameters, named parameters or groups.
        lr: Learning rate.
        mode: "ema" (Eq. 75e, ours) updates a matrix by the same size whatever the scale of the loss; "literal"
            (Eq. 75) follows the paper, and its updates shrink like 1/sqrt(t).
        betas: Factors of the fast memory, the squares and the slow memory. By default (.95, .999, .9), in "literal"
            (.9, .999, .9); the paper gives none of these numbers.
        alpha: Weight of the slow memory, by default .5, in "literal" 1.
        slow_every: Gradients per slow update, by default 10, in "literal" 100.
        ns_steps: Newton-Schulz iterations.
        eps: Added to the root of the squares, for "literal".
        weight_decay: Decoupled weight decay of matrices, for "ema". A group may set its own, whatever its rule.
        adam_betas: Factors of AdamW's memories.
        adam_weight_decay: Decoupled weight decay of AdamW.

    Raises:
        UsageError: For invalid settings, for a group with an unknown option (M3 has no `foreach` or `maximize`), and
            for a parameter of a group with rule "m3" that is complex or not a matrix.

    Examples:
        >>> import torch, laconic
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = laconic.M3(laconic.M3.build_param_groups(model), lr=0.01)
        >>> model(torch.randn(4, 3)).square().mean().backward()
        >>> optimizer.step()
    """

    rule = "m3"
    settings = ("mode",)
    state_name = "O2"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2e-3,
        *,
        mode: Mode = "ema",
        betas: tuple[float, float, float] | None = None,
        alpha: float | None = None,
        slow_every: int | None = None,
        ns_steps: int = 5,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_weight_decay: float = 0.0,
    ) -> None:
        check_choices(mode=(mode, Mode))
        check_number("M3", "adam_weight_decay", adam_weight_decay)
        explicit = {"betas": betas, "alpha": alpha, "slow_every": slow_every, "eps": eps}
        defaults = M3Hyperparameters() if mode == "ema" else M3Hyperparameters((0.9, 0.999, 0.9), 1.0, 100)
        self.mode = mode
        self.adamw_settings = {"weight_decay": adam_weight_decay}
        super().__init__(
            params,
            {
                "lr": lr, "ns_steps": ns_steps, "weight_decay": weight_decay, "adam_betas": adam_betas,
                **vars(defaults), **{name: value for name, value in explicit.items() if value is not None},
            },
        )  # fmt: skip

    @staticmethod
    def build_param_groups(model: nn.Module) -> list[ParamGroup]:
        """Return groups of the trainable parameters of a model.

        Matrices are updated by M3; embeddings, output heads and everything else by AdamW. A head is a linear map with
        as many outputs as an embedding has rows, outside the numbered blocks of the model: inside them, a map may
        just be as wide as the table of positions.
        """
        embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        vocab_sizes = {embedding.num_embeddings for embedding in embeddings}
        heads = [
            m
            for name, m in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
            if isinstance(m, nn.Linear) and m.out_features in vocab_sizes and not IN_BLOCK.search(name)
        ]
        excluded = {id(m.weight) for m in (*embeddings, *heads)}
        return group_parameters(model, "m3", lambda p: id(p) not in excluded and p.ndim == 2)

    def _find_rule(self, name: str, p: Tensor) -> str:
        return "m3" if p.ndim == 2 else "adamw"

    def _check_group(self, group: ParamGroup) -> None:
        super()._check_group(group)
        check_numbers("M3", "betas", group["betas"], 3, below=1.0 if self.mode == "ema" else math.inf)
        for name in ("alpha", "eps"):
            check_number("M3", name, group[name])
        for name in ("slow_every", "ns_steps"):
            if not isinstance(group[name], Integral) or group[name] < 1:
                raise UsageError(f"M3: {name} {group[name]!r} must be a whole number of 1 or more")
        if self.mode == "literal" and group["rule"] == "m3" and group["weight_decay"]:
            raise UsageError(f"M3: weight_decay {group['weight_decay']} needs mode='ema'; Algorithm 1 has none")

    def _prepare_group(self, group: ParamGroup) -> None:
        for p in group["params"]:
            if p.ndim != 2 or p.is_complex():
                kind = "complex" if p.is_complex() else "not a matrix"
                raise UsageError(f"M3: {describe_parameter(p)} is {kind}; set rule='adamw' for its group")

    def _step_group(self, group: ParamGroup) -> None:
        """Update the matrices of a group, those with equally many gradients together."""
        by_count: dict[int, list[Tensor]] = {}
        for p in cast("list[Tensor]", group["params"]):
            if p.grad is not None:
                by_count.setdefault(int(self._prepare_state(p)["step"]), []).append(p)
        for n, matrices in by_count.items():
            self._update_matrices(matrices, n + 1, group)

    def _prepare_state(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of a matrix, zeros before its first gradient."""
        state = cast("dict[str, Tensor]", self.state[p])
        if not state:
            state.update(M1=torch.zeros_like(p), M2=torch.zeros_like(p), step=torch.zeros(()))
            state["O2"] = torch.zeros_like(p, dtype=newton_schulz_dtype(p))
            if self.mode == "literal":
                state["V"] = torch.zeros_like(p)
        return state

    def _update_matrices(self, matrices: list[Tensor], n: int, group: ParamGroup) -> None:
        """Update matrices by their n-th gradients, and their states."""
        states = [self.state[p] for p in matrices]
        gradients = [cast(Tensor, p.grad) for p in matrices]
        memories = M3Memories(*([s[name] for s in states if name in s] for name in M3Memories._fields))
        hyperparameters = M3Hyperparameters(tuple(group["betas"]), group["alpha"], group["slow_every"], group["eps"])
        NS = partial(orthogonalize, steps=group["ns_steps"])
        if self.mode == "literal":
            algorithm1(matrices, gradients, memories, n, group["lr"], hyperparameters, NS)
        else:
            algorithm1_ema(matrices, gradients, memories, n, group["lr"], hyperparameters, NS, group["weight_decay"])
        for state in states:
            state["step"] += 1


def newton_schulz_dtype(p: Tensor) -> torch.dtype:
    """Return the type of Newton-Schulz's result for a matrix, and of O2."""
    return torch.float64 if p.dtype == torch.float64 else torch.bfloat16


def orthogonalize(m: Tensor, divisor: float, steps: int) -> Tensor:
    """Apply Newton-Schulz (Eq. 44) to m / divisor; a sharded matrix is gathered, and the result sharded like it."""
    if not hasattr(m, "full_tensor"):
        return fused_newton_schulz(m, divisor, steps)
    from torch.distributed.tensor import DTensor, Replicate  # slow to import

    sharded = cast(DTensor, m)
    mesh = sharded.device_mesh
    full = fused_newton_schulz(sharded.full_tensor(), divisor, steps)
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=sharded.placements)


def fused_newton_schulz(m: Tensor, divisor: float, steps: int) -> Tensor:
    """Apply Newton-Schulz (Eq. 44) to m / divisor, with each addition part of a product."""
    a, b, c = QUINTIC
    norm = cast(Tensor, cast(Any, torch.linalg).vector_norm(m, dtype=accumulation_dtype(m.dtype)))
    dtype = newton_schulz_dtype(m)
    is_slow = dtype == torch.bfloat16 and not has_fast_bfloat16(m.device)
    x = m.to(torch.float32 if is_slow else dtype) / (norm + divisor * 1e-7)
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    for _ in range(steps):
        xx = x @ x.mT
        x = torch.addmm(x, torch.addmm(xx, xx, xx, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(dtype)
