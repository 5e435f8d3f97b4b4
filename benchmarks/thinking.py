"""Latent reasoning: a KaVa step against its reference, and answering with latents against a written chain."""

import copy
import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.measure import Scale, Table, clock, clock_name, peak_allocated, time_interleaved, verdict
from benchmarks.models import large_llama, llama, medium_llama, num_parameters
from laconic import Decoder, DecoderConfig
from laconic.batches import IGNORE_INDEX, AnswerBatch, ReasoningBatch
from laconic.config.methods import DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.latent.answering import AnswerDecoding
from laconic.latent.kava import Kava
from laconic.latent.kava_reference import kava_loss
from laconic.latent.thoughts import LatentThoughts
from laconic.models.ops.packed_linear import pack_weights

MEBI = 2**20
PROMPT, ANSWER = 5, 2  # tokens of `The answer is:`, and of a number with eos


def small_llama(scale: Scale) -> DecoderConfig:
    """Return the Llama of a training step: half as deep and wide as that of the other tables."""
    layers, width = max(scale.layers // 2, 1), max(scale.width // 2, 16)
    mlp_size = 688 if width == 256 else 2 * width
    return llama(
        layers,
        width,
        scale.small_vocab,
        heads=8 if width == 256 else 2,
        groups=4 if width == 256 else 1,
        mlp_size=mlp_size,
    )


def build_kava(config: DecoderConfig, scale: Scale) -> Kava:
    """Build KaVa with its default settings."""
    decoder = Decoder(config)
    thoughts = LatentThoughts(decoder, num_latents=scale.latents, num_iterations=scale.iterations)
    return Kava(decoder, thoughts, DistillationConfig(), KVSelectionConfig(), KVDistillationConfig())


def batch_of(config: DecoderConfig, B: int, Nq: int, Nc: int, Na: int = PROMPT + ANSWER) -> ReasoningBatch:
    """Return random ids without padding; the number is the second-to-last token."""
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
    """Return a function that runs forward and backward with fresh gradients."""

    def run() -> None:
        method.zero_grad(set_to_none=True)
        method.decoder.attn_implementation = attention
        loss().backward()
        method.decoder.attn_implementation = "sdpa"

    return run


def gradient_difference(method: Kava, ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> float:
    """Return the largest difference between the two gradients, relative to the largest gradient entry."""

    def gradients(loss: Callable[[], Tensor]) -> list[Tensor]:
        method.zero_grad(set_to_none=True)
        loss().backward()
        return [p.grad.clone() for p in method.parameters() if p.grad is not None]

    pairs = list(zip(gradients(ours), gradients(theirs), strict=True))
    scale = max(float(y.abs().max()) for _, y in pairs)
    return max(float((x - y).abs().max()) for x, y in pairs) / scale


def thinking(scale: Scale) -> Table:
    """Return the table of KaVa steps."""
    config = small_llama(scale)
    method = build_kava(config, scale).train()
    batch = batch_of(config, scale.kava_rows, scale.question, scale.chain)
    ours = lambda: method(batch).loss  # noqa: E731
    plain = lambda: kava_loss(method.decoder, method.latent_thoughts, batch)  # noqa: E731
    workloads = {
        "laconic": step(method, ours, "sdpa"),
        "reference": step(method, plain, "eager"),
        "reference, fused attention": step(method, plain, "sdpa"),
    }
    times = {name: clock(t) for name, t in time_interleaved(workloads, scale.rounds, 2 * scale.patience).items()}
    mebibytes: dict[str, float] = {}
    for name, workload in workloads.items():
        method.zero_grad(set_to_none=True)
        mebibytes[name] = peak_allocated(workload) / MEBI
    rows: list[tuple[str, ...]] = []
    for name in workloads:
        has_target = name == "reference"
        time, memory = times["laconic"] / times[name], mebibytes["laconic"] / mebibytes[name]
        rows.append((
            name, f"{times[name]:.2f}", f"{time:.2f}", verdict(time, most=0.5) if has_target else "–",
            f"{mebibytes[name]:.0f}", f"{memory:.2f}", verdict(memory, most=1.0) if has_target else "–",
        ))  # fmt: skip
    method.double()
    far = gradient_difference(method, ours, plain)
    text = (
        f"Forward and backward of one step of KaVa, float32, train mode: batch {scale.kava_rows}, question "
        f"{scale.question}, chain {scale.chain}, answer {PROMPT + ANSWER}, M {scale.latents}, T {scale.iterations}, "
        f"random Llama {config.num_hidden_layers} × {config.hidden_size}, V {config.vocab_size:,} "
        f"({num_parameters(method.decoder) / 1e6:.3g} M); no optimizer. The reference "
        f"(`laconic.latent.kava_reference`) "
        "runs teacher and student separately, reads the question in every pass, has no cache, uses eager attention, "
        "computes R-KV from the full matrix of logits, and logits at every position; the last row is the same with "
        "fused "
        "attention. Ratios are those of laconic to each. "
        f"Time: seconds by {clock_name()}, best of {scale.rounds}, rounds interleaved. Memory: the peak above the "
        f"weights, gradients included, in MiB. In float64 the gradients differ by {far:.0e}, relative to the largest."
    )
    head = ("way", "time, s", "laconic's ratio", "target", "allocated, MiB", "laconic's ratio", "target")
    return Table("A step of KaVa", text, head, rows)


def answering(scale: Scale) -> Table:
    """Return the table of answers with latents and with written chains, with one thread and with all."""
    rows: list[tuple[str, ...]] = []
    before = torch.get_num_threads()
    for config in [small_llama(scale), medium_llama(scale, scale.small_vocab)] + (
        [large_llama(scale)] if scale.large else []
    ):
        method, batch = build_kava(config, scale).eval(), batch_of(config, 1, scale.question, scale.chain)
        for threads in dict.fromkeys((1, os.cpu_count() or 1)):
            torch.set_num_threads(threads)
            rows.append(answering_row(method, batch, scale))
    torch.set_num_threads(before)
    text = (
        f"One question of {scale.question} tokens, batch 1, greedy, float32: {scale.latents} latents in "
        f"{scale.iterations} iterations, the answer prompt of {PROMPT} tokens and {ANSWER} generated tokens, compared "
        f"with a chain of "
        f"{scale.chain_tokens} tokens, prompt and answer generated by the same weights. Packed: after "
        "`laconic.pack_weights`, which doubles the memory of the weights, and does not change the time of single "
        "tokens. "
        "Milliseconds per question, best of "
        f"{2 * scale.rounds} (of three where they take longer than {scale.patience:.0f} s), rounds interleaved: CPU "
        "time with one thread, wall time with more, which other processes affect. Latents are compute-bound and single "
        "tokens are bound by memory bandwidth, so the ratio depends mostly on the processor."
    )
    head = (
        "model", "threads", "passes", "latents, ms", "packed, ms", "passes", "chain, ms", "ratio", "ratio, packed",
        "target, packed",
    )  # fmt: skip
    return Table("Answering with latents", text, head, rows)


def answering_row(method: Kava, batch: ReasoningBatch, scale: Scale) -> tuple[str, ...]:
    """Return the row of one model with the current number of threads."""
    decode_answer = AnswerDecoding(ANSWER, (), str, tuple(range(3, 3 + PROMPT)))
    decode_chain = replace(decode_answer, max_tokens=scale.chain_tokens + PROMPT + ANSWER)
    packed = copy.deepcopy(method)
    pack_weights(packed.decoder)
    workloads: dict[str, Callable[[], AnswerBatch]] = {
        "latents": lambda: method.answer(batch, decode_answer),
        "packed": lambda: packed.answer(batch, decode_answer),
        "chain": lambda: method.answer(batch, decode_chain, with_cot=True),
    }
    passes = {name: workload().passes[0].total for name, workload in workloads.items()}
    times = time_interleaved(workloads, 2 * scale.rounds, scale.patience)
    milliseconds = {name: 1e3 * clock(times[name]) for name in workloads}
    ratio, packed_ratio = (milliseconds["chain"] / milliseconds[name] for name in ("latents", "packed"))
    c = method.decoder.config
    return (
        f"random Llama {c.num_hidden_layers} × {c.hidden_size}, V {c.vocab_size:,}", str(torch.get_num_threads()),
        str(passes["latents"]), f"{milliseconds['latents']:.1f}", f"{milliseconds['packed']:.1f}",
        str(passes["chain"]), f"{milliseconds['chain']:.1f}",
        f"{ratio:.2f}", f"{packed_ratio:.2f}", verdict(packed_ratio, least=5.0),
    )  # fmt: skip
