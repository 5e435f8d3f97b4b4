"""`laconic compress` with a plain checkpoint: keep the most important keys and values of a text."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import laconic
from laconic.cli.arguments import parse_dtype, refuse_flags
from laconic.cli.commands.compress import SUMMARY_FLAGS, CompressCommand
from laconic.compression.kv.cartridge import CartridgeConfig, check_document_fits
from laconic.compression.kv.compress import PROMPT_SHARE
from laconic.compression.kv.config import MIN_DEFAULT_SLOTS, SHARED_METHODS, KVCompressionConfig
from laconic.compression.kv.memory import KVMemory
from laconic.console import log_message, pluralize, progress, status
from laconic.experiment.cartridge import fit_text
from laconic.experiment.from_recipe.cost import format_bytes, kv_bytes_per_position
from laconic.experiment.text_models.kv_compressor import compress_text, encode_document
from laconic.models.config import DecoderConfig
from laconic.storage.atomic import check_space_for_file


def compress_with_checkpoint(command: CompressCommand) -> int:
    """Compress one text, or each line of a .jsonl, into a KV memory; print what it took and what it saves."""
    refuse_flags(command, SUMMARY_FLAGS, f"{command.model} was not trained to compress")
    reason = f"{command.model} keeps keys and values, for which no progress is saved"
    refuse_flags(command, ("save_every", "resume"), reason)
    config = command.build_kv_config()
    if config.method != "random" and command.fit is None:
        refuse_flags(command, ("seed",), "only with --method random or --fit")
    if config.method not in SHARED_METHODS:
        refuse_flags(command, ("equal_heads",), f"{config.method} always keeps the same number in every head")
    end = "" if command.is_jsonl else "\n"  # of a file's last line
    with command.open_source() as file:
        texts = [(name, "".join(parts).removesuffix(end)) for name, parts in command.iter_texts(file)]
    with status(f"loading {command.model}"):
        model = laconic.load(command.model, device=command.device)
    decoder, tokenizer = model.decoder, model.tokenizer
    dtype = parse_dtype(command.dtype)
    lengths = [len(encode_document(tokenizer, x, command.chat)[0]) for _, x in texts]
    note_short_texts(config, lengths)
    fit = None if command.fit is None else CartridgeConfig(steps=command.fit, seed=command.seed)
    if fit is not None:
        check_document_fits(decoder, max(lengths), fit)  # before reading, which may take minutes
    if config.max_loss is None:
        num_slots = sum(map(config.num_slots, lengths))
        stored_dtype = dtype or decoder.dtype
        check_space_for_file(command.out, num_slots * kv_bytes_per_position(decoder.config, stored_dtype))
    memories: list[KVMemory] = []
    windows, positions = 0, 0
    start = time.perf_counter()
    with progress("compressing") as show:
        for name, text in texts:
            result = compress_text(decoder, tokenizer, text, config, name=name, chat=command.chat, on_progress=show)
            if fit is not None:
                result = fit_text(decoder, tokenizer, text, result, fit, on_progress=show)
            memories.append(result.memory)
            windows += len(result.windows)
            positions += result.positions
    memory = memories[0] if len(memories) == 1 else KVMemory.concat_rows(*memories)
    memory = memory if dtype is None else memory.to(dtype=dtype)
    memory.save(command.out)
    taken = max(int(m.num_tokens.max()) for m in memories)
    context = decoder.config.max_position_embeddings
    if windows > len(texts) and config.method in SHARED_METHODS and not config.equal_heads:
        log_message(
            f"warning: read in {windows:,} windows, as text and repetition exceed the context of {context:,} tokens; "
            "all heads then keep the same number of slots, as with --equal-heads, which loses more at the same size; "
            "give a shorter text"
        )
    if context - taken < PROMPT_SHARE * context:  # windows take the positions of their slots, else those of the text
        log_message(
            f"the memory takes {taken:,} of the model's {context:,} positions, which leaves "
            f"{max(0, context - taken):,} for prompt and answer; "
            f"{'keep less' if windows > len(texts) else 'give a shorter text'}"
        )
    metadata = [m.metadata for m in memories if m.metadata is not None and m.metadata.measured]
    cost = compute_kv_cost(memory, decoder.config, windows, positions)
    lines = cost_lines(cost)
    for same in metadata:
        lines += loss_lines(same.measured, same.documents[0][0].name if len(texts) > 1 else None)
    command.print_result(lines, {"cost": cost, "measured": [m.measured for m in metadata]}, time.perf_counter() - start)
    return 0


def note_short_texts(config: KVCompressionConfig, lengths: Sequence[int]) -> None:
    num_short = sum(n <= MIN_DEFAULT_SLOTS for n in lengths)
    if num_short and config.keep is config.slots is config.max_loss is None:
        texts = f"{num_short:,} of {len(lengths):,} texts have" if len(lengths) > 1 else "the text has"
        least = f"{MIN_DEFAULT_SLOTS} tokens, the least that is kept by default"
        log_message(f"{texts} at most {least}, so all are kept; --keep or --slots keeps fewer")


def compute_kv_cost(memory: KVMemory, config: DecoderConfig, num_windows: int, positions: int) -> dict[str, Any]:
    """Return what all texts of a memory took and save, as JSON.

    Slots are those kept per KV head, on average, and of the heads that keep least and most. `used_cache_bytes` is the
    KV cache of all texts in use, where each head of a batch is padded to its longest row; `positions` are those that
    the decoder read to compress.
    """
    assert memory.metadata is not None
    cache = memory.to_cache()
    heads = memory.slots
    tokens = sum(document.tokens for row in memory.metadata.documents for document in row)
    return {
        "method": memory.metadata.method,
        "num_texts": memory.B,
        "num_tokens": tokens,
        "num_windows": num_windows,
        "num_slots": float(memory.num_slots.mean()),
        "smallest_head": int(heads.min()),
        "largest_head": int(heads.max()),
        "kept_bytes": memory.num_bytes,
        "text_cache_bytes": tokens * kv_bytes_per_position(config, memory.keys[0].dtype),
        "used_cache_bytes": cache.kv_bytes,
        "positions_spent": positions,
    }


def cost_lines(cost: Mapping[str, Any]) -> list[str]:
    names = ("num_texts", "num_tokens", "num_windows", "num_slots")
    num_texts, num_tokens, num_windows, num_slots = (cost[name] for name in names)
    texts = f" of {num_texts:,} texts" if num_texts > 1 else ""
    reading = f" in {num_windows:,} windows, each read without the others" if num_windows > num_texts else ""
    after = f" after one of {num_texts:,} texts" if num_texts > 1 else ""
    smallest, largest = cost["smallest_head"], cost["largest_head"]
    padded = f"; {format_bytes(cost['used_cache_bytes'])} as a batch, padded" if num_texts > 1 else ""
    heads = "" if smallest == largest else f"; a head keeps {smallest:,} to {largest:,}"
    return [
        f"read       {pluralize(num_tokens, 'token')}{texts}{reading}",
        f"slots      {num_slots:,.1f} per KV head, {num_slots * num_texts / num_tokens:.1%} by {cost['method']}{heads}",
        f"bytes      {format_bytes(cost['kept_bytes'])} of keys and values in place of "
        f"{format_bytes(cost['text_cache_bytes'])}{padded}",
        f"positions  {cost['positions_spent']:,} read to compress; a prompt{after} reads {num_tokens / num_texts:,.0f} "
        "fewer",
    ]


def loss_lines(measured: Mapping[str, Any], name: str | None = None) -> list[str]:
    """Return what was measured to choose the size, a line per window, and what fitting gained; `name` the text."""
    lines = [] if name is None else [f"text       {name}"]
    windows = measured.get("windows", ())
    for index, window in enumerate(windows, 1):
        of_window = f" in window {index}" if len(windows) > 1 else ""
        full, memory, trials = window["full"], window["memory"], window["trials"]
        sizes = ", ".join(f"{trial['slots']:,}: {trial['loss'] - full['mean']:+.3f}" for trial in trials)
        excess = memory["mean"] - full["mean"]
        lines.append(
            f"loss       {memory['mean']:.3f} nats per token on repeated passages and a continuation{of_window}, "
            f"{excess:+.3f} from the whole cache's {full['mean']:.3f}; at most {window['max_loss']:+g} allowed"
        )
        lines.append(f"measured   slots and loss against the whole cache: {sizes}")
        if excess > window["max_loss"]:
            lines.append(
                "           more than allowed: with more slots the windows would not leave a quarter of the context "
                "to a prompt; give a shorter text"
            )
        elif memory == full:
            lines.append("           no smaller memory stays within the bound; all keys and values are kept")
    if "fit" in measured:
        step, losses = measured["fit"]["best_step"], measured["fit"]["held_out"]
        lines.append(
            f"fit        KL divergence from the whole text on held-out self-study: {losses['0']:.3f} before, "
            f"{losses[str(step)]:.3f} nats per token at step {step:,}"
        )
    return lines
