"""A training step of AutoCompressor equals the same step written the obvious way: loss and gradients in float64."""

from dataclasses import replace

import pytest
import torch

from laconic.compression.autocompressor_reference import training_step
from tests.compression.documents import compressor, documents, gradients, run_step
from tests.models.fixtures import assert_close

LENGTHS = ((5, 4, 5, 3, 2), (4, 5, 2, 0, 0), (3, 2, 4, 4, 0))


@pytest.mark.parametrize(("name", "windows"), [("llama", (3, 1)), ("qwen3", (2, 0))])
@pytest.mark.parametrize("step", [0, 9])
def test_autocompressor_step_equals_the_reference(name: str, windows: tuple[int, int], step: int) -> None:
    """Step 0 trains the decoder with random lengths, step 9 the stop head with the ponder estimator."""
    method = compressor(name, {"length_cost": 0.3}, length_policy="stop_head")
    batch = documents(LENGTHS, pads=1, windows=windows, step=step)
    loss, grads, _ = run_step(method, batch)
    assert method.stop_head_config is not None
    expected = training_step(
        method.decoder, method.summaries, method.stop_head_config, batch, total_steps=method.total_steps, seed=1
    )
    assert_close(loss, expected.detach())
    expected_grads = gradients(method, expected)
    assert {n for n, g in grads.items() if g.any()} == {n for n, g in expected_grads.items() if g.any()}
    scale = max(float(g.abs().max()) for g in expected_grads.values())
    for n, g in grads.items():
        assert float((g - expected_grads[n]).abs().max()) <= 1e-12 * scale, n


def test_reference_differs_where_a_rule_is_changed() -> None:
    """The comparison would notice another price and another random stream."""
    method = compressor("llama", {"length_cost": 0.3}, length_policy="stop_head")
    batch = documents(LENGTHS, windows=(3, 1), step=9)
    assert method.stop_head_config is not None
    losses = [
        training_step(method.decoder, method.summaries, config, changed, total_steps=10, seed=1)
        for config, changed in (
            (method.stop_head_config, batch),
            (method.stop_head_config.model_copy(update={"length_cost": 0.0}), batch),
            (method.stop_head_config, replace(batch, epoch=1)),
        )
    ]
    assert len({float(loss.detach()) for loss in losses}) == 3
    assert all(isinstance(loss, torch.Tensor) for loss in losses)
