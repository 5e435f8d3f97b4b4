"""A KaVa step equals the same step the plain way, in loss and in every gradient."""

import pytest
import torch

from benchmarks.plain_kava import plain_kava
from laconic.latent.kava import Kava
from tests.core.readings import SOME, all_same, same
from tests.methods.batches import gradients, kava, reasoning


def plainly(method: Kava, batch: object) -> torch.Tensor:
    method.decoder.attn_implementation = "eager"
    loss = plain_kava(method.decoder, method.latent_thoughts, batch)  # type: ignore[arg-type]
    method.decoder.attn_implementation = "sdpa"
    return loss


@pytest.mark.parametrize(("family", "rounds"), [("llama", 0), *((family, 2) for family in SOME)])
def test_a_step_equals_the_plain_way(family: str, rounds: int) -> None:
    method, batch = kava(family, rounds=rounds), reasoning(((5, 6, 4), (3, 3, 3), (4, 0, 5), (6, 5, 2)), pads=1)
    ours, plain = method(batch).loss, plainly(method, batch)
    same(ours, plain)
    all_same(gradients(method, ours).values(), gradients(method, plain).values())
