"""Cartridges (arXiv:2506.06266): keys and values for one document, trained so that the model answers as with its text.

The memory begins as a selection of the document's own keys and values. Its loss is the KL divergence of the model with
the memory from the model with the whole document, on rows of self-study.

Symbols: p teacher, q student; M slots; the first slots are frozen, since they serve as attention sinks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.compression.distillation import distillation_loss
from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.selection import DocumentReader
from laconic.compression.self_study import QUOTED_TOKENS, Requests, StudyBatch, build_study_batch, write_study_rows
from laconic.errors import UsageError
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.ops.rope_scaling import get_movable_rope
from laconic.rng import permutation

HELD_OUT_SHARE = 1 / 8  # share of the rows that choose the best step
STEPS_BETWEEN_CHECKS = 10
NO_REQUESTS = Requests()  # rows are passages and continuations of the document only


@dataclass(frozen=True)
class CartridgeConfig:
    """Options of `fit_cartridge`.

    Args:
        steps: Optimizer steps.
        num_rows: Number of self-study rows; an eighth is held out to choose the best step.
        max_tokens: Largest number of scored ids per row.
        batch_size: Rows per step.
        learning_rate: Learning rate of Adam, which falls linearly to 0.
        num_frozen_tokens: Number of first slots that are not trained.
        seed: Seed of the samples and of the order of rows.

    Raises:
        UsageError: If a number is too small.
    """

    steps: int = 200
    num_rows: int = 128
    max_tokens: int = 64
    batch_size: int = 8
    learning_rate: float = 5e-2
    num_frozen_tokens: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        minima = {"steps": 1, "num_rows": 16, "max_tokens": 2, "batch_size": 1, "num_frozen_tokens": 0}
        for name, minimum in minima.items():
            if getattr(self, name) < minimum:
                raise UsageError(f"{name} {getattr(self, name)}: give {minimum} or more")
        if not self.learning_rate > 0:
            raise UsageError(f"learning_rate {self.learning_rate:g}: give a number above 0")

    @property
    def row_tokens(self) -> int:
        """Largest number of tokens of a row of self-study, which follow the document."""
        return QUOTED_TOKENS + 2 * self.max_tokens


class CartridgeFit(NamedTuple):
    """Result of `fit_cartridge`: the memory of the step with the lowest held-out loss."""

    memory: KVMemory
    best_step: int
    held_out_losses: dict[int, float]  # KL divergence in nats per token, by step from 0


def fit_cartridge(
    decoder: Decoder,
    memory: KVMemory,
    document: Sequence[int],
    config: CartridgeConfig = CartridgeConfig(),
    *,
    requests: Requests = NO_REQUESTS,
    on_progress: Callable[[str, int, int, float | None], None] = lambda label, done, total, loss: None,
) -> CartridgeFit:
    """Train a memory's keys and values to replace a document; the decoder's weights do not change.

    If all heads have the same number of slots, these get consecutive positions from 0, and the next token follows at
    position M, as in peft's cartridges. Otherwise slots keep their positions, and the next token follows the document.

    Args:
        decoder: Model that wrote the memory.
        memory: Selection of one document's keys and values, see `laconic.compress_kv`.
        document: Ids of the whole document.
        config: Options.
        requests: Prompts of self-study.
        on_progress: Called with a label, the steps done, their number, and the last held-out loss.

    Returns:
        The memory of the step with the lowest held-out loss.

    Raises:
        UsageError: If the memory has several rows, the document does not fit the context, or the slots cannot be moved.
    """
    if memory.B != 1:
        raise UsageError(f"fit_cartridge: the memory has {memory.B} documents; fit one at a time")
    check_document_fits(decoder, len(document), config)
    start = memory
    if memory.has_equal_heads:
        hint = "fit a memory by kvzip without equal heads, whose slots stay where they are"
        get_movable_rope(decoder.config.rope, decoder.config.family, hint)
        start = memory.renumber_slots(decoder.config)
    batches, held_out = write_study_batches(decoder, document, config, requests, on_progress)
    frozen = start.split_layers(start.slot_index < config.num_frozen_tokens)
    parameters = [t.detach().clone().requires_grad_() for t in (*start.keys, *start.values)]
    optimizer = torch.optim.Adam(parameters, lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=config.steps)
    trainable = [p for p in decoder.parameters() if p.requires_grad]
    losses = dict[int, float]()
    best = list[Tensor]()
    try:
        decoder.requires_grad_(False)
        for step in range(config.steps + 1):
            if step % STEPS_BETWEEN_CHECKS == 0 or step == config.steps:
                losses[step] = held_out_loss(decoder, replace_tensors(start, parameters).to_cache(), held_out)
                on_progress("fitting", step, config.steps, losses[step])
                if min(losses, key=losses.__getitem__) == step:
                    best = [p.detach().clone() for p in parameters]
            if step == config.steps:
                break
            optimizer.zero_grad()
            cache = replace_tensors(start, parameters).to_cache()
            study_loss(decoder, cache, batches[step % len(batches)]).backward()  # pyright: ignore[reportUnknownMemberType]
            for p, is_frozen in zip(parameters, (*frozen, *frozen), strict=True):
                assert p.grad is not None
                p.grad[is_frozen] = 0
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]
            schedule.step()
    finally:
        for p in trainable:
            p.requires_grad_()
    return CartridgeFit(replace_tensors(start, best), min(losses, key=losses.__getitem__), losses)


def check_document_fits(decoder: Decoder, num_tokens: int, config: CartridgeConfig) -> None:
    context = decoder.config.max_position_embeddings
    room = context - config.row_tokens
    if num_tokens > room:
        hint = f"fit a text of at most {room:,} tokens" if room > 0 else "use a model with a longer context"
        raise UsageError(
            f"a text of {num_tokens:,} tokens and the {config.row_tokens} of a row of self-study after it exceed the "
            f"context of {context:,}; {hint}"
        )


@torch.no_grad()
def write_study_batches(
    decoder: Decoder,
    document: Sequence[int],
    config: CartridgeConfig,
    requests: Requests,
    on_progress: Callable[[str, int, int, float | None], None],
) -> tuple[list[StudyBatch], list[StudyBatch]]:
    """Build self-study rows about a document; return the batches to train on, and those held out."""
    cache = DocumentReader(decoder).read(torch.tensor([list(document)], device=decoder.device))
    rows = write_study_rows(
        decoder,
        cache,
        document,
        requests,
        num_rows=config.num_rows,
        max_tokens=config.max_tokens,
        seed=config.seed,
        on_progress=lambda done, total: on_progress("self-study, before fitting", done, total, None),
    )
    rows = [rows[i] for i in permutation(len(rows), config.seed)]
    num_held_out = max(1, int(len(rows) * HELD_OUT_SHARE))
    parts = list[list[StudyBatch]]()
    for part in (rows[num_held_out:], rows[:num_held_out]):
        size = min(config.batch_size, len(part))
        starts = range(0, len(part), size)
        parts.append([build_study_batch(decoder, cache, part[start : start + size]) for start in starts])
    return parts[0], parts[1]


def replace_tensors(memory: KVMemory, parameters: Sequence[Tensor]) -> KVMemory:
    """Return the memory with other keys, the first half of the parameters, and values."""
    L = len(memory.keys)
    return replace(memory, keys=tuple(parameters[:L]), values=tuple(parameters[L:]))


def study_loss(decoder: Decoder, cache: KVCache, batch: StudyBatch) -> Float[Tensor, ""]:
    """Return the mean of KL(p ‖ q) over the scored positions of a batch read after a memory."""
    output = decoder(
        decoder.embed(batch.input_ids), cache.repeat_rows(len(batch.input_ids)), attention_mask=batch.attention_mask
    )
    student = decoder.logits(output.hidden_states[batch.predicts])
    return distillation_loss(student, decoder.logits(batch.teacher)).mean()


@torch.no_grad()
def held_out_loss(decoder: Decoder, cache: KVCache, batches: Sequence[StudyBatch]) -> float:
    counts = [int(batch.predicts.sum()) for batch in batches]
    losses = [float(study_loss(decoder, cache, batch)) for batch in batches]
    return sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
