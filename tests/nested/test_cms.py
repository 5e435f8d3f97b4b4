"""CMS: equals its reference, pieces equal the whole, weights change at multiples of their chunk size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from laconic.config.nested import CMSOptions
from laconic.errors import UsageError
from laconic.nested import state as states
from laconic.nested.cms.cms_reference import cms_reference
from laconic.nested.cms.layer import CMS, accumulate_tokens, forward_levels, require_levels, tokens_to_boundary
from laconic.nested.cms.level import (
    GradientMode,
    LinearRecords,
    add,
    clip_error,
    frobenius_norm,
    linear_errors,
    scale,
    smaller_form,
    to_dense,
)
from laconic.nested.state import FastWeightState, LayerState, LowRankChange, reset_rows, where_rows
from laconic.nested.state_file import load_state, save_state
from tests.models.fixtures import noise
from tests.nested.helpers import assert_close, gradients, perturb, states_equal

D, F = 4, 3
OPTIMIZERS = ("gd", "momentum", "delta_momentum", "muon", "dgd")
STRUCTURES = ("sequential", "nested", "independent")
pytestmark = pytest.mark.usefixtures("unchecked")


def build(chunks: tuple[int, ...] = (2, 4), has_bias: bool = False, **options: Any) -> CMS:
    settings = {"inner_objective": "associative", "inner_lr": 0.5, **options}
    cms = perturb(CMS(D, F, chunks, CMSOptions(**settings), has_bias=has_bias), 0.2)
    assert isinstance(cms, CMS)
    return cms


def dense_state(state: LayerState) -> list[Tensor]:
    """Return every tensor of a state with low-rank changes as matrices, so that other forms can be compared."""
    tensors: list[Tensor] = []
    for level in require_levels(state):
        for part in (level.change, level.accumulated, level.start_change, level.meta_accumulated):
            tensors += [to_dense(change) for change in part.values()]
        tensors += [*level.moments.values(), level.num_tokens.double(), level.num_updates.double()]
    return tensors


def has_changed(level: states.CMSLevelState) -> bool:
    return any(bool(to_dense(change).any()) for change in level.change.values())


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "options",
    [
        {"max_update_ratio": 0.0}, {"inner_lr": 5.0, "lr_granularity": "token"},
        {"residual": "plain", "has_bias": True},
        {"associative_target": "start", "max_update_ratio": 0.3, "inner_lr": 5.0},
    ],
)  # fmt: skip
def test_cms_equals_its_reference(structure: str, options: dict[str, Any]) -> None:
    """Values and the gradient of every weight, over two chunks of the slowest level and a part."""
    cms, x = build(structure=structure, **options), noise(0, 2, 9, D)
    y, _ = cms(x)
    expected = cms_reference(cms.params, x)
    assert_close([y], [expected])
    assert_close(gradients(y, cms), gradients(expected, cms))


@st.composite
def drawn_options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "structure": draw(st.sampled_from(STRUCTURES)),
        "inner_optimizer": draw(st.sampled_from(OPTIMIZERS)),
        "residual": draw(st.sampled_from(("residual", "plain"))),
        "lr_granularity": draw(st.sampled_from(("level", "token"))),
        "associative_target": draw(st.sampled_from(("map", "start"))),
        "meta_gradient": draw(st.sampled_from(("first_order", "full", "reptile", "outer"))),
        "max_update_ratio": draw(st.sampled_from((0.0, 0.1))),
    }


CUTS = st.lists(st.integers(1, 11), unique=True).map(sorted)


@pytest.mark.medium
@settings(max_examples=20)
@given(drawn_options(), st.integers(2, 12), CUTS)
def test_cms_pieces_equal_the_whole(options: dict[str, Any], T: int, cuts: list[int]) -> None:
    cms, x = build(**options), noise(T, 2, T, D)
    whole, final = cms(x)
    outputs, state, ends = [], None, [cut for cut in cuts if cut < T]
    for a, b in zip([0, *ends], [*ends, T], strict=True):
        y, state = cms(x[:, a:b], state)
        outputs.append(y)
    assert state is not None
    assert_close([torch.cat(outputs, 1)], [whole])
    assert_close(dense_state(state), dense_state(final))


@pytest.mark.medium
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"structure": "nested"}, marks=pytest.mark.slow),
        {"structure": "nested", "meta_gradient": "full"},
    ],
)
def test_cms_padding_and_other_rows_change_nothing(optimizer: str, options: dict[str, Any]) -> None:
    """Rows of different lengths, padded anywhere, then continued from different offsets, equal each row alone."""
    cms = build(inner_optimizer=optimizer, **options)
    mask = torch.tensor(
        [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]
    ).bool()
    x, more = noise(2, 4, 7, D), noise(3, 4, 5, D)
    y, state = cms(x, attention_mask=mask)
    assert not y[~mask].any()
    y_more, final = cms(more, state)
    for row in (0, 1, 3):
        alone, row_state = cms(x[row : row + 1, mask[row]])
        assert_close([y[row : row + 1, mask[row]]], [alone])
        assert_close(dense_state(states.select_rows(state, [row])), dense_state(row_state))
        alone, row_state = cms(more[row : row + 1], row_state)
        assert_close([y_more[row : row + 1]], [alone])
        assert_close(dense_state(states.select_rows(final, [row])), dense_state(row_state))


def test_cms_levels_change_at_multiples_of_their_chunk_size() -> None:
    cms, x, state = build((2, 4), inner_lr=1.0), noise(1, 1, 9, D), None
    for i in range(1, 10):
        before = [to_dense(level.change["up_proj"]) for level in require_levels(state)] if state else None
        _, state = cms(x[:, i - 1 : i], state)
        for l, (C, level) in enumerate(zip((2, 4), require_levels(state), strict=True)):
            assert (int(level.num_tokens), int(level.num_updates)) == (i % C, i // C)
            if before is not None:
                assert torch.equal(to_dense(level.change["up_proj"]), before[l]) == bool(i % C)


def test_cms_nested_levels_restart_with_the_next_slower_update() -> None:
    cms, x = build((1, 4), structure="nested", meta_gradient="outer", max_update_ratio=0.0), noise(2, 1, 8, D)
    for i in range(1, 9):
        _, state = cms(x[:, :i])
        assert bool(to_dense(require_levels(state)[0].change["down_proj"]).any()) == bool(i % 4)
    for meta_gradient in ("first_order", "full", "reptile"):
        cms = build((1, 4), structure="nested", meta_gradient=meta_gradient)
        fast = require_levels(cms(x[:, :4])[1])[0]
        assert torch.equal(to_dense(fast.change["up_proj"]), to_dense(fast.start_change["up_proj"]))
        assert to_dense(fast.start_change["up_proj"]).any()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_cms_zero_learning_rate_is_the_static_mlp_bit_for_bit(optimizer: str, structure: str) -> None:
    x = noise(4, 2, 9, D)
    cms = build(inner_optimizer=optimizer, structure=structure)
    with torch.no_grad():
        for name, p in cms.named_parameters():
            if name.endswith("step.bias"):
                p.fill_(-1e4)
    y, state = cms(x)
    static = torch.cat([cms(x[:, t : t + 2], update_weights=False)[0] for t in range(0, 9, 2)], 1)
    assert torch.equal(y, static)
    assert not any(has_changed(level) for level in require_levels(state))
    assert_close(gradients(y, cms), gradients(cms(x, update_weights=False)[0], cms))
    frozen = build(inner_optimizer=optimizer, structure=structure, inner_lr=0.0)
    y, state = frozen(x)
    assert torch.equal(y, frozen(x, update_weights=False)[0])
    assert not any(level.num_tokens.any() or level.num_updates.any() for level in require_levels(state))


@pytest.mark.medium
def test_cms_every_weight_gets_a_gradient() -> None:
    """If the text is longer than twice the slowest chunk."""
    for structure in STRUCTURES:
        for optimizer in OPTIMIZERS:
            cms = build(
                structure=structure, inner_optimizer=optimizer, max_update_ratio=0.0, lr_granularity="token",
                has_bias=True,
            )  # fmt: skip
            y, _ = cms(noise(5, 2, 9, D))
            for (name, _), grad in zip(cms.named_parameters(), gradients(y, cms), strict=True):
                assert grad.isfinite().all(), name
                assert grad.any(), f"{structure}, {optimizer}: {name}"


@pytest.mark.parametrize("structure", ["sequential", "nested"])
def test_cms_outer_gradient_changes_no_value(structure: str) -> None:
    cms, x = build(structure=structure, inner_lr=1.0), noise(6, 2, 11, D)
    modes: dict[str, dict[str, Any]] = {"full": {}, "truncated": {"truncate_after": 2}, "first_order": {}}
    grads, names = {}, [name for name, _ in cms.named_parameters()]
    for mode, extra in modes.items():
        y, _ = cms(x, outer_gradient=mode, **extra)
        assert_close([y], [cms(x)[0]], tolerance=1e-14)
        grads[mode] = dict(zip(names, gradients(y, cms), strict=True))
    assert all(grads[mode][name].any() for mode in modes for name in names if "_proj" in name)
    steps, keys = ("levels.0.step.bias", "levels.1.step.bias"), ("levels.0.key.weight", "levels.1.value.weight")
    assert all(grads[mode][name].any() for mode in ("full", "truncated", "first_order") for name in steps)
    assert not any(grads["first_order"][name].any() for name in keys)
    assert len({tuple(grads[mode]["levels.0.up_proj.weight"].flatten().tolist()) for mode in modes}) == 3
    with torch.no_grad():
        assert_close([cms(x)[0]], [y])
    with torch.inference_mode():
        y, state = cms(x[:, :6])
        assert_close([torch.cat([y, cms(x[:, 6:], state)[0]], 1)], [cms(x)[0]])


@pytest.mark.medium
@pytest.mark.parametrize(
    ("meta_gradient", "lr_granularity"),
    [
        *((kind, "level") for kind in ("first_order", "full", "reptile", "outer")),
        ("full", "token"),
        *(pytest.param(kind, "token", marks=pytest.mark.slow) for kind in ("first_order", "reptile", "outer")),
    ],
)
def test_cms_restart_has_equal_values_in_all_gradient_modes(meta_gradient: str, lr_granularity: str) -> None:
    """Outputs and the weights of all three levels, whose later step sizes depend on the starts of earlier ones."""
    options: dict[str, Any] = {"structure": "nested", "meta_gradient": meta_gradient, "lr_granularity": lr_granularity}
    cms, x = build((2, 4, 8), inner_lr=1.0, max_update_ratio=0.0, **options), noise(6, 1, 18, D)

    def read(**mode: Any) -> list[Tensor]:
        y, state = cms(x, **mode)
        parts = [part for level in require_levels(state) for part in (level.change, level.start_change)]
        return [y, *(to_dense(change) for part in parts for change in part.values())]

    with torch.no_grad():
        expected = read()
    assert all(change.any() for change in expected) or meta_gradient == "outer"  # whose starts never move
    for mode in ("full", "truncated", "first_order"):
        values = read(outer_gradient=mode, truncate_after=2 if mode == "truncated" else None)
        assert_close(values, expected, tolerance=1e-13)
    with torch.inference_mode():
        assert_close(read(), expected, tolerance=1e-13)
        y, state = cms(x[:, :11])  # and when a state of inference mode is read on
        assert_close([torch.cat([y, cms(x[:, 11:], state)[0]], 1)], expected[:1], tolerance=1e-13)


def test_cms_update_is_clipped_to_a_share_of_the_start() -> None:
    """In training and evaluation; a map that starts at zero is measured by its level."""
    x = 3 * noise(7, 2, 8, D)
    unclipped, clipped = (build((8,), inner_lr=50.0, max_update_ratio=ratio) for ratio in (0.0, 0.1))
    for training in (True, False):
        for name, change in require_levels(clipped.train(training)(x)[1])[0].change.items():
            start = clipped.get_parameter(f"levels.0.{name}.weight")
            assert (frobenius_norm(change) <= 0.1 * start.norm() * (1 + 1e-12)).all()
            assert (frobenius_norm(require_levels(unclipped(x)[1])[0].change[name]) > 0.1 * start.norm()).any()
    grown = build((2, 4), inner_lr=1.0)
    nn.init.zeros_(grown.get_parameter("levels.1.down_proj.weight"))
    assert to_dense(require_levels(grown(x)[1])[1].change["down_proj"]).any(), "a level that starts at zero changes"


def test_cms_changes_are_low_rank_while_that_is_smaller() -> None:
    cms = build((1,), inner_lr=0.1)
    changes = [require_levels(cms(noise(8, 1, T, D))[1])[0].change["up_proj"] for T in (1, 2)]
    assert isinstance(changes[0], LowRankChange)
    assert isinstance(changes[1], Tensor), "D F / (D + F) is 1.7"


def test_cms_state_files_forks_and_resets(tmp_path: Path) -> None:
    cms = build((2, 4), structure="nested", inner_optimizer="momentum")
    _, state = cms(noise(9, 3, 5, D))
    path = tmp_path / "state.safetensors"
    whole = states.detach(FastWeightState((state,), torch.full((3,), 5)))
    save_state(whole, path, model_fingerprint="m")
    assert states_equal(load_state(path, model_fingerprint="m"), whole)
    row, more = states.select_rows(state, [1]), noise(10, 2, 4, D)
    y, after = cms(more, states.select_rows(row, [0, 0]))
    assert_close([y[1:]], [cms(more[1:], row)[0]])
    assert_close(dense_state(states.select_rows(after, [0])), dense_state(cms(more[:1], row)[1]))
    reset = reset_rows(state, [0])
    assert_close([cms(more[:1], states.select_rows(reset, [0]))[0]], [cms(more[:1])[0]])
    dense, low_rank = cms(noise(11, 1, 9, D))[1], cms(noise(12, 1, 1, D))[1]
    both = states.concat_rows(dense, low_rank)
    assert_close([cms(more, both)[0][:1]], [cms(more[:1], dense)[0]])


def test_cms_learns_from_the_errors_of_an_outer_loss() -> None:
    """Two layers and one loss above both, as the objective "task" needs it."""
    layers = [build((3,), inner_objective="task", inner_lr=1.0, max_update_ratio=0.0) for _ in range(2)]
    x, records = noise(13, 2, 3, D), list[LinearRecords]([{}, {}])
    levels = [require_levels(cms(x)[1]) for cms in layers]
    assert not any(level.num_tokens.any() for pair in levels for level in pair), "a layer alone has no task loss"
    y, inputs = forward_levels(layers[0].params, levels[0], x, records[0])
    z, deep_inputs = forward_levels(layers[1].params, levels[1], y, records[1])
    loss = z.square().sum()
    for cms, record, read, old in zip(layers, records, (inputs, deep_inputs), levels, strict=True):
        pairs = linear_errors(loss, record, retain_graph=True)
        errors = {name.rpartition(".")[2]: clip_error(pair, 0.0) for name, pair in pairs.items()}
        new = accumulate_tokens(cms.params, old, [errors], read, GradientMode())
        for name, change in new[0].change.items():
            p = cms.get_parameter(f"levels.0.{name}.weight")
            step = nn.functional.softplus(cms.get_parameter("levels.0.step.bias"))
            for row in range(2):
                (grad,) = torch.autograd.grad(z[row].square().sum(), p, retain_graph=True)
                assert_close([to_dense(change)[row]], [-step * grad])
    assert tokens_to_boundary(cms.params, new) == 3
    with pytest.raises(UsageError, match="4 tokens exceed the 3"):
        accumulate_tokens(cms.params, new, [errors], [noise(14, 2, 4, D)], GradientMode())


def test_low_rank_and_dense_changes_give_the_same_results() -> None:
    low_rank = [LowRankChange(noise(n, 2, 3, 4), noise(n + 9, 2, 3, 5)) for n in range(2)]
    one, other = (pair.dense for pair in low_rank)
    factors = torch.tensor([2.0, 3.0]).double()
    for a in (low_rank[0], one):
        for b in (low_rank[1], other):
            assert_close([to_dense(add(a, b))], [one + other])
            rows = where_rows(torch.tensor([True, False]), a, b)
            assert_close([to_dense(rows)], [torch.stack([one[0], other[1]])])
        expected = [one.norm(dim=(1, 2)), one * factors[:, None, None]]
        assert_close([frobenius_norm(a), to_dense(scale(a, factors))], expected)
    assert isinstance(smaller_form(low_rank[0]), Tensor)
    assert (clip_error(low_rank[0], 1.0).left.norm(dim=-1) <= 1 + 1e-12).all()


def test_cms_refuses_inconsistent_options_and_inputs() -> None:
    for chunks, options, key in (
        ((), {}, "chunk"), ((4, 6), {}, "divide"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=key):
            build(chunks, **options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="activation 'foo' is unknown; use one of 'silu', "):
        CMS(D, D, activation="foo")
    with pytest.raises(UsageError, match="give the names of gate, up and down"):
        CMS(D, D, projections=("foo",))
    with pytest.raises(UsageError, match="another kind of layer"):
        build()(noise(0, 1, 2, D), LayerState(conv_tails={"x": torch.zeros(1, 1, 1)}))
