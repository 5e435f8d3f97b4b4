"""Loss of a KV memory on its own document: the loss of repeating parts of the document and of continuing it."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from laconic.batches.padding import pad_rows
from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.selection import RepeatPrompt
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder

NUM_PASSAGES, PASSAGE_TOKENS = 4, 64  # passages of the document that the model repeats
CONTINUATION_TOKENS = 64
SMALLEST_SHARE = 1 / 128  # size of the smallest memory that is tried, as a share of the document's tokens
SIZE_PRECISION = 1.08  # the search ends when two sizes differ by less than this factor


@dataclass(frozen=True)
class DocumentLoss:
    """Nats per token: on passages to repeat, on the model's own greedy continuation of the document, and on both."""

    repeat: float
    continuation: float
    mean: float


@dataclass(frozen=True)
class LossProbes:
    """Texts to read on top of a memory [R, T], and where their tokens are scored; the last row is the continuation."""

    ids: Int[Tensor, "R T"]
    attention_mask: Bool[Tensor, "R T"]
    scored: Bool[Tensor, "R T"]


def build_loss_probes(
    decoder: Decoder, cache: KVCache, ids: Int[Tensor, "1 N"], prompt: RepeatPrompt, prefix_tokens: int = 0
) -> LossProbes:
    """Return passages that are spread evenly over a document, each after a request to repeat it, and a continuation.

    `cache` is that of the whole document, whose first `prefix_tokens`, of a chat prefix, are not repeated.
    """
    N = ids.shape[1]
    length = min(PASSAGE_TOKENS, N - prefix_tokens)
    spacing = (N - length - prefix_tokens) / (NUM_PASSAGES - 1)
    starts = sorted({prefix_tokens + round(i * spacing) for i in range(NUM_PASSAGES)})
    rows = [list(map(int, prompt.build(ids, start, start + length, prefix_tokens)[0])) for start in starts]
    config = GenerationConfig(max_tokens=CONTINUATION_TOKENS, eos_token_ids=(), return_state=False)
    continuation = generate(decoder, input_ids=ids[:, -1:], state=cache.crop(N - 1), config=config)[0].token_ids
    padded, mask = pad_rows([*rows, continuation], pad_left=True)
    lengths = torch.tensor([length] * len(rows) + [len(continuation) - 1], device="cpu")
    scored = torch.arange(padded.shape[1], device="cpu") >= padded.shape[1] - lengths[:, None]
    return LossProbes(padded.to(ids.device), mask.to(ids.device), scored.to(ids.device))


@torch.no_grad()
def measure_document_loss(decoder: Decoder, cache: KVCache, probes: LossProbes) -> DocumentLoss:
    """Return the loss of the probes on top of a cache of one row. The first token of the continuation is not scored."""
    rows = len(probes.ids)
    output = decoder(decoder.embed(probes.ids), cache.repeat_rows(rows), attention_mask=probes.attention_mask)
    scored = probes.scored[:, 1:]
    losses = F.cross_entropy(
        decoder.logits(output.hidden_states[:, :-1][scored]).float(), probes.ids[:, 1:][scored], reduction="none"
    )
    is_last = torch.arange(rows, device=scored.device)[:, None].expand_as(scored)[scored] == rows - 1
    repeat, continuation, mean = (float(x.mean()) for x in (losses[~is_last], losses[is_last], losses))
    return DocumentLoss(repeat, continuation, mean)


def find_smallest_memory(
    decoder: Decoder,
    memory: KVMemory,
    probes: LossProbes,
    max_loss: float,
    on_measure: Callable[[int], None] = lambda slots: None,
) -> tuple[KVMemory, dict[str, Any]]:
    """Find the smallest memory whose loss exceeds that of the whole cache by at most `max_loss`, in nats per token.

    The slots are dropped in the order of their ranks; the number is found by bisection on a logarithmic scale, which
    assumes that the loss falls as slots are added. Return the memory, the whole one if no smaller one satisfies the
    bound, and what was measured.
    """
    full = measure_document_loss(decoder, memory.to_cache(), probes)
    best, loss = memory, full
    low = max(1, int(memory.M * SMALLEST_SHARE))
    high = memory.M
    slots = low
    trials: list[dict[str, float]] = []
    while high > low:
        on_measure(slots)
        candidate = memory.keep_top_slots(slots)
        measured = measure_document_loss(decoder, candidate.to_cache(), probes)
        trials.append({"slots": slots, "loss": measured.mean})
        if measured.mean - full.mean <= max_loss:
            high = slots
            best, loss = candidate, measured
        else:
            low = slots
        if high <= low * SIZE_PRECISION or high - low <= 1:
            break
        slots = round(math.sqrt(low * high))
    return best, {"max_loss": max_loss, "full": asdict(full), "memory": asdict(loss), "trials": trials}
