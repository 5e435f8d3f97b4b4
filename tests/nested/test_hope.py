"""Laws of the self-modifying layer: chunks as tokens for every option, pieces as the whole, gradients, bounds."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.config.nested import ALL_PROJECTIONS, SelfModifyingOptions
from laconic.errors import UsageError
from laconic.nested import state as values
from laconic.nested.hope.layer import SelfTitans, build_memories, initial_state, mix_inputs
from laconic.nested.recurrence.gated_delta_rule import Gates
from laconic.nested.recurrence.memory_cells import UpdateRule
from laconic.nested.state import LinearMemoryState
from laconic.nested.titans.equations import TitansMemory
from laconic.nested.titans.layer import gate_and_project
from tests.core.readings import noise
from tests.nested.helpers import assert_close, assert_states_close, gradients, perturb
from tests.reference.self_titans import recurrent_self_titans

D, H, E = 6, 2, 3
CHUNKS = {"chunk_memory": 3, "chunk_projections": 3}
SMALL: dict[str, Any] = {"step_projections": 0.3, "keep_half_life": 20.0, "hidden": 4}


def layer(**options: Any) -> SelfTitans:
    made = perturb(SelfTitans(D, H, E, SelfModifyingOptions(**(SMALL | CHUNKS | options))))
    assert isinstance(made, SelfTitans)
    return made


def token_by_token(memory: SelfTitans, x: Tensor) -> Tensor:
    """The layer by the definition of its memories."""
    w = memory.params.weights
    heads, q, _ = mix_inputs(memory.params, initial_state(memory.params, len(x)), x, None)
    return gate_and_project(recurrent_self_titans(memory.shape, w, heads, q), x, w)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Any that go together and do not run away; with the guard on, for an error is a part of what grows."""
    found: dict[str, Any] = {
        "mix": draw(st.sampled_from(("map", "none"))),
        "inner": draw(st.sampled_from(((), ALL_PROJECTIONS, ("k",), ("v", "step"), ("keep", "k")))),
        "inner_query": draw(st.booleans()),
        "mixer": draw(st.sampled_from(("linear", "affine", "mlp"))),
        "objective": draw(st.sampled_from(("dot", "l2"))),
        "factor": draw(st.sampled_from((1, 2))),
        "erase": draw(st.booleans()),
        "erase_inner": draw(st.booleans()),
        "read": draw(st.sampled_from(("token", "boundary", "after"))),
        "groups": draw(st.sampled_from((1, 2))),
        "decay_to": draw(st.sampled_from(("start", "zero"))),
        "momentum": draw(st.booleans()),
        "step_form": draw(st.sampled_from(("sigmoid", "softplus"))),
        "step_max": draw(st.sampled_from((1.0, 2.0))),
        "cap": draw(st.sampled_from((0.0, 1.0, 0.3))),
        "guard": draw(st.sampled_from((4.0, 0.3))),
        "own_values_gradient": draw(st.booleans()),
    }
    chunks = draw(st.sampled_from(((3, 3), (1, 1)) if found["groups"] == 1 else ((3, 3), (2, 4), (4, 2), (1, 3))))
    found |= {"chunk_memory": chunks[0], "chunk_projections": chunks[1]}
    if found["momentum"] and (found["inner"] or found["inner_query"]):
        found["cap"] = 0.0
    return found


@settings(max_examples=30)
@given(options(), st.integers(1, 11), st.integers(1, 10))
def test_chunks_are_tokens_and_cuts_change_nothing(given_options: dict[str, Any], T: int, cut: int) -> None:
    """In values and in the gradient of every weight; up to three chunks and two tokens."""
    memory, x = layer(**given_options), noise(T, 2, T, D)
    y, after = memory(x)
    slow = token_by_token(memory, x)
    assert_close([y], [slow])
    assert_close(gradients(y, memory), gradients(slow, memory))
    if cut < T:
        first, state = memory(x[:, :cut])
        second, state = memory(x[:, cut:], state)
        assert_close([torch.cat([first, second], 1)], [y])
        assert_states_close(state, after)


def test_a_gate_that_keeps_nothing_is_kept_from_nothing_by_both() -> None:
    """A keep of 2e-9 is 1e-6 for the chunk form and the definition: else they are that much apart."""
    memory, x = layer(momentum=True, cap=0.0, memory_chunk_size=4, projection_chunk_size=4), noise(5, 2, 9, D)
    with torch.no_grad():
        for group in ("memory", "projections"):
            memory.get_parameter(f"keep.{group}.bias").fill_(-20.0)
    assert_close([memory(x)[0]], [token_by_token(memory, x)])


@pytest.mark.parametrize("memory", ["linear", "affine", "mlp"])
@pytest.mark.parametrize("decay_to", ["start", "zero"])
def test_padding_changes_nothing(memory: str, decay_to: str) -> None:
    """Rows of different lengths, padded anywhere, read on from different places: each as if alone."""
    made = layer(memory=memory, decay_target=decay_to, memory_chunk_size=2, projection_chunk_size=4)
    live = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0]]).bool()
    x, more = noise(2, 3, 7, D), noise(3, 3, 5, D)
    y, state = made(x, live=live)
    assert not y[~live].any()
    after, last = made(more, state)
    for row in range(3):
        own, held = made(x[row : row + 1, live[row]])
        assert_close([y[row : row + 1, live[row]]], [own])
        assert_states_close(values.select_rows(state, [row]), held)
        own, held = made(more[row : row + 1], held)
        assert_close([after[row : row + 1]], [own])
        assert_states_close(values.select_rows(last, [row]), held)


def test_token_after_token_is_the_whole() -> None:
    memory, x = layer(projection_chunk_size=6), noise(1, 1, 10, D)
    whole, after = memory(x)
    state, found = None, []
    for t in range(10):
        y, state = memory(x[:, t : t + 1], state)
        found.append(y)
    assert_close([torch.cat(found, 1)], [whole])
    assert_states_close(state, after)


def test_static_projections_are_titans_with_a_matrix() -> None:
    """inner=(), the error written, nothing erased, momentum, read after: Ti 12 to 15."""
    memory = layer(
        inner=(), objective="l2", erase=False, momentum=True, decay_target="zero", read="after", guard=0.0, cap=0.0
    )
    x, own = noise(4, 2, 7, D), build_memories(memory.params)
    begin = initial_state(memory.params, 2)
    heads, q, _ = mix_inputs(memory.params, begin, x, None)
    y, moved = own.step_chunk(begin.memory, (heads, q), None)
    k, v, gates = own.generate(begin.memory, heads)
    titan = TitansMemory("memory", 64, own.w["memory.M"], UpdateRule(), 1, None)
    inputs = (q, k, v, *(g for g in gates["memory"] if g is not None))
    other, after = titan.step_chunk(begin.memory, inputs, None)
    assert_close([y], [other])
    assert_states_close(moved, after)


@pytest.mark.parametrize("groups", [1, 2])
def test_every_start_gets_a_gradient(groups: int) -> None:
    """k, v, step, keep, memory, the query's and the convolution, once there are two chunks."""
    for memory in ("linear", "affine", "mlp"):
        made = layer(memory=memory, groups=groups, adaptive_query=True)
        y, _ = made(noise(5, 2, 8, D))
        for (name, _), slope in zip(made.named_parameters(), gradients(y, made), strict=True):
            assert slope.isfinite().all(), name
            assert slope.any(), name


@pytest.mark.parametrize("memory", ["linear", "mlp"])
@pytest.mark.parametrize("decay_to", ["start", "zero"])
def test_ways_of_gradients_change_no_value(memory: str, decay_to: str) -> None:
    made, x = layer(memory=memory, decay_target=decay_to), noise(6, 2, 11, D)
    ways: dict[str, dict[str, Any]] = {"full": {}, "truncated": {"horizon": 2}, "first_order": {}, "none": {}}
    found, names = {}, [name for name, _ in made.named_parameters()]
    for way, more in ways.items():
        y, _ = made(x, gradient=way, **more)
        assert_close([y], [made(x)[0]], token_range=1e-15)
        found[way] = dict(zip(names, gradients(y, made), strict=True))
    k, read = ("k.M", "memory.M") if memory == "linear" else ("k.W1", "memory.W1")
    assert all(found[way][name].any() for way in ways for name in (read, "q_proj.weight"))
    assert not any(found["none"][name].any() for name in (k, "keep.memory.bias", "step.memory.weight")), "constants"
    assert all(found[way][k].any() for way in ("full", "truncated", "first_order"))
    assert len({tuple(found[way][k].flatten().tolist()) for way in ways}) == 4


def test_a_detached_state_leaves_the_starts_their_gradient() -> None:
    memory, x = layer(), noise(7, 1, 9, D)
    _, state = memory(x[:, :6])
    y, _ = memory(x[:, 6:7], values.detach(state))
    found = dict(zip((n for n, _ in memory.named_parameters()), gradients(y, memory), strict=True))
    assert found["memory.M"].any()


def test_projections_stay_in_their_radius_and_the_memory_in_its_guard() -> None:
    """Whatever is read; without the cap the projections leave it."""
    x = 30 * noise(8, 1, 300, D)
    norms = {}
    for cap in (1.0, 0.0):
        memory = layer(cap=cap, projection_lr_init=0.9, decay_half_life=5.0, guard=0.5)
        state, worst = None, 0.0
        for t in range(0, 300, 3):
            _, state = memory(x[:, t : t + 3], state)
            projections, held = state.memory["projections"], state.memory["memory"]
            assert isinstance(projections, LinearMemoryState)
            assert isinstance(held, LinearMemoryState)
            worst = max(worst, torch.linalg.matrix_norm(projections.change, 2).max().item())
            if worst > 1:
                break
            assert held.change.norm(dim=(-2, -1)).max() <= 0.5 * E**0.5 * (1 + 1e-12)
        norms[cap] = worst
    assert norms[1.0] <= 1.0 < norms[0.0]


def test_with_one_write_the_memory_gives_the_value() -> None:
    """keep 1, step 1, a unit key and the dot objective: M k is v̂, whatever M held."""
    memory = layer(read="after", guard=0.0, memory_chunk_size=1, projection_chunk_size=1, inner=("k", "v"))
    with torch.no_grad():
        for name, value in (("keep", 1e9), ("step", 1e9)):
            memory.get_parameter(f"{name}.memory.bias").fill_(value)
            memory.get_parameter(f"{name}.memory.weight").zero_()
    own, begin = build_memories(memory.params), initial_state(memory.params, 1)
    heads, _, _ = mix_inputs(memory.params, begin, noise(9, 1, 1, D), None)
    k, v, gates = own.generate(begin.memory, heads)
    assert torch.equal(gates["memory"].decay, torch.ones(1, H, 1, dtype=torch.float64))
    y, _ = own.step_chunk(begin.memory, (heads, k), None)
    assert_close([y], [v @ own.w["memory.M"].mT])


def test_nothing_is_learned_where_learning_is_off() -> None:
    for options in ({}, {"memory": "affine"}, {"memory": "mlp"}, {"inner": ()}, {"inner_query": True}):
        memory, x = layer(**options), noise(10, 2, 8, D)
        _, state = memory(x[:, :4])
        y, after = memory(x[:, 4:], state, learn=False)
        assert values.states_equal(after.memory, state.memory)
        assert not values.states_equal(after.tails, state.tails)
        first, piece = memory(x[:, 4:6], state, learn=False)
        assert_close([torch.cat([first, memory(x[:, 6:], piece, learn=False)[0]], 1)], [y])
        still, _ = memory(x, learn=False)
        assert not torch.equal(still, memory(x)[0])
        with torch.no_grad():
            for name, p in memory.named_parameters():
                if name.endswith(".bias"):
                    p.fill_(1e9 if name.startswith("keep") else -1e9)
                if name.startswith(("keep", "step")) and name.endswith(".weight"):
                    p.zero_()
        assert_close([memory(x)[0]], [still], token_range=1e-15)


def test_reset_is_the_start_and_a_fork_is_its_own() -> None:
    memory = layer(memory="affine", momentum=True, cap=0.0)
    _, state = memory(noise(11, 3, 5, D))
    assert values.states_equal(values.reset_rows(state), initial_state(memory.params, 3))
    both = values.repeat_rows(values.select_rows(state, [0]), 2)
    y, _ = memory(noise(12, 2, 4, D), both)
    assert_close([y[1:]], [memory(noise(12, 2, 4, D)[1:], values.select_rows(state, [0]))[0]])


def test_what_comes_later_changes_nothing_before() -> None:
    """And with the boundary's state tokens of one chunk meet in the convolution alone."""
    x = noise(13, 1, 9, D)
    other = torch.cat([x[:, :4], noise(14, 1, 1, D), x[:, 5:]], 1)
    for read in ("token", "boundary", "after"):
        memory = layer(read=read)
        assert_close([memory(x)[0][:, :4]], [memory(other)[0][:, :4]])
    memory = layer(read="boundary", mix="none")
    assert_close([memory(x)[0][:, 5:6]], [memory(other)[0][:, 5:6]])
    assert not torch.equal(memory(x)[0][:, 6:], memory(other)[0][:, 6:])


def test_recomputed_chunks_have_the_same_gradients() -> None:
    x = noise(15, 2, 8, D)
    kept, again = layer(), layer(checkpoint=True)
    assert_close(gradients(again(x)[0], again), gradients(kept(x)[0], kept), token_range=1e-14)


def test_gates_begin_where_the_options_say() -> None:
    memory = SelfTitans(D, H, E, SelfModifyingOptions(decay_half_life=7.0, lr_form="softplus"))
    own = build_memories(memory.params)
    _, _, gates = own.generate(initial_state(memory.params, 1).memory, noise(16, 1, H, 2, E).float())
    for group, step in (("memory", 0.5), ("projections", 0.02)):
        given: Gates = gates[group]
        torch.testing.assert_close(given.decay, torch.full((1, H, 2), 0.5 ** (1 / 7)))
        torch.testing.assert_close(given.step_size, torch.full((1, H, 2), step))


@pytest.mark.parametrize("memory", ["linear", "affine", "mlp"])
def test_a_token_asked_again_is_nearest_to_what_stood_at_it_and_behind_it(memory: Any) -> None:
    """As training begins at windows, in nearly every head and row: of keys those whose windows hold the token."""
    x, window = noise(19, 16, 12, 64), SelfModifyingOptions().conv_kernel_size
    x[:, -1] = x[:, 2]

    def share(begins: Any) -> float:
        made = SelfTitans(64, 2, options=SelfModifyingOptions(memory_kind=memory, init=begins)).double()
        begin = initial_state(made.params, len(x))
        heads, q, _ = mix_inputs(made.params, begin, x, None)
        k, _, _ = build_memories(made.params).generate(begin.memory, heads)
        near_by = (k @ q[:, :, -1:].mT)[:, :, :-window, 0].argmax(-1)
        return float(((near_by >= 2) & (near_by < 2 + window)).double().mean())

    assert share("window") > 0.9
    assert share("drawn") < 0.8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chunk_memory": 0}, "hope: chunk 0 was asked for; a chunk has at least 1 token"),
        ({"chunk_memory": 4, "chunk_projections": 6}, "hope: chunks 4 and 6; one divides the other"),
        ({"groups": 1, "chunk_memory": 32}, "hope: one group has one chunk, 32 and 64 were asked for; take groups=2"),
        ({"step_max": 2.5}, "hope: step_max 2.5 is beyond 2, where an erase overshoots; lower it"),
        ({"momentum": True}, "hope: the cap bounds a write, not the sum that momentum keeps; take cap=0"),
        ({"begins": "window", "mix": "none"}, 'hope: begins "window" is of a mapped input and a static query; take'),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        SelfTitans(D, H, E, SelfModifyingOptions(**options))


def test_sizes_and_calls_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="hope: width 6 does not divide by 4 heads; give the width of a head"):
        SelfTitans(6, 4)
    with pytest.raises(UsageError, match="hope: mix none splits width 6, not into 2 heads of 4; mix it"):
        SelfTitans(6, 2, 4, SelfModifyingOptions(input_proj="none"))
    with pytest.raises(UsageError, match=r"hope: vectors are \[1, 2, 5\]; give one or more of width 6"):
        layer()(noise(0, 1, 2, 5))
