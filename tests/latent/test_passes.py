"""Number of decoder calls of every method, in training and in answering."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from laconic.config.methods import (
    CoconutConfig,
    DistillationConfig,
    IcotConfig,
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
from tests.latent.batches import reasoning_batch
from tests.models.fixtures import fresh

M, T = 4, 2
BATCH = reasoning_batch(((5, 6, 4),))


def build_latents(decoder: Decoder, num_iterations: int | None, projection: str = "pccot") -> LatentThoughts:
    mode = "sequential" if num_iterations is None else "jacobi"
    return LatentThoughts(
        decoder,
        num_latents=M,
        num_iterations=num_iterations,
        schedule=mode,
        projection=projection,
        control_init="normal",
    )  # type: ignore[arg-type]


METHODS: dict[str, tuple[Callable[[Decoder], nn.Module], int]] = {  # and the decoder calls of a training step
    "nocot": (NoCot, 1),
    "cot": (Cot, 1),
    "icot": (lambda d: Icot(d, IcotConfig(), steps_per_epoch=8), 1),
    "coconut": (
        lambda d: Coconut(d, build_latents(d, None, "none"), CoconutConfig(max_stage=2), steps_per_epoch=8),
        1 + 0 + 1,
    ),
    "codi": (lambda d: Codi(d, build_latents(d, None), DistillationConfig()), 1 + 1 + M + 1 + 1),
    "pccot": (lambda d: Pccot(d, build_latents(d, T), DistillationConfig()), 1 + 1 + T + 1 + 1),
    "pause": (lambda d: Pccot(d, build_latents(d, 0), DistillationConfig()), 1 + 1 + 0 + 1 + 1),
    "kava": (
        lambda d: Kava(d, build_latents(d, T), DistillationConfig(), KVSelectionConfig(), KVDistillationConfig()),
        T + 4,
    ),
}


class CountingDecoder(Decoder):
    """A decoder that counts its calls; as a subclass it is not replaced by the static-cache path in generation."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **kwargs)


def counting_decoder() -> CountingDecoder:
    decoder = fresh("llama")
    decoder.__class__ = CountingDecoder
    return decoder  # type: ignore[return-value]


@pytest.mark.parametrize("name", METHODS)
def test_passes_of_a_training_step(name: str) -> None:
    make, calls = METHODS[name]
    decoder = counting_decoder()
    make(decoder).train()(BATCH).loss.backward()
    assert decoder.calls == calls


@pytest.mark.parametrize("with_cot", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_passes_of_an_answer(name: str, with_cot: bool) -> None:
    if with_cot and name in ("nocot", "icot", "coconut"):
        return
    decoder = counting_decoder()
    (got,) = METHODS[name][0](decoder).answer(BATCH, AnswerDecoding(5, (), str, (7, 8)), with_cot=with_cot).passes
    assert decoder.calls == got.total
    n = 5
    written, think = (1, 0, 0, n - 1), {"pccot": T, "pause": 0, "kava": T}
    latent = (0, 1, think[name], n - 1) if name in think else (1, 0, M, n - 1)
    assert got == (written if with_cot or name in ("nocot", "cot", "icot") else latent)


@pytest.mark.parametrize("name", METHODS)
def test_latent_methods_in_low_precision(name: str) -> None:
    """Losses are float32 under autocast, gradients are finite, and answers are decoded."""
    decoder = fresh("llama")
    method = METHODS[name][0](decoder).train()
    with torch.autocast("cpu", torch.bfloat16):
        step = method(BATCH)
        got = method.answer(BATCH, AnswerDecoding(3, (), str))
    assert step.loss.dtype == torch.float32
    assert {part.dtype for part in step.metrics.values()} == {torch.float32}
    step.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in method.parameters())
    assert len(got.token_ids[0]) == 3
    half = METHODS[name][0](fresh("llama").bfloat16())
    assert half(BATCH).loss.dtype == torch.float32
    assert len(half.answer(BATCH, AnswerDecoding(3, (), str)).token_ids[0]) == 3
