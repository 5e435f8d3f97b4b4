"""The memory an update needs: followed through a pass over tensors that have none, or by a closed formula.

torch's FakeTensorMode gives every tensor its type and size and no bytes, MemTracker adds up those that are alive. Two
layers are followed; each other one leaves as much for the backward pass as the second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any, cast

import torch
from torch import nn

from laconic.batches import DocumentBatch
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.experiment import build_nested
from laconic.experiment.need_learning import kept
from laconic.experiment.pace import Reads
from laconic.experiment.sketch import shallow, sketched
from laconic.interfaces import Batch, Method, MethodState, StepOutput
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.training.step import PRECISION_DTYPES

HELD = {"cpu": 1.15, "cuda": 1.0}  # what an allocator holds for a byte that is alive: malloc, measured on five models
SHARE = 0.95  # of the memory that is free, which a run may take


@dataclass(frozen=True)
class Need:
    """Bytes: `held` from the second update on (weights and AdamW's moments), `grads`, what a row of a micro-batch
    takes at the peak of its passes, and what the optimizer takes while it works."""

    held: int
    grads: int
    row: float
    update: int
    factor: float

    def peak(self, micro: int, batch: int) -> int:
        """At the peak of an update of `batch` rows; where they come in several micro-batches, gradients wait."""
        waiting = self.grads if micro < batch else 0
        return round(self.factor * (self.held + max(waiting + micro * self.row, self.grads + self.update)))

    def largest(self, room: float, batch: int) -> int:
        """The largest micro-batch for which there is room, 0 if none."""
        if self.peak(batch, batch) <= room:
            return batch
        fits = floor((room / self.factor - self.held - self.grads) / self.row)
        return max(0, min(fits, batch)) if self.peak(1, batch) <= room else 0


def need(method: nn.Module, row: float, device: torch.device) -> Need:
    """All but `row` is known from the parameters alone."""
    sizes = [p.nbytes for p in method.parameters()]
    learn = [p.nbytes for p in method.parameters() if p.requires_grad]
    many = device.type == "cuda"  # there AdamW works on all at once, else on one after the other
    update = sum(learn) if many else 2 * max(learn, default=0)
    return Need(sum(sizes) + 2 * sum(learn), sum(learn), row, update, HELD.get(device.type, 1.0))


def tracked(
    recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, batches: Sequence[Batch], device: torch.device
) -> float:
    """Bytes a row, at the peak of forward and backward, beyond the weights; of the batch that takes most."""
    recipe = settled(recipe)
    alike = recipe.train.activation_checkpointing or 1  # every so many blocks
    depth = min(2 * alike, config.num_hidden_layers)
    few, more = shallow(recipe, config, depth), (config.num_hidden_layers - depth) / alike
    found = [(followed(*few, tokenizer, batch, device), batch.B) for batch in batches]
    if recipe.compression is not None and recipe.compression.checkpoint_segments:
        found = [((peak, unit(*few, tokenizer, batch, device)), rows) for ((peak, _), rows), batch in
                 zip(found, batches, strict=True)]  # fmt: skip
    return max((peak + more * kept) / rows for (peak, kept), rows in found)


def settled(recipe: Recipe) -> Recipe:
    """The recipe with as many vectors for every segment as there can be, so that no number decides what is done."""
    if recipe.compression is None:
        return recipe
    return recipe.model_copy(
        update={"compression": recipe.compression.model_copy(update={"length_policy": "fixed", "num_vectors": None})}
    )


def unit(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, batch: Batch, device: torch.device) -> float:
    """Bytes that the last blocks leave for the backward pass of the longest segment, all else being computed again."""
    assert recipe.compression is not None
    plain = recipe.model_copy(
        update={"compression": recipe.compression.model_copy(update={"checkpoint_segments": False})}
    )
    kept = followed(plain, config, tokenizer, batch, device)[1]
    windows = [
        [s.stop - s.start for s in cast(DocumentBatch, piece).segment_slices] for piece in batch.sequential_parts
    ]
    return kept * max(max(lengths) / sum(lengths) for lengths in windows)


def followed(
    recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, batch: Batch, device: torch.device
) -> tuple[int, int]:
    """Bytes beyond the weights at the peak of a forward and backward pass, and those that the last blocks leave for it.

    None of them is taken. The first block leaves less than the others where words do not learn. Of several pieces, it
    is the one that leaves most.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    method = sketched(recipe, config, tokenizer, 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        faked(method, device)
    whole: Any = replace(cast(Any, batch), totals=cast(Method, method).loss_denominators(batch))
    tracker, kept, most = follower(), list[int](), 0
    decoder = cast(Decoder, method.decoder)
    hooks = [h for block in decoder.layers[len(decoder.layers) // 2 :] for h in (
        block.register_forward_pre_hook(lambda *_: kept.append(-alive(tracker))),
        block.register_forward_hook(lambda *_: kept.append(alive(tracker))),
    )]  # fmt: skip
    tracker.track_external(method)
    how, state = recipe.train, cast(MethodState | None, None)
    with tracker:
        for piece in whole.pieces:
            kept.clear()
            with torch.autocast(device.type, PRECISION_DTYPES[how.precision], how.precision != "float32"):
                step: StepOutput = method(*([piece.to(device)] if state is None else [piece.to(device), state]))
            most = max(most, sum(kept))  # what is computed again in backward counts there
            cast(Any, step.loss).backward()
            state = None if step.state is None else step.state.detach()
    for hook in hooks:
        hook.remove()
    return alive(tracker, "peak") - sum(p.nbytes for p in method.parameters()), most


def alive(tracker: Any, when: str = "current") -> int:
    """Bytes of all tensors, now or at the peak."""
    return sum(each["Total"] for each in tracker.get_tracker_snapshot(when).values())


def faked(method: nn.Module, device: torch.device) -> None:
    """Parameters and buffers on meta become such on a device, under the mode that gives them no memory."""
    for module in method.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            empty = torch.empty(p.shape, dtype=p.dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=p.requires_grad))
        for name, b in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(b.shape, dtype=b.dtype, device=device))


def follower() -> Any:
    """MemTracker without its account by module, which looks at every module at every operation."""
    from torch.distributed._tools.mem_tracker import MemTracker

    class Follower(MemTracker):
        def _pre_fw_hook(self, module: Any, inputs: Any) -> None: ...
        def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None: ...
        def _pre_bw_hook(self, module: Any, args: Any) -> None: ...
        def _post_bw_hook(self, module: Any, args: Any) -> None: ...

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.prim.device.default:  # most of all operations, and nothing to follow
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Follower()


def counted(recipe: Recipe, config: DecoderConfig, read: Reads) -> float:
    """The same by a formula: what the blocks keep for the backward pass of a piece, and logits."""
    if recipe.method == "hope" and recipe.inner_loop is not None:
        shape = build_nested.build_hope_config(recipe, config, donor=recipe.model.family is None)
        return 4 * (read.positions * kept(shape, recipe.inner_loop) + 3 * read.scored * config.vocab_size)
    D, F, L, V = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size
    E, H, G = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    width = 4 if recipe.train.precision == "float32" else 2
    block = 6 * D + 3 * H * E + 4 * G * E + (4 if config.gated_mlp else 2) * F
    if recipe.train.activation_checkpointing:
        block = (D + 2 * G * E) + (block - D) // max(1, L)
    return L * (read.positions * block + 2 * G * E * read.joined) * width + 3 * read.scored * V * 4
