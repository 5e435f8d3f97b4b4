"""Compress the KV cache of a document of any length without training (`compress_kv`)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Int
from torch import Tensor

from laconic.compression.kv.config import DEFAULT_CONFIG, KVCompressionConfig, KVMethod
from laconic.compression.kv.loss import (
    PASSAGE_TOKENS,
    LossProbes,
    build_loss_probes,
    find_smallest_memory,
    measure_document_loss,
)
from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.selection import (
    NO_REPEAT_PROMPT,
    PREVIOUS_TOKENS,
    DocumentReader,
    RepeatPrompt,
    count_repeated,
    rank_document,
    repeat_tokens,
)
from laconic.compression.memory_policy import find_smallest_window
from laconic.console import ProgressFn
from laconic.errors import UsageError
from laconic.generation.config import check_type
from laconic.generation.prompt import check_ids, check_is_decoder
from laconic.models.decoder import Decoder
from laconic.models.ops.rope_scaling import get_movable_rope

PROMPT_SHARE = 1 / 4  # share of the context that max_loss leaves for prompts after a document of several windows


class DocumentCompression(NamedTuple):
    """A compressed document: its memory, the windows it was read in, the positions read, and what was measured."""

    memory: KVMemory
    windows: list[int]
    positions: int
    measured: dict[str, Any]


def compress_kv(
    decoder: Decoder,
    input_ids: Sequence[int] | Int[Tensor, " T"],
    config: KVCompressionConfig = DEFAULT_CONFIG,
    *,
    repeat_prompt: RepeatPrompt = NO_REPEAT_PROMPT,
) -> KVMemory:
    """Read a document and keep the most important part of its KV cache, without training.

    Pass the result's `to_cache()` to `laconic.generate` as `state`; tokens continue after the document.

    Args:
        decoder: Any decoder.
        input_ids: Token ids of the document. If they exceed the model's context, they are read in windows.
        config: Method and size.
        repeat_prompt: Token ids of the request to repeat the document, for KVzip.

    Returns:
        A memory of one row, without metadata.

    Raises:
        UsageError: If there are no ids, or the document cannot be read in windows.
        InputError: If an id is outside the vocabulary.

    Examples:
        >>> import laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> memory = laconic.compress_kv(decoder, list(range(64)), laconic.KVCompressionConfig("snapkv", slots=16))
        >>> config = laconic.GenerationConfig(max_tokens=4, eos_token_ids=())
        >>> generation = laconic.generate(decoder, input_ids=[[5, 6]], state=memory.to_cache(), config=config)[0]
        >>> memory.M, len(generation.token_ids)
        (16, 4)
    """
    return compress_document(decoder, input_ids, config, repeat_prompt).memory


@torch.no_grad()
def compress_document(
    decoder: Decoder,
    input_ids: Sequence[int] | Int[Tensor, " T"],
    config: KVCompressionConfig,
    repeat_prompt: RepeatPrompt,
    prefix_tokens: int = 0,
    on_progress: ProgressFn = lambda name, done, total: None,
) -> DocumentCompression:
    """Compress as `compress_kv` does, and also report the cost.

    `repeat_prompt` also serves to measure the loss. The first `prefix_tokens`, of a chat prefix, are kept while there
    is room. `on_progress` gets the current step, the positions read so far, and all that are to be read.
    """
    check_is_decoder(decoder)
    check_type("config", config, KVCompressionConfig, 'laconic.KVCompressionConfig("kvzip", keep=…)')
    check_type("input_ids", input_ids, Iterable, "the token ids of one document")
    is_tensor = isinstance(input_ids, Tensor)
    row = cast(list[int], input_ids.cpu().numpy().tolist()) if is_tensor else list(input_ids)
    if not row:
        raise UsageError("the document has no tokens; give text")
    check_ids([row], decoder.config.vocab_size)
    ids = torch.tensor([row], dtype=torch.long, device=decoder.device)
    longest = compute_window_tokens(decoder, config.method, repeat_prompt, measures_loss=config.max_loss is not None)
    windows = split_windows(decoder, ids, longest)
    # each window gets its share of the slots, rounded so that they add up
    total = config.num_slots(ids.shape[1])
    ends = accumulate((window.shape[1] for window in windows), initial=0)
    shares = [total * end // ids.shape[1] for end in ends]
    slots = [max(1, end - start) for start, end in pairwise(shares)]
    if len(windows) > 1:  # checked before reading, which may take hours
        hint = f"give a text of at most {longest:,} tokens, which is read in one window"
        get_movable_rope(decoder.config.rope, decoder.config.family, hint)
        if config.max_loss is None:
            check_slots_fit(decoder, slots, ids.shape[1])
        config = replace(config, equal_heads=True)  # since they are joined at consecutive positions
    prefixes = [min(prefix_tokens, windows[0].shape[1] - 1), *[0] * (len(windows) - 1)]
    to_read = ids.shape[1]
    if config.method == "kvzip":
        pairs = zip(windows, prefixes, strict=True)
        to_read += sum(count_repeated(decoder, window, repeat_prompt, prefix) for window, prefix in pairs)
    reader = DocumentReader(decoder, lambda done: on_progress("positions read", done, to_read))
    num_probed = 0  # positions read to measure
    memories: list[KVMemory] = []
    measured: list[dict[str, Any]] = []
    probes_of_windows: list[LossProbes] = []
    for window, num_slots, prefix in zip(windows, slots, prefixes, strict=True):
        memory = rank_document(reader, window, config, repeat_prompt, prefix)
        if config.max_loss is None:
            memories.append(memory.keep_top_slots(num_slots))
            continue
        probes = build_loss_probes(decoder, memory.to_cache(), window, repeat_prompt, prefix)
        smallest, losses = find_smallest_memory(
            decoder, memory, probes, config.max_loss, lambda slots: on_progress(f"measuring {slots:,} slots", 0, 0)
        )
        num_probed += int(probes.attention_mask.sum()) * (len(losses["trials"]) + 1)
        memories.append(smallest)
        measured.append(losses)
        probes_of_windows.append(probes)
    if config.max_loss is not None and len(windows) > 1:
        memories = shrink_to_context(decoder, memories, probes_of_windows, measured)
    lengths = [window.shape[1] for window in windows]
    if len(memories) > 1:  # joined at consecutive positions, as if the dropped tokens had never been
        check_slots_fit(decoder, [memory.M for memory in memories], ids.shape[1])
        memories = [memory.renumber_slots(decoder.config) for memory in memories]
    memory = memories[0] if len(memories) == 1 else KVMemory.concat_documents(decoder.config, *memories)
    positions = reader.positions + num_probed
    return DocumentCompression(memory, lengths, positions, {"windows": measured} if measured else {})


def split_windows(decoder: Decoder, ids: Int[Tensor, "1 N"], longest: int) -> list[Int[Tensor, "1 n"]]:
    """Split a document into windows of nearly equal size, of `longest` tokens at most."""
    N = ids.shape[1]
    sliding = find_smallest_window(decoder.config)
    if sliding is not None and sliding < N:
        raise UsageError(f"{N:,} tokens, but layers attend to the last {sliding:,} only; give at most that many")
    return list(ids.tensor_split(-(-N // longest), 1))


def compute_window_tokens(
    decoder: Decoder, method: KVMethod, repeat_prompt: RepeatPrompt, *, measures_loss: bool = False
) -> int:
    """Return the length of the longest document that is read in one window.

    What is repeated after it has to fit too: pieces for KVzip, passages if the loss is measured.
    """
    context = decoder.config.max_position_embeddings
    repeated = PASSAGE_TOKENS if measures_loss else 0
    if method == "kvzip":
        repeated = max(repeated, repeat_tokens(decoder))
    return max(1, context - repeated - PREVIOUS_TOKENS - sum(map(len, repeat_prompt))) if repeated else context


def check_slots_fit(decoder: Decoder, slots: Sequence[int], num_tokens: int) -> None:
    total = sum(slots)
    context = decoder.config.max_position_embeddings
    if total > context:
        raise UsageError(
            f"{num_tokens:,} tokens in {len(slots)} windows leave {total:,} slots, more than the context of "
            f"{context:,}; keep at most {context:,} slots, a share of {math.floor(1e3 * context / num_tokens) / 1e3:g}"
        )


def shrink_to_context(
    decoder: Decoder, memories: Sequence[KVMemory], probes: Sequence[LossProbes], measured: Sequence[dict[str, Any]]
) -> list[KVMemory]:
    """Shorten the memories of windows, all by the same share, until a prompt fits behind them into the context.

    Their losses are measured again and replaced in `measured`.
    """
    limit = int((1 - PROMPT_SHARE) * decoder.config.max_position_embeddings)
    total = sum(memory.M for memory in memories)
    if total <= limit:
        return list(memories)
    shorter = [memory.keep_top_slots(max(1, memory.M * limit // total)) for memory in memories]
    for memory, texts, losses in zip(shorter, probes, measured, strict=True):
        loss = measure_document_loss(decoder, memory.to_cache(), texts)
        losses["memory"] = asdict(loss)
        losses["trials"].append({"slots": memory.M, "loss": loss.mean})
    return shorter
