"""Reads of a rollout, in a batch and of one row, against loops over questions and their iterations (float64)."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from laconic.batches import PassCounts
from laconic.config.methods import DistillationConfig
from laconic.errors import UsageError
from laconic.generation import backends
from laconic.latent.codi import Codi
from laconic.latent.pccot import Pccot
from laconic.latent.rollout import LatentRollout
from laconic.latent.stepwise_rollout import (
    FinishedReads,
    RowCounts,
    can_read_suffix,
    jacobi_residual,
    read_latents,
    run_reads,
    run_stepwise_rollout,
)
from laconic.latent.stop_head import keep_first_latents
from laconic.latent.thoughts import LatentThoughts
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from tests.latent.test_answering import build_decoding, questions
from tests.models.fixtures import assert_close, fresh, noise, valid_slots

pytestmark = pytest.mark.usefixtures("unchecked")
D = 48
LENGTHS = (1, 5, 3, 2, 4, 3)
QUESTIONS, MASK = noise(7, 6, 5, D), torch.arange(5) >= 5 - torch.tensor(LENGTHS)[:, None]
SUFFIX = noise(9, 1, 2, D)
HEAD: dict[str, Any] = {"length_policy": "stop_head"}

Case = tuple[dict[str, Any], float]
FIXED: list[Case] = [
    ({"num_iterations": 3}, 0.0),
    ({"num_iterations": 6}, 0.0),
    ({"num_iterations": 1}, 0.0),
    ({"num_iterations": 0}, 0.0),
    ({"num_latents": 1, "num_iterations": 2}, 0.0),
    ({"num_latents": 1, "num_iterations": 2}, 0.5),
    ({"schedule": "sequential"}, 0.0),
]
ADAPTIVE: list[Case] = [
    ({"num_iterations": 5, "projection": "none"}, 0.5),
    ({"num_iterations": 3, "projection": "none"}, 0.6),
    ({"num_iterations": 4, **HEAD}, 0.0),
    ({"num_iterations": 6, **HEAD}, 0.0),
    ({"num_iterations": 2, **HEAD}, 0.0),  # the head may keep latents that are not final
    ({"num_iterations": 4, **HEAD}, 0.6),
]


def build(name: str, options: dict[str, Any]) -> tuple[Decoder, LatentThoughts]:
    """A decoder whose iterations converge at different speeds, and a stop head that keeps different numbers."""
    decoder = fresh(name).double().requires_grad_(False)
    for p in decoder.layers.parameters():
        p.mul_(0.6 if p.ndim == 2 else 1.0)
    latents = LatentThoughts(decoder, **({"num_latents": 4} | options)).requires_grad_(False)
    if latents.stop_head is not None:
        latents.stop_head.u.copy_(0.2 * noise(8, D))
    return decoder, latents


class Expected(NamedTuple):
    """The last hidden state of one question with its latents and the suffix, their cache, and the counts."""

    hidden_states: Tensor
    cache: KVCache
    counts: RowCounts


def think(decoder: Decoder, latents: LatentThoughts, question: Tensor, num_iterations: int | None) -> LatentRollout:
    """A rollout of one question with so many iterations, without the stop head."""
    trained, latents.num_iterations = latents.num_iterations, num_iterations
    rollout = latents.compute_latents(decoder, latents.build_prefix(decoder, None, question[None]), latents.num_latents)
    latents.num_iterations = trained
    return rollout


def rollout_by_row(decoder: Decoder, latents: LatentThoughts, question: Tensor, tolerance: float) -> Expected:
    """One question alone: the shortest fixed rollout after which it may end, then the suffix in a pass of its own."""
    T, M, head = latents.num_iterations, latents.num_latents, latents.stop_head
    t = T if T is None else min(T, M)
    n = M
    for i in range(1, (t or 0) + 1):
        fixed, longer = (think(decoder, latents, question, k).latents[0] for k in (i, i + 1))
        changes = [math.dist(longer[m], fixed[m]) / math.hypot(*fixed[m]) for m in range(M)]
        if head is not None:
            n = int(head.count_latents(think(decoder, latents, question, i).hidden_states))
        if max(changes) < tolerance or (head is not None and n <= i):
            t = i
            break
    rollout = think(decoder, latents, question, t)
    last = decoder(SUFFIX, keep_first_latents(rollout.cache, torch.tensor([n]), M))
    return Expected(last.hidden_states[0, -1], last.cache, RowCounts(rollout.passes[0], n))


def run_batch(decoder: Decoder, latents: LatentThoughts, tolerance: float) -> FinishedReads:
    """The reads of several questions, and of the suffix if it takes a pass of its own."""
    prefix = latents.build_prefix(decoder, None, QUESTIONS, MASK)
    M = latents.num_latents
    reads_suffix = can_read_suffix(latents, M, tolerance)
    reads = read_latents(latents, prefix.embeds, M, SUFFIX if reads_suffix else SUFFIX[:, :0], tolerance)
    finished = run_reads(decoder, reads, None, prefix.attention_mask)
    if reads_suffix:
        return finished
    num_latents = torch.tensor([row.num_latents for row in finished.counts])
    last = decoder(SUFFIX.expand(len(num_latents), -1, -1), keep_first_latents(finished.cache, num_latents, M))
    return FinishedReads(last.hidden_states[:, -1], last.cache, finished.counts)


def run_alone(decoder: Decoder, latents: LatentThoughts, question: Tensor, tolerance: float) -> FinishedReads:
    """The stepwise reads of one question."""
    reads = run_stepwise_rollout(latents, question[None], latents.num_latents, SUFFIX, tolerance)
    return run_reads(decoder, reads, None, None)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("options", "tolerance"), [*FIXED, *ADAPTIVE])
@torch.no_grad()
def test_reads_equal_a_loop_over_rows(name: str, options: dict[str, Any], tolerance: float) -> None:
    decoder, latents = build(name, options)
    together, counts = run_batch(decoder, latents, tolerance), list[RowCounts]()
    for row in range(len(LENGTHS)):
        question = QUESTIONS[row, MASK[row]]
        expected, alone = (f(decoder, latents, question, tolerance) for f in (rollout_by_row, run_alone))
        assert alone.counts == (together.counts[row],) == (expected.counts,)
        for finished, index in ((together, row), (alone, 0)):
            assert_close(finished.hidden_states[index], expected.hidden_states)
            slots = valid_slots(finished.cache, index), valid_slots(expected.cache, 0)
            for x, y in zip(*slots, strict=True):
                assert_close(x, y)
        counts.append(expected.counts)
    assert (len(set(counts)) > 1) == ((options, tolerance) in ADAPTIVE), "questions end apart"


@pytest.mark.parametrize(("options", "tolerance"), ADAPTIVE)
@torch.no_grad()
def test_reads_call_the_decoder_for_running_rows_only(options: dict[str, Any], tolerance: float) -> None:
    decoder, latents = build("llama", options)
    sizes = list[int]()

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(x))
        return decoder(x, *args, **kwargs)

    prefix = latents.build_prefix(decoder, None, QUESTIONS, MASK)
    reads = read_latents(latents, prefix.embeds, latents.num_latents, SUFFIX[:, :0], tolerance)
    counts = [row.passes.latent for row in run_reads(forward, reads, None, prefix.attention_mask).counts]
    assert sizes == [len(LENGTHS), *(sum(n >= t for n in counts) for t in range(1, max(counts) + 1))]


@pytest.mark.parametrize(("options", "tolerance"), [*FIXED, *ADAPTIVE])
def test_answers_take_one_pass_more_than_the_latents_and_further_tokens(
    options: dict[str, Any], tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eot and the answer prompt take no pass of their own unless nobody knows before where they belong."""
    monkeypatch.setattr(backends, "is_stock_decoder", lambda decoder: False)  # so that it is called for each new token
    decoder, latents = build("llama", options)
    calls, forward = list[int](), decoder.forward

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(decoder, "forward", count)
    method = (Codi if latents.schedule == "sequential" else Pccot)(decoder, latents, DistillationConfig())
    setup = (1, 0) if latents.schedule == "sequential" else (0, 1)
    for seed in range(4):
        batch, decoding = questions(4, pads=seed), build_decoding(answer_prompt=(9, 8), jacobi_tolerance=tolerance)
        calls.clear()
        answer = method.answer(batch, decoding)
        t, num_tokens = answer.passes[0].latent, len(answer.token_ids[0])
        is_apart = not can_read_suffix(latents, latents.num_latents, tolerance)
        assert answer.passes[0] == PassCounts(*setup, t, num_tokens - 1 + is_apart)
        assert len(calls) == answer.passes[0].total == 1 + t + is_apart + num_tokens - 1


def test_jacobi_residual_is_the_largest_change_of_a_latent() -> None:
    z = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[30.0, 40.0], [0.0, 1.0]]])
    z_next = z + torch.tensor([[[0.0, 0.5], [0.0, 0.2]], [[0.0, 5.0], [0.0, 0.0]]])
    assert jacobi_residual(z, z_next).tolist() == pytest.approx([0.2, 0.1])


def test_latents_refuse_a_tolerance_without_iterations() -> None:
    decoder, prefix = fresh("llama"), noise(1, 1, 2, D).float()
    pause = LatentThoughts(decoder, num_latents=2, num_iterations=0)
    for latents in (pause, LatentThoughts(decoder, num_latents=2, schedule="sequential")):
        with pytest.raises(UsageError, match=r"jacobi_tolerance=0.1: there are no Jacobi iterations"):
            next(read_latents(latents, prefix, 2, prefix, 0.1))
    latents = LatentThoughts(decoder, num_latents=2, num_iterations=2)
    with pytest.raises(UsageError, match=r"jacobi_tolerance=-1"):
        next(read_latents(latents, prefix, 2, prefix, -1))
