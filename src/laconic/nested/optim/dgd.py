"""DGD as a torch optimizer: linear maps and embeddings by the delta rule, everything else by AdamW."""

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from laconic.errors import UsageError
from laconic.generation.config import check_choices
from laconic.models.attention import accumulation_dtype
from laconic.nested.optim.dgd_equations import dgd_embedding, dgd_gram, solve_ridge
from laconic.nested.optim.input_recording import InputStatistics, get_statistics
from laconic.nested.optim.rule_optimizer import (
    RULE_SETTINGS,
    ParamGroup,
    RuleOptimizer,
    check_number,
    describe_parameter,
    group_parameters,
    step_adamw,
)

InputScale = Literal["unit", "raw"]
StoredValue = Literal["minus_delta", "target"]


class DGD(RuleOptimizer):
    """Delta gradient descent (Nested Learning, Eq. 57b to 57v) on a model prepared by `record_inputs`.

    Parameters whose inputs are not recorded are updated by AdamW, as are groups with `rule="adamw"`. A bias is the
    weight of an input 1, or is updated by AdamW while its weight is frozen. A step uses what
    was recorded since the last one or since this optimizer's `zero_grad` (`model.zero_grad` does not clear it), by
    every backward pass, summed over all ranks. Under FSDP2 each rank updates its own rows of a weight, since Eq. 57b
    acts on every row alone; nothing is gathered. Copy an optimizer together with its model:
    `copy.deepcopy((model, optimizer))`.

    Args:
        params: Parameters, best with their names (`model.named_parameters()`), or groups.
        lr: eta. Each step minimises Eq. 56, for a loss that is a mean over positions, and is bounded for any eta and
            inputs.
        inputs: "unit" scales inputs to length 1 and their gradients so that the gradient of the weight stays; "raw"
            uses them as they are.
        value: What the weight stores for an input. "minus_delta", as in the paper, stores the negative gradient and
            erases what the weight answered before, so a regression converges to half of its target. "target" draws
            the output to y - delta: nothing is erased, and a regression converges to its target.
        momentum: Eq. 33 on the step.
        adam_lr: Learning rate of AdamW.
        adam_betas: Factors of AdamW's memories.
        adam_weight_decay: Decoupled weight decay of AdamW.

    Raises:
        UsageError: For a matrix that was not recorded, for invalid settings, and for a group with an unknown option.

    Examples:
        >>> import torch, laconic
        >>> from laconic.nested.optim.input_recording import record_inputs
        >>> model = record_inputs(torch.nn.Linear(3, 2))
        >>> optimizer = laconic.DGD(model.named_parameters(), lr=0.1)
        >>> model(torch.randn(4, 3)).square().mean().backward()
        >>> optimizer.step()
    """

    rule = "dgd"
    settings = ("inputs", "value")
    state_name = "m"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        *,
        inputs: InputScale = "unit",
        value: StoredValue = "minus_delta",
        momentum: float = 0.0,
        adam_lr: float = 1e-3,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_weight_decay: float = 0.0,
    ) -> None:
        check_choices(inputs=(inputs, InputScale), value=(value, StoredValue))
        for name, number in (("adam_lr", adam_lr), ("adam_weight_decay", adam_weight_decay)):
            check_number("DGD", name, number)
        self.inputs, self.value = inputs, value
        self.adamw_settings = {"lr": adam_lr, "weight_decay": adam_weight_decay}
        super().__init__(params, {"lr": lr, "momentum": momentum, "adam_betas": adam_betas, "weight_decay": 0.0})

    @staticmethod
    def build_param_groups(model: nn.Module) -> list[ParamGroup]:
        """Return groups of the trainable parameters of a model that `record_inputs` has prepared.

        Linear maps and embeddings whose inputs are recorded are updated by DGD, everything else by AdamW.
        """
        return group_parameters(model, "dgd", is_recorded)

    def _find_rule(self, name: str, p: Tensor) -> str:
        """Return the rule of a parameter. Raises `UsageError` for a matrix that was not recorded."""
        statistics = get_statistics(p)
        if statistics is None and p.ndim == 2:
            raise UsageError(
                f"DGD: {name} was not recorded; call record_inputs(model), or use DGD.build_param_groups(model)"
            )
        if statistics is not None and statistics.kind == "foreign":
            raise UsageError(
                f"DGD: {statistics.name} has a forward of its own and is not recorded; "
                "use DGD.build_param_groups(model)"
            )
        return "dgd" if is_recorded(p) else "adamw"

    def _check_group(self, group: ParamGroup) -> None:
        super()._check_group(group)
        check_number("DGD", "momentum", group["momentum"], below=1.0)
        if group["rule"] == "dgd" and group["weight_decay"]:
            raise UsageError(
                f"DGD: weight_decay {group['weight_decay']}: the delta rule erases by itself; set weight_decay for "
                "groups with rule='adamw'"
            )

    def _prepare_group(self, group: ParamGroup) -> None:
        if group["momentum"] and any(map(is_sharded, group["params"])):
            raise UsageError(f"DGD: momentum {group['momentum']} is not supported with sharded weights; use DDP")
        members = {id(p) for p in group["params"]}
        for p in group["params"]:
            if not is_recorded(p):
                raise UsageError(f"DGD: {describe_parameter(p)} has no recorded inputs; set rule='adamw' for its group")
            statistics = cast(InputStatistics, get_statistics(p))
            statistics.normalize_inputs = self.inputs == "unit"
            statistics.bias_in_input = {id(statistics.weight), id(statistics.bias)} <= members
            statistics.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as torch's optimizers do, and everything recorded with them."""
        super().zero_grad(set_to_none)
        for statistics in self.input_statistics():
            statistics.clear()

    def input_statistics(self) -> list[InputStatistics]:
        """Return the statistics of every weight updated by the delta rule."""
        groups = [group for group in self.param_groups if group["rule"] == "dgd"]
        every = [get_statistics(p) for group in groups for p in group["params"]]
        return list({id(statistics): statistics for statistics in every if statistics is not None}.values())

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update by what was recorded since the last step; return the loss of the closure, if there is one."""
        loss = super().step(closure)
        for statistics in self.input_statistics():
            statistics.clear()
        return loss

    def _step_group(self, group: ParamGroup) -> None:
        """Update the parameters of a group by the delta rule, and by AdamW the biases of frozen weights."""
        alone: list[Tensor] = []
        for p in cast("list[Tensor]", group["params"]):
            statistics = get_statistics(p)
            if statistics is None:
                raise UsageError(
                    f"DGD: {describe_parameter(p)} is no longer recorded; copy an optimizer together with its model, "
                    "copy.deepcopy((model, optimizer)), and call stop_recording after the last step"
                )
            if p.grad is None or not p.requires_grad:
                continue
            if p is not statistics.bias:
                self._update_parameter(statistics, group["lr"], group["momentum"])
            elif not statistics.has_bias_column:
                local_shard(p).sub_(group["lr"] * local_shard(p.grad))
            elif statistics.weight.grad is None or not statistics.weight.requires_grad:
                alone.append(p)
        if alone:
            settings = group[RULE_SETTINGS]
            schedule = float(group["lr"]) / settings["base_lr"] if settings["base_lr"] else 1.0
            adam = {**settings["adamw"], "lr": schedule * settings["adamw"]["lr"]}
            step_adamw(self.state, {**group, **adam, "params": alone})

    def _update_parameter(self, statistics: InputStatistics, eta: float, momentum: float) -> None:
        """Update a weight, and the bias that is part of its input."""
        all_reduce_statistics(statistics)
        bias = statistics.bias if statistics.has_bias_column else None
        W = concat_bias(statistics.weight, bias)
        if statistics.num_positions is None:
            if float(eta) and local_shard(cast(Tensor, statistics.weight.grad)).any():
                raise UsageError(f"DGD: {statistics.name} has a gradient but no inputs; step once after each backward")
            if momentum:  # torch.distributed.checkpoint takes a step with learning rate 0 before it loads a state
                self.state[statistics.weight].setdefault("m", torch.zeros_like(W))
            return
        G = concat_bias(cast(Tensor, statistics.weight.grad), None if bias is None else bias.grad)
        offset = W if self.value == "target" else torch.zeros_like(W)  # the erasure acts on W - offset
        change = update_weight(W - offset, G, statistics, eta) - (W - offset)
        if momentum:
            state = self.state[statistics.weight]
            if "m" in state and state["m"].shape == change.shape:  # its column of the bias goes if that is frozen
                change = change + momentum * state["m"].to(W.dtype)
            state["m"] = change
        local_shard(statistics.weight).copy_((W + change)[:, : statistics.weight.shape[1]])
        if bias is not None:
            local_shard(bias).copy_((W + change)[:, -1])


def update_weight(V: Tensor, G: Tensor, statistics: InputStatistics, eta: float) -> Tensor:
    """Return V' by 57b, and rows of an embedding by 57v."""
    N = cast(Tensor, statistics.num_positions).clamp(min=1).to(V.dtype)
    if statistics.kind == "embedding":
        counts = local_shard(shard_like(statistics.compute_gram(), statistics.weight))
        return dgd_embedding(V, G, counts, N, eta)
    if statistics.gram is not None:
        return dgd_gram(V, G, statistics.gram / N, eta)
    return solve_ridge(V - eta * G, torch.cat(statistics.inputs).to(V.dtype), eta / N)


def is_recorded(p: Tensor) -> bool:
    """Return whether a parameter is that of a linear map or an embedding whose inputs are recorded."""
    statistics = get_statistics(p)
    return statistics is not None and statistics.kind in ("linear", "embedding")


def concat_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [W b], or W alone, in the accumulation type; of sharded tensors this rank's rows."""
    W = local_shard(weight)
    matrix = W if bias is None else torch.cat([W, local_shard(bias)[:, None]], 1)
    return matrix.to(accumulation_dtype(matrix.dtype))


def is_sharded(p: Tensor) -> bool:
    """Return whether FSDP2 sharded a parameter, over its rows."""
    return hasattr(p, "to_local")


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, or a whole tensor itself."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, weight: Tensor) -> Tensor:
    """Return a tensor that every rank has whole, sharded like the weight."""
    if not is_sharded(weight):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor  # slow to import

    like = cast(DTensor, weight)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def all_reduce_statistics(statistics: InputStatistics) -> None:
    """Sum the statistics over all ranks."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    weight = statistics.weight
    size = [len(weight)] if statistics.kind == "embedding" else [weight.shape[1] + statistics.has_bias_column] * 2
    if statistics.num_positions is None:
        statistics.gram = torch.zeros(size, dtype=accumulation_dtype(weight.dtype), device=weight.device)
        statistics.num_positions = torch.zeros((), dtype=torch.long, device=weight.device)
    for tensor in (statistics.compute_gram(), statistics.num_positions):
        dist.all_reduce(tensor)  # pyright: ignore[reportUnknownMemberType]
