"""Laws of Titans as a layer: chunks as tokens, pieces as the whole, padding, gradients, spans side by side."""

from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

from laconic.config.nested import TitansOptions
from laconic.errors import UsageError
from laconic.nested import state as values
from laconic.nested.hope import layer as hope_layer
from laconic.nested.hope.layer import SelfTitans
from laconic.nested.recurrence import chunked_scan
from laconic.nested.recurrence.chunked_scan import check_inputs
from laconic.nested.recurrence.packing import pack_left
from laconic.nested.state import LayerState, MLPMemoryState
from laconic.nested.titans import equations as titans_equations
from laconic.nested.titans import layer as titans_layer
from laconic.nested.titans.layer import Titans, initial_state
from laconic.nested.titans.titans_reference import titans_reference
from tests.core.readings import noise
from tests.nested.helpers import near, same_state, slopes, stirred

D, H, C = 6, 2, 3


def layer(chunk: int = C, seed: int = 0, **options: Any) -> Titans:
    made = stirred(Titans(D, H, chunk, TitansOptions(mlp_width=4, **options), seed))
    assert isinstance(made, Titans)
    return made


@pytest.mark.parametrize(("depth", "read"), list(product((1, 2), ("after", "before", "boundary"))))
@pytest.mark.parametrize(
    "options", [{}, {"momentum": False, "factor": 2, "guard": 0.5}, {"guard": 0.0, "gates": "chunk"}]
)
def test_chunks_are_their_tokens_in_order(depth: int, read: str, options: dict[str, Any]) -> None:
    """In values and in the gradient of every weight, for lengths up to three chunks and two tokens."""
    memory = layer(depth=depth, read=read, **options)
    for T in (1, 3, 4, 11):
        x = noise(T, 2, T, D)
        y, _ = memory(x)
        slow = titans_reference(memory.params, x)
        near([y], [slow])
        near(slopes(y, memory), slopes(slow, memory))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"depth": 1}, {"read": "boundary"}, {"gates": "chunk"}, {"persistent": 2}, {"global_chunk": 6},
        {"reset_every": 6}, {"momentum": False, "conv": 1},
    ],
)  # fmt: skip
def test_any_cut_gives_the_whole(options: dict[str, Any]) -> None:
    memory, x = layer(**options), noise(1, 2, 11, D)
    whole, after = memory(x)
    for cut in range(1, 11):
        first, state = memory(x[:, :cut])
        second, state = memory(x[:, cut:], state)
        near([torch.cat([first, second], 1)], [whole])
        same_state(state, after)
    state, found = None, []
    for t in range(11):
        y, state = memory(x[:, t : t + 1], state)
        found.append(y)
    near([torch.cat(found, 1)], [whole])
    same_state(state, after)


@pytest.mark.parametrize("options", [{}, {"gates": "chunk"}, {"persistent": 2}, {"global_chunk": 6, "reset_every": 3}])
def test_padding_changes_nothing(options: dict[str, Any]) -> None:
    """Rows of different lengths, padded anywhere, read on from different places: each as if alone."""
    memory = layer(**options)
    live = torch.tensor(
        [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]
    ).bool()
    x, more = noise(2, 4, 7, D), noise(3, 4, 5, D)
    y, state = memory(x, live=live)
    assert not y[~live].any()
    after, last = memory(more, state)
    for row in range(4):
        n = int(live[row].sum())
        own, held = memory(x[row : row + 1, live[row]]) if n else (x[:1, :0], initial_state(memory.params, 1))
        near([y[row : row + 1, live[row]]], [own])
        same_state(values.select_rows(state, [row]), held)
        own, held = memory(more[row : row + 1], held)
        near([after[row : row + 1]], [own])
        same_state(values.select_rows(last, [row]), held)


def test_at_chunk_one_it_is_the_recurrence_of_tokens() -> None:
    memory, x = layer(chunk=1), noise(4, 1, 6, D)
    near([memory(x)[0]], [titans_reference(memory.params, x)])


def test_what_comes_later_changes_nothing_before() -> None:
    for options in ({}, {"gates": "chunk"}, {"read": "boundary"}):
        memory, x = layer(**options), noise(5, 1, 9, D)
        other = torch.cat([x[:, :4], noise(6, 1, 5, D)], 1)
        near([memory(x)[0][:, :4]], [memory(other)[0][:, :4]])
        assert not torch.equal(memory(x)[0][:, 4:], memory(other)[0][:, 4:])


def test_nothing_is_learned_where_learning_is_off() -> None:
    """The memory and its counts stand still, the convolution moves on, and reading on afterwards is in step."""
    memory, x = layer(), noise(7, 2, 8, D)
    _, state = memory(x[:, :4])
    y, after = memory(x[:, 4:], state, learn=False)
    assert values.states_equal(after.memory, state.memory)
    assert not values.states_equal(after.tails, state.tails)
    first, piece = memory(x[:, 4:6], state, learn=False)
    near([torch.cat([first, memory(x[:, 6:], piece, learn=False)[0]], 1)], [y])
    fresh, _ = memory(x, learn=False)
    params = dict(memory.named_parameters())
    assert not torch.equal(fresh, memory(x)[0])
    with torch.no_grad():
        params["step.bias"].fill_(-1e9)
        params["keep.bias"].fill_(1e9)
    near([fresh], [memory(x)[0]], token_range=0.0)


def test_a_fork_sees_nothing_of_its_sister() -> None:
    memory, x = layer(), noise(8, 1, 5, D)
    _, state = memory(x)
    both = values.repeat_rows(state, 2)
    y, _ = memory(noise(9, 2, 4, D), both)
    near([y[1:]], [memory(noise(9, 2, 4, D)[1:], state)[0]])
    _, moved = memory(noise(10, 1, 4, D), state)
    assert not values.states_equal(moved, state)
    again, _ = memory(noise(9, 2, 4, D)[1:], state)
    near([again], [y[1:]])


def test_reset_is_the_start() -> None:
    for options in ({}, {"depth": 1, "persistent": 1, "gates": "chunk"}):
        memory = layer(**options)
        _, state = memory(noise(11, 3, 5, D))
        assert values.states_equal(values.reset_rows(state), initial_state(memory.params, 3))
        some = values.reset_rows(state, [1])
        assert values.states_equal(values.select_rows(some, [0, 2]), values.select_rows(state, [0, 2]))
        assert values.states_equal(values.select_rows(some, [1]), initial_state(memory.params, 1))


@pytest.mark.parametrize("depth", [1, 2])
def test_starts_and_gates_get_gradients(depth: int) -> None:
    memory = layer(depth=depth, persistent=1, global_chunk_size=6)
    y, _ = memory(noise(12, 2, 13, D))
    for (name, _), slope in zip(memory.named_parameters(), slopes(y, memory), strict=True):
        assert slope.isfinite().all(), name
        assert slope.any(), name


@pytest.mark.parametrize("options", [{}, {"depth": 1}, {"depth": 1, "read": "boundary"}])
def test_ways_of_gradients_change_no_value(options: dict[str, Any]) -> None:
    memory, x = layer(**options), noise(13, 2, 11, D)
    ways: dict[str, dict[str, Any]] = {
        "full": {}, "truncated": {"horizon": 2}, "first_order": {}, "none": {},
    }  # fmt: skip
    found, names = {}, [name for name, _ in memory.named_parameters()]
    for way, more in ways.items():
        y, _ = memory(x, gradient=way, **more)
        near([y], [memory(x)[0]], token_range=1e-15)
        found[way] = dict(zip(names, slopes(y, memory), strict=True))
    starts = ["memory.M"] if options.get("depth") == 1 else ["memory.W1", "memory.W2"]
    assert all(found[way][name].any() for way in ways for name in starts)
    written = ("k_proj.weight", "v_proj.weight", "step.weight", "keep.weight")
    assert not any(found["none"][name].any() for name in written), "all writes are constants"
    assert all(found[way][name].any() for way in ("full", "truncated", "first_order") for name in written)
    assert len({tuple(found[way]["k_proj.weight"].flatten().tolist()) for way in ways}) == 4


def test_a_detached_state_leaves_the_start_its_gradient() -> None:
    memory, x = layer(depth=1), noise(14, 1, 8, D)
    _, state = memory(x[:, :4])
    y, _ = memory(x[:, 4:], values.detach(state))
    found = dict(zip((n for n, _ in memory.named_parameters()), slopes(y, memory), strict=True))
    assert found["memory.M"].any()


@pytest.mark.parametrize(("module", "memory"), [(titans_layer, Titans(D, H, C)), (hope_layer, SelfTitans(D, H))])
def test_long_texts_are_read_by_stretches(module: ModuleType, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In values, state and gradients as at once, rows that end in the first stretch among them."""
    memory, x = stirred(memory), noise(21, 2, 9, D)
    live = torch.arange(9) < torch.tensor([[9], [3]])
    whole, after = memory(x, live=live)
    for place in (chunked_scan, module):
        monkeypatch.setattr(place, "STRETCH", 4)
    read: list[int] = []
    monkeypatch.setattr(module, "packed", lambda x, live: read.append(x.shape[1]) or pack_left(x, live))
    y, state = memory(x, live=live)
    assert read == [4, 4, 1]
    near([y, *slopes(y, memory)], [whole, *slopes(whole, memory)])
    same_state(state, after)


@pytest.mark.parametrize("T", [12, 14])
def test_spans_between_resets_are_read_side_by_side(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, x = layer(reset_every=6), noise(15, 2, T, D)
    y, state = memory(x)
    side = slopes(y, memory)
    monkeypatch.setattr(titans_layer, "scan_reset_spans", titans_layer.scan_chunks)
    slow, after = memory(x)
    near([y, *side], [slow, *slopes(slow, memory)])
    same_state(state, after)


def test_recomputed_chunks_have_the_same_gradients() -> None:
    x = noise(16, 2, 8, D)
    kept, again = layer(), layer(checkpoint=True)
    near(slopes(again(x)[0], again), slopes(kept(x)[0], kept), token_range=1e-14)


def test_a_token_asked_again_is_nearest_to_what_stood_at_it_and_behind_it() -> None:
    """As training begins, in every head of every row: of earlier keys those of windows that hold the token."""
    memory, T, window = Titans(64, 2, 16), 12, TitansOptions().conv_kernel_size
    x = noise(19, 8, T, 64)
    x[:, -1] = x[:, 2]
    params = memory.double().params
    found = titans_equations.project_qkv(x, params.weights, initial_state(params, 8).conv_tails, 2, None)
    near_by = (found.k @ found.q[:, :, -1:].mT)[:, :, : T - window, 0].argmax(-1)
    assert ((near_by >= 2) & (near_by < 2 + window)).all()


@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_two_layers_do_not_run_away_as_training_begins(chunk: int) -> None:
    """With no guard and the print's factor; a first step of 0.5, which a matrix bears, ends in infinities."""
    x = noise(20, 1, 256, 32, dtype=torch.float32)
    for options, stays in (
        (TitansOptions(max_memory_norm=0.0, loss_factor=2), True),
        (TitansOptions(max_memory_norm=0.0, loss_factor=2, lr_init=0.5), False),
    ):
        memory = Titans(32, 2, chunk, options)
        with torch.no_grad():
            found = memory(x)[1].memory["memory"]
        assert isinstance(found, MLPMemoryState)
        moved = [
            (found.W1.change, memory.get_parameter("memory.W1")),
            (found.W2.change, memory.get_parameter("memory.W2")),
        ]
        assert all(bool(change.norm() < start.norm()) is stays for change, start in moved)


def test_half_precision_has_a_wide_state() -> None:
    memory = Titans(D, H, C).bfloat16()
    y, state = memory(noise(17, 1, 5, D, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert {x.dtype for _, x in values.named_tensors(state.memory) if x.is_floating_point()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        _, state = Titans(D, H, C)(noise(17, 1, 5, D, dtype=torch.float32))
    assert {x.dtype for _, x in values.named_tensors(state.memory) if x.is_floating_point()} == {torch.float32}


def test_the_state_is_of_one_size_for_any_length() -> None:
    memory = layer()
    sizes = {values.num_bytes(memory(noise(18, 1, T, D))[1]) for T in (3, 6, 12)}
    assert len(sizes) == 1
    assert isinstance(memory(noise(18, 1, 3, D))[1], LayerState)


@pytest.mark.parametrize(
    ("chunk", "options", "says"),
    [
        (0, {}, "titans: chunk 0 was asked for; a chunk has at least 1 token"),
        (4, {"reset_every": 6}, "titans: reset_every 6 is no multiple of the chunk, 4; memories change at its ends"),
        (4, {"global_chunk": 2}, "titans: global_chunk 2 is no multiple of the chunk, 4"),
        (
            4,
            {"step_max": 1.5, "factor": 2},
            "factor 2 is beyond 2, where one write overshoots further than it was off; lower it",
        ),
        (4, {"step_start": 1.0}, "titans: step_start 1.0 is not below step_max 1.0, which a sigmoid never reaches"),
        (4, {"momentum_start": 1.0}, "momentum_start 1.0: between 0 and 1 of its largest value, both left out"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(chunk: int, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Titans(D, H, chunk, TitansOptions(**options))


def test_calls_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="titans: width 6 does not divide by 4 heads; choose others"):
        Titans(6, 4)
    memory = layer()
    _, state = memory(noise(0, 2, 3, D))
    for x, more, says in (
        (noise(0, 2, 3, 5), {}, r"titans: vectors are \[2, 3, 5\]; give one or more of width 6, \[B, T, D\]"),
        (noise(0, 2, 0, D), {}, r"titans: vectors are \[2, 0, 6\]; give one or more of width 6"),
        (noise(0, 3, 2, D), {"state": state}, "titans: 3 rows of vectors, the state has 2; take or join its rows"),
        (noise(0, 2, 3, D), {"gradient": "truncated"}, "horizon None; truncated has one of 1 or more, others none"),
        (noise(0, 2, 3, D), {"horizon": 3}, "titans: gradient 'full', horizon 3"),
    ):
        with pytest.raises(UsageError, match=says):
            memory(x, **more)
    with pytest.raises(
        UsageError, match=r"titans: live is \[2, 2\], the vectors are \[2, 3, 6\]; give one of \[B, T\]"
    ):
        check_inputs("titans", D, state, noise(0, 2, 3, D), torch.ones(2, 2).bool(), "full", None)
