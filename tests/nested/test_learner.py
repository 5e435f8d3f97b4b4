"""Laws of training a model that learns while it reads: lanes go on, fresh rows begin, numbers are means over rows."""

import math
import re
import warnings
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.config.nested import CMSConfig, InnerLoopConfig, SelfModifyingOptions, TitansOptions
from laconic.errors import UsageError
from laconic.interfaces import AfterUpdateHook, LocatesNonFinite, Method
from laconic.nested import state as values
from laconic.nested.cms.forward import require_levels
from laconic.nested.cms.low_rank_updates import to_dense
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.model import Hope
from laconic.nested.language_model import NestedLanguageModel, check_levels
from laconic.nested.metrics import DeadLevelMonitor
from laconic.nested.state import FastWeightState
from tests.nested.helpers import assert_close
from tests.nested.test_hope_model import MEMORY, attention, changes, hope, ids_of, titans

pytestmark = pytest.mark.usefixtures("unchecked")


def documents(text: Tensor, **more: Any) -> DocumentBatch:
    """Rows of which all is live and scored."""
    live = torch.ones(text.shape, dtype=torch.bool)
    return DocumentBatch(text, live, live, (text.shape[1],), torch.arange(len(text)), **more)


def lanes(text: Tensor, fresh: list[bool], **more: Any) -> DocumentBatch:
    return documents(text, document_starts=torch.tensor(fresh), **more)


def test_the_loss_is_nats_of_what_is_scored() -> None:
    model, text = hope("associative"), ids_of(2, 7)
    learner = NestedLanguageModel(model)
    assert isinstance(learner, Method)
    assert isinstance(learner, AfterUpdateHook)
    batch = documents(text)
    step = learner(batch)
    logits = model.logits(model.read_tokens(text).hidden_states)
    assert_close([step.loss], [cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())])
    assert learner.loss_denominators(batch) == {"scored": 12.0, "rows": 2.0}
    labels = torch.full((2, 7), IGNORE_INDEX)
    labels[:, 3] = 5
    step = learner(replace(batch, labels=labels))
    assert_close([step.loss], [cross_entropy(logits[:, 3], torch.tensor([5, 5]))])
    assert not learner.resets_optimizer_state(batch)


@pytest.mark.parametrize("inner", ["task", "associative"])
@pytest.mark.parametrize("make", [hope, titans])
def test_lanes_are_their_documents(make: Any, inner: str) -> None:
    """Three batches of 4 tokens: the second row ends after 6, and another document begins in the third batch."""
    model, text, other = make(inner), ids_of(2, 13), ids_of(1, 5, 1)
    learner = NestedLanguageModel(model)
    batches = [lanes(text[:, :5], [True, True]), lanes(text[:, 4:9], [False, False])]
    live = torch.ones(2, 5, dtype=torch.bool)
    live[1, 3:] = False  # tokens 4, 5 are read, 6 is a target
    batches[1] = replace(batches[1], attention_mask=live, loss_mask=live)
    third = torch.stack([text[0, 8:13], other[0]])
    batches.append(lanes(third, [False, True]))
    state: Any = None
    nats = 0.0
    for batch in batches:
        scored = learner.loss_denominators(batch)["scored"]
        step = learner(batch, state)
        state, nats = step.state.detach(), nats + step.loss.item() * scored
    said = 0.0
    for ids in (text[:1], text[1:, :7], other):
        logits = model.logits(model.advance(ids).hidden)
        said += cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
    assert nats == pytest.approx(said, rel=1e-9)
    assert state.position.tolist() == [12, 4]
    again = learner(batches[0], None)
    assert_close(changes(learner(batches[0], state).state), changes(again.state))


def test_attention_reads_a_batch_and_levels_go_on() -> None:
    learner, text = NestedLanguageModel(attention()), ids_of(2, 9)
    state = learner(lanes(text[:, :5], [True, True])).state
    assert all(layer.cache.S == 0 for layer in state.layers)
    step = learner(lanes(text[:, 4:9], [False, False]), state.detach())
    assert step.state.position.tolist() == [8, 8]
    assert all(level.num_updates.all() for layer in step.state.layers for level in require_levels(layer))


def test_the_control_learns_nothing_but_slow_weights() -> None:
    for inner in ("task", "associative"):
        learner, text = NestedLanguageModel(hope(inner), InnerLoopConfig(enabled=False)), ids_of(2, 9)
        step = learner(documents(text))
        assert_close(
            [step.loss],
            [NestedLanguageModel(hope(inner, eta=0.0), InnerLoopConfig(enabled=False))(documents(text)).loss],
            token_range=1e-2,
        )
        assert not any(
            to_dense(x).any()
            for layer in step.state.layers
            for level in require_levels(layer)
            for x in level.change.values()
        )
        assert not any(x.any() for layer in step.state.layers for _, x in values.named_tensors(layer.memory))
        step.loss.backward()
        assert learner.decoder.get_parameter("model.layers.0.mlp.levels.0.up_proj.weight").grad is not None


@pytest.mark.parametrize("gradient", ["full", "truncated", "first_order", "none"])
def test_gradients_change_no_value(gradient: Any) -> None:
    model, batch = hope("associative"), documents(ids_of(2, 9))
    whole, step = NestedLanguageModel(model)(batch).loss, model.get_parameter("model.layers.0.mlp.levels.0.step.bias")
    horizon = 2 if gradient == "truncated" else None
    loss = NestedLanguageModel(model, InnerLoopConfig(outer_gradient=gradient, truncate_after=horizon))(batch).loss
    assert_close([loss], [whole])
    (slope,) = torch.autograd.grad(loss, step, allow_unused=True)
    assert (slope is not None and bool(slope)) == (gradient != "none")


@pytest.mark.parametrize("make", [hope, titans, attention])
def test_numbers_are_means_over_rows(make: Any) -> None:
    """Of micro-batches too, whose parts are summed."""
    learner, text = NestedLanguageModel(make("associative")), ids_of(3, 9)
    whole = learner(documents(text)).parts
    totals = learner.loss_denominators(documents(text))
    split = [learner(documents(part, totals=totals)).parts for part in (text[:1], text[1:])]
    apart = {name: torch.stack([part[name] for part in split]).sum() for name in whole}
    ends = ("_half_life", "_step", "_low", "_high", "_capped", "_contracted")  # of the first row alone
    sampled = [name for name in whole if name.endswith(ends)]
    same = [name for name in whole if name not in sampled]
    assert_close([apart[name] for name in same], [whole[name] for name in same], token_range=1e-6)
    assert bool(sampled) == (make is not attention)
    assert whole.keys().isdisjoint({"step", "epoch", "lr", "tokens", "seconds", "loss"}), "names of the log's own"
    assert whole["level0_fired"] == 4.0
    assert whole["level1_fired"] == 2.0
    assert whole["row_tokens"] == 9.0
    zero = ("right", "_capped", "_guarded")
    assert all(x.isfinite() and x > 0 for name, x in whole.items() if not name.endswith(zero))


def test_memories_are_looked_at_in_every_tenth_step() -> None:
    learner, batch = NestedLanguageModel(hope("associative")), documents(ids_of(2, 3))
    first, late, tenth = (set(learner(replace(batch, step=step)).parts) for step in (0, 9, 10))
    assert first == tenth > late >= {"level0_fired", "level0_update", "row_tokens", "nats"}
    assert {"memory_half_life", "memory_norm", "memory_guarded"} <= first - late


def test_sizes_are_those_of_the_change() -> None:
    """Of a level that fires once: its change over its start, and no further than that."""
    learner, text = NestedLanguageModel(hope("associative")), ids_of(1, 2)
    step = learner(documents(text))
    asked = []
    for n, layer in enumerate(cast(FastWeightState, step.state).layers):
        level, names = require_levels(layer)[0], learner.decoder.hope_config.mlp_projections
        at = f"model.layers.{n}.mlp.levels.0."
        starts = [learner.decoder.get_parameter(f"{at}{name}.weight") for name in names]
        moved = torch.cat([to_dense(level.change[name]).flatten() for name in names])
        asked.append(moved.norm() / torch.cat([w.flatten() for w in starts]).norm())
    assert_close([step.parts["level0_moved"], step.parts["level0_update"]], [torch.stack(asked).mean()] * 2)
    assert step.parts["level1_fired"] == 0
    assert step.parts["level1_moved"] < 1e-12


def test_gates_and_norms_begin_where_the_options_say() -> None:
    memory = SelfModifyingOptions(decay_half_life=7.0, memory_lr_init=0.25)
    learner = NestedLanguageModel(
        Hope(HopeConfig.attention_free(97, 8, 2, chunk_sizes=(4,), num_heads=2, memory=memory)),
        InnerLoopConfig(enabled=False),
    )
    parts = learner(documents(ids_of(2, 6))).parts
    for name, asked in (
        ("memory_half_life", 7.0), ("projections_half_life", 7.0), ("memory_step", 0.25), ("projections_step", 0.02),
        ("memory_norm", 1.0), ("projections_norm", 1.0),
    ):  # fmt: skip
        assert parts[name].item() == pytest.approx(asked, rel=1e-4), name
        for end in ("_low", "_high") if f"{name}_low" in parts else ():
            assert parts[name + end].item() == pytest.approx(asked, rel=1e-4), "of every token and head the same"


def told_of(memory: Any) -> dict[str, float]:
    """Of one chunk, so that no write is let go before its end."""
    return {
        name: float(x)
        for name, x in NestedLanguageModel(hope("associative", memory))(documents(ids_of(2, 3))).parts.items()
    }


@pytest.mark.parametrize("kind", ["linear", "affine", "mlp"])
@pytest.mark.parametrize("decay_to", ["start", "zero"])
def test_bounds_that_bind_are_counted(kind: Any, decay_to: Any) -> None:
    tight = MEMORY.model_copy(update={"memory": kind, "decay_to": decay_to, "hidden": 3, "cap": 1e-9, "guard": 1e-3})
    found = told_of(tight)
    assert (found["projections_capped"], found["memory_guarded"]) == (1.0, 1.0)
    wide = tight.model_copy(update={"cap": 1e9, "guard": 1e3})
    found = told_of(wide)
    assert (found["projections_capped"], found["memory_guarded"]) == (0.0, 0.0)
    none = told_of(wide.model_copy(update={"cap": 0.0, "guard": 0.0}))
    assert not [name for name in none if name.endswith(("_capped", "_guarded", "_contracted"))]


@pytest.mark.parametrize(("half_life", "share"), [(0.01, 1.0), (1e6, 0.0)])
def test_steps_that_would_overshoot_are_counted(half_life: float, share: float) -> None:
    found = told_of(
        MEMORY.model_copy(update={"step_max": 2.0, "step_memory": 1.9, "keep_half_life": half_life, "inner": ()})
    )
    assert found["memory_contracted"] == share


def test_the_guard_of_titans_is_counted() -> None:
    for depth in (1, 2):
        for guard, share in ((1e-3, 1.0), (1e3, 0.0)):
            options = TitansOptions(memory_depth=depth, mlp_width=3, max_memory_norm=guard, global_chunk_size=6)
            assert told_of(options)["memory_guarded"] == share


def test_the_rank_is_that_of_the_factors() -> None:
    """Chunks of 2 and 4 tokens in maps of 8 by 16: an outer product for every token learned, until it is folded."""
    step = NestedLanguageModel(hope("associative"))(documents(ids_of(1, 5)))
    level = require_levels(step.state.layers[0])[0]
    widths = [
        x.right.shape[1] if isinstance(x, values.LowRankChange) else min(x.shape[1:]) for x in level.change.values()
    ]
    assert step.parts["level0_rank"] == sum(widths) / len(widths)
    assert step.parts["level1_rank"] == 4


def numbers(fired: float, update: float, tokens: float = 8.0) -> dict[str, float]:
    return {"level0_fired": fired, "level0_update": update, "row_tokens": tokens}


def test_dead_levels_are_said_once() -> None:
    alive = DeadLevelMonitor((4,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            alive.observe(numbers(2.0, 1e-3))
        for _ in range(4):
            alive.observe(numbers(2.0, 1e-8))
    slow = DeadLevelMonitor((4,))
    with pytest.warns(UserWarning, match=r"cms: level 0 \(chunk 4\) was not updated in 8 tokens; read longer rows"):
        slow.observe(numbers(0.0, 0.0))
    still = DeadLevelMonitor((4,))
    for _ in range(9):
        still.observe(numbers(2.0, 2e-8))
    with pytest.warns(UserWarning, match=r"moved 2e-08 per update over 20 updates; raise its eta, start from a pre"):
        still.observe(numbers(2.0, 2e-8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        still.observe(numbers(2.0, 2e-8))
    control = NestedLanguageModel(hope(), InnerLoopConfig(enabled=False))
    control.after_update({})


def test_what_is_not_finite_is_found() -> None:
    """The layer, the level and the token; the loop stops by its numbers."""
    for inner, token in (("associative", 1), ("task", 3)):  # of the task, when the last target of the chunk arrives
        model = hope(inner)
        with torch.no_grad():
            model.get_parameter("model.layers.1.mlp.levels.0.step.bias").fill_(math.inf)
        learner, batch = NestedLanguageModel(model), documents(ids_of(2, 9), names=("a", "b"))
        assert isinstance(learner, LocatesNonFinite)
        step = learner(batch)
        assert not step.parts["level0_moved"].isfinite()
        place = rf"level 0 of layer 1 \(\S+\), row 0 \(a\), from token {token} on"
        assert re.fullmatch(place, learner.locate_nonfinite(batch, None))
        assert not NestedLanguageModel(model, InnerLoopConfig(enabled=False)).locate_nonfinite(batch, None)
    assert not NestedLanguageModel(hope()).locate_nonfinite(batch, None)


def test_levels_that_no_gradient_reaches_are_refused() -> None:
    levels = CMSConfig(chunk_sizes=(4, 16))
    check_levels(levels, 17, InnerLoopConfig())
    with pytest.raises(
        UsageError, match=r"cms.chunk_sizes: level 1 has chunk 16, rows have 16 tokens between two updates"
    ):
        check_levels(levels, 16, InnerLoopConfig())
    for learning in (InnerLoopConfig(allow_untrained_level=True), InnerLoopConfig(enabled=False)):
        check_levels(levels, 16, learning)
    check_levels(CMSConfig(chunk_sizes=(16,), inner_lr=0.0), 16, InnerLoopConfig())
