"""Titans and SelfTitans alike: pieces equal the whole, padding and other rows change nothing, gradients flow."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from laconic.config.nested import SelfModifyingOptions, TitansOptions
from laconic.errors import UsageError
from laconic.nested import state as states
from laconic.nested.cms.layer import CMS
from laconic.nested.hope import layer as hope_layer
from laconic.nested.hope.layer import SelfTitans
from laconic.nested.recurrence import chunked_scan
from laconic.nested.recurrence.chunked_scan import pack_left
from laconic.nested.state import reset_rows
from laconic.nested.titans import layer as titans_layer
from laconic.nested.titans.layer import Titans
from tests.models.fixtures import noise
from tests.nested.helpers import assert_close, assert_states_close, gradients, perturb, states_equal

D, H, C, E = 6, 2, 3, 3
SMALL: dict[str, Any] = {
    "projection_lr_init": 0.3, "decay_half_life": 20.0, "memory_chunk_size": C, "projection_chunk_size": C,
}  # fmt: skip
TITANS: list[dict[str, Any]] = [{}, {"memory_depth": 1}, {"read_at": "boundary"}, {"num_persistent_tokens": 2}]
SELF_TITANS: list[dict[str, Any]] = [
    {}, {"memory_kind": "affine", "decay_target": "zero"}, {"memory_kind": "mlp"},
    {"memory_kind": "affine", "momentum": True, "max_projection_norm": 0.0}, {"adaptive_projections": ()},
    {"adaptive_query": True, "memory_chunk_size": 2, "projection_chunk_size": 4},
]  # fmt: skip
MODES: dict[str, dict[str, Any]] = {"full": {}, "truncated": {"truncate_after": 2}, "first_order": {}}
Layer = Titans | SelfTitans


def build(kind: type[Layer], **options: Any) -> Any:
    if kind is Titans:
        return perturb(Titans(D, H, C, TitansOptions(mlp_width=4, **options)))
    return perturb(SelfTitans(D, H, E, SelfModifyingOptions(**(SMALL | options))))


def initial_state(layer: Layer, batch_size: int) -> states.LayerState:
    if isinstance(layer, Titans):
        return titans_layer.initial_state(layer.params, batch_size)
    return hope_layer.initial_state(layer.params, batch_size)


every_kind = pytest.mark.parametrize("kind", [Titans, SelfTitans])
every_layer = pytest.mark.parametrize(
    ("kind", "options"), [*((Titans, o) for o in TITANS), *((SelfTitans, o) for o in SELF_TITANS)], ids=str
)


@every_layer
def test_layer_pieces_equal_the_whole(kind: type[Layer], options: dict[str, Any]) -> None:
    layer, x = build(kind, **options), noise(1, 2, 11, D)
    whole, final = layer(x)
    for cuts in (*((cut,) for cut in range(1, 11)), tuple(range(1, 11))):
        outputs, state = [], None
        for a, b in zip((0, *cuts), (*cuts, 11), strict=True):
            y, state = layer(x[:, a:b], state)
            outputs.append(y)
        assert_close([torch.cat(outputs, 1)], [whole])
        assert_states_close(state, final)


@every_layer
def test_layer_padding_and_other_rows_change_nothing(kind: type[Layer], options: dict[str, Any]) -> None:
    """Rows of different lengths, padded anywhere, then continued from different offsets, equal each row alone."""
    layer = build(kind, **options)
    mask = torch.tensor(
        [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]
    ).bool()
    x, more = noise(2, 4, 7, D), noise(3, 4, 5, D)
    y, state = layer(x, attention_mask=mask)
    assert not y[~mask].any()
    y_more, final = layer(more, state)
    for row in range(4):
        has_tokens = bool(mask[row].any())
        alone, row_state = layer(x[row : row + 1, mask[row]]) if has_tokens else (x[:1, :0], initial_state(layer, 1))
        assert_close([y[row : row + 1, mask[row]]], [alone])
        assert_states_close(states.select_rows(state, [row]), row_state)
        alone, row_state = layer(more[row : row + 1], row_state)
        assert_close([y_more[row : row + 1]], [alone])
        assert_states_close(states.select_rows(final, [row]), row_state)


@every_layer
def test_layer_is_causal(kind: type[Layer], options: dict[str, Any]) -> None:
    layer, x = build(kind, **options), noise(5, 1, 9, D)
    other = torch.cat([x[:, :4], noise(6, 1, 5, D)], 1)
    assert_close([layer(x)[0][:, :4]], [layer(other)[0][:, :4]])
    assert not torch.equal(layer(x)[0][:, 4:], layer(other)[0][:, 4:])


@every_layer
def test_layer_without_update_weights_moves_only_convolutions(kind: type[Layer], options: dict[str, Any]) -> None:
    layer, x = build(kind, **options), noise(7, 2, 8, D)
    _, state = layer(x[:, :4])
    y, after = layer(x[:, 4:], state, update_weights=False)
    assert states_equal(after.memory, state.memory)
    assert not states_equal(after.conv_tails, state.conv_tails)
    first, part = layer(x[:, 4:6], state, update_weights=False)
    assert_close([torch.cat([first, layer(x[:, 6:], part, update_weights=False)[0]], 1)], [y])
    if "num_persistent_tokens" in options:  # which are not read without writing
        return
    frozen, _ = layer(x, update_weights=False)
    assert not torch.equal(frozen, layer(x)[0])
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.startswith(("keep", "step")):
                p.fill_(0 if name.endswith(".weight") else 1e9 if name.startswith("keep") else -1e9)
    assert_close([layer(x)[0]], [frozen], tolerance=1e-15)


@every_layer
def test_layer_state_fork_and_reset(kind: type[Layer], options: dict[str, Any]) -> None:
    layer, more = build(kind, **options), noise(9, 2, 4, D)
    _, state = layer(noise(11, 3, 5, D))
    row = states.select_rows(state, [0])
    assert_close([layer(more, states.select_rows(row, [0, 0]))[0][1:]], [layer(more[1:], row)[0]])
    assert states_equal(reset_rows(state), initial_state(layer, 3))
    partial = reset_rows(state, [1])
    assert states_equal(states.select_rows(partial, [0, 2]), states.select_rows(state, [0, 2]))
    assert states_equal(states.select_rows(partial, [1]), initial_state(layer, 1))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((Titans, {"memory_depth": depth, "num_persistent_tokens": 1}) for depth in (1, 2)),
        *(
            (SelfTitans, {"memory_kind": memory_kind, "gate_groups": groups, "adaptive_query": True})
            for memory_kind in ("linear", "affine", "mlp")
            for groups in (1, 2)
        ),
    ],
    ids=str,
)
def test_layer_every_weight_gets_a_gradient(kind: type[Layer], options: dict[str, Any]) -> None:
    layer = build(kind, **options)
    y, _ = layer(noise(12, 2, 13, D))
    for (name, _), grad in zip(layer.named_parameters(), gradients(y, layer), strict=True):
        assert grad.isfinite().all(), name
        assert grad.any(), name


@pytest.mark.medium
@every_layer
def test_layer_outer_gradient_changes_no_value(kind: type[Layer], options: dict[str, Any]) -> None:
    layer, x = build(kind, **options), noise(13, 2, 11, D)
    grads, names = {}, [name for name, _ in layer.named_parameters()]
    for mode, extra in MODES.items():
        y, _ = layer(x, outer_gradient=mode, **extra)
        assert_close([y], [layer(x)[0]], tolerance=1e-15)
        grads[mode] = dict(zip(names, gradients(y, layer), strict=True))
    assert all(grads[mode][name].any() for mode in MODES for name in names if name.startswith(("memory.", "q_proj")))
    written = [name for name in names if name.startswith(("k_proj", "v_proj", "k.", "keep", "step"))]
    assert all(grads[mode][name].any() for mode in ("full", "truncated") for name in written)
    assert len({tuple(grads[mode][written[0]].flatten().tolist()) for mode in MODES}) >= 2


@every_kind
def test_layer_detached_state_leaves_the_start_its_gradient(kind: type[Layer]) -> None:
    layer, x = build(kind, **({"memory_depth": 1} if kind is Titans else {})), noise(14, 1, 9, D)
    _, state = layer(x[:, :6])
    y, _ = layer(x[:, 6:], states.detach(state))
    assert dict(zip((n for n, _ in layer.named_parameters()), gradients(y, layer), strict=True))["memory.M"].any()


@every_kind
def test_layer_activation_checkpointing_keeps_gradients(kind: type[Layer]) -> None:
    plain, recomputed, x = build(kind), build(kind, activation_checkpointing=True), noise(16, 2, 8, D)
    assert_close(gradients(recomputed(x)[0], recomputed), gradients(plain(x)[0], plain), tolerance=1e-14)


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


@every_kind
def test_layer_half_precision_has_a_float32_state(kind: type[Layer]) -> None:
    layer, x = (Titans(D, H, C) if kind is Titans else SelfTitans(D, H)), noise(17, 1, 5, D, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = layer(x)
    y, after = layer.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    for memory in (state.memory, after.memory):
        assert {x.dtype for _, x in states.named_tensors(memory) if x.is_floating_point()} == {torch.float32}


@every_kind
def test_layer_state_size_does_not_depend_on_length(kind: type[Layer]) -> None:
    assert len({states.num_bytes(build(kind)(noise(18, 1, T, D))[1]) for T in (3, 6, 12)}) == 1


@pytest.mark.parametrize("replace", [partial(prune.l1_unstructured, amount=0.5), parametrizations.weight_norm])
@pytest.mark.parametrize("build_layer", [lambda: build(Titans), lambda: build(SelfTitans), lambda: CMS(D, D, (2, 4))])
def test_layers_refuse_replaced_weights(build_layer: Callable[[], nn.Module], replace: Callable[..., object]) -> None:
    layer = build_layer()
    path, _, name = next(name for name, p in layer.named_parameters() if p.ndim == 2 and "." in name).rpartition(".")
    replace(layer.get_submodule(path), name=name)
    with pytest.raises(UsageError, match=rf"{type(layer).__name__}: {path}.*pruning or a parametrization"):
        layer(noise(0, 1, 5, D))


def test_self_titans_refuses_states_of_other_layers() -> None:
    layer = build(SelfTitans)
    others = (build(Titans), perturb(SelfTitans(D, H, 2 * E)), build(SelfTitans, memory_chunk_size=2 * C))
    for other in others:
        _, state = other(noise(0, 1, 5, D))
        with pytest.raises(UsageError, match="of another layer"):
            layer(noise(1, 1, 3, D), state)
