"""SelfTitans: chunks equal tokens for every option, norms stay bounded; `test_memory_layers.py` has the other laws."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from laconic.config.nested import ALL_PROJECTIONS, SelfModifyingOptions
from laconic.errors import UsageError
from laconic.nested.hope.layer import SelfTitans, build_memories, initial_state, mix_inputs
from laconic.nested.recurrence.memory_cells import UpdateRule, gate_and_project
from laconic.nested.state import LinearMemoryState
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
