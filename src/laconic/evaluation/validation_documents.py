"""Held-out documents read during training, with the lengths of inference, and lengths that no longer mean anything."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from laconic.batches import IGNORE_INDEX, DocumentBatch, next_token_targets
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.halting.estimators import penalty_ramp
from laconic.compression.halting.inference import StopRule, default_rule
from laconic.compression.halting.stop_distribution import draw_uniforms
from laconic.config.recipe import Recipe
from laconic.data.documents.stateful_batches import StatefulBatches
from laconic.experiment.build_data import load_held_out
from laconic.experiment.build_model import ModelParts
from laconic.interfaces import MethodState, StepOutput
from laconic.models.modes import eval_no_grad
from laconic.training.ranks import Ranks, map_over_ranks

COLLAPSED_SPREAD, NEVER_STOPS_FRACTION = (
    0.05,
    0.99,
)  # standard deviation of lengths that is none; share of the most that is always all


class DocumentScore(NamedTuple):
    """Of one document: nats, right answers and scored tokens; vectors of each of its compressions."""

    nll: float
    num_correct: float
    num_scored: float
    lengths: tuple[int, ...] = ()


def build_document_validation(
    recipe: Recipe, parts: ModelParts, method: nn.Module, device: torch.device, ranks: Ranks
) -> Callable[[int], Mapping[str, float]]:
    """Gives `nats` a scored token, the share of them that were `right`, and `vectors` a document with their `spread`.

    Without a memory the windows of a document stand alone, and there are no vectors; lanes go on from batch to batch,
    with what they have learned. Warns where a learned length is
    the same everywhere, or the longest.
    """
    assert recipe.validation is not None
    how = recipe.validation
    rows = load_held_out(recipe, parts.tokenizer, parts.decoder.config.max_position_embeddings, "valid", how.max_rows)

    def read(places: list[int]) -> list[DocumentScore]:
        if isinstance(rows.source, StatefulBatches):
            return score_lanes(method, rows.source, device)
        found: list[DocumentScore] = []
        for at in range(0, len(places), how.batch_size):
            batch = cast(Any, rows.source.batch(places[at : at + how.batch_size], 0, 0)).to(device)
            with eval_no_grad(method):
                found += (
                    score_segments(method, batch)
                    if isinstance(method, AutoCompressor)
                    else score_without_memory(method, batch)
                )
        return found

    def numbers(step: int) -> Mapping[str, float]:
        found = map_over_ranks(ranks, len(rows.source), read)
        n = sum(each.num_scored for each in found) or 1.0
        told = {"nats": sum(each.nll for each in found) / n, "right": sum(each.num_correct for each in found) / n}
        if not isinstance(method, AutoCompressor):
            return told
        lengths = [length for each in found for length in each.lengths]
        if ranks.rank == 0 and has_stop_head_started(method, step):
            warn_collapsed_lengths(lengths, method.config.fixed_length)
        return told | {"vectors": sum(lengths) / len(found), "spread": pstdev(lengths) if lengths else 0.0}

    return numbers


def has_stop_head_started(method: AutoCompressor, step: int) -> bool:
    """Whether a stop head has learned anything by an update, and its price counts in full."""
    how, u = method.stop_head_config, method.summaries.u
    if how is None or method.config.length_policy != "stop_head" or (u is not None and not bool(u.detach().any())):
        return False
    if method.training_phase(step) == "joint":
        return penalty_ramp(step, method.total_steps, how.cost_start, how.cost_ramp) == 1.0
    return step > method.head_only_step


def warn_collapsed_lengths(lengths: Sequence[int], most: int) -> None:
    """Says that lengths have collapsed onto one, or that nothing ever stops."""
    if not lengths:
        return
    mean, deviation = fmean(lengths), pstdev(lengths)
    if mean > NEVER_STOPS_FRACTION * most:
        warnings.warn(f"never stops: {mean:.2f} of {most} vectors a segment; raise stop_head.length_cost", stacklevel=2)
    elif deviation < COLLAPSED_SPREAD:
        warnings.warn(
            f"lengths collapsed: every segment has about {mean:.2f} vectors; change stop_head.length_cost or stop_head.estimator",
            stacklevel=2,
        )


def score_segments(method: AutoCompressor, batch: DocumentBatch) -> list[DocumentScore]:
    """Every document of a batch, segment by segment; the first token of a segment is not scored."""
    memory, sums = method.segment_model.empty_memory(batch.B), torch.zeros(batch.B, 3, dtype=torch.float64)
    lengths: list[list[int]] = [[] for _ in range(batch.B)]
    for i, columns in enumerate(batch.segment_slices):
        text, live = batch.input_ids[:, columns], batch.attention_mask[:, columns]
        targets = next_token_targets(text, live, batch.loss_mask[:, columns])
        nats = method.segment_model.segment_loss(method.read_text(text, live, memory), targets)
        sums += torch.stack([nats.nll, nats.num_correct, (targets != IGNORE_INDEX).sum(1)], 1).double().cpu()
        if i < len(batch.segment_ends) - 1:
            memory = method.compress(text, live, memory, inference_rule(method, batch, i))
            for row, there, n in zip(lengths, live.any(1), memory.vectors_per_segment[:, -1], strict=True):
                row += [int(n)] if there else []
    nats, right, scored = (column.tolist() for column in sums.unbind(1))
    return [DocumentScore(*row) for row in zip(nats, right, scored, map(tuple, lengths), strict=True)]


def inference_rule(method: AutoCompressor, batch: DocumentBatch, i: int) -> StopRule:
    """How a run stops by itself; where that draws, the draws of segment `i`."""
    own = default_rule(method.segment_model)
    if own.name != "sample":
        return own
    return own._replace(
        uniforms=draw_uniforms("length", method.seed, 0, batch.row_index, i, method.config.fixed_length)
    )


def score_lanes(method: nn.Module, source: StatefulBatches, device: torch.device) -> list[DocumentScore]:
    """Held-out documents side by side, each batch on the state that the one before gave."""
    found, state = list[DocumentScore](), cast(MethodState | None, None)
    for time in range(source.num_steps):
        places = range(time * source.num_lanes, (time + 1) * source.num_lanes)
        batch = source.batch(places, 0, 0).to(device)
        totals = cast(Any, method).totals(batch)
        with eval_no_grad(method):
            step: StepOutput = method(replace(batch, loss_denominators=totals), state)
        nats, right = (float(step.metrics[name]) * totals["scored"] for name in ("nats", "right"))
        found += [DocumentScore(nats, right, totals["scored"]), *[DocumentScore(0.0, 0.0, 0.0)] * (batch.B - 1)]
        state = None if step.state is None else step.state.detach()
    return found


def score_without_memory(method: nn.Module, batch: DocumentBatch) -> list[DocumentScore]:
    """Every document of a batch without a memory; the sums are those of all, told of the first."""
    totals = cast(Any, method).totals(batch)
    found = [method(piece) for piece in replace(batch, loss_denominators=totals).sequential_parts]
    nats, right = (sum(float(step.parts[name]) * totals["scored"] for step in found) for name in ("nats", "right"))
    return [DocumentScore(nats, right, totals["scored"]), *[DocumentScore(0.0, 0.0, 0.0)] * (batch.B - 1)]
