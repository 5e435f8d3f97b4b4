"""Record the inputs of a model's linear maps and embeddings in the backward pass, for optimizers that need them.

Symbols: X inputs of a map, one row per position, and D the loss's gradient at its outputs. Positions whose row of D is
zero (padding, ignored labels) do not count.
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
    """Input statistics of one weight: X'X and the number of positions.

    The rows of X are stored instead while they are fewer than its columns. For an embedding X'X is diagonal: how often
    each row was looked up, without its padding.

    The kind is "foreign" for a linear map with a forward of its own, "other" for any other parameter; the bias is that
    of the map, if it belongs to this weight alone.

    Attributes:
        normalize_inputs: Whether to divide each row of X by its length. The optimizer sets this and the next.
        bias_in_input: Whether the bias is the weight of an input 1.
    """

    def __init__(
        self, name: str, kind: ParameterKind, weight: Tensor, bias: Tensor | None = None, padding_idx: int | None = None
    ) -> None:
        self.name, self.kind = name, kind
        self.weight, self.bias, self.padding_idx = weight, bias, padding_idx
        self.normalize_inputs, self.bias_in_input = True, False
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what was recorded: copies of parameters have no gradients either."""
        recorded = ("gram", "num_positions", "inputs")
        return {name: value for name, value in vars(self).items() if name not in recorded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Record for the copied parameters; parameters that a copy shares with its model stay with the model's."""
        vars(self).update(state)
        self.clear()
        if not hasattr(self.weight, "recording"):
            self.attach()

    def attach(self) -> None:
        for p in (self.weight, self.bias):
            if p is not None:
                setattr(p, "recording", self)  # noqa: B010

    @property
    def has_bias_column(self) -> bool:
        """Whether X has a column of ones: the bias is the weight of an input 1, and is not frozen."""
        return self.bias_in_input and self.bias is not None and self.bias.requires_grad

    def clear(self) -> None:
        self.gram: Tensor | None = None
        self.num_positions: Tensor | None = None
        self.inputs: list[Tensor] = []

    def add(self, x: Tensor, d: Tensor) -> None:
        """Add the inputs of one call where the gradients of its outputs are not 0."""
        valid = (d.detach().reshape(-1, d.shape[-1]) != 0).any(-1)
        if self.kind == "embedding":
            self.count_ids(x.reshape(-1), valid)
            return
        x = x.detach().reshape(-1, x.shape[-1]).to(accumulation_dtype(d.dtype))
        x = (F.pad(x, (0, 1), value=1.0) if self.has_bias_column else x) * valid[:, None]
        if self.normalize_inputs:
            x = x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=torch.finfo(x.dtype).tiny)
        self.add_positions(valid)
        if self.gram is not None:
            self.gram += x.mT @ x
            return
        self.inputs.append(x)
        if sum(map(len, self.inputs)) >= x.shape[1]:
            self.compute_gram()

    def add_positions(self, valid: Tensor) -> None:
        self.num_positions = valid.sum() + (0 if self.num_positions is None else self.num_positions)

    def count_ids(self, ids: Tensor, valid: Tensor) -> None:
        if self.padding_idx is not None:
            valid = valid & (ids != self.padding_idx)  # no gradient reaches that row, so nothing may erase it
        if self.gram is None:
            dtype = accumulation_dtype(self.weight.dtype)
            self.gram = torch.zeros(len(self.weight), dtype=dtype, device=ids.device)
        self.gram.index_add_(0, ids, valid.to(self.gram.dtype))
        self.add_positions(valid)

    def compute_gram(self) -> Tensor:
        """Return X'X, computed from the stored rows if necessary."""
        if self.gram is None:
            x = torch.cat(self.inputs)
            self.gram = x.mT @ x
            self.inputs = []
        return self.gram


def get_statistics(p: Tensor) -> InputStatistics | None:
    """Return the input statistics that `record_inputs` attached to a parameter."""
    return cast("InputStatistics | None", getattr(p, "recording", None))


class RecordGradient(torch.autograd.Function):
    """Identity on a map's output, whose backward pass records the input and the gradient.

    Under activation checkpointing the forward pass runs twice but the backward pass once.
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


def attach_recorder(recording: InputStatistics | None, weight: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return `y`, recorded if the weight needs a gradient."""
    if recording is None or not (weight.requires_grad and torch.is_grad_enabled()):
        return y
    return cast(Tensor, cast(Any, RecordGradient).apply(y, x, recording))


class RecordedLinear(nn.Linear):
    """An `nn.Linear` whose inputs are recorded.

    The statistics belong to the module: under FSDP2 its weight in a pass is another tensor than the sharded one.
    """

    recording: InputStatistics | None = None

    def forward(self, input: Tensor) -> Tensor:
        return attach_recorder(self.recording, self.weight, super().forward(input), input)


class RecordedEmbedding(nn.Embedding):
    """An `nn.Embedding` whose inputs are recorded; see `RecordedLinear`."""

    recording: InputStatistics | None = None

    def forward(self, input: Tensor) -> Tensor:
        return attach_recorder(self.recording, self.weight, super().forward(input), input)


RECORDED_TYPES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: RecordedLinear, nn.Embedding: RecordedEmbedding}


def parameter_kind(module: nn.Module) -> ParameterKind:
    """Return whether and how a module's weight can be recorded."""
    if type(module) is nn.Linear or type(module) is RecordedLinear:
        return "linear"
    if isinstance(module, nn.Linear):
        return "foreign"
    if type(module) in (nn.Embedding, RecordedEmbedding):
        embedding = cast(nn.Embedding, module)
        is_plain = not (embedding.sparse or embedding.scale_grad_by_freq or embedding.max_norm)
        return "embedding" if is_plain else "other"
    weight = getattr(module, "weight", None)  # a matrix product of another class, such as transformers' Conv1D
    return "foreign" if isinstance(weight, Tensor) and weight.ndim == 2 else "other"


def find_owners(model: nn.Module) -> dict[int, list[tuple[str, ParameterKind, nn.Module]]]:
    """Return for every parameter, by its `id`, the names, kinds and modules it occurs in."""
    owners: dict[int, list[tuple[str, ParameterKind, nn.Module]]] = {}
    for path, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        for name, p in module.named_parameters(recurse=False):
            kind = parameter_kind(module) if name == "weight" else "other"
            owners.setdefault(id(p), []).append((f"{path}.{name}" if path else name, kind, module))
    return owners


def record_inputs(model: ModuleT) -> ModuleT:
    """Replace the `nn.Linear` and `nn.Embedding` modules of a model by subclasses that record their inputs.

    Parameters, names, hooks and outputs stay the same, bit for bit; `stop_recording` undoes it. A weight shared by an
    embedding and a linear map is not recorded, nor are modules added later; a copy of the model records its own inputs.
    Each recorded map stores a matrix as wide as its input; under FSDP2 each rank stores it whole, for its own rows.

    Every backward pass through a map is recorded until `DGD.step` or `DGD.zero_grad`, also one whose gradients do not
    reach `.grad`, such as `torch.autograd.grad` for an input: call `DGD.zero_grad` after it, not `model.zero_grad`.

    Returns:
        The same model.

    Raises:
        UsageError: If the model has nothing to record.
    """
    owners = find_owners(model)
    num_recorded = 0
    for p in model.parameters():
        name, kind, module = owners[id(p)][0]
        if p.ndim != 2:
            continue
        kind = kind if all(kind == other for _, other, _ in owners[id(p)]) else "other"
        num_recorded += kind in ("linear", "embedding")
        recording = get_statistics(p)
        if recording is None:
            owns_bias = kind == "linear" and len(owners[id(p)]) == 1
            bias = cast("Tensor | None", getattr(module, "bias", None)) if owns_bias else None
            padding_idx = cast("int | None", getattr(module, "padding_idx", None))
            recording = InputStatistics(name, kind, p, bias, padding_idx)
            recording.attach()
        is_recorded = kind in ("linear", "embedding") and kind == recording.kind  # of the first model with this weight
        for _, _, owner in owners[id(p)] if is_recorded else ():
            owner.__class__ = RECORDED_TYPES.get(type(owner), type(owner))
            setattr(owner, "recording", recording)  # noqa: B010
    if not num_recorded:
        raise UsageError("record_inputs: the model has no nn.Linear and no nn.Embedding")
    return model


def stop_recording(model: ModuleT) -> ModuleT:
    """Undo `record_inputs`."""
    originals = {recorded: original for original, recorded in RECORDED_TYPES.items()}
    for module in model.modules():
        module.__class__ = originals.get(type(module), type(module))
        vars(module).pop("recording", None)
    for p in model.parameters():
        if hasattr(p, "recording"):
            delattr(p, "recording")
    return model
