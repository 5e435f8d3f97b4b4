"""What a model's linear maps saw: kept beside the weights by the backward pass, for optimizers that ask for inputs.

Symbols: X inputs of a map, a row for each position, and D the loss's gradient at its outputs. Positions whose row of D
is zero throughout (padding, labels that are ignored) are not counted.
"""

from collections.abc import Iterator
from typing import Any, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.errors import UsageError
from laconic.models.attention import accumulation_dtype

ModuleT = TypeVar("ModuleT", bound=nn.Module)
ParameterKind = Literal["linear", "embedding", "foreign", "other"]


class InputStatistics:
    """Of one weight: X'X and the number of positions, or the rows of X while they are fewer than it has columns.

    `kind` is "foreign" for a linear map with a forward of its own, "other" for whatever else is no map's weight alone.
    `pairs` keeps all rows of X and D, `unit` divides each row by its length and multiplies D by it, `rides` appends the
    bias's 1 to X; the optimizer sets them. An embedding counts how often each row was met, but for its padding.
    """

    def __init__(
        self, name: str, kind: ParameterKind, weight: Tensor, bias: Tensor | None = None, padding_idx: int | None = None
    ) -> None:
        self.name, self.kind, self.weight, self.bias, self.padding_idx = name, kind, weight, bias, padding_idx
        self.store_pairs, self.normalize_inputs, self.bias_in_input = False, True, False
        self.clear()

    def clear(self) -> None:
        """As before the first backward pass."""
        self.gram: Tensor | None = None
        self.num_positions: Tensor | None = None
        self.inputs: list[Tensor] = []
        self.output_gradients: list[Tensor] = []

    def add(self, x: Tensor, d: Tensor) -> None:
        """Inputs and output gradients of one call; adds up, as `.grad` does."""
        d = d.detach().reshape(-1, d.shape[-1]).to(accumulation_dtype(d.dtype))
        live = (d != 0).any(-1)
        if self.kind == "embedding":
            self.count_ids(x.reshape(-1), live)
            return
        x = x.detach().reshape(-1, x.shape[-1]).to(d.dtype)
        x = (F.pad(x, (0, 1), value=1.0) if self.bias_in_input else x) * live[:, None]
        if self.normalize_inputs:
            length = x.square().sum(-1, keepdim=True).sqrt()
            x, d = x / length.clamp(min=torch.finfo(x.dtype).tiny), d * length
        self.add_positions(live)
        if self.store_pairs:
            self.output_gradients.append(d)
        if self.gram is not None:
            self.gram += x.mT @ x
            return
        self.inputs.append(x)
        if not self.store_pairs and sum(map(len, self.inputs)) >= x.shape[1]:
            self.compute_gram()

    def add_positions(self, valid: Tensor) -> None:
        """Count positions."""
        self.num_positions = valid.sum() + (0 if self.num_positions is None else self.num_positions)

    def count_ids(self, ids: Tensor, valid: Tensor) -> None:
        """An embedding's X'X is the diagonal of how often each row was met."""
        if self.padding_idx is not None:
            valid = valid & (ids != self.padding_idx)  # no gradient reaches that row, so nothing erases it
        if self.gram is None:
            self.gram = torch.zeros(len(self.weight), dtype=accumulation_dtype(self.weight.dtype), device=ids.device)
        self.gram.index_add_(0, ids, valid.to(self.gram.dtype))
        self.add_positions(valid)

    def compute_gram(self) -> Tensor:
        """X'X, made of the rows if it is not there yet."""
        if self.gram is None:
            x = torch.cat(self.inputs)
            self.gram, self.inputs = x.mT @ x, []
        return self.gram


class RecordGradient(torch.autograd.Function):
    """The identity on a map's output; its backward pass records input and gradient, once for each gradient that comes.

    Under activation checkpointing the forward pass runs twice, the backward pass once.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, recording: InputStatistics) -> Tensor:
        ctx.save_for_backward(x)
        ctx.recording = recording
        ctx.mark_dirty(y)  # a view would forbid `nn.ReLU(inplace=True)` after the map
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad(), torch.autocast(d.device.type, enabled=False):
            ctx.recording.add(ctx.saved_tensors[0], d)
        return d, None, None


def attach_recorder(weight: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """`y` as it is, watched where a gradient of the weight is asked for."""
    recording = getattr(weight, "recording", None)
    if recording is None or not (weight.requires_grad and torch.is_grad_enabled()):
        return y
    return cast(Tensor, cast(Any, RecordGradient).apply(y, x, recording))


class RecordedLinear(nn.Linear):
    """`nn.Linear`, recorded."""

    def forward(self, input: Tensor) -> Tensor:
        return attach_recorder(self.weight, super().forward(input), input)


class RecordedEmbedding(nn.Embedding):
    """`nn.Embedding`, recorded."""

    def forward(self, input: Tensor) -> Tensor:
        return attach_recorder(self.weight, super().forward(input), input)


RECORDED_TYPES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: RecordedLinear, nn.Embedding: RecordedEmbedding}


def parameter_kind(module: nn.Module) -> ParameterKind:
    """Whether a module's weight can be recorded."""
    if type(module) is nn.Linear or type(module) is RecordedLinear:
        return "linear"
    if isinstance(module, nn.Linear):
        return "foreign"
    whole = isinstance(module, nn.Embedding) and not (module.sparse or module.scale_grad_by_freq or module.max_norm)
    return "embedding" if whole and type(module) in (nn.Embedding, RecordedEmbedding) else "other"


def find_owners(model: nn.Module) -> dict[int, list[tuple[str, ParameterKind, nn.Module]]]:
    """Of every parameter by its `id`: under which names, as what, and in which modules it stands."""
    found: dict[int, list[tuple[str, ParameterKind, nn.Module]]] = {}
    for path, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        for name, p in module.named_parameters(recurse=False):
            kind = parameter_kind(module) if name == "weight" else "other"
            found.setdefault(id(p), []).append((f"{path}.{name}" if path else name, kind, module))
    return found


def record_inputs(model: ModuleT) -> ModuleT:
    """The model, its `nn.Linear` and `nn.Embedding` swapped for subclasses that record; `plain` undoes it.

    Parameters, names, hooks and outputs stay as they are, bit for bit. A weight that a table and a map share is left
    alone. Copies of the model are not recorded, nor are maps put in later. Each recorded map holds a matrix as wide as
    its input. Raises `Usage` (2) where the weights lie in shards, or there is nothing to record.
    """
    standing, recorded = find_owners(model), 0
    for p in model.parameters():
        name, kind, module = standing[id(p)][0]
        if hasattr(p, "full_tensor"):
            raise UsageError(f"record: {name} lies in shards, its inputs on several ranks; replicate the model (DDP)")
        if p.ndim != 2:
            continue
        kind = kind if all(kind == other for _, other, _ in standing[id(p)]) else "other"
        recorded += kind in ("linear", "embedding")
        if hasattr(p, "recording"):
            continue
        alone = kind == "linear" and len(standing[id(p)]) == 1  # a bias rides on one map's inputs
        bias = cast("Tensor | None", getattr(module, "bias", None)) if alone else None
        recording = InputStatistics(name, kind, p, bias, cast("int | None", getattr(module, "padding_idx", None)))
        for part in (p, bias):
            if part is not None:
                setattr(part, "recording", recording)  # noqa: B010
        for _, _, owner in standing[id(p)] if kind in ("linear", "embedding") else ():
            owner.__class__ = RECORDED_TYPES.get(type(owner), type(owner))
    if not recorded:
        raise UsageError("record: no nn.Linear and no nn.Embedding in this model; give one that has some")
    return model


def stop_recording(model: ModuleT) -> ModuleT:
    """The model as it was before `record`."""
    back = {swapped: original for original, swapped in RECORDED_TYPES.items()}
    for module in model.modules():
        module.__class__ = back.get(type(module), type(module))
    for p in model.parameters():
        if hasattr(p, "recording"):
            delattr(p, "recording")
    return model
