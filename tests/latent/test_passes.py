"""Passes are counted as they are made: decoder calls in training, and in answering against what an answer says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from laconic.batches import ReasoningBatch
from laconic.config.methods import (
    CoconutConfig,
    DistillationConfig,
    ICoTConfig,
    KVDistillationConfig,
    KVSelectionConfig,
)
from laconic.latent.answering import AnswerDecoding
from laconic.latent.coconut import Coconut
from laconic.latent.codi import Codi
from laconic.latent.cot import Cot, NoCot
from laconic.latent.icot import Icot
from laconic.latent.kava import Kava
from laconic.latent.pccot import Pccot
from laconic.latent.thoughts import LatentThoughts
from laconic.models.decoder import Decoder
from tests.core.readings import fresh
from tests.methods.batches import reasoning

M, T = 4, 2
BATCH = reasoning(((5, 6, 4),))


def thoughts(decoder: Decoder, rounds: int | None, project: str = "pccot") -> LatentThoughts:
    mode = "sequential" if rounds is None else "jacobi"
    return LatentThoughts(
        decoder, num_latents=M, num_iterations=rounds, schedule=mode, projection=project, control_init="normal"
    )  # type: ignore[arg-type]


METHODS: dict[str, tuple[Callable[[Decoder], nn.Module], int]] = {  # and the decoder calls of a training step
    "nocot": (NoCot, 1),
    "cot": (Cot, 1),
    "icot": (lambda d: Icot(d, ICoTConfig(), steps_per_epoch=8), 1),
    "coconut": (
        lambda d: Coconut(d, thoughts(d, None, "none"), CoconutConfig(max_stage=2), steps_per_epoch=8),
        1 + 0 + 1,
    ),
    "codi": (lambda d: Codi(d, thoughts(d, None), DistillationConfig()), 1 + 1 + M + 1 + 1),
    "pccot": (lambda d: Pccot(d, thoughts(d, T), DistillationConfig()), 1 + 1 + T + 1 + 1),
    "pause": (lambda d: Pccot(d, thoughts(d, 0), DistillationConfig()), 1 + 1 + 0 + 1 + 1),
    "kava": (
        lambda d: Kava(d, thoughts(d, T), DistillationConfig(), KVSelectionConfig(), KVDistillationConfig()),
        T + 4,
    ),
}


class Counted(Decoder):
    """A decoder that counts its calls; no part of it is plain, so that generation calls it too."""

    calls = 0

    def forward(self, *rest: Any, **named: Any) -> Any:
        self.calls += 1
        return super().forward(*rest, **named)


def counted() -> Counted:
    decoder = fresh("llama")
    decoder.__class__ = Counted
    return decoder  # type: ignore[return-value]


@pytest.mark.parametrize("name", METHODS)
def test_decoder_calls_of_a_training_step(name: str) -> None:
    make, calls = METHODS[name]
    decoder = counted()
    make(decoder).train()(BATCH).loss.backward()
    assert decoder.calls == calls


@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_an_answer_says_what_it_took(name: str, teacher: bool) -> None:
    if teacher and name in ("nocot", "icot", "coconut"):
        return
    decoder = counted()
    (got,) = METHODS[name][0](decoder).answer(BATCH, AnswerDecoding(5, (), str, (7, 8)), with_cot=teacher).passes
    assert decoder.calls == got.total
    n = 5
    written, think = (1, 0, 0, n - 1), {"pccot": T, "pause": 0, "kava": T}
    latent = (0, 1, think[name], n) if name in think else (1, 0, M, n)
    assert got == (written if teacher or name in ("nocot", "cot", "icot") else latent)


@pytest.mark.parametrize("name", METHODS)
def test_low_precision(name: str) -> None:
    """Losses are float32 under autocast, gradients finite, and answers come."""
    decoder = fresh("llama")
    method = METHODS[name][0](decoder).train()
    with torch.autocast("cpu", torch.bfloat16):
        step = method(BATCH)
        got = method.answer(BATCH, AnswerDecoding(3, (), str))
    assert step.loss.dtype == torch.float32
    assert {part.dtype for part in step.parts.values()} == {torch.float32}
    step.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in method.parameters())
    assert len(got.ids[0]) == 3
    half = METHODS[name][0](fresh("llama").bfloat16())
    assert half(BATCH).loss.dtype == torch.float32
    assert len(half.answer(BATCH, AnswerDecoding(3, (), str)).ids[0]) == 3


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("nocot", "cot", "icot")])
def test_bot_slot_and_eot_learn_beside_a_frozen_decoder(name: str) -> None:
    decoder = fresh("llama, one head of keys, tied").requires_grad_(False)
    method = METHODS[name][0](decoder)
    method.thoughts.control = "rows"
    batch: ReasoningBatch = BATCH
    method.train()(batch).loss.backward()
    grad = method.thoughts.vectors.grad
    assert [bool(row.any()) for row in grad] == [True] * 3  # as rows of the head, if as nothing else
    assert all(p.grad is None for p in decoder.parameters())
