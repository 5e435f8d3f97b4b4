"""Held-out documents read during training, with the lengths of inference, and lengths that no longer mean anything."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from laconic.core.answering import quiet
from laconic.core.contract import UNSCORED, Documents, State, Step, followers
from laconic.data.lanes import Lanes
from laconic.methods.autocompressor import AutoCompressor
from laconic.methods.estimators import ramp
from laconic.methods.halting import draws
from laconic.methods.stopping import Stopping, default
from laconic.recipe.models import Parts
from laconic.recipe.rows import held_out
from laconic.recipe.schema import Recipe
from laconic.training.ranks import Ranks, spread

COLLAPSED, NEVER = 0.05, 0.99  # standard deviation of lengths that is none; share of the most that is always all


class Read(NamedTuple):
    """Of one document: nats, right answers and scored tokens; vectors of each of its compressions."""

    nats: float
    right: float
    scored: float
    lengths: tuple[int, ...] = ()


def documents(
    recipe: Recipe, parts: Parts, method: nn.Module, device: torch.device, ranks: Ranks
) -> Callable[[int], Mapping[str, float]]:
    """Gives `nats` a scored token, the share of them that were `right`, and `vectors` a document with their `spread`.

    Without a memory the windows of a document stand alone, and there are no vectors; lanes go on from batch to batch,
    with what they have learned. Warns where a learned length is
    the same everywhere, or the longest.
    """
    assert recipe.validation is not None
    how = recipe.validation
    rows = held_out(recipe, parts.tokenizer, parts.decoder.config.max_position_embeddings, "valid", how.rows)

    def read(places: list[int]) -> list[Read]:
        if isinstance(rows.source, Lanes):
            return in_lanes(method, rows.source, device)
        found: list[Read] = []
        for at in range(0, len(places), how.batch):
            batch = cast(Any, rows.source.batch(places[at : at + how.batch], 0, 0)).to(device)
            with quiet(method):
                found += through(method, batch) if isinstance(method, AutoCompressor) else plain(method, batch)
        return found

    def numbers(step: int) -> Mapping[str, float]:
        found = spread(ranks, len(rows.source), read)
        n = sum(each.scored for each in found) or 1.0
        told = {"nats": sum(each.nats for each in found) / n, "right": sum(each.right for each in found) / n}
        if not isinstance(method, AutoCompressor):
            return told
        lengths = [length for each in found for length in each.lengths]
        if ranks.rank == 0 and begun(method, step):
            warn(lengths, method.reading.fixed)
        return told | {"vectors": sum(lengths) / len(found), "spread": pstdev(lengths) if lengths else 0.0}

    return numbers


def begun(method: AutoCompressor, step: int) -> bool:
    """Whether a stop head has learned anything by an update, and its price counts in full."""
    how, u = method.halting, method.summaries.u
    if how is None or method.reading.length != "stop" or (u is not None and not bool(u.detach().any())):
        return False
    if method.phase(step) == "both":
        return ramp(step, method.steps, how.penalty_start, how.penalty_ramp) == 1.0
    return step > method.alone


def warn(lengths: Sequence[int], most: int) -> None:
    """Says that lengths have collapsed onto one, or that nothing ever stops."""
    if not lengths:
        return
    mean, deviation = fmean(lengths), pstdev(lengths)
    if mean > NEVER * most:
        warnings.warn(f"never stops: {mean:.2f} of {most} vectors a segment; raise halting.price", stacklevel=2)
    elif deviation < COLLAPSED:
        warnings.warn(
            f"lengths collapsed: every segment has about {mean:.2f} vectors; change halting.price or halting.estimator",
            stacklevel=2,
        )


def through(method: AutoCompressor, batch: Documents) -> list[Read]:
    """Every document of a batch, segment by segment; the first token of a segment is not scored."""
    memory, sums = method.unit.empty(batch.B), torch.zeros(batch.B, 3, dtype=torch.float64)
    lengths: list[list[int]] = [[] for _ in range(batch.B)]
    for i, columns in enumerate(batch.segments):
        text, live = batch.text[:, columns], batch.live[:, columns]
        targets = followers(text, live, batch.scored[:, columns])
        nats = method.unit.nats(method.read(text, live, memory), targets)
        sums += torch.stack([nats.sum, nats.right, (targets != UNSCORED).sum(1)], 1).double().cpu()
        if i < len(batch.cuts) - 1:
            memory = method.compress(text, live, memory, rule(method, batch, i))
            for row, there, n in zip(lengths, live.any(1), memory.block_lengths[:, -1], strict=True):
                row += [int(n)] if there else []
    nats, right, scored = (column.tolist() for column in sums.unbind(1))
    return [Read(*row) for row in zip(nats, right, scored, map(tuple, lengths), strict=True)]


def rule(method: AutoCompressor, batch: Documents, i: int) -> Stopping:
    """How a run stops by itself; where that draws, the draws of segment `i`."""
    own = default(method.unit)
    if own.stop != "sample":
        return own
    return own._replace(draws=draws("length", method.seed, 0, batch.index, i, method.reading.fixed))


def in_lanes(method: nn.Module, source: Lanes, device: torch.device) -> list[Read]:
    """Held-out documents side by side, each batch on the state that the one before gave."""
    found, state = list[Read](), cast(State | None, None)
    for time in range(source.times):
        places = range(time * source.lanes, (time + 1) * source.lanes)
        batch = source.batch(places, 0, 0).to(device)
        totals = cast(Any, method).totals(batch)
        with quiet(method):
            step: Step = method(replace(batch, totals=totals), state)
        nats, right = (float(step.parts[name]) * totals["scored"] for name in ("nats", "right"))
        found += [Read(nats, right, totals["scored"]), *[Read(0.0, 0.0, 0.0)] * (batch.B - 1)]
        state = None if step.state is None else step.state.detach()
    return found


def plain(method: nn.Module, batch: Documents) -> list[Read]:
    """Every document of a batch without a memory; the sums are those of all, told of the first."""
    totals = cast(Any, method).totals(batch)
    found = [method(piece) for piece in replace(batch, totals=totals).pieces]
    nats, right = (sum(float(step.parts[name]) * totals["scored"] for step in found) for name in ("nats", "right"))
    return [Read(nats, right, totals["scored"]), *[Read(0.0, 0.0, 0.0)] * (batch.B - 1)]
