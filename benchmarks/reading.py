"""AutoCompressors: time of compression, memory of a training step by document length, and ragged batches."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import Scale, Table, clock, clock_name, peak_allocated, time_interleaved, verdict
from benchmarks.models import medium_llama
from benchmarks.thinking import small_llama
from laconic import Decoder, DecoderConfig
from laconic.batches import DocumentBatch
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.memory import SummaryMemory
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig

MEBI = 2**20
SHARE = 41  # tokens per summary vector, as in 50 vectors for 2,048 tokens (AutoCompressors)
SEGMENTS = (2, 8, 32)
BLOCKS = 4  # segments of the longest document in a batch


def compressor(config: DecoderConfig, cap: int, **reading: object) -> AutoCompressor:
    """Return an AutoCompressor with `cap` parallel summary vectors."""
    decoder, compression_config = (
        Decoder(config),
        CompressionConfig.model_validate({"max_vectors": cap, "summary_init": "normal", **reading}),
    )
    return AutoCompressor(
        decoder,
        SummaryParameters(decoder, compression_config, None, eos_token_id=None),
        compression_config,
        total_steps=1,
    )


def ids(config: DecoderConfig, *shape: int) -> Tensor:
    """Return random ids."""
    return torch.randint(config.vocab_size, shape)


def compressing(scale: Scale) -> tuple[str, ...]:
    """Return the row of compressing three segments in sequence, compared with a plain pass over each."""
    config, S = medium_llama(scale, scale.small_vocab), 2 * scale.prefill
    method = compressor(config, max(S // SHARE, 1)).eval()
    text = ids(config, 1, 3 * S)

    @torch.inference_mode()
    def ours() -> None:
        memory = None
        for part in text.split(S, 1):
            memory = method.compress(part, None, memory)

    @torch.inference_mode()
    def plain() -> None:
        for part in text.split(S, 1):
            method.decoder(method.decoder.embed(part))

    seconds = time_interleaved({"ours": ours, "plain": plain}, scale.rounds, scale.patience)
    a, b = clock(seconds["ours"]), clock(seconds["plain"])
    name = (
        f"compressing 3 segments of {S} tokens into {method.config.fixed_length} vectors each, against a plain pass "
        "over each"
    )
    return name, f"{a:.3f} s", f"{b:.3f} s", f"{a / b:.3f}", verdict(a / b, most=1.1, digits=3)


def documents(config: DecoderConfig, n: int, S: int) -> DocumentBatch:
    """Return a document of n segments, in windows of two."""
    text = ids(config, 1, n * S)
    attention_mask, segment_ends = torch.ones_like(text, dtype=torch.bool), tuple(range(S, (n + 1) * S, S))
    return DocumentBatch(
        text,
        attention_mask,
        attention_mask,
        segment_ends,
        torch.zeros(1, dtype=torch.long),
        ("document",),
        windows=(2, 0),
    )


def step(method: AutoCompressor, batch: DocumentBatch) -> None:
    """Run forward and backward of an update, one window after the other, as in training."""
    state = None
    for piece in batch.sequential_parts:
        output = method(piece, state)
        output.loss.backward()
        state = None if output.state is None else output.state.detach()
    method.zero_grad(set_to_none=False)


def training(scale: Scale) -> list[tuple[str, ...]]:
    """Return the rows of peak bytes of a step by the number of segments of its document."""
    config, S, rows = small_llama(scale), scale.length, list[tuple[str, ...]]()
    for memory in ("replace", "accumulate"):
        method = compressor(config, max(S // SHARE, 1), memory_policy=memory).train()
        step(method, documents(config, 2, S))  # allocate the gradients before measuring
        documents_by_length = {n: documents(config, n, S) for n in SEGMENTS}
        peaks = {n: peak_allocated(partial(step, method, documents_by_length[n])) for n in SEGMENTS}
        first = peaks[SEGMENTS[0]]
        for n, peak in peaks.items():
            target = verdict(peak / first, most=1.05, digits=3) if memory == "replace" else "the prompt grows"
            name = f"training step, memory {memory}, document of {n} segments of {S}, against {SEGMENTS[0]} segments"
            rows.append((name, f"{peak / MEBI:.1f} MiB", f"{first / MEBI:.1f} MiB", f"{peak / first:.3f}", target))
    return rows


def read(method: AutoCompressor, text: Tensor, lengths: Tensor, S: int) -> SummaryMemory:
    """Compress a batch of documents of the given lengths, one segment at a time."""
    attention_mask, memory = torch.arange(text.shape[1]) < lengths[:, None], None
    for at in range(0, text.shape[1], S):
        memory = method.compress(text[:, at : at + S], attention_mask[:, at : at + S], memory)
    assert memory is not None
    return memory


def ragged(scale: Scale) -> tuple[str, ...]:
    """Return the row of documents of different lengths, compared with documents of their mean length."""
    config, S, B = medium_llama(scale, scale.small_vocab), scale.length, scale.batch
    method = compressor(config, max(S // SHARE, 1)).eval()
    lengths = torch.linspace(S // 2, BLOCKS * S, B).long()
    equal = torch.full_like(lengths, int(lengths.float().mean()))
    workloads = {
        name: partial(read, method, ids(config, B, int(row_lengths.max())), row_lengths, S)
        for name, row_lengths in (("ragged", lengths), ("equal", equal))
    }
    seconds = time_interleaved(workloads, scale.rounds, scale.patience)
    a, b = int(lengths.sum()) / clock(seconds["ragged"]), int(equal.sum()) / clock(seconds["equal"])
    name = (
        f"compressing a batch of {B} documents of {lengths[0]} to {lengths[-1]} tokens in segments of {S}, against "
        f"documents of {equal[0]}"
    )
    return name, f"{a:,.0f} tokens/s", f"{b:,.0f} tokens/s", f"{a / b:.3f}", verdict(a / b, least=0.8, digits=3)


def first_token(scale: Scale) -> tuple[str, ...]:
    """Return the row of the time to the first answer token from summary vectors, compared with the full text."""
    config, T = medium_llama(scale, scale.small_vocab), 4 * scale.prefill
    decoder, n = Decoder(config).eval(), max(T // SHARE, 1)
    vectors, prompt = torch.randn(1, n, config.hidden_size), ids(config, 1, scale.prompt)
    text = ids(config, 1, T)

    @torch.inference_mode()
    def answered(before: Tensor) -> Tensor:
        hidden = decoder(torch.cat([before, decoder.embed(prompt)], 1)).hidden_states
        return decoder.logits(hidden[:, -1]).argmax(-1)

    seconds = time_interleaved(
        {"vectors": lambda: answered(vectors), "text": lambda: answered(decoder.embed(text))}, scale.rounds,
        scale.patience,
    )  # fmt: skip
    a, b = clock(seconds["vectors"]), clock(seconds["text"])
    name = (
        f"first token of an answer from {n} vectors and a prompt of {scale.prompt}, against {T} tokens and the prompt"
    )
    return name, f"{1e3 * a:.1f} ms", f"{1e3 * b:.1f} ms", f"{b / a:.2f}", verdict(b / a, least=5)


def reading(scale: Scale) -> Table:
    """Return the table."""
    rows = [compressing(scale), *training(scale), ragged(scale), first_token(scale)]
    text = (
        f"Random Llamas, float32, times by {clock_name()}, best of {scale.rounds}, both sides alternately in one "
        "process; bytes as counted by torch's allocator, above those before the step. The ratio is that of times or "
        "bytes; "
        "for the batch, of throughputs; for the first token, text over vectors. With memory_policy accumulate the "
        "prompt "
        "grows with the document, and so does the memory of a step."
    )
    return Table("Compressing documents", text, ("measurement", "laconic", "baseline", "ratio", "target"), rows)
