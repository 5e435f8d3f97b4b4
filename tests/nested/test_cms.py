"""Laws of the continuum memory: pieces as the whole, weights that change at multiples of their chunk, starts, forks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from laconic.config.nested import CMSOptions
from laconic.errors import UsageError
from laconic.models.block import Block
from laconic.models.config import DecoderConfig
from laconic.nested import state as values
from laconic.nested import state_file
from laconic.nested.cms.equations import chunk_sizes, place_levels
from laconic.nested.cms.forward import accumulate_tokens, forward_levels, require_levels, tokens_to_boundary
from laconic.nested.cms.layer import CMS
from laconic.nested.cms.level import LinearRecords, clip_error, linear_errors
from laconic.nested.cms.low_rank_updates import add, frobenius_norm, scale, smaller_form, to_dense, where_rows
from laconic.nested.state import LayerState, LowRankChange
from tests.core.readings import noise
from tests.nested.helpers import assert_close, gradients, perturb

D, F = 4, 3
OPTIMIZERS = ("gd", "momentum", "delta_momentum", "muon", "dgd")
pytestmark = pytest.mark.usefixtures("unchecked")


def layer(chunks: tuple[int, ...] = (2, 4), bias: bool = False, **options: Any) -> CMS:
    how = {"inner": "associative", "eta": 0.5, **options}
    made = perturb(CMS(D, F, chunks, CMSOptions(**how), has_bias=bias), 0.2)
    assert isinstance(made, CMS)
    return made


def dense_state(state: LayerState) -> list[Tensor]:
    """Every tensor of a state, sums of factors as matrices, so that what stands in other forms may be compared."""
    found: list[Tensor] = []
    for level in require_levels(state):
        for part in (level.change, level.accumulated, level.start_change, level.meta_accumulated):
            found += [to_dense(change) for change in part.values()]
        found += [*level.moments.values(), level.num_tokens.double(), level.num_updates.double()]
    return found


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "structure": draw(st.sampled_from(("sequential", "nested", "independent"))),
        "inner_optimizer": draw(st.sampled_from(OPTIMIZERS)),
        "link": draw(st.sampled_from(("residual", "plain"))),
        "order": draw(st.sampled_from(("fast_first", "slow_first"))),
        "reduce": draw(st.sampled_from(("sum", "mean"))),
        "step": draw(st.sampled_from(("level", "token"))),
        "target": draw(st.sampled_from(("map", "start"))),
        "meta": draw(st.sampled_from(("first_order", "full", "reptile", "outer"))),
        "on": draw(st.sampled_from(("weights", "delta"))),
        "clip": draw(st.sampled_from((0.0, 0.1))),
        "bias": draw(st.booleans()),
    }


@settings(max_examples=12)
@given(options(), st.integers(2, 11), st.lists(st.integers(1, 10), max_size=3))
def test_pieces_are_the_whole(given_options: dict[str, Any], T: int, cuts: list[int]) -> None:
    """In values, in the state and in the gradient of every weight, wherever a stream is cut."""
    memory, x = layer(**given_options), noise(T, 2, T, D)
    whole, after = memory(x)
    ends = sorted({cut for cut in cuts if cut < T} | {T})
    found, state = [], None
    for a, b in zip([0, *ends], ends, strict=False):
        y, state = memory(x[:, a:b], state)
        found.append(y)
    assert_close([torch.cat(found, 1)], [whole])
    assert state is not None
    assert_close(dense_state(state), dense_state(after))
    assert_close(gradients(torch.cat(found, 1), memory), gradients(whole, memory))


def test_token_after_token_is_the_whole() -> None:
    memory, x = layer((1, 3, 6)), noise(0, 2, 13, D)
    whole, after = memory(x)
    found, state = [], None
    for t in range(13):
        y, state = memory(x[:, t : t + 1], state)
        found.append(y)
    assert_close([torch.cat(found, 1)], [whole])
    assert state is not None
    assert_close(dense_state(state), dense_state(after))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", [{}, {"structure": "nested"}, {"structure": "nested", "meta": "full"}])
def test_padding_changes_nothing(optimizer: str, how: dict[str, Any]) -> None:
    """Rows of different lengths, padded anywhere, read on from different places: each as if alone."""
    made = layer(inner_optimizer=optimizer, **how)
    live = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]])
    x, more, live = noise(2, 4, 7, D), noise(3, 4, 5, D), live.bool()
    y, state = made(x, live=live)
    assert not y[~live].any()
    after, last = made(more, state)
    for row in (0, 1, 3):
        own, held = made(x[row : row + 1, live[row]])
        assert_close([y[row : row + 1, live[row]]], [own])
        assert_close(dense_state(values.select_rows(state, [row])), dense_state(held))
        own, held = made(more[row : row + 1], held)
        assert_close([after[row : row + 1]], [own])
        assert_close(dense_state(values.select_rows(last, [row])), dense_state(held))


def test_weights_change_exactly_at_multiples_of_their_chunk() -> None:
    memory, x, state = layer((2, 4), eta=1.0), noise(1, 1, 9, D), None
    for i in range(1, 10):
        before = [to_dense(level.change["up_proj"]) for level in require_levels(state)] if state else None
        _, state = memory(x[:, i - 1 : i], state)
        for l, (C, level) in enumerate(zip((2, 4), require_levels(state), strict=True)):
            assert (int(level.num_tokens), int(level.num_updates)) == (i % C, i // C)
            if before is not None:
                assert torch.equal(to_dense(level.change["up_proj"]), before[l]) == bool(i % C)


def test_nested_levels_begin_again_where_the_next_slower_one_ends() -> None:
    memory, x = layer((1, 4), structure="nested", meta_gradient="outer", clip=0.0), noise(2, 1, 8, D)
    for i in range(1, 9):
        _, state = memory(x[:, :i])
        assert bool(to_dense(require_levels(state)[0].change["down_proj"]).any()) == bool(i % 4)
    for meta in ("first_order", "full", "reptile"):
        memory = layer((1, 4), structure="nested", meta_gradient=meta)
        fast = require_levels(memory(x[:, :4])[1])[0]
        assert torch.equal(to_dense(fast.change["up_proj"]), to_dense(fast.start_change["up_proj"]))
        assert to_dense(fast.start_change["up_proj"]).any()


def test_the_sum_over_a_chunk_is_one_backward_and_as_many_single_ones() -> None:
    """Of the associative loss at the weights of the chunk's start, by autograd on the weights themselves."""
    memory = layer((5,), eta=1.0, clip=0.0, bias=True)
    w, x = dict(memory.named_parameters()), noise(3, 1, 5, D)
    level = require_levels(memory(x)[1])[0]

    def loss(at: slice) -> Tensor:
        key = nn.functional.normalize(x[:, at] @ w["levels.0.key.weight"].mT, dim=-1)
        linear = {n: (w[f"levels.0.{n}_proj.weight"], w[f"levels.0.{n}_proj.bias"]) for n in ("gate", "up", "down")}
        mid = nn.functional.silu(nn.functional.linear(key, *linear["gate"])) * nn.functional.linear(key, *linear["up"])
        y = nn.functional.linear(mid, *linear["down"])
        return (y - x[:, at] @ w["levels.0.value.weight"].mT).square().sum() / 2

    step = nn.functional.softplus(w["levels.0.step.bias"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        theta = [w[f"levels.0.{name}.weight"], w[f"levels.0.{name}.bias"]]
        whole = torch.autograd.grad(loss(slice(0, 5)), theta)
        single = [torch.autograd.grad(loss(slice(t, t + 1)), theta) for t in range(5)]
        asked = torch.cat([whole[0], whole[1][:, None]], 1)
        assert_close([to_dense(level.change[name])[0]], [-step * asked])
        assert_close([sum((torch.cat([g[0], g[1][:, None]], 1) for g in single), torch.zeros(()))], [asked])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("structure", ["sequential", "nested", "independent"])
def test_steps_of_0_are_the_static_model_bit_for_bit(optimizer: str, structure: str) -> None:
    x = noise(4, 2, 9, D)
    moving = layer(inner_optimizer=optimizer, structure=structure, on="delta")
    with torch.no_grad():
        for name, p in moving.named_parameters():
            if name.endswith("step.bias"):
                p.fill_(-1e4)
    y, state = moving(x)
    asked = torch.cat([moving(x[:, t : t + 2], learn=False)[0] for t in range(0, 9, 2)], 1)
    assert torch.equal(y, asked)
    assert not any(to_dense(change).any() for level in require_levels(state) for change in level.change.values())
    assert_close(gradients(y, moving), gradients(moving(x, learn=False)[0], moving))
    still = layer(inner_optimizer=optimizer, structure=structure, eta=0.0)
    y, state = still(x)
    assert torch.equal(y, still(x, learn=False)[0])
    assert not any(level.num_tokens.any() or level.num_updates.any() for level in require_levels(state))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_one_level_is_the_mlp_bit_for_bit(family: str) -> None:
    """And each way to begin slower levels leaves what the MLP gives."""
    config = DecoderConfig.tiny(family)
    block = Block(config, 0)
    for n, p in enumerate(block.parameters()):
        nn.init.normal_(p, generator=torch.Generator().manual_seed(n))
    mlp, x = block.get_submodule("mlp"), torch.randn(2, 7, config.hidden_size)
    asked = block.mlp_forward(x)
    for structure in ("sequential", "independent", "nested"):
        for link in ("residual", "plain") if structure != "independent" else ("residual",):
            how = CMSOptions(
                inner_objective="associative", structure=structure, residual=link, associative_target="start"
            )
            made = CMS.from_mlp(mlp, (8,), how, activation=config.activation)
            assert torch.equal(made(x)[0], asked)
        grown = CMS.from_mlp(
            mlp, (8, 16), CMSOptions(inner_objective="associative", structure=structure), activation=config.activation
        )
        assert torch.equal(grown(x)[0], asked)
        assert dict(grown.named_parameters())[f"levels.0.{grown.shape.projections[-1]}.weight"] is next(
            p for name, p in mlp.named_parameters() if name == f"{grown.shape.projections[-1]}.weight"
        )


def test_every_start_gets_a_gradient() -> None:
    """When the text is longer than twice the slowest chunk."""
    for structure in ("sequential", "nested", "independent"):
        for optimizer in OPTIMIZERS:
            memory = layer(structure=structure, inner_optimizer=optimizer, clip=0.0, step="token", bias=True)
            y, _ = memory(noise(5, 2, 9, D))
            for (name, _), slope in zip(memory.named_parameters(), gradients(y, memory), strict=True):
                assert slope.isfinite().all(), name
                assert slope.any(), f"{structure}, {optimizer}: {name}"


@pytest.mark.parametrize("structure", ["sequential", "nested"])
def test_ways_of_gradients_change_no_value(structure: str) -> None:
    memory, x = layer(structure=structure, eta=1.0), noise(6, 2, 11, D)
    ways: dict[str, dict[str, Any]] = {"full": {}, "truncated": {"horizon": 2}, "first_order": {}, "none": {}}
    found, names = {}, [name for name, _ in memory.named_parameters()]
    for way, more in ways.items():
        y, _ = memory(x, gradient=way, **more)
        assert_close([y], [memory(x)[0]], token_range=1e-14)
        found[way] = dict(zip(names, gradients(y, memory), strict=True))
    assert all(found[way][name].any() for way in ways for name in names if "_proj" in name)
    steps, keys = ("levels.0.step.bias", "levels.1.step.bias"), ("levels.0.key.weight", "levels.1.value.weight")
    assert all(found[way][name].any() for way in ("full", "truncated", "first_order") for name in steps)
    assert not any(found["none"][name].any() for name in (*steps, *keys))
    assert not any(found["first_order"][name].any() for name in keys)
    assert len({tuple(found[way]["levels.0.up_proj.weight"].flatten().tolist()) for way in ways}) == 4
    with torch.no_grad():
        assert_close([memory(x)[0]], [y])
    with torch.inference_mode():
        y, state = memory(x[:, :6])
        assert_close([torch.cat([y, memory(x[:, 6:], state)[0]], 1)], [memory(x)[0]])


def test_an_update_is_no_longer_than_its_bound() -> None:
    """Of the start's length, and where that is zero of the level's; in training and evaluation alike."""
    x = 3 * noise(7, 2, 8, D)
    loose, bound = layer((8,), eta=50.0, clip=0.0), layer((8,), eta=50.0, clip=0.1)
    for training in (True, False):
        for name, change in require_levels(bound.train(training)(x)[1])[0].change.items():
            start = bound.get_parameter(f"levels.0.{name}.weight")
            assert (frobenius_norm(change) <= 0.1 * start.norm() * (1 + 1e-12)).all()
            assert (frobenius_norm(require_levels(loose(x)[1])[0].change[name]) > 0.1 * start.norm()).any()
    grown = CMS.from_mlp(
        bound.get_submodule("levels.0"), (2, 4), CMSOptions(inner_objective="associative", inner_lr=1.0)
    )
    assert to_dense(require_levels(grown(x)[1])[1].change["down_proj"]).any(), "a level that begins at zero moves"


def test_changes_are_sums_while_those_are_smaller() -> None:
    memory = layer((1,), eta=0.1)
    held = [require_levels(memory(noise(8, 1, T, D))[1])[0].change["up_proj"] for T in (1, 2)]
    assert isinstance(held[0], LowRankChange)
    assert isinstance(held[1], Tensor), "D F / (D + F) is 1.7"


def test_forks_resets_and_rows_are_their_own(tmp_path: Path) -> None:
    memory = layer((2, 4), structure="nested", inner_optimizer="momentum")
    _, state = memory(noise(9, 3, 5, D))
    state_file.save_state(state, tmp_path / "me.safetensors", memory_kind="cms", model_fingerprint="m")
    assert values.states_equal(
        state_file.load_state(tmp_path / "me.safetensors", memory_kind="cms", model_fingerprint="m"),
        values.detach(state),
    )
    both, more = values.repeat_rows(values.select_rows(state, [1]), 2), noise(10, 2, 4, D)
    y, after = memory(more, both)
    assert_close([y[1:]], [memory(more[1:], values.select_rows(state, [1]))[0]])
    assert_close(dense_state(values.select_rows(after, [0])), dense_state(memory(more[:1], values.select_rows(state, [1]))[1]))
    fresh = values.reset_rows(state, [0])
    assert_close([memory(more[:1], values.select_rows(fresh, [0]))[0]], [memory(more[:1])[0]])
    only = values.reset_rows(state, levels=[1])
    assert require_levels(only)[0].num_updates.any()
    assert not require_levels(only)[1].num_tokens.any()
    summed, factors = memory(noise(11, 1, 9, D))[1], memory(noise(12, 1, 1, D))[1]
    joined = values.concat_rows(summed, factors)
    assert_close([memory(more, joined)[0][:1]], [memory(more[:1], summed)[0]])


def test_errors_of_a_loss_teach_a_layer_that_stands_alone() -> None:
    """Two layers, one loss above both: what the task's objective needs, by hand."""
    one, two = layer((3,), inner="task", eta=1.0, clip=0.0), layer((3,), inner="task", eta=1.0, clip=0.0)
    x, states = noise(13, 2, 3, D), []
    notes: list[LinearRecords] = [{}, {}]
    levels = [require_levels(memory(x)[1]) for memory in (one, two)]
    assert not any(level.num_tokens.any() for pair in levels for level in pair), "the task's loss is not a layer's own"
    y, inputs = forward_levels(one.params, levels[0], x, notes[0])
    z, deeper = forward_levels(two.params, levels[1], y, notes[1])
    loss = z.square().sum()
    for memory, own, read, held in zip((one, two), notes, (inputs, deeper), levels, strict=True):
        pairs = {
            name.rpartition(".")[2]: clip_error(pair, 0.0)
            for name, pair in linear_errors(loss, own, retain_graph=True).items()
        }
        states.append(accumulate_tokens(memory.params, held, [pairs], read))
    for memory, found in zip((one, two), states, strict=True):
        for name, change in found[0].moved.items():
            p = memory.get_parameter(f"levels.0.{name}.weight")
            step = nn.functional.softplus(memory.get_parameter("levels.0.step.bias"))
            for row in range(2):
                (slope,) = torch.autograd.grad(z[row].square().sum(), p, retain_graph=True)
                assert_close([to_dense(change)[row]], [-step * slope])
    assert tokens_to_boundary(one.params, states[0]) == 3
    with pytest.raises(UsageError, match="cms: 4 tokens were given to learn, the chunk has room for 3; cut them there"):
        accumulate_tokens(one.params, states[0], [pairs], [noise(14, 2, 4, D)])


def test_changes_are_added_chosen_and_measured_in_either_form() -> None:
    sums = [LowRankChange(noise(n, 2, 3, 4), noise(n + 9, 2, 3, 5)) for n in range(2)]
    one, other = (pair.dense for pair in sums)
    for a in (sums[0], one):
        for b in (sums[1], other):
            assert_close([to_dense(add(a, b))], [one + other])
            assert_close([to_dense(where_rows(torch.tensor([True, False]), a, b))], [torch.stack([one[0], other[1]])])
        assert_close(
            [frobenius_norm(a), to_dense(scale(a, torch.tensor([2.0, 3.0]).double()))],
            [one.norm(dim=(1, 2)), one * torch.tensor([2.0, 3.0])[:, None, None]],
        )
    assert isinstance(smaller_form(sums[0]), Tensor)
    shortened = clip_error(sums[0], 1.0)
    assert (shortened.left.norm(dim=-1) <= 1 + 1e-12).all()


def test_added_levels_may_be_copies() -> None:
    mlp = Block(DecoderConfig.tiny("llama"), 1).get_submodule("mlp")
    grown = CMS.from_mlp(mlp, (2, 4), new_level_init="copy")
    for name, p in mlp.named_parameters():
        assert grown.get_parameter(f"levels.0.{name}") is p
        assert torch.equal(grown.get_parameter(f"levels.1.{name}"), p)
        assert grown.get_parameter(f"levels.1.{name}") is not p


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"chunks": ()}, r"cms: chunks \[\]; give one a level, each of at least 1 token"),
        ({"chunks": (0, 4)}, r"cms: chunks \[0, 4\]; give one a level, each of at least 1 token"),
        ({"meta": "full", "inner": "task"}, "cms: meta full reads a level's chunk again by its own loss"),
        ({"chunks": (4, 6)}, "cms: chunk 4 does not divide 6, the next; chunks ascend, each divides the next"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        layer(**how)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"cms: frequencies \[4, 2\]; they are relative to the slowest level's, the last"
    ):
        chunk_sizes((4, 2), 8)
    with pytest.raises(
        UsageError, match="cms: frequency 3 does not divide the slowest chunk, 8; choose divisors of it"
    ):
        chunk_sizes((3, 1), 8)
    with pytest.raises(UsageError, match=r"cms: map \[0, 3\]; place depth takes 2 numbers from 0 to 1"):
        place_levels(2, (4, 8), "depth", [0, 3])
    with pytest.raises(UsageError, match="cms: Linear has no parts; an MLP has up_proj and down_proj"):
        CMS.from_mlp(nn.Linear(3, 3))
    how = CMSOptions(inner_objective="associative", level_order="slow_first")
    with pytest.raises(
        UsageError, match="cms: level 0 is the MLP there was, and slow_first would run another before it"
    ):
        CMS.from_mlp(layer().get_submodule("levels.0"), (4, 8), how)
    with pytest.raises(UsageError, match=r"cms: the state holds no levels; begin with start\(params, batch\)"):
        layer()(noise(0, 1, 2, D), LayerState(conv_tails={"x": torch.zeros(1, 1, 1)}))
