"""Titans: chunks equal tokens, pieces equal the whole, padding and other rows change nothing, gradients flow."""

from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

from laconic.config.nested import TitansOptions
from laconic.errors import UsageError
from laconic.nested import state as states
from laconic.nested.hope import layer as hope_layer
from laconic.nested.hope.layer import SelfTitans
from laconic.nested.recurrence import chunked_scan
from laconic.nested.recurrence.chunked_scan import pack_left
from laconic.nested.state import LayerState, MLPMemoryState, reset_rows
from laconic.nested.titans import layer as titans_layer
from laconic.nested.titans.equations import project_qkv
from laconic.nested.titans.layer import Titans, initial_state
from laconic.nested.titans.titans_reference import titans_reference
from tests.models.fixtures import noise
from tests.nested.helpers import assert_close, assert_states_close, gradients, perturb

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


@pytest.mark.parametrize(
    "options",
    [
        {}, {"memory_depth": 1}, {"read_at": "boundary"}, {"num_persistent_tokens": 2},
        {"momentum": False, "conv_kernel_size": 1},
    ],
)  # fmt: skip
def test_titans_pieces_equal_the_whole(options: dict[str, Any]) -> None:
    layer, x = build(**options), noise(1, 2, 11, D)
    whole, final = layer(x)
    for cut in range(1, 11):
        first, state = layer(x[:, :cut])
        second, state = layer(x[:, cut:], state)
        assert_close([torch.cat([first, second], 1)], [whole])
        assert_states_close(state, final)
    state, outputs = None, []
    for t in range(11):
        y, state = layer(x[:, t : t + 1], state)
        outputs.append(y)
    assert_close([torch.cat(outputs, 1)], [whole])
    assert_states_close(state, final)


@pytest.mark.parametrize("options", [{}, {"num_persistent_tokens": 2}])
def test_titans_padding_and_other_rows_change_nothing(options: dict[str, Any]) -> None:
    """Rows of different lengths, padded anywhere, then continued from different offsets, equal each row alone."""
    layer = build(**options)
    mask = torch.tensor(
        [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]
    ).bool()
    x, more = noise(2, 4, 7, D), noise(3, 4, 5, D)
    y, state = layer(x, attention_mask=mask)
    assert not y[~mask].any()
    y_more, final = layer(more, state)
    for row in range(4):
        n = int(mask[row].sum())
        alone, row_state = layer(x[row : row + 1, mask[row]]) if n else (x[:1, :0], initial_state(layer.params, 1))
        assert_close([y[row : row + 1, mask[row]]], [alone])
        assert_states_close(states.select_rows(state, [row]), row_state)
        alone, row_state = layer(more[row : row + 1], row_state)
        assert_close([y_more[row : row + 1]], [alone])
        assert_states_close(states.select_rows(final, [row]), row_state)


def test_titans_is_causal() -> None:
    for options in ({}, {"read_at": "boundary"}):
        layer, x = build(**options), noise(5, 1, 9, D)  # pyright: ignore[reportArgumentType]
        other = torch.cat([x[:, :4], noise(6, 1, 5, D)], 1)
        assert_close([layer(x)[0][:, :4]], [layer(other)[0][:, :4]])
        assert not torch.equal(layer(x)[0][:, 4:], layer(other)[0][:, 4:])


def test_titans_without_update_weights_moves_only_convolutions() -> None:
    layer, x = build(), noise(7, 2, 8, D)
    _, state = layer(x[:, :4])
    y, after = layer(x[:, 4:], state, update_weights=False)
    assert states.states_equal(after.memory, state.memory)
    assert not states.states_equal(after.conv_tails, state.conv_tails)
    first, part = layer(x[:, 4:6], state, update_weights=False)
    assert_close([torch.cat([first, layer(x[:, 6:], part, update_weights=False)[0]], 1)], [y])
    frozen, _ = layer(x, update_weights=False)
    assert not torch.equal(frozen, layer(x)[0])
    with torch.no_grad():
        layer.get_parameter("step.bias").fill_(-1e9)
        layer.get_parameter("keep.bias").fill_(1e9)
    assert_close([frozen], [layer(x)[0]], tolerance=0.0)


def test_titans_state_fork_and_reset() -> None:
    layer, x = build(), noise(8, 1, 5, D)
    _, state = layer(x)
    y, _ = layer(noise(9, 2, 4, D), states.repeat_rows(state, 2))
    assert_close([y[1:]], [layer(noise(9, 2, 4, D)[1:], state)[0]])
    for options in ({}, {"memory_depth": 1, "num_persistent_tokens": 1}):
        layer = build(**options)
        _, state = layer(noise(11, 3, 5, D))
        assert states.states_equal(reset_rows(state), initial_state(layer.params, 3))
        partial = reset_rows(state, [1])
        assert states.states_equal(states.select_rows(partial, [0, 2]), states.select_rows(state, [0, 2]))
        assert states.states_equal(states.select_rows(partial, [1]), initial_state(layer.params, 1))


@pytest.mark.parametrize("depth", [1, 2])
def test_titans_every_weight_gets_a_gradient(depth: int) -> None:
    layer = build(memory_depth=depth, num_persistent_tokens=1)
    y, _ = layer(noise(12, 2, 13, D))
    for (name, _), grad in zip(layer.named_parameters(), gradients(y, layer), strict=True):
        assert grad.isfinite().all(), name
        assert grad.any(), name


@pytest.mark.parametrize("options", [{}, {"memory_depth": 1}, {"memory_depth": 1, "read_at": "boundary"}])
def test_titans_outer_gradient_changes_no_value(options: dict[str, Any]) -> None:
    layer, x = build(**options), noise(13, 2, 11, D)
    modes: dict[str, dict[str, Any]] = {"full": {}, "truncated": {"truncate_after": 2}, "first_order": {}, "none": {}}
    grads, names = {}, [name for name, _ in layer.named_parameters()]
    for mode, extra in modes.items():
        y, _ = layer(x, outer_gradient=mode, **extra)
        assert_close([y], [layer(x)[0]], tolerance=1e-15)
        grads[mode] = dict(zip(names, gradients(y, layer), strict=True))
    starts = ["memory.M"] if options.get("memory_depth") == 1 else ["memory.W1", "memory.W2"]
    assert all(grads[mode][name].any() for mode in modes for name in starts)
    written = ("k_proj.weight", "v_proj.weight", "step.weight", "keep.weight")
    assert not any(grads["none"][name].any() for name in written), "all writes are constants"
    assert all(grads[mode][name].any() for mode in ("full", "truncated", "first_order") for name in written)
    assert len({tuple(grads[mode]["k_proj.weight"].flatten().tolist()) for mode in modes}) == 4


def test_titans_detached_state_leaves_the_start_its_gradient() -> None:
    layer, x = build(memory_depth=1), noise(14, 1, 8, D)
    _, state = layer(x[:, :4])
    y, _ = layer(x[:, 4:], states.detach(state))
    grads = dict(zip((n for n, _ in layer.named_parameters()), gradients(y, layer), strict=True))
    assert grads["memory.M"].any()


@pytest.mark.parametrize(("module", "layer"), [(titans_layer, Titans(D, H, C)), (hope_layer, SelfTitans(D, H))])
def test_scan_in_segments_equals_one_scan(module: ModuleType, layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, state and gradients, with a row that ends in the first segment."""
    layer, x = perturb(layer), noise(21, 2, 9, D)
    mask = torch.arange(9) < torch.tensor([[9], [3]])
    whole, final = layer(x, attention_mask=mask)
    for place in (chunked_scan, module):
        monkeypatch.setattr(place, "MAX_SCAN_TOKENS", 4)
    lengths: list[int] = []
    monkeypatch.setattr(module, "pack_left", lambda x, valid: lengths.append(x.shape[1]) or pack_left(x, valid))
    y, state = layer(x, attention_mask=mask)
    assert lengths == [4, 4, 1]
    assert_close([y, *gradients(y, layer)], [whole, *gradients(whole, layer)])
    assert_states_close(state, final)


def test_titans_activation_checkpointing_keeps_gradients() -> None:
    x = noise(16, 2, 8, D)
    plain, recomputed = build(), build(activation_checkpointing=True)
    assert_close(gradients(recomputed(x)[0], recomputed), gradients(plain(x)[0], plain), tolerance=1e-14)


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


def test_titans_half_precision_has_a_float32_state() -> None:
    layer = Titans(D, H, C).bfloat16()
    y, state = layer(noise(17, 1, 5, D, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert {x.dtype for _, x in states.named_tensors(state.memory) if x.is_floating_point()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        _, state = Titans(D, H, C)(noise(17, 1, 5, D, dtype=torch.float32))
    assert {x.dtype for _, x in states.named_tensors(state.memory) if x.is_floating_point()} == {torch.float32}


def test_titans_state_size_does_not_depend_on_length() -> None:
    layer = build()
    results = [layer(noise(18, 1, T, D))[1] for T in (3, 6, 12)]
    assert len({states.num_bytes(state) for state in results}) == 1
    assert isinstance(results[0], LayerState)


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
