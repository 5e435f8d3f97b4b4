"""Reading with a memory: compressing beside a plain pass, a step by the length of its document, ragged rows."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import Scale, Table, clock, clock_name, peak_allocated, race, verdict
from benchmarks.models import middling
from benchmarks.thinking import small
from laconic import Decoder, DecoderConfig
from laconic.batches import DocumentBatch
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.memory import SummaryMemory
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig

MEBI = 2**20
SHARE = 41  # tokens that a vector stands for, as 50 for 2,048 (AutoCompressors)
SEGMENTS = (2, 8, 32)
BLOCKS = 4  # segments of the longest document of a batch


def compressor(config: DecoderConfig, cap: int, **reading: object) -> AutoCompressor:
    """Parallel summaries of `cap` vectors."""
    decoder, settings = (
        Decoder(config),
        CompressionConfig.model_validate({"max_vectors": cap, "summary_init": "normal", **reading}),
    )
    return AutoCompressor(
        decoder, SummaryParameters(decoder, settings, None, eos_token_id=None), settings, total_steps=1
    )


def ids(config: DecoderConfig, *shape: int) -> Tensor:
    """Random ids."""
    return torch.randint(config.vocab_size, shape)


def compressing(scale: Scale) -> tuple[str, ...]:
    """Four segments compressed one after another, each with the memory of those before; and each read plainly."""
    config, S = middling(scale, scale.few_words), 2 * scale.prefill
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

    took = race({"ours": ours, "plain": plain}, scale.rounds, scale.patience)
    a, b = clock(took["ours"]), clock(took["plain"])
    vectors = method.config.fixed_length
    what = f"compressing 3 segments of {S} tokens into {vectors} vectors each, beside a plain pass of each"
    return what, f"{a:.3f} s", f"{b:.3f} s", f"{a / b:.3f}", verdict(a / b, most=1.1, digits=3)


def documents(config: DecoderConfig, n: int, S: int) -> DocumentBatch:
    """A document of n segments, in windows of two."""
    text = ids(config, 1, n * S)
    live, cuts = torch.ones_like(text, dtype=torch.bool), tuple(range(S, (n + 1) * S, S))
    return DocumentBatch(text, live, live, cuts, torch.zeros(1, dtype=torch.long), ("document",), windows=(2, 0))


def step(method: AutoCompressor, batch: DocumentBatch) -> None:
    """An update without the optimizer's part: window after window, as training runs them."""
    state = None
    for piece in batch.sequential_parts:
        output = method(piece, state)
        output.loss.backward()
        state = None if output.state is None else output.state.detach()
    method.zero_grad(set_to_none=False)


def training(scale: Scale) -> list[tuple[str, ...]]:
    """Peak bytes of a step by the segments of its document."""
    config, S, rows = small(scale), scale.length, list[tuple[str, ...]]()
    for memory in ("replace", "accumulate"):
        method = compressor(config, max(S // SHARE, 1), memory_policy=memory).train()
        step(method, documents(config, 2, S))  # gradients are there before anything is measured
        batches = {n: documents(config, n, S) for n in SEGMENTS}
        peaks = {n: peak_allocated(partial(step, method, batches[n])) for n in SEGMENTS}
        first = peaks[SEGMENTS[0]]
        for n, peak in peaks.items():
            target = verdict(peak / first, most=1.05, digits=3) if memory == "replace" else "the prompt grows"
            what = f"training step, memory {memory}, document of {n} segments of {S}, beside one of {SEGMENTS[0]}"
            rows.append((what, f"{peak / MEBI:.1f} MiB", f"{first / MEBI:.1f} MiB", f"{peak / first:.3f}", target))
    return rows


def read(method: AutoCompressor, text: Tensor, lengths: Tensor, S: int) -> SummaryMemory:
    """Documents of so many tokens compressed side by side, a segment of each at a time."""
    live, memory = torch.arange(text.shape[1]) < lengths[:, None], None
    for at in range(0, text.shape[1], S):
        memory = method.compress(text[:, at : at + S], live[:, at : at + S], memory)
    assert memory is not None
    return memory


def ragged(scale: Scale) -> tuple[str, ...]:
    """Documents of different length in one batch against documents of their mean length."""
    config, S, B = middling(scale, scale.few_words), scale.length, scale.batch
    method = compressor(config, max(S // SHARE, 1)).eval()
    lengths = torch.linspace(S // 2, BLOCKS * S, B).long()
    equal = torch.full_like(lengths, int(lengths.float().mean()))
    ways = {
        name: partial(read, method, ids(config, B, int(row_lengths.max())), row_lengths, S)
        for name, row_lengths in (("ragged", lengths), ("equal", equal))
    }
    took = race(ways, scale.rounds, scale.patience)
    a, b = int(lengths.sum()) / clock(took["ragged"]), int(equal.sum()) / clock(took["equal"])
    what = (
        f"compressing a batch of {B} documents of {lengths[0]} to {lengths[-1]} tokens in segments of {S}, beside "
        f"documents of {equal[0]}"
    )
    return what, f"{a:,.0f} tokens/s", f"{b:,.0f} tokens/s", f"{a / b:.3f}", verdict(a / b, least=0.8, digits=3)


def first_token(scale: Scale) -> tuple[str, ...]:
    """The first token of an answer from vectors, and from the tokens that they stand for."""
    config, T = middling(scale, scale.few_words), 4 * scale.prefill
    decoder, n = Decoder(config).eval(), max(T // SHARE, 1)
    vectors, prompt = torch.randn(1, n, config.hidden_size), ids(config, 1, scale.prompt)
    text = ids(config, 1, T)

    @torch.inference_mode()
    def answered(before: Tensor) -> Tensor:
        hidden = decoder(torch.cat([before, decoder.embed(prompt)], 1)).hidden_states
        return decoder.logits(hidden[:, -1]).argmax(-1)

    took = race(
        {"vectors": lambda: answered(vectors), "text": lambda: answered(decoder.embed(text))}, scale.rounds,
        scale.patience,
    )  # fmt: skip
    a, b = clock(took["vectors"]), clock(took["text"])
    what = f"first token of an answer from {n} vectors and a prompt of {scale.prompt}, beside {T} tokens and the prompt"
    return what, f"{1e3 * a:.1f} ms", f"{1e3 * b:.1f} ms", f"{b / a:.2f}", verdict(b / a, least=5)


def reading(scale: Scale) -> Table:
    """All of it."""
    rows = [compressing(scale), *training(scale), ragged(scale), first_token(scale)]
    text = (
        f"Random Llamas, float32, times by {clock_name()}, best of {scale.rounds}, both sides by turns in one process; "
        "bytes by torch's own allocator, above what was held before the step. The ratio is of times or bytes, for the "
        "batch of throughputs, for the first token of text over vectors. Where memory accumulates, the prompt itself "
        "grows with the document, and so does a step."
    )
    return Table("Reading with a memory", text, ("what", "ours", "beside", "ratio", "target"), rows)
