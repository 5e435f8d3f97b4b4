"""NestedLanguageModel and its metrics: streams continue, documents reset, micro-batches sum to the whole."""

import warnings
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.config.nested import InnerLoopConfig, SelfModifyingOptions
from laconic.interfaces import AfterUpdateHook, Method
from laconic.nested.cms.layer import require_levels
from laconic.nested.cms.level import to_dense
from laconic.nested.dead_levels import DeadLevelMonitor
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.model import Hope
from laconic.nested.language_model import NestedLanguageModel
from laconic.nested.state import FastWeightState, LowRankChange, named_tensors
from tests.nested.helpers import assert_close
from tests.nested.test_hope_model import (
    MEMORY,
    all_levels,
    build_attention,
    build_hope,
    build_titans,
    learned_tensors,
    random_ids,
)

pytestmark = pytest.mark.usefixtures("unchecked")


def documents(ids: Tensor, **fields: Any) -> DocumentBatch:
    """Return rows whose tokens are all real and scored."""
    mask = torch.ones(ids.shape, dtype=torch.bool)
    return DocumentBatch(ids, mask, mask, (ids.shape[1],), torch.arange(len(ids)), **fields)


def stream(ids: Tensor, starts: list[bool], **fields: Any) -> DocumentBatch:
    """Return rows that continue those of the last batch, except where a document starts."""
    return documents(ids, document_starts=torch.tensor(starts), **fields)


def metrics_of(memory: Any) -> dict[str, float]:
    """Return the metrics of reading one chunk, so that nothing has decayed at its end."""
    output = NestedLanguageModel(build_hope("associative", memory))(documents(random_ids(2, 3)))
    return {name: float(x) for name, x in output.metrics.items()}


def test_language_model_loss_is_the_mean_over_scored_tokens() -> None:
    model, ids = build_hope("associative"), random_ids(2, 7)
    method, batch = NestedLanguageModel(model), documents(ids)
    assert isinstance(method, Method)
    assert isinstance(method, AfterUpdateHook)
    logits = model.logits(model.read_tokens(ids).hidden_states)
    assert_close([method(batch).loss], [cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())])
    assert method.loss_denominators(batch) == {"scored": 12.0, "rows": 2.0}
    labels = torch.full((2, 7), IGNORE_INDEX)
    labels[:, 3] = 5
    expected = cross_entropy(logits[:, 3], torch.tensor([5, 5]))
    assert_close([method(replace(batch, labels=labels)).loss], [expected])


@pytest.mark.medium
@pytest.mark.parametrize("objective", ["task", "associative"])
@pytest.mark.parametrize("build", [build_hope, build_titans])
def test_language_model_streams_equal_their_documents(build: Any, objective: str) -> None:
    """Three batches of 4 tokens: the second row ends after 6, and another document starts in the third batch."""
    model, ids, other = build(objective), random_ids(2, 13), random_ids(1, 5, 1)
    method = NestedLanguageModel(model)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False  # tokens 4 and 5 are read, 6 is a target
    second = replace(stream(ids[:, 4:9], [False, False]), attention_mask=mask, loss_mask=mask)
    third = stream(torch.stack([ids[0, 8:13], other[0]]), [False, True])
    batches = [stream(ids[:, :5], [True, True]), second, third]
    state: Any = None
    total = 0.0
    for batch in batches:
        output = method(batch, state)
        state = output.state.detach()
        total += output.loss.item() * method.loss_denominators(batch)["scored"]
    expected = 0.0
    for document in (ids[:1], ids[1:, :7], other):
        logits = model.logits(model.read_tokens(document).hidden_states)
        expected += cross_entropy(logits[0, :-1], document[0, 1:], reduction="sum").item()
    assert total == pytest.approx(expected, rel=1e-9)
    assert state.position.tolist() == [12, 4]
    fresh = method(batches[0], None).state
    assert_close(learned_tensors(method(batches[0], state).state), learned_tensors(fresh))


def test_carry_state_empties_attention_and_keeps_levels() -> None:
    method, ids = NestedLanguageModel(build_attention()), random_ids(2, 9)
    state = method(stream(ids[:, :5], [True, True])).state
    assert all(layer.cache.S == 0 for layer in state.layers)
    state = method(stream(ids[:, 4:9], [False, False]), state.detach()).state
    assert state.position.tolist() == [8, 8]
    assert all(level.num_updates.all() for level in all_levels(state))


def test_language_model_disabled_inner_loop_trains_only_slow_weights() -> None:
    disabled = InnerLoopConfig(enabled=False)
    for objective in ("task", "associative"):
        method, batch = NestedLanguageModel(build_hope(objective), disabled), documents(random_ids(2, 9))
        output = method(batch)
        static = NestedLanguageModel(build_hope(objective, inner_lr=0.0), disabled)
        assert_close([output.loss], [static(batch).loss], tolerance=1e-2)
        assert not any(to_dense(x).any() for level in all_levels(output.state) for x in level.change.values())
        assert not any(x.any() for layer in output.state.layers for _, x in named_tensors(layer.memory))
        output.loss.backward()
        assert method.decoder.get_parameter("model.layers.0.mlp.levels.0.up_proj.weight").grad is not None


@pytest.mark.parametrize("outer_gradient", ["full", "truncated", "first_order", "none"])
def test_language_model_outer_gradient_changes_no_value(outer_gradient: Any) -> None:
    model, batch = build_hope("associative"), documents(random_ids(2, 9))
    expected, step = NestedLanguageModel(model)(batch).loss, "model.layers.0.mlp.levels.0.step.bias"
    truncate_after = 2 if outer_gradient == "truncated" else None
    config = InnerLoopConfig(outer_gradient=outer_gradient, truncate_after=truncate_after)
    loss = NestedLanguageModel(model, config)(batch).loss
    assert_close([loss], [expected])
    (grad,) = torch.autograd.grad(loss, model.get_parameter(step), allow_unused=True)
    assert (grad is not None and bool(grad)) == (outer_gradient != "none")


@pytest.mark.parametrize("build", [build_hope, build_titans, build_attention])
def test_metrics_of_micro_batches_sum_to_the_whole(build: Any) -> None:
    method, ids = NestedLanguageModel(build("associative")), random_ids(3, 9)
    whole = method(documents(ids)).metrics
    totals = method.loss_denominators(documents(ids))
    parts = [method(documents(part, loss_denominators=totals)).metrics for part in (ids[:1], ids[1:])]
    summed = {name: torch.stack([part[name] for part in parts]).sum() for name in whole}
    first_row_only = ("_half_life", "_step", "_low", "_high", "_capped")
    sampled = [name for name in whole if name.endswith(first_row_only)]
    others = [name for name in whole if name not in sampled]
    assert_close([summed[name] for name in others], [whole[name] for name in others], tolerance=1e-6)
    assert bool(sampled) == (build is not build_attention)
    assert whole.keys().isdisjoint({"step", "epoch", "lr", "tokens", "seconds", "loss"}), "names of the training log"
    assert (whole["level0_updates"], whole["level1_updates"], whole["row_tokens"]) == (4.0, 2.0, 9.0)
    may_be_zero = ("accuracy", "_capped")
    assert all(x.isfinite() and x > 0 for name, x in whole.items() if not name.endswith(may_be_zero))


def test_metrics_of_memories_are_computed_every_tenth_step() -> None:
    method, batch = NestedLanguageModel(build_hope("associative")), documents(random_ids(2, 3))
    first, ninth, tenth = (set(method(replace(batch, step=step)).metrics) for step in (0, 9, 10))
    assert first == tenth > ninth >= {"level0_updates", "level0_update_size", "row_tokens", "nats"}
    assert {"memory_half_life", "memory_norm"} <= first - ninth


@pytest.mark.parametrize("build", [build_hope, build_titans])
def test_metrics_of_memories_do_not_depend_on_padding(build: Any) -> None:
    method, ids = NestedLanguageModel(build("associative")), random_ids(1, 9)
    expected, padded = method(documents(ids)).metrics, documents(torch.cat([ids, torch.zeros_like(ids)], 1))
    metrics = method(replace(padded, attention_mask=torch.arange(18)[None] < 9)).metrics
    names = [name for name in expected if name.startswith(("memory_", "projections_"))]
    assert_close([metrics[name] for name in names], [expected[name] for name in names])
    no_tokens = replace(documents(ids), attention_mask=torch.zeros_like(ids, dtype=torch.bool))  # as on a rank
    assert method(no_tokens).metrics.keys() == expected.keys()


def test_metrics_level_sizes_are_relative_to_the_start() -> None:
    """Of a level that is updated once."""
    method = NestedLanguageModel(build_hope("associative"))
    output, expected = method(documents(random_ids(1, 2))), []
    for n, layer in enumerate(cast(FastWeightState, output.state).layers):
        level, names = require_levels(layer)[0], method.decoder.hope_config.mlp_projections
        prefix = f"model.layers.{n}.mlp.levels.0."
        start = torch.cat([method.decoder.get_parameter(f"{prefix}{name}.weight").flatten() for name in names])
        change = torch.cat([to_dense(level.change[name]).flatten() for name in names])
        expected.append(change.norm() / start.norm())
    actual = [output.metrics["level0_change"], output.metrics["level0_update_size"]]
    assert_close(actual, [torch.stack(expected).mean()] * 2)
    assert output.metrics["level1_updates"] == 0
    assert output.metrics["level1_change"] < 1e-12


def test_metrics_gates_and_norms_start_as_the_options_say() -> None:
    memory = SelfModifyingOptions(decay_half_life=7.0, memory_lr_init=0.25)
    config = HopeConfig.attention_free(97, 8, 2, chunk_sizes=(4,), num_heads=2, memory=memory)
    metrics = NestedLanguageModel(Hope(config), InnerLoopConfig(enabled=False))(documents(random_ids(2, 6))).metrics
    for name, expected in (
        ("memory_half_life", 7.0), ("projections_half_life", 7.0), ("memory_step", 0.25), ("projections_step", 0.001),
        ("memory_norm", 1.0), ("projections_norm", 1.0),
    ):  # fmt: skip
        assert metrics[name].item() == pytest.approx(expected, rel=1e-4), name
        for end in ("_low", "_high") if f"{name}_low" in metrics else ():
            assert metrics[name + end].item() == pytest.approx(expected, rel=1e-4), "equal for every token and head"


@pytest.mark.parametrize("memory_kind", ["linear", "affine", "mlp"])
def test_metrics_count_capped_writes(memory_kind: Any) -> None:
    for max_norm, share in ((1e-9, 1.0), (1e9, 0.0), (0.0, None)):
        options = {"memory_kind": memory_kind, "max_projection_norm": max_norm}
        assert metrics_of(MEMORY.model_copy(update=options)).get("projections_capped") == share


def test_metrics_rank_is_the_stored_rank() -> None:
    """Chunks of 2 and 4 tokens in maps of 8 by 16: one outer product per token until the change becomes dense."""
    output = NestedLanguageModel(build_hope("associative"))(documents(random_ids(1, 5)))
    changes = require_levels(output.state.layers[0])[0].change.values()
    ranks = [x.right.shape[1] if isinstance(x, LowRankChange) else min(x.shape[1:]) for x in changes]
    assert output.metrics["level0_rank"] == sum(ranks) / len(ranks)
    assert output.metrics["level1_rank"] == 4


def step_metrics(num_updates: float, size: float, tokens: float = 8.0) -> dict[str, float]:
    return {"level0_updates": num_updates, "level0_update_size": size, "row_tokens": tokens}


def test_dead_level_monitor_warns_once() -> None:
    healthy = DeadLevelMonitor((4,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            healthy.observe(step_metrics(2.0, 1e-3))
        for _ in range(4):
            healthy.observe(step_metrics(2.0, 1e-8))
    never = DeadLevelMonitor((4,))
    with pytest.warns(UserWarning, match=r"level 0 \(chunk size 4\) was not updated in 8 tokens"):
        never.observe(step_metrics(0.0, 0.0))
    vanishing = DeadLevelMonitor((4,))
    for _ in range(9):
        vanishing.observe(step_metrics(2.0, 2e-8))
    with pytest.warns(UserWarning, match="2e-08 per update over 20 updates"):
        vanishing.observe(step_metrics(2.0, 2e-8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vanishing.observe(step_metrics(2.0, 2e-8))
    NestedLanguageModel(build_hope(), InnerLoopConfig(enabled=False)).after_update({})
