"""Self-study: texts about a document that the model itself writes, to distil the document into a smaller memory.

Cartridges (arXiv:2506.06266), section 4. A row is a passage that the model is asked to repeat, a continuation of the
document, or an answer to a request about it. Before a request the model reads a passage of the document once more, so
that the rows together ask about all of it; the passage is not part of the row. The teacher is the model with the whole
document in its KV cache.

Shapes: R rows, T columns, N scored ids, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches.padding import pad_rows
from laconic.compression.kv.selection import RepeatPrompt
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder

SAMPLED_TOGETHER = 8  # rows of one call of `generate`; each needs a copy of the document's cache
PASSAGE_SHARE = 0.4  # share of the rows that are passages of the document
QUOTED_TOKENS = 48  # length of the passage that precedes a request
TEMPERATURE = 0.7  # at 1, small models stray from the document


class Requests(NamedTuple):
    """Token ids that are put after the document: requests to answer (empty: continue the text), and one to repeat.

    `quote` are the ids before and after a passage that a request refers to.
    """

    prompts: tuple[tuple[int, ...], ...] = ((),)
    repeat: RepeatPrompt = RepeatPrompt()
    quote: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def build_quote(self, document: Sequence[int], prompt: Sequence[int], share: float) -> list[int]:
        """Return the passage to read before a prompt, at a share of the document; none before a continuation."""
        if not prompt:
            return []
        start = int(share * max(len(document) - QUOTED_TOKENS, 0))
        return [*self.quote[0], *document[start : start + QUOTED_TOKENS], *self.quote[1]]


class StudyRow(NamedTuple):
    """Ids to read after the document; the first `num_prompt` are not scored, nor is the first id of a row."""

    ids: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True)
class StudyBatch:
    """Rows padded on the right; the teacher's states, after the final norm, are those where the next id is scored."""

    input_ids: Int[Tensor, "R T"]
    attention_mask: Bool[Tensor, "R T"]
    predicts: Bool[Tensor, "R T"]
    teacher: Float[Tensor, "N D"]


def write_study_rows(
    decoder: Decoder,
    cache: KVCache,
    document: Sequence[int],
    requests: Requests,
    *,
    num_rows: int,
    max_tokens: int,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[StudyRow]:
    """Return passages of a document, whose `cache` has one row, and texts that the model writes about it.

    A row has at most `max_tokens` scored ids. `on_progress` gets the number of rows that the model has written, and
    their total.
    """
    ids = torch.tensor([list(document)])
    num_passages = int(num_rows * PASSAGE_SHARE)
    rows = list[StudyRow]()
    for i in range(num_passages):
        start = i * max(len(document) - max_tokens, 0) // max(num_passages - 1, 1)
        stop = min(start + max_tokens, len(document))
        text = tuple(int(i) for i in requests.repeat.build(ids, start, stop)[0])
        rows.append(StudyRow(text, len(text) - (stop - start)))
    context = cache.crop(cache.S - 1)  # `generate` reads the document's last id again, before the prompt
    for first in range(num_passages, num_rows, SAMPLED_TOGETHER):
        on_progress(first - num_passages, num_rows - num_passages)
        numbers = range(first, min(first + SAMPLED_TOGETHER, num_rows))
        prompts = [requests.prompts[i % len(requests.prompts)] for i in numbers]
        config = GenerationConfig(
            max_tokens=max_tokens, temperature=TEMPERATURE, seed=[seed + i for i in numbers], return_state=False
        )
        shares = [(i - num_passages) / (num_rows - num_passages) for i in numbers]
        quotes = [requests.build_quote(document, p, share) for p, share in zip(prompts, shares, strict=True)]
        inputs = [[document[-1], *quote, *prompt] for quote, prompt in zip(quotes, prompts, strict=True)]
        replies = generate(decoder, input_ids=inputs, state=context.repeat_rows(len(prompts)), config=config)
        rows += [StudyRow((*p, *reply.token_ids), len(p)) for p, reply in zip(prompts, replies, strict=True)]
    return rows


@torch.no_grad()
def build_study_batch(decoder: Decoder, cache: KVCache, rows: Sequence[StudyRow]) -> StudyBatch:
    """Pad rows, and compute the teacher's hidden states with the cache of the whole document."""
    device = cache.valid.device
    input_ids, mask = pad_rows([row.ids for row in rows], device=device)
    prompts = torch.tensor([[max(row.num_prompt, 1)] for row in rows], device=device)
    column = torch.arange(mask.shape[1], device=device)
    predicts = (column >= prompts - 1) & (column < mask.sum(1, keepdim=True) - 1)
    output = decoder(decoder.embed(input_ids), cache.repeat_rows(len(rows)), attention_mask=mask)
    return StudyBatch(input_ids, mask, predicts, output.hidden_states[predicts])
