"""The reads of a stepwise rollout, run one after the other, give what `LatentThoughts.think` gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.latent.stepwise_rollout import RolloutReads, StepwiseCounts, run_stepwise_rollout
from laconic.latent.thoughts import LatentThoughts
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from tests.models.fixtures import assert_close, fresh, noise, valid_slots

pytestmark = pytest.mark.usefixtures("unchecked")
D, M = 48, 4
QUESTIONS = [noise(seed, 1, length, D) for seed, length in ((1, 1), (2, 5), (3, 3), (4, 2), (5, 4), (6, 3))]


def run_reads(decoder: Decoder, reads: RolloutReads) -> tuple[KVCache, Tensor, StepwiseCounts]:
    """Run the reads of one row; return its cache, the last hidden state, and what the generator returns."""
    cache = KVCache.empty(decoder.config, 1, torch.float64)
    read = next(reads)
    while True:
        output = decoder(read.inputs_embeds, cache.crop(cache.S - read.num_replaced))
        cache, hidden_states = output.cache, output.hidden_states[:, -read.num_outputs :]
        try:
            read = reads.send(hidden_states)
        except StopIteration as end:
            return cache, hidden_states, end.value


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"num_iterations": 3}, 0.0),
        ({"num_iterations": 3, "projection": "none"}, 0.3),
        ({"num_iterations": 0}, 0.0),
        ({"schedule": "sequential"}, 0.0),
        ({"num_iterations": 3, "length_policy": "stop_head"}, 0.0),
        ({"num_iterations": 1}, 0.0),
    ],
)
@torch.no_grad()
def test_run_stepwise_rollout_equals_think(name: str, options: dict[str, Any], tolerance: float) -> None:
    decoder = fresh(name).double()
    for p in decoder.layers.parameters():  # so that iterations converge at different speeds
        p.mul_(0.6 if p.ndim == 2 else 1.0)
    latents, suffix = LatentThoughts(decoder, num_latents=M, **options), noise(9, 1, 2, D)
    if latents.stop_head is not None:
        latents.stop_head.u.copy_(noise(8, D))
    counts = list[StepwiseCounts]()
    for question in QUESTIONS:
        expected = latents.think(decoder, question=question, tolerance=tolerance)
        last = decoder(suffix, expected.cache)
        cache, hidden_states, count = run_reads(decoder, run_stepwise_rollout(latents, question, M, suffix, tolerance))
        assert_close(hidden_states, last.hidden_states[:, -1:])
        for x, y in zip(valid_slots(cache, 0), valid_slots(last.cache, 0), strict=True):
            assert_close(x, y)
        assert count == (expected.passes[0], *expected.count_latents())
        counts.append(count)
    assert (len(set(counts)) > 1) == bool(tolerance or latents.stop_head), "questions end apart"
