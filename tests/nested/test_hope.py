"""SelfTitans: chunks equal tokens for every option, pieces equal the whole, gradients flow, norms stay bounded."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from laconic.config.nested import ALL_PROJECTIONS, SelfModifyingOptions
from laconic.errors import UsageError
from laconic.nested import state as states
from laconic.nested.hope.layer import SelfTitans, build_memories, initial_state, mix_inputs
from laconic.nested.recurrence.memory_cells import UpdateRule, gate_and_project
from laconic.nested.state import LinearMemoryState, reset_rows
from laconic.nested.titans.equations import TitansMemory
from tests.models.fixtures import noise
from tests.nested.helpers import assert_close, assert_states_close, gradients, perturb
from tests.reference.self_titans import recurrent_self_titans

D, H, E = 6, 2, 3
SMALL: dict[str, Any] = {
    "projection_lr_init": 0.3, "decay_half_life": 20.0, "memory_chunk_size": 3,
    "projection_chunk_size": 3,
}  # fmt: skip


def build(**options: Any) -> SelfTitans:
    layer = perturb(SelfTitans(D, H, E, SelfModifyingOptions(**(SMALL | options))))
    assert isinstance(layer, SelfTitans)
    return layer


def token_by_token(layer: SelfTitans, x: Tensor) -> Tensor:
    """Return the outputs by the recurrence of explicit memories."""
    w = layer.params.weights
    heads, q, _ = mix_inputs(layer.params, initial_state(layer.params, len(x)), x, None)
    return gate_and_project(recurrent_self_titans(layer.shape, w, heads, q), x, w)


@st.composite
def drawn_options(draw: st.DrawFn) -> dict[str, Any]:
    """Draw options that are consistent and stable: two-layer projections diverge in ten tokens without a norm bound."""
    projections = st.sampled_from(((), ALL_PROJECTIONS, ("k",), ("v", "step"), ("keep", "k")))
    options: dict[str, Any] = {
        "adaptive_projections": draw(projections),
        "adaptive_query": draw(st.booleans()),
        "memory_kind": draw(st.sampled_from(("linear", "affine", "mlp"))),
        "objective": draw(st.sampled_from(("dot", "l2"))),
        "delta_rule": draw(st.booleans()),
        "read_at": draw(st.sampled_from(("token", "boundary", "after"))),
        "gate_groups": draw(st.sampled_from((1, 2))),
        "decay_target": draw(st.sampled_from(("start", "zero"))),
        "momentum": draw(st.booleans()),
        "max_lr": draw(st.sampled_from((1.0, 2.0))),
        "max_projection_norm": draw(st.sampled_from((0.0, 1.0, 0.3))),
        "max_memory_norm": draw(st.sampled_from((4.0, 0.3))),
    }
    sizes = ((3, 3), (1, 1)) if options["gate_groups"] == 1 else ((3, 3), (2, 4), (4, 2), (1, 3))
    options["memory_chunk_size"], options["projection_chunk_size"] = draw(st.sampled_from(sizes))
    if options["adaptive_projections"] or options["adaptive_query"]:
        if options["memory_kind"] == "mlp":
            options["momentum"] = False
            options["max_projection_norm"] = options["max_projection_norm"] or 1.0
        elif options["momentum"]:
            options["max_projection_norm"] = 0.0
    return options


@pytest.mark.medium
@settings(max_examples=20)
@given(drawn_options(), st.integers(1, 11), st.integers(1, 10))
def test_self_titans_chunks_equal_tokens_and_pieces(options: dict[str, Any], T: int, cut: int) -> None:
    """Values and the gradient of every weight, up to three chunks and two tokens."""
    layer, x = build(**options), noise(T, 2, T, D)
    y, final = layer(x)
    expected = token_by_token(layer, x)
    assert_close([y], [expected])
    assert_close(gradients(y, layer), gradients(expected, layer))
    if cut < T:
        first, state = layer(x[:, :cut])
        second, state = layer(x[:, cut:], state)
        assert_close([torch.cat([first, second], 1)], [y])
        assert_states_close(state, final)


def test_self_titans_vanishing_decay_gate_is_clamped_alike() -> None:
    """A decay of 2e-9 becomes 1e-6 in the chunk form and in the recurrence."""
    layer = build(momentum=True, max_projection_norm=0.0, memory_chunk_size=4, projection_chunk_size=4)
    x = noise(5, 2, 9, D)
    with torch.no_grad():
        for group in ("memory", "projections"):
            layer.get_parameter(f"keep.{group}.bias").fill_(-20.0)
    assert_close([layer(x)[0]], [token_by_token(layer, x)])


@pytest.mark.parametrize("memory_kind", ["linear", "affine", "mlp"])
@pytest.mark.parametrize("decay_target", ["start", "zero"])
def test_self_titans_padding_and_other_rows_change_nothing(memory_kind: str, decay_target: str) -> None:
    """Rows of different lengths, padded anywhere, then continued from different offsets, equal each row alone."""
    layer = build(memory_kind=memory_kind, decay_target=decay_target, memory_chunk_size=2, projection_chunk_size=4)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0]]).bool()
    x, more = noise(2, 3, 7, D), noise(3, 3, 5, D)
    y, state = layer(x, attention_mask=mask)
    assert not y[~mask].any()
    y_more, final = layer(more, state)
    for row in range(3):
        alone, row_state = layer(x[row : row + 1, mask[row]])
        assert_close([y[row : row + 1, mask[row]]], [alone])
        assert_states_close(states.select_rows(state, [row]), row_state)
        alone, row_state = layer(more[row : row + 1], row_state)
        assert_close([y_more[row : row + 1]], [alone])
        assert_states_close(states.select_rows(final, [row]), row_state)


def test_self_titans_single_tokens_equal_the_whole() -> None:
    layer, x = build(projection_chunk_size=6), noise(1, 1, 10, D)
    whole, final = layer(x)
    state, outputs = None, []
    for t in range(10):
        y, state = layer(x[:, t : t + 1], state)
        outputs.append(y)
    assert_close([torch.cat(outputs, 1)], [whole])
    assert_states_close(state, final)


def test_self_titans_with_static_projections_equals_titans_with_a_matrix() -> None:
    """Write the error, erase nothing, momentum, read after the token: Titans 12 to 15."""
    layer = build(
        adaptive_projections=(), objective="l2", delta_rule=False, momentum=True, decay_target="zero", read_at="after",
        max_memory_norm=0.0, max_projection_norm=0.0,
    )  # fmt: skip
    x, memories, start = noise(4, 2, 7, D), build_memories(layer.params), initial_state(layer.params, 2)
    heads, q, _ = mix_inputs(layer.params, start, x, None)
    y, state = memories.step_chunk(start.memory, (heads, q), None)
    k, v, gates = memories.generate(start.memory, heads)
    titans = TitansMemory(64, memories.w["memory.M"], UpdateRule(), 1, None)
    inputs = (q, k, v, *(g for g in gates["memory"] if g is not None))
    expected, expected_state = titans.step_chunk(start.memory, inputs, None)
    assert_close([y], [expected])
    assert_states_close(state, expected_state)


@pytest.mark.parametrize("gate_groups", [1, 2])
def test_self_titans_every_weight_gets_a_gradient(gate_groups: int) -> None:
    """Once there are two chunks."""
    for memory_kind in ("linear", "affine", "mlp"):
        layer = build(memory_kind=memory_kind, gate_groups=gate_groups, adaptive_query=True)
        y, _ = layer(noise(5, 2, 8, D))
        for (name, _), grad in zip(layer.named_parameters(), gradients(y, layer), strict=True):
            assert grad.isfinite().all(), name
            assert grad.any(), name


@pytest.mark.medium
@pytest.mark.parametrize("memory_kind", ["linear", "mlp"])
@pytest.mark.parametrize("decay_target", ["start", "zero"])
def test_self_titans_outer_gradient_changes_no_value(memory_kind: str, decay_target: str) -> None:
    layer, x = build(memory_kind=memory_kind, decay_target=decay_target), noise(6, 2, 11, D)
    modes: dict[str, dict[str, Any]] = {"full": {}, "truncated": {"truncate_after": 2}, "first_order": {}, "none": {}}
    grads, names = {}, [name for name, _ in layer.named_parameters()]
    for mode, extra in modes.items():
        y, _ = layer(x, outer_gradient=mode, **extra)
        assert_close([y], [layer(x)[0]], tolerance=1e-15)
        grads[mode] = dict(zip(names, gradients(y, layer), strict=True))
    k, read = ("k.M", "memory.M") if memory_kind == "linear" else ("k.W1", "memory.W1")
    assert all(grads[mode][name].any() for mode in modes for name in (read, "q_proj.weight"))
    constants = (k, "keep.memory.bias", "step.memory.weight")
    assert not any(grads["none"][name].any() for name in constants)
    assert all(grads[mode][k].any() for mode in ("full", "truncated", "first_order"))
    assert len({tuple(grads[mode][k].flatten().tolist()) for mode in modes}) == 4


def test_self_titans_detached_state_leaves_the_starts_their_gradient() -> None:
    layer, x = build(), noise(7, 1, 9, D)
    _, state = layer(x[:, :6])
    y, _ = layer(x[:, 6:7], states.detach(state))
    grads = dict(zip((n for n, _ in layer.named_parameters()), gradients(y, layer), strict=True))
    assert grads["memory.M"].any()


def test_self_titans_norms_stay_within_their_bounds() -> None:
    """For any input; without the cap the projections exceed theirs."""
    x = 30 * noise(8, 1, 300, D)
    worst = {}
    for cap in (1.0, 0.0):
        layer = build(max_projection_norm=cap, projection_lr_init=0.9, decay_half_life=5.0, max_memory_norm=0.5)
        state, worst[cap] = None, 0.0
        for t in range(0, 300, 3):
            _, state = layer(x[:, t : t + 3], state)
            projections, memory = state.memory["projections"], state.memory["memory"]
            assert isinstance(projections, LinearMemoryState)
            assert isinstance(memory, LinearMemoryState)
            worst[cap] = max(worst[cap], torch.linalg.matrix_norm(projections.change, 2).max().item())
            if worst[cap] > 1:
                break
            assert memory.change.norm(dim=(-2, -1)).max() <= 0.5 * E**0.5 * (1 + 1e-12)
    assert worst[1.0] <= 1.0 < worst[0.0]


def test_self_titans_one_write_is_read_back() -> None:
    """With decay 1, step size 1, a unit key and the dot objective, M k is v̂, whatever M stored."""
    layer = build(
        read_at="after", max_memory_norm=0.0, memory_chunk_size=1, projection_chunk_size=1,
        adaptive_projections=("k", "v"),
    )  # fmt: skip
    with torch.no_grad():
        for name in ("keep", "step"):
            layer.get_parameter(f"{name}.memory.bias").fill_(1e9)
            layer.get_parameter(f"{name}.memory.weight").zero_()
    memories, start = build_memories(layer.params), initial_state(layer.params, 1)
    heads, _, _ = mix_inputs(layer.params, start, noise(9, 1, 1, D), None)
    k, v, gates = memories.generate(start.memory, heads)
    assert torch.equal(gates["memory"].decay, torch.ones(1, H, 1, dtype=torch.float64))
    y, _ = memories.step_chunk(start.memory, (heads, k), None)
    assert_close([y], [v @ memories.w["memory.M"].mT])


def test_self_titans_without_update_weights_moves_only_the_convolution() -> None:
    kinds = [{"memory_kind": "affine"}, {"memory_kind": "mlp"}, {"adaptive_projections": ()}, {"adaptive_query": True}]
    for options in ({}, *kinds):
        layer, x = build(**options), noise(10, 2, 8, D)
        _, state = layer(x[:, :4])
        y, after = layer(x[:, 4:], state, update_weights=False)
        assert states.states_equal(after.memory, state.memory)
        assert not states.states_equal(after.conv_tails, state.conv_tails)
        first, part = layer(x[:, 4:6], state, update_weights=False)
        assert_close([torch.cat([first, layer(x[:, 6:], part, update_weights=False)[0]], 1)], [y])
        frozen, _ = layer(x, update_weights=False)
        assert not torch.equal(frozen, layer(x)[0])
        with torch.no_grad():
            for name, p in layer.named_parameters():
                if name.endswith(".bias"):
                    p.fill_(1e9 if name.startswith("keep") else -1e9)
                if name.startswith(("keep", "step")) and name.endswith(".weight"):
                    p.zero_()
        assert_close([layer(x)[0]], [frozen], tolerance=1e-15)


def test_self_titans_state_fork_and_reset() -> None:
    layer = build(memory_kind="affine", momentum=True, max_projection_norm=0.0)
    _, state = layer(noise(11, 3, 5, D))
    assert states.states_equal(reset_rows(state), initial_state(layer.params, 3))
    row, more = states.select_rows(state, [0]), noise(12, 2, 4, D)
    y, _ = layer(more, states.repeat_rows(row, 2))
    assert_close([y[1:]], [layer(more[1:], row)[0]])


def test_self_titans_is_causal() -> None:
    x = noise(13, 1, 9, D)
    other = torch.cat([x[:, :4], noise(14, 1, 1, D), x[:, 5:]], 1)
    for read_at in ("token", "boundary", "after"):
        layer = build(read_at=read_at)
        assert_close([layer(x)[0][:, :4]], [layer(other)[0][:, :4]])


def test_self_titans_activation_checkpointing_keeps_gradients() -> None:
    x = noise(15, 2, 8, D)
    plain, recomputed = build(), build(activation_checkpointing=True)
    assert_close(gradients(recomputed(x)[0], recomputed), gradients(plain(x)[0], plain), tolerance=1e-14)


def test_self_titans_initial_gates_follow_the_options() -> None:
    layer = SelfTitans(D, H, E, SelfModifyingOptions(decay_half_life=7.0))
    memories = build_memories(layer.params)
    _, _, gates = memories.generate(initial_state(layer.params, 1).memory, noise(16, 1, H, 2, E).float())
    for group, step_size in (("memory", 0.5), ("projections", 0.001)):
        torch.testing.assert_close(gates[group].decay, torch.full((1, H, 2), 0.5 ** (1 / 7)))
        torch.testing.assert_close(gates[group].step_size, torch.full((1, H, 2), step_size))


@pytest.mark.parametrize("memory_kind", ["linear", "affine", "mlp"])
def test_self_titans_window_init_recalls_what_followed_a_repeated_token(memory_kind: Any) -> None:
    """In nearly every head and row the key nearest to a repeated token's query has the token in its window."""
    x, window = noise(19, 16, 12, 64), SelfModifyingOptions().conv_kernel_size
    x[:, -1] = x[:, 2]

    def recall(init: Any) -> float:
        options = SelfModifyingOptions(memory_kind=memory_kind, init=init)
        layer = SelfTitans(64, 2, options=options).double()
        start = initial_state(layer.params, len(x))
        heads, q, _ = mix_inputs(layer.params, start, x, None)
        k, _, _ = build_memories(layer.params).generate(start.memory, heads)
        nearest = (k @ q[:, :, -1:].mT)[:, :, :-window, 0].argmax(-1)
        return float(((nearest >= 2) & (nearest < 2 + window)).double().mean())

    assert recall("window") > 0.9
    assert recall("random") < 0.8


def test_self_titans_refuses_inconsistent_options_and_inputs() -> None:
    for options, key in (
        ({"memory_chunk_size": 0}, "chunk"), ({"memory_chunk_size": 4, "projection_chunk_size": 6}, "chunk"),
        ({"gate_groups": 1, "memory_chunk_size": 32}, "group"), ({"max_lr": 2.5}, "max_lr"),
        ({"momentum": True}, "momentum"), ({"init": "window", "adaptive_query": True}, "window"),
    ):  # fmt: skip
        with pytest.raises(ValidationError, match=key):
            SelfModifyingOptions(**options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="4 heads"):
        SelfTitans(6, 4)
    with pytest.raises(UsageError, match="expected vectors"):
        build()(noise(0, 1, 2, 5))
