"""DGD as an optimizer of torch: a model's maps and tables by the delta rule, all else by AdamW."""

from collections.abc import Callable
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from laconic.errors import UsageError
from laconic.models.attention import accumulation_dtype
from laconic.nested.optim.dgd_equations import dgd_embedding, dgd_gram, dgd_mean, dgd_sequential, solve_ridge
from laconic.nested.optim.input_recording import InputStatistics
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

BatchMode = Literal["joint", "mean", "sequential"]


def get_statistics(p: Tensor) -> InputStatistics | None:
    """What `dgd.record` put beside a parameter."""
    return cast("InputStatistics | None", getattr(p, "recording", None))


class DGD(torch.optim.Optimizer):
    """Delta gradient descent, Eq. 57b to 57v, on the maps and tables of a model that `dgd.record` prepared.

    `lr` is eta: each step is the minimiser of 56, bounded for whatever eta and inputs. `batch="joint"` takes all
    positions since the last step at once; "mean" and "sequential" keep every input and its gradient (neither clipping
    nor a loss scale reaches those). `inputs="unit"` makes each input of length 1, with its gradient scaled so that G
    stays; "raw" takes it as it is. `erase` is the weight of the erasing (0: plain descent, as far as the step goes) and
    `value="target"` draws the output to y - delta, where nothing is erased. `loss` says whether the loss is a "mean" or
    a "sum" over positions. `momentum` is 33 on the step. `bias="rides"` has the bias in x as a 1, "gd" descends it.

    What is no recorded weight goes into groups of AdamW (`adam_lr`, `adam_betas`, `adam_decay`), as does a group given
    with rule="adamw". One step takes what was recorded since the last; under DDP it is summed over all ranks. Raises
    `Usage` (2) for a matrix that nothing recorded, by name where the parameters come with names.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        *,
        batch: BatchMode = "joint",
        inputs: Literal["unit", "raw"] = "unit",
        erase: float = 1.0,
        value: Literal["minus_delta", "target"] = "minus_delta",
        loss: Literal["mean", "sum"] = "mean",
        momentum: float = 0.0,
        bias: Literal["rides", "gd"] = "rides",
        adam_lr: float = 1e-3,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_decay: float = 0.0,
    ) -> None:
        check_choice("DGD", "batch", batch, ("joint", "mean", "sequential"))
        check_choice("DGD", "inputs", inputs, ("unit", "raw"))
        check_choice("DGD", "value", value, ("minus_delta", "target"))
        check_choice("DGD", "loss", loss, ("mean", "sum"))
        check_choice("DGD", "bias", bias, ("rides", "gd"))
        check_fraction("DGD", "momentum", momentum)
        if erase < 0:
            raise UsageError(f"DGD: erase {erase}; it is the weight of a square, 0 or more")
        self.batch, self.inputs, self.erase, self.value, self.loss, self.bias = batch, inputs, erase, value, loss, bias
        settings: ParamGroup = {"lr": lr, "momentum": momentum, "adam_betas": adam_betas, "adam_decay": adam_decay}
        super().__init__(split_groups_by_rule(params, dgd_rule, {"lr": adam_lr}), settings | {"rule": "dgd"})

    def add_param_group(self, param_group: ParamGroup) -> None:
        """A further group, rule "dgd" unless it says another."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_group("DGD", group, ("dgd", "adamw"))
        members = {id(p) for p in group["params"]}
        for p in group["params"] if group["rule"] == "dgd" else ():
            if dgd_rule(describe_parameter(p), p) == "adamw":
                raise UsageError(
                    f"DGD: {describe_parameter(p)} belongs to no recorded map; give its group rule='adamw'"
                )
            recording = cast(InputStatistics, get_statistics(p))
            recording.store_pairs, recording.normalize_inputs = self.batch != "joint", self.inputs == "unit"
            both = {id(recording.weight), id(recording.bias)} <= members
            recording.bias_in_input = self.bias == "rides" and both and cast(Tensor, recording.bias).requires_grad
            recording.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients and what was recorded with them."""
        super().zero_grad(set_to_none)
        for recording in self.input_statistics():
            recording.clear()

    def input_statistics(self) -> list[InputStatistics]:
        """Of every weight moved by the rule."""
        found = [get_statistics(p) for group in self.param_groups if group["rule"] == "dgd" for p in group["params"]]
        return list({id(r): r for r in found if r is not None}.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update by what was recorded since the last; gives the closure's loss."""
        loss = call_closure(closure)
        for group in self.param_groups:
            if group["rule"] == "adamw":
                step_adamw(self.state, group)
                continue
            for p in cast("list[Tensor]", group["params"]):
                recording = cast(InputStatistics, get_statistics(p))
                if p.grad is None or (p is recording.bias and recording.bias_in_input):
                    continue
                if p is recording.bias:
                    p.sub_(group["lr"] * self.mean_gradient(p.grad, recording))
                else:
                    self.update_parameter(recording, group["lr"], group["momentum"])
        for recording in self.input_statistics():
            recording.clear()
        return loss

    def mean_gradient(self, G: Tensor, statistics: InputStatistics) -> Tensor:
        """The gradient of the mean over positions."""
        if self.loss == "mean" or statistics.num_positions is None:
            return G
        return G / statistics.num_positions.clamp(min=1)

    def update_parameter(self, statistics: InputStatistics, eta: float, momentum: float) -> None:
        """A weight, with the bias that rides on it, to where the rule and its momentum take it."""
        all_reduce_statistics(statistics)
        if statistics.num_positions is None:
            raise UsageError(
                f"DGD: {statistics.name} has a gradient and no inputs beside it; step once after each backward"
            )
        bias = statistics.bias if statistics.bias_in_input else None
        W, G = (
            concat_bias(statistics.weight, bias),
            concat_bias(statistics.weight.grad, None if bias is None else bias.grad),
        )
        held = W if self.value == "target" else torch.zeros_like(W)  # the erasing acts on what W has beside it
        moved = self.dgd_update(W - held, self.mean_gradient(G, statistics), statistics, eta) - (W - held)
        if momentum:
            state = self.state[statistics.weight]
            state["m"] = moved = moved + momentum * state["m"].to(W.dtype) if "m" in state else moved
        statistics.weight.copy_((W + moved)[:, : statistics.weight.shape[1]])
        if bias is not None:
            bias.copy_((W + moved)[:, -1])

    def dgd_update(self, V: Tensor, G: Tensor, statistics: InputStatistics, eta: float) -> Tensor:
        """V' by 57b, 57c or 57d; a table's rows by 57v, whatever the batch."""
        N = cast(Tensor, statistics.num_positions).clamp(min=1).to(V.dtype)
        if statistics.kind == "embedding":
            return dgd_embedding(V, G, statistics.compute_gram(), N, eta, erase=self.erase)
        if statistics.gram is not None:
            return dgd_gram(V, G, statistics.gram / N, eta, erase=self.erase)
        X = torch.cat(statistics.inputs).to(V.dtype)
        if self.batch == "joint":
            return solve_ridge(V - eta * G, X, self.erase * eta / N)
        D = torch.cat(statistics.output_gradients).to(V.dtype)
        live = (D != 0).any(-1)
        form = dgd_mean if self.batch == "mean" else dgd_sequential
        return form(V, X, D * N if self.loss == "mean" else D, eta, valid=live, erase=self.erase)


def dgd_rule(name: str, p: Tensor) -> str:
    """Which rule moves a parameter. Raises `Usage` (2) for a matrix that nothing recorded."""
    recording = get_statistics(p)
    if recording is None and p.ndim == 2:
        raise UsageError(
            f"DGD: {name} was not recorded; call dgd.record(model) first, or give it a group of rule='adamw'"
        )
    if recording is not None and recording.kind == "foreign":
        raise UsageError(
            f"DGD: {recording.name} is a map with a forward of its own, not recorded; give it rule='adamw'"
        )
    return "dgd" if recording is not None and recording.kind in ("linear", "embedding") else "adamw"


def concat_bias(weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """[W b], or W alone, wide."""
    whole = cast(Tensor, weight) if bias is None else torch.cat([cast(Tensor, weight), bias[:, None]], 1)
    return whole.to(accumulation_dtype(whole.dtype))


def all_reduce_statistics(statistics: InputStatistics) -> None:
    """What all ranks recorded, where there are several. Raises `Usage` (2) for rows, which stay where they are."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    if statistics.store_pairs:
        raise UsageError(f"DGD: {statistics.name}: several ranks add up X'X, which batch='joint' alone can do with")
    weight = statistics.weight
    size = [len(weight)] if statistics.kind == "embedding" else [weight.shape[1] + statistics.bias_in_input] * 2
    if statistics.num_positions is None:
        statistics.gram = torch.zeros(size, dtype=accumulation_dtype(weight.dtype), device=weight.device)
        statistics.num_positions = torch.zeros((), dtype=torch.long, device=weight.device)
    for tensor in (statistics.compute_gram(), statistics.num_positions):
        dist.all_reduce(tensor)  # pyright: ignore[reportUnknownMemberType]
