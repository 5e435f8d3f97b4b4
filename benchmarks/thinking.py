"""Thinking in vectors: a KaVa step beside the plain way, an answer from thoughts beside one from a written chain."""

import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.measure import Scale, Table, clock, clock_name, peak_allocated, race, verdict
from benchmarks.models import large, llama, middling, size
from laconic import Decoder, DecoderConfig
from laconic.batches import IGNORE_INDEX, AnswerBatch, ReasoningBatch
from laconic.config.methods import DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.latent.answering import AnswerDecoding
from laconic.latent.kava import Kava
from laconic.latent.kava_reference import kava_loss
from laconic.latent.thoughts import LatentThoughts

MEBI = 2**20
PROMPT, ANSWER = 5, 2  # `The answer is:` and a number with its eos, in tokens


def small(scale: Scale) -> DecoderConfig:
    """The Llama of a step: half as deep and wide as that of the other tables."""
    layers, width = max(scale.layers // 2, 1), max(scale.width // 2, 16)
    feed = 688 if width == 256 else 2 * width
    return llama(
        layers, width, scale.few_words, heads=8 if width == 256 else 2, groups=4 if width == 256 else 1, feed=feed
    )


def kava(config: DecoderConfig, scale: Scale) -> Kava:
    """KaVa with the defaults of its settings."""
    decoder = Decoder(config)
    thoughts = LatentThoughts(decoder, num_latents=scale.thoughts, num_iterations=scale.iterations)
    return Kava(decoder, thoughts, DistillationConfig(), KVSelectionConfig(), KVDistillationConfig())


def batch_of(config: DecoderConfig, B: int, Nq: int, Nc: int, Na: int = PROMPT + ANSWER) -> ReasoningBatch:
    """Random ids, nothing padded; the number is the last token but one."""
    generator = torch.Generator().manual_seed(1)
    question, chain, answer = (torch.randint(3, config.vocab_size, (B, n), generator=generator) for n in (Nq, Nc, Na))
    after = torch.cat([chain, answer, torch.full((B, 1), IGNORE_INDEX)], 1)
    columns = torch.arange(Na)
    return ReasoningBatch(
        question,
        torch.ones_like(question).bool(),
        chain,
        torch.ones_like(chain).bool(),
        torch.zeros_like(chain),
        answer,
        torch.ones_like(answer).bool(),
        after[:, 0],
        after[:, 1 : Nc + 1],
        after[:, Nc + 1 :],
        torch.full((B,), Na - 3),
        (columns == Na - 2).expand(B, -1),
        torch.arange(B),
    )


def step(method: Kava, loss: Callable[[], Tensor], attention: str) -> Callable[[], None]:
    """Forward and backward; gradients are made anew each time."""

    def run() -> None:
        method.zero_grad(set_to_none=True)
        method.decoder.attn_implementation = attention
        loss().backward()
        method.decoder.attn_implementation = "sdpa"

    return run


def apart(method: Kava, ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> float:
    """The largest distance of a gradient of the two, over the largest magnitude of any."""

    def gradients(loss: Callable[[], Tensor]) -> list[Tensor]:
        method.zero_grad(set_to_none=True)
        loss().backward()
        return [p.grad.clone() for p in method.parameters() if p.grad is not None]

    pairs = list(zip(gradients(ours), gradients(theirs), strict=True))
    scale = max(float(y.abs().max()) for _, y in pairs)
    return max(float((x - y).abs().max()) for x, y in pairs) / scale


def thinking(scale: Scale) -> Table:
    """The table of KaVa steps."""
    config = small(scale)
    method = kava(config, scale).train()
    batch = batch_of(config, scale.thinkers, scale.question, scale.chain)
    ours = lambda: method(batch).loss  # noqa: E731
    plain = lambda: kava_loss(method.decoder, method.latent_thoughts, batch)  # noqa: E731
    ways = {
        "laconic": step(method, ours, "sdpa"),
        "the plain way": step(method, plain, "eager"),
        "the plain way, fused attention": step(method, plain, "sdpa"),
    }
    times = {name: clock(t) for name, t in race(ways, scale.rounds, 2 * scale.patience).items()}
    peaks: dict[str, float] = {}
    for name, way in ways.items():
        method.zero_grad(set_to_none=True)
        peaks[name] = peak_allocated(way) / MEBI
    rows: list[tuple[str, ...]] = []
    for name in ways:
        judged = name == "the plain way"
        time, memory = times["laconic"] / times[name], peaks["laconic"] / peaks[name]
        rows.append((
            name, f"{times[name]:.2f}", f"{time:.2f}", verdict(time, most=0.5) if judged else "–",
            f"{peaks[name]:.0f}", f"{memory:.2f}", verdict(memory, most=1.0) if judged else "–",
        ))  # fmt: skip
    method.double()
    far = apart(method, ours, plain)
    text = (
        f"Forward and backward of one step of KaVa, float32, train mode: batch {scale.thinkers}, question "
        f"{scale.question}, chain {scale.chain}, answer {PROMPT + ANSWER}, M {scale.thoughts}, T {scale.iterations}, "
        f"random Llama {config.num_hidden_layers} × {config.hidden_size}, V {config.vocab_size:,} "
        f"({size(method.decoder) / 1e6:.3g} M); no optimizer. The plain way (`laconic.latent.kava_reference`): "
        "teacher and student apart, the question read anew in every pass, no cache, eager attention, R-KV out of the whole matrix "
        "of logits, logits of every position; below it the same with fused attention. Ratios are laconic's to each. "
        f"Time: seconds by {clock_name()}, best of {scale.rounds}, rounds interleaved. Memory: the peak above the "
        f"weights, gradients included, in MiB. In float64 the gradients of both are {far:.0e} apart, of the largest."
    )
    head = ("way", "time, s", "laconic's ratio", "target", "allocated, MiB", "laconic's ratio", "target")
    return Table("A step of KaVa", text, head, rows)


def answering(scale: Scale) -> Table:
    """The table of answers from thoughts and from chains, with one thread and with all."""
    rows: list[tuple[str, ...]] = []
    before = torch.get_num_threads()
    for config in [small(scale), middling(scale, scale.few_words)] + ([large(scale)] if scale.large else []):
        method, batch = kava(config, scale).eval(), batch_of(config, 1, scale.question, scale.chain)
        for threads in dict.fromkeys((1, os.cpu_count() or 1)):
            torch.set_num_threads(threads)
            rows.append(answering_row(method, batch, scale))
    torch.set_num_threads(before)
    text = (
        f"One question of {scale.question} tokens, batch 1, greedy, float32: {scale.thoughts} thoughts in "
        f"{scale.iterations} rounds, the prompt of {PROMPT} tokens given and {ANSWER} written, beside a chain of "
        f"{scale.written} tokens, prompt and answer written by the same weights. Milliseconds a question, best of "
        f"{2 * scale.rounds} (of three where they take longer than {scale.patience:.0f} s), rounds interleaved: CPU "
        "seconds with one thread, wall seconds with more, which other work on the machine lengthens. Thoughts are "
        "bound by arithmetic and single tokens by reading the weights, so the ratio is the processor's before it is "
        "ours."
    )
    head = ("model", "threads", "passes", "thoughts, ms", "passes", "chain, ms", "ratio", "target")
    return Table("An answer from thoughts", text, head, rows)


def answering_row(method: Kava, batch: ReasoningBatch, scale: Scale) -> tuple[str, ...]:
    """Both ways on one model, with the threads that are set."""
    latent = AnswerDecoding(ANSWER, (), str, tuple(range(3, 3 + PROMPT)))
    written = replace(latent, max_tokens=scale.written + PROMPT + ANSWER)
    ways: dict[str, Callable[[], AnswerBatch]] = {
        "thoughts": lambda: method.answer(batch, latent),
        "chain": lambda: method.answer(batch, written, with_cot=True),
    }
    passes = {name: way().passes[0].total for name, way in ways.items()}
    times = race(ways, 2 * scale.rounds, scale.patience)
    took = {name: 1e3 * clock(times[name]) for name in ways}
    ratio, c = took["chain"] / took["thoughts"], method.decoder.config
    return (
        f"random Llama {c.num_hidden_layers} × {c.hidden_size}, V {c.vocab_size:,}", str(torch.get_num_threads()),
        str(passes["thoughts"]), f"{took['thoughts']:.1f}", str(passes["chain"]), f"{took['chain']:.1f}",
        f"{ratio:.2f}", verdict(ratio, least=5.0),
    )  # fmt: skip
