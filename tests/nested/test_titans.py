"""Titans: equals its reference, is stable at initialization; `test_memory_layers.py` has the laws of both memories."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from laconic.config.nested import TitansOptions
from laconic.errors import UsageError
from laconic.nested.recurrence import chunked_scan
from laconic.nested.state import MLPMemoryState
from laconic.nested.titans.equations import project_qkv
from laconic.nested.titans.layer import Titans, initial_state
from laconic.nested.titans.titans_reference import titans_reference
from tests.models.fixtures import noise
from tests.nested.helpers import assert_close, gradients, perturb

D, H, C = 6, 2, 3


def build(chunk_size: int = C, seed: int = 0, **options: Any) -> Titans:
    layer = perturb(Titans(D, H, chunk_size, TitansOptions(mlp_width=4, **options), seed))
    assert isinstance(layer, Titans)
    return layer


@pytest.mark.parametrize(("depth", "read_at"), list(product((1, 2), ("after", "before", "boundary"))))
@pytest.mark.parametrize(
    "options",
    [
        {}, {"momentum": False, "loss_factor": 2, "max_memory_norm": 0.5},
        {"max_memory_norm": 0.0},
        {"num_persistent_tokens": 2},
    ],
)  # fmt: skip
def test_titans_equals_its_reference(depth: int, read_at: str, options: dict[str, Any]) -> None:
    """Values and the gradient of every weight, for lengths up to three chunks and two tokens."""
    layer = build(memory_depth=depth, read_at=read_at, **options)
    for T in (1, 3, 4, 11):
        x = noise(T, 2, T, D)
        y, _ = layer(x)
        expected = titans_reference(layer.params, x)
        assert_close([y], [expected])
        assert_close(gradients(y, layer), gradients(expected, layer))


def test_titans_with_a_frozen_matrix_equals_its_reference() -> None:
    """The other matrix of a two-layer memory still gets the gradient through the inner gradient."""
    layer, x = build(memory_depth=2), noise(4, 1, 6, D)
    layer.get_parameter("memory.W1").requires_grad_(False)
    trained = [p for p in layer.parameters() if p.requires_grad]
    ours, theirs = (
        torch.autograd.grad(y.square().sum(), trained) for y in (layer(x)[0], titans_reference(layer.params, x))
    )
    assert_close(ours, theirs)


def test_titans_with_chunk_size_one_equals_its_reference() -> None:
    layer, x = build(chunk_size=1), noise(4, 1, 6, D)
    assert_close([layer(x)[0]], [titans_reference(layer.params, x)])


def test_titans_init_recalls_what_followed_a_repeated_token() -> None:
    """At initialization the key nearest to a repeated token's query is one whose window contains the token."""
    layer, T, window = Titans(64, 2, 16), 12, TitansOptions().conv_kernel_size
    x = noise(19, 8, T, 64)
    x[:, -1] = x[:, 2]
    params = layer.double().params
    qkv = project_qkv(x, params.weights, initial_state(params, 8).conv_tails, 2, None)
    nearest = (qkv.k @ qkv.q[:, :, -1:].mT)[:, :, : T - window, 0].argmax(-1)
    assert ((nearest >= 2) & (nearest < 2 + window)).all()


@pytest.mark.parametrize("chunk_size", [4, 16, 64])
def test_titans_two_layer_memory_is_stable_at_initialization(chunk_size: int) -> None:
    """Without a norm bound; an initial step size of 0.5, which a matrix tolerates, diverges."""
    x = noise(20, 1, 256, 32, dtype=torch.float32)
    for lr_init, is_stable in ((None, True), (0.5, False)):
        layer = Titans(32, 2, chunk_size, TitansOptions(max_memory_norm=0.0, loss_factor=2, lr_init=lr_init))
        with torch.no_grad():
            memory = layer(x)[1].memory["memory"]
        assert isinstance(memory, MLPMemoryState)
        pairs = [
            (part.change, layer.get_parameter(f"memory.{n}")) for n, part in (("W1", memory.W1), ("W2", memory.W2))
        ]
        assert all(bool(change.norm() < start.norm()) is is_stable for change, start in pairs)


def test_titans_refuses_inputs_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="4 heads"):
        Titans(6, 4)
    with pytest.raises(UsageError, match="chunk_size 0"):
        Titans(D, H, 0)
    layer = build()
    _, state = layer(noise(0, 2, 3, D))
    for x, arguments, message in (
        (noise(0, 2, 3, 5), {}, "expected vectors"),
        (noise(0, 2, 0, D), {}, "T >= 1"),
        (noise(0, 3, 2, D), {"state": state}, "3 rows, the state 2"),
        (noise(0, 2, 3, D), {"state": replace(state, memory={})}, "state is that of another kind of layer"),
        (noise(0, 2, 3, D), {"outer_gradient": "truncated"}, "truncate_after"),
        (noise(0, 2, 3, D), {"outer_gradient": "truncated", "truncate_after": 0}, "truncate_after 0"),
        (noise(0, 2, 3, D), {"truncate_after": 3}, "truncate_after"),
        (noise(0, 0, 3, D), {}, "B, T >= 1"),
        (noise(0, 2, 3, D), {"outer_gradient": "first-order"}, "'first-order' is not one of full, truncated, first_"),
    ):
        with pytest.raises(UsageError, match=message):
            layer(x, **arguments)
    with pytest.raises(UsageError, match=r"expected vectors .*got \[2, 5\]"):
        chunked_scan.check_inputs("titans", 5, state, noise(0, 2, 5), None, "full", None)
    with pytest.raises(UsageError, match="attention_mask"):
        chunked_scan.check_inputs("titans", D, state, noise(0, 2, 3, D), torch.ones(2, 2).bool(), "full", None)
    with pytest.raises(UsageError, match=r"attention_mask is float32 \[2, 3\], expected bool or integers"):
        chunked_scan.check_inputs("titans", D, state, noise(0, 2, 3, D), torch.ones(2, 3), "full", None)
