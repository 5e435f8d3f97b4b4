"""DGD as an optimizer of torch: a model's maps and tables by the delta rule, all else by AdamW."""

from collections.abc import Callable
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from laconic.core.attention import wide
from laconic.core.errors import Usage
from laconic.methods.adamw import Group, by_rule, checked, closed, one_of, shaped, share, step_adamw
from laconic.methods.dgd import dgd_embedding, dgd_gram, dgd_mean, dgd_sequential, resolved
from laconic.methods.recorded import Recording

Batch = Literal["joint", "mean", "sequential"]


def recording_of(p: Tensor) -> Recording | None:
    """What `dgd.record` put beside a parameter."""
    return cast("Recording | None", getattr(p, "recording", None))


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
        batch: Batch = "joint",
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
        one_of("DGD", "batch", batch, ("joint", "mean", "sequential"))
        one_of("DGD", "inputs", inputs, ("unit", "raw"))
        one_of("DGD", "value", value, ("minus_delta", "target"))
        one_of("DGD", "loss", loss, ("mean", "sum"))
        one_of("DGD", "bias", bias, ("rides", "gd"))
        share("DGD", "momentum", momentum)
        if erase < 0:
            raise Usage(f"DGD: erase {erase}; it is the weight of a square, 0 or more")
        self.batch, self.inputs, self.erase, self.value, self.loss, self.bias = batch, inputs, erase, value, loss, bias
        settings: Group = {"lr": lr, "momentum": momentum, "adam_betas": adam_betas, "adam_decay": adam_decay}
        super().__init__(by_rule(params, dgd_rule, {"lr": adam_lr}), settings | {"rule": "dgd"})

    def add_param_group(self, param_group: Group) -> None:
        """A further group, rule "dgd" unless it says another."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        checked("DGD", group, ("dgd", "adamw"))
        members = {id(p) for p in group["params"]}
        for p in group["params"] if group["rule"] == "dgd" else ():
            if dgd_rule(shaped(p), p) == "adamw":
                raise Usage(f"DGD: {shaped(p)} belongs to no recorded map; give its group rule='adamw'")
            recording = cast(Recording, recording_of(p))
            recording.pairs, recording.unit = self.batch != "joint", self.inputs == "unit"
            both = {id(recording.weight), id(recording.bias)} <= members
            recording.rides = self.bias == "rides" and both and cast(Tensor, recording.bias).requires_grad
            recording.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients and what was recorded with them."""
        super().zero_grad(set_to_none)
        for recording in self.recordings():
            recording.clear()

    def recordings(self) -> list[Recording]:
        """Of every weight moved by the rule."""
        found = [recording_of(p) for group in self.param_groups if group["rule"] == "dgd" for p in group["params"]]
        return list({id(r): r for r in found if r is not None}.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update by what was recorded since the last; gives the closure's loss."""
        loss = closed(closure)
        for group in self.param_groups:
            if group["rule"] == "adamw":
                step_adamw(self.state, group)
                continue
            for p in cast("list[Tensor]", group["params"]):
                recording = cast(Recording, recording_of(p))
                if p.grad is None or (p is recording.bias and recording.rides):
                    continue
                if p is recording.bias:
                    p.sub_(group["lr"] * self.mean(p.grad, recording))
                else:
                    self.move(recording, group["lr"], group["momentum"])
        for recording in self.recordings():
            recording.clear()
        return loss

    def mean(self, G: Tensor, recording: Recording) -> Tensor:
        """The gradient of the mean over positions."""
        if self.loss == "mean" or recording.seen is None:
            return G
        return G / recording.seen.clamp(min=1)

    def move(self, recording: Recording, eta: float, share: float) -> None:
        """A weight, with the bias that rides on it, to where the rule and its momentum take it."""
        summed(recording)
        if recording.seen is None:
            raise Usage(f"DGD: {recording.name} has a gradient and no inputs beside it; step once after each backward")
        bias = recording.bias if recording.rides else None
        W, G = joined(recording.weight, bias), joined(recording.weight.grad, None if bias is None else bias.grad)
        held = W if self.value == "target" else torch.zeros_like(W)  # the erasing acts on what W has beside it
        moved = self.ruled(W - held, self.mean(G, recording), recording, eta) - (W - held)
        if share:
            state = self.state[recording.weight]
            state["m"] = moved = moved + share * state["m"].to(W.dtype) if "m" in state else moved
        recording.weight.copy_((W + moved)[:, : recording.weight.shape[1]])
        if bias is not None:
            bias.copy_((W + moved)[:, -1])

    def ruled(self, V: Tensor, G: Tensor, recording: Recording, eta: float) -> Tensor:
        """V' by 57b, 57c or 57d; a table's rows by 57v, whatever the batch."""
        N = cast(Tensor, recording.seen).clamp(min=1).to(V.dtype)
        if recording.kind == "embedding":
            return dgd_embedding(V, G, recording.fold(), N, eta, erase=self.erase)
        if recording.gram is not None:
            return dgd_gram(V, G, recording.gram / N, eta, erase=self.erase)
        X = torch.cat(recording.rows).to(V.dtype)
        if self.batch == "joint":
            return resolved(V - eta * G, X, self.erase * eta / N)
        D = torch.cat(recording.errors).to(V.dtype)
        live = (D != 0).any(-1)
        form = dgd_mean if self.batch == "mean" else dgd_sequential
        return form(V, X, D * N if self.loss == "mean" else D, eta, live=live, erase=self.erase)


def dgd_rule(name: str, p: Tensor) -> str:
    """Which rule moves a parameter. Raises `Usage` (2) for a matrix that nothing recorded."""
    recording = recording_of(p)
    if recording is None and p.ndim == 2:
        raise Usage(f"DGD: {name} was not recorded; call dgd.record(model) first, or give it a group of rule='adamw'")
    if recording is not None and recording.kind == "foreign":
        raise Usage(f"DGD: {recording.name} is a map with a forward of its own, not recorded; give it rule='adamw'")
    return "dgd" if recording is not None and recording.kind in ("linear", "embedding") else "adamw"


def joined(weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """[W b], or W alone, wide."""
    whole = cast(Tensor, weight) if bias is None else torch.cat([cast(Tensor, weight), bias[:, None]], 1)
    return whole.to(wide(whole.dtype))


def summed(recording: Recording) -> None:
    """What all ranks recorded, where there are several. Raises `Usage` (2) for rows, which stay where they are."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    if recording.pairs:
        raise Usage(f"DGD: {recording.name}: several ranks add up X'X, which batch='joint' alone can do with")
    weight = recording.weight
    size = [len(weight)] if recording.kind == "embedding" else [weight.shape[1] + recording.rides] * 2
    if recording.seen is None:
        recording.gram = torch.zeros(size, dtype=wide(weight.dtype), device=weight.device)
        recording.seen = torch.zeros((), dtype=torch.long, device=weight.device)
    for tensor in (recording.fold(), recording.seen):
        dist.all_reduce(tensor)  # pyright: ignore[reportUnknownMemberType]
