"""Contexts that precede the probes of a document: nothing, text, a KV memory, a cartridge, or summary vectors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.kv.cartridge import CartridgeConfig, fit_cartridge
from laconic.compression.kv.compress import compress_document, compute_window_tokens
from laconic.compression.kv.config import KVCompressionConfig, KVMethod
from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.selection import DocumentReader, RepeatPrompt
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.cartridge import build_requests
from laconic.experiment.from_recipe.cost import count_cache_bytes
from laconic.experiment.text_models.kv_compressor import build_repeat_prompt
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder

KV_METHODS: dict[str, tuple[KVMethod, bool]] = {  # name -> score, and whether all heads keep as many
    "kvzip": ("kvzip", False),
    "kvzip-equal": ("kvzip", True),
    **{name: (name, True) for name in ("snapkv", "rkv", "h2o", "expected", "knorm", "window", "random")},
}
NO_CONTEXT, FULL_TEXT, LAST_TOKENS, FIT, SUMMARY = "no context", "full text", "last tokens", "fit", "summary vectors"
INDEX_BYTES = 8  # of a slot in a memory's file: its position and its rank
HiddenStates = Callable[[Int[Tensor, "R T"], Bool[Tensor, "R T"]], Float[Tensor, "R T D"]]


class ProbeContext(NamedTuple):
    """What precedes the probes: `hidden_states` reads their ids, with a mask, after it.

    The name has the share of the document's tokens that is kept, where it is chosen. Positions are per layer and KV
    head, on average; bytes are those of the tensors in a file, and of the KV cache that attention reads.
    """

    name: str
    hidden_states: HiddenStates
    positions: float
    file_bytes: int
    used_bytes: int


def read_after_cache(
    decoder: Decoder, cache: KVCache | None, ids: Int[Tensor, "R T"], mask: Bool[Tensor, "R T"]
) -> Float[Tensor, "R T D"]:
    state = None if cache is None else cache.repeat_rows(len(ids))
    return decoder(decoder.embed(ids), state, attention_mask=mask).hidden_states


def build_kv_context(decoder: Decoder, name: str, memory: KVMemory) -> ProbeContext:
    cache = memory.to_cache()
    file_bytes = memory.num_bytes + int(memory.slots.sum()) * INDEX_BYTES
    read = partial(read_after_cache, decoder, cache)
    return ProbeContext(name, read, float(memory.num_slots[0]), file_bytes, cache.kv_bytes)


def iter_text_contexts(
    read: Callable[[str, Sequence[int]], ProbeContext], ids: Sequence[int], num_special: int, keeps: Sequence[float]
) -> Iterator[ProbeContext]:
    """Yield the plain baselines: no context, the whole text, and as many of its last tokens as a memory keeps.

    The first `num_special` ids are special tokens, which precede the last tokens too; `keeps` are shares of the tokens.
    """
    special = ids[:num_special]
    yield read(NO_CONTEXT, special)
    yield read(FULL_TEXT, ids)
    for keep in keeps:
        num_tokens = KVCompressionConfig(keep=keep).num_slots(len(ids)) - num_special
        yield read(f"{LAST_TOKENS} {keep:g}", [*special, *(ids[-num_tokens:] if num_tokens > 0 else ())])


def read_into_cache(decoder: Decoder, name: str, ids: Sequence[int]) -> ProbeContext:
    if not ids:
        return ProbeContext(name, partial(read_after_cache, decoder, None), 0.0, 0, 0)
    cache = DocumentReader(decoder).read(torch.tensor([list(ids)], device=decoder.device))
    return build_kv_context(decoder, name, KVMemory.from_cache(cache))


def iter_kv_memories(
    decoder: Decoder,
    ids: Sequence[int],
    config: KVCompressionConfig,
    keeps: Sequence[float],
    repeat_prompt: RepeatPrompt,
) -> Iterator[KVMemory]:
    """Yield the memories that `laconic compress` writes of a document with each share of `keeps`.

    A document of one window is read and ranked once. Windows are joined at consecutive positions, which depend on how
    many slots each of them keeps, so that a longer document is compressed for each share.
    """
    if len(ids) > compute_window_tokens(decoder, config.method, repeat_prompt):
        for keep in keeps:
            yield compress_document(decoder, ids, replace(config, keep=keep), repeat_prompt).memory
        return
    ranked = compress_document(decoder, ids, replace(config, keep=1.0), repeat_prompt).memory
    for keep in keeps:
        yield ranked.keep_top_slots(replace(config, keep=keep).num_slots(len(ids)))


def iter_kv_contexts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    method: str,
    keeps: Sequence[float],
    fit_steps: int | None = None,
) -> Iterator[ProbeContext]:
    """Yield the contexts of one of `KV_METHODS` at several sizes.

    With `fit_steps`, each selection is trained as a cartridge for so many steps. `keeps` are shares of the tokens.
    """
    score, equal_heads = KV_METHODS[method]
    config = KVCompressionConfig(score, equal_heads=equal_heads)
    memories = iter_kv_memories(decoder, ids, config, keeps, build_repeat_prompt(tokenizer))
    for keep, memory in zip(keeps, memories, strict=True):
        if fit_steps is not None:
            requests = build_requests(tokenizer, chat=False)
            fit = CartridgeConfig(steps=fit_steps)
            with torch.enable_grad():
                memory = fit_cartridge(decoder, memory, ids, fit, requests=requests).memory
        name = method if fit_steps is None else f"{FIT} {fit_steps} steps"
        yield build_kv_context(decoder, f"{name} {keep:g}", memory)


def read_text_with_compressor(method: AutoCompressor, name: str, document: Sequence[int]) -> ProbeContext:
    """Return the context of a text that a compressor reads together with every probe."""
    prefix = torch.tensor([list(document)], dtype=torch.long, device=method.decoder.device)

    def hidden_states(ids: Int[Tensor, "R T"], mask: Bool[Tensor, "R T"]) -> Float[Tensor, "R T D"]:
        before = prefix.expand(len(ids), -1)
        whole_mask = torch.cat([torch.ones_like(before, dtype=torch.bool), mask], 1)
        return method.read_text(torch.cat([before, ids], 1), whole_mask)[:, before.shape[1] :]

    size = count_cache_bytes(method.decoder, len(document))
    return ProbeContext(name, hidden_states, float(len(document)), size, size)


def compress_to_vectors(method: AutoCompressor, document: Sequence[int], segment_tokens: int) -> ProbeContext:
    """Compress a document, segment by segment. Raises `UsageError` for more segments than the memory holds."""
    segments = torch.tensor([list(document)], dtype=torch.long, device=method.decoder.device).split(segment_tokens, 1)
    memory = None
    for segment in segments:
        memory = method.compress(segment, None, memory)
    assert memory is not None
    M = int(memory.num_vectors[0])

    def hidden_states(ids: Int[Tensor, "R T"], mask: Bool[Tensor, "R T"]) -> Float[Tensor, "R T D"]:
        return method.read_text(ids, mask, memory.select_rows([0] * len(ids)))

    return ProbeContext(SUMMARY, hidden_states, float(M), memory.num_bytes, count_cache_bytes(method.decoder, M))
