"""KV cache selection: read a document once, and rank its keys and values within every layer and KV head.

Methods: KVzip (arXiv:2505.23416), SnapKV (2404.14469), R-KV (2505.24133), H2O (2306.14048), expected attention
(2510.00636), StreamingLLM's sinks and recent window (2309.17453), key norms (2406.11430), random. KVzip's scores are
comparable between heads, so that its slots go to the heads that need them; the others rank each head for itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.compression.kv import scores as kv_scores
from laconic.compression.kv.config import SHARED_METHODS, KVCompressionConfig, KVMethod
from laconic.compression.kv.memory import KVMemory
from laconic.models import rope
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput
from laconic.models.kv_prefix import KVPrefix, PrefixHead
from laconic.models.ops.rope_scaling import ROPE_SCALINGS
from laconic.rng import uniform

LayerScores = Float[Tensor, "L B G N"]
READ_TOKENS = 512  # positions per forward pass
REPEAT_TOKENS = 2048  # tokens that KVzip has repeated at once
OBSERVED_TOKENS = {"snapkv": 64, "rkv": 8}  # last queries whose attention SnapKV and R-KV use
FUTURE_POSITIONS = 512  # positions after the document that expected attention averages over
PREVIOUS_TOKENS = 8  # tokens before a later piece that KVzip's prompt quotes


class RepeatPrompt(NamedTuple):
    """Token ids of KVzip's request to repeat a document: its first piece, a later one, and what precedes the reply."""

    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def build(self, ids: Int[Tensor, "1 N"], start: int, stop: int, begin: int = 0) -> Int[Tensor, "1 T"]:
        """Return the ids of the request and of the piece from `start` to `stop` that the model repeats.

        The tokens before `begin` are never repeated, so the piece that starts there is the first.
        """
        quoted = ids[:, max(begin, start - PREVIOUS_TOKENS) : start]
        request = torch.tensor([self.first if start == begin else self.later], dtype=torch.long, device=ids.device)
        suffix = torch.tensor([self.suffix], dtype=torch.long, device=ids.device)
        return torch.cat([request, quoted, suffix, ids[:, start:stop]], 1)


NO_REPEAT_PROMPT = RepeatPrompt()


class DocumentReader:
    """Reads ids with a decoder, `READ_TOKENS` per pass; calls `on_read` with the number of positions read so far."""

    def __init__(self, decoder: Decoder, on_read: Callable[[int], None] | None = None) -> None:
        self.decoder, self.on_read = decoder, on_read
        self.positions = 0

    def read(
        self,
        ids: Int[Tensor, "1 T"],
        cache: KVCache | None = None,
        capture: tuple[str, ...] = (),
        observe: Callable[[DecoderOutput], None] | None = None,
    ) -> KVCache:
        """Read ids on top of a cache and return the longer cache; `observe` sees the output of every pass."""
        for start in range(0, ids.shape[1], READ_TOKENS):
            piece = ids[:, start : start + READ_TOKENS]
            output = self.decoder(self.decoder.embed(piece), cache, capture=capture)
            self.positions += piece.shape[1]
            if observe is not None:
                observe(output)
            if self.on_read is not None:
                self.on_read(self.positions)
            cache = output.cache
        assert cache is not None
        return cache


def rank_document(
    reader: DocumentReader,
    ids: Int[Tensor, "1 N"],
    config: KVCompressionConfig,
    repeat_prompt: RepeatPrompt = NO_REPEAT_PROMPT,
    prefix_tokens: int = 0,
) -> KVMemory:
    """Read a document and return a memory of all its positions, ranked; `keep_top_slots` then shortens it.

    `repeat_prompt` is KVzip's, which does not have the first `prefix_tokens`, of a chat template, repeated.
    """
    N = ids.shape[1]
    observed = min(OBSERVED_TOKENS.get(config.method, 0), N // 2)
    if config.method == "h2o":
        cache, scores = score_observed_attention(reader, ids)
    elif config.method == "expected":
        cache, scores = score_expected_attention(reader, ids, config.num_sinks)
    elif observed:
        cache, scores = score_last_queries(reader, ids, config.method, observed)
    elif config.method == "kvzip":
        cache = reader.read(ids)
        begin = min(prefix_tokens, N - 1)
        scores = score_repetition(reader, ids, cache, config.num_sinks, repeat_prompt, begin)
    else:
        cache = reader.read(ids)
        scores = score_cache(cache, config)
    recent = torch.arange(N, device=ids.device) >= N - observed
    equal_heads = config.equal_heads or config.method not in SHARED_METHODS
    ranks = kv_scores.rank_slots(scores, min(config.num_sinks, N), recent, equal_heads)
    return replace(KVMemory.from_cache(cache), ranks=ranks.flatten())


def score_cache(cache: KVCache, config: KVCompressionConfig) -> LayerScores:
    """Return the scores of the methods that need no queries."""
    L, G, _ = cache.shape_summary
    N, device = cache.S, cache.valid.device
    if config.method == "knorm":
        return torch.stack([kv_scores.key_norm_scores(k) for k in cache.keys])
    if config.method == "random":
        layer, head, key = np.ogrid[:L, :G, :N]
        return torch.tensor(uniform(config.seed, layer, head, key), device=device)[:, None]
    # "window": the later a token, the higher its score; also SnapKV and R-KV of a single token, which observe no query
    return torch.arange(N, device=device, dtype=torch.float32).expand(L, 1, G, N)


def score_observed_attention(reader: DocumentReader, ids: Int[Tensor, "1 N"]) -> tuple[KVCache, LayerScores]:
    """Return the mean attention to each key, over the queries of the document that see it (Eq. HH1)."""
    config = reader.decoder.config
    N = ids.shape[1]
    total = torch.zeros(config.num_hidden_layers, 1, config.num_key_value_heads, N, device=ids.device)

    def observe(output: DecoderOutput) -> None:
        for i, k in enumerate(output.cache.keys):
            q = output.activations[f"q_rot.{i}"]
            total[i, ..., : k.shape[2]] += kv_scores.accumulated_attention(q, k, reader.decoder.attention_scale(i))

    cache = reader.read(ids, None, ("q_rot",), observe)
    return cache, total / torch.arange(N, 0, -1, device=ids.device)


def score_last_queries(
    reader: DocumentReader, ids: Int[Tensor, "1 N"], method: KVMethod, observed: int
) -> tuple[KVCache, LayerScores]:
    """Return the scores of SnapKV or R-KV, from the queries of the last `observed` tokens."""
    function = kv_scores.snapkv_scores if method == "snapkv" else kv_scores.rkv_scores
    scores = list[Tensor]()

    def observe(output: DecoderOutput) -> None:
        for i, k in enumerate(output.cache.keys):
            scores.append(function(output.activations[f"q_rot.{i}"], k, reader.decoder.attention_scale(i)))

    cache = reader.read(ids[:, -observed:], reader.read(ids[:, :-observed]), ("q_rot",), observe)
    return cache, torch.stack(scores)


def score_expected_attention(
    reader: DocumentReader, ids: Int[Tensor, "1 N"], num_sinks: int
) -> tuple[KVCache, LayerScores]:
    """Return the scores of expected attention, from mean and covariance of the document's queries before rotation.

    The sinks are left out of the statistics and of the softmax, because their queries and keys are outliers.
    """
    decoder = reader.decoder
    config = decoder.config
    N = ids.shape[1]
    start = min(num_sinks, N - 1)
    L, H, E = config.num_hidden_layers, config.num_attention_heads, config.head_dim
    sum_q = torch.zeros(L, 1, H, E, dtype=torch.float64, device=ids.device)  # float64: the moments nearly cancel
    sum_qq = torch.zeros(L, 1, H, E, E, dtype=torch.float64, device=ids.device)

    def observe(output: DecoderOutput) -> None:
        T = output.hidden_states.shape[1]
        skipped = max(0, start - (output.cache.S - T))
        for i in range(L):
            q = output.activations[f"q.{i}"][:, :, skipped:].double()
            sum_q[i] += q.sum(2)
            sum_qq[i] += q.transpose(-1, -2) @ q

    cache = reader.read(ids, None, ("q",), observe)
    mean = sum_q / (N - start)
    covariance = sum_qq / (N - start) - mean[..., None] * mean[..., None, :]
    dtype = accumulation_dtype(cache.keys[0].dtype)
    mean, covariance = mean.to(dtype), covariance.to(dtype)
    scores = torch.zeros(L, *cache.keys[0].shape[:3], dtype=dtype, device=ids.device)
    for i, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        mu, sigma = mean[i], covariance[i]
        if config.rope is not None and i not in config.nope_layers:
            future = torch.arange(N, N + FUTURE_POSITIONS, device=ids.device)[None]
            omega, a = ROPE_SCALINGS[config.rope.kind](config.rope, E, future[:, -1] + 1)
            cos, sin = rope.cos_sin_tables(future, omega, a, dtype)
            mu, sigma = kv_scores.average_rotation(mu, sigma, cos[0, 0], sin[0, 0])
        scores[i, ..., start:] = kv_scores.expected_attention_scores(
            mu, sigma, k[:, :, start:], v[:, :, start:], decoder.attention_scale(i)
        )
    return cache, scores


@dataclass(frozen=True, eq=False)
class RepeatedPrefix(KVPrefix):
    """The KV cache of a document while the model repeats a piece of it, which updates the largest `scores` of its keys.

    A sliding window hides neither the document nor its repetition, as it does not hide the memory later. The softmax of
    the scores is over the piece, its repetition and the first `num_sinks` keys of the document.
    """

    piece: slice
    num_sinks: int
    scores: LayerScores

    def heads(self, layer: int) -> list[PrefixHead]:
        """Return the heads of a layer, which attend by themselves."""
        pairs = zip(super().heads(layer), self.scores[layer, 0], strict=True)
        return [head._replace(attend=partial(self.attend, scores)) for head, scores in pairs]

    def attend(
        self, scores: Float[Tensor, " N"], q: Tensor, k: Tensor, v: Tensor, scale: float, mask: object, dropout: float
    ) -> Float[Tensor, "1 T RE"]:
        """Return the attention output of a KV head's queries, and update the scores of its keys."""
        others = None
        if self.piece.stop - self.piece.start < len(scores):
            key = torch.arange(k.shape[2], device=k.device)
            is_in_piece = (key >= self.piece.start) & (key < self.piece.stop)
            others = (key < len(scores)) & ~is_in_piece & (key >= self.num_sinks)
        context, best = kv_scores.attend_and_score(q, k, v, scale, self.piece, others)
        scores[self.piece] = torch.maximum(scores[self.piece], best[0])
        return context


def score_repetition(
    reader: DocumentReader,
    ids: Int[Tensor, "1 N"],
    cache: KVCache,
    num_sinks: int,
    prompt: RepeatPrompt,
    begin: int,
) -> LayerScores:
    """Return KVzip's scores: the model repeats the document piece by piece, on top of its whole cache.

    The cache is a KV prefix of the repetition, so that no pass copies it.
    """
    L, G, _ = cache.shape_summary
    N = cache.S
    scores = torch.zeros(L, 1, G, N, dtype=accumulation_dtype(cache.keys[0].dtype), device=ids.device)
    document = KVMemory.from_cache(cache).to_prefix_cache()
    assert document.prefix is not None
    for start, stop in iter_pieces(reader.decoder, N, begin):
        first = 0 if start == begin else start  # what precedes the first piece is scored with it
        sinks = min(num_sinks, first)
        prefix = RepeatedPrefix(**vars(document.prefix), piece=slice(first, stop), num_sinks=sinks, scores=scores)
        reader.read(prompt.build(ids, start, stop, begin), replace(document, prefix=prefix))
    return scores


def iter_pieces(decoder: Decoder, N: int, begin: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each piece that KVzip has repeated, from the token `begin` on."""
    size = repeat_tokens(decoder)
    return ((start, min(start + size, N)) for start in range(begin, N, size))


def count_repeated(decoder: Decoder, ids: Int[Tensor, "1 N"], prompt: RepeatPrompt, begin: int) -> int:
    """Return how many positions KVzip reads after the document."""
    pieces = iter_pieces(decoder, ids.shape[1], begin)
    return sum(prompt.build(ids, start, stop, begin).shape[1] for start, stop in pieces)


def repeat_tokens(decoder: Decoder) -> int:
    """Return how many tokens KVzip repeats at once; a repetition fills at most a quarter of the context."""
    return max(1, min(REPEAT_TOKENS, decoder.config.max_position_embeddings // 4))
