"""Validation during training: held-out problems answered as the method answers them, held-out documents read."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from laconic.core.answering import quiet
from laconic.core.contract import Documents
from laconic.evaluation.evaluate import judged
from laconic.evaluation.protocols import Protocol, check_gold
from laconic.methods.autocompressor import AutoCompressor
from laconic.methods.units import followers
from laconic.recipe.methods import answer, staged, writing
from laconic.recipe.models import Parts
from laconic.recipe.rows import held_out
from laconic.recipe.schema import DOCUMENTS, Recipe
from laconic.training.ranks import Alone, Ranks, spread

TEACHERS = ("codi", "pccot", "kava")  # methods that also learn to write the chain


def validation(
    recipe: Recipe, parts: Parts, method: nn.Module, device: torch.device, ranks: Ranks | None = None
) -> Callable[[int], Mapping[str, float]] | None:
    """Gives an epoch's `accuracy`, and that of the chain as `teacher_accuracy`; None where a recipe asks for none.

    Several `ranks` share the problems, and all get the same numbers.
    """
    how = recipe.validation
    if how is None:
        return None
    if recipe.data.kind in DOCUMENTS:
        return reading(recipe, parts, method, device, ranks or Alone())
    rows = held_out(recipe, parts.tokenizer, parts.decoder.config.max_position_embeddings, "valid", how.rows)
    protocol = cast(Protocol, rows.protocol)  # None only for documents, which no method answers
    check_gold(protocol, rows.examples, "data.valid", 'set data.answers = "text", or mend the row')
    asked = writing(parts, recipe, how.max_tokens)
    both = how.teacher and recipe.method in TEACHERS

    def right(places: list[int], teacher: bool) -> list[bool]:
        found: list[bool] = []
        for at in range(0, len(places), how.batch):
            some = places[at : at + how.batch]
            answers = answer(method, cast(Any, rows.source.batch(some, 0, 0)).to(device), asked, teacher=teacher)
            found += [row.right for row in judged(answers, [rows.examples[i] for i in some], protocol)]
        return found

    def share(teacher: bool) -> float:
        found = spread(ranks or Alone(), len(rows.examples), lambda places: right(places, teacher))
        return sum(found) / len(found)

    def shares(epoch: int) -> Mapping[str, float]:
        staged(method, epoch)
        return {"accuracy": share(False)} | ({"teacher_accuracy": share(True)} if both else {})

    return shares


def reading(
    recipe: Recipe, parts: Parts, method: nn.Module, device: torch.device, ranks: Ranks
) -> Callable[[int], Mapping[str, float]]:
    """Gives `nats` a scored token of held-out documents, the share of them that were `right`, and vectors a document.

    Their lengths are those of inference. Without a memory the windows of a document stand alone, and there are none.
    """
    assert recipe.validation is not None
    how = recipe.validation
    rows = held_out(recipe, parts.tokenizer, parts.decoder.config.max_position_embeddings, "valid", how.rows)

    def sums(places: list[int]) -> list[tuple[float, float, float, float]]:
        found: list[tuple[float, float, float, float]] = []
        for at in range(0, len(places), how.batch):
            batch = cast(Any, rows.source.batch(places[at : at + how.batch], 0, 0)).to(device)
            with quiet(method):
                found += (
                    read_through(method, batch) if isinstance(method, AutoCompressor) else read_plain(method, batch)
                )
        return found

    def numbers(_: int) -> Mapping[str, float]:
        nats, right, scored, vectors = zip(*spread(ranks, len(rows.source), sums), strict=True)
        n = sum(scored) or 1.0
        found = {"nats": sum(nats) / n, "right": sum(right) / n}
        return found | ({"vectors": sum(vectors) / len(vectors)} if isinstance(method, AutoCompressor) else {})

    return numbers


def read_through(method: AutoCompressor, batch: Documents) -> list[tuple[float, float, float, float]]:
    """Of each document nats, right answers and scored tokens, and the vectors it became: segment by segment."""
    memory, sums = method.unit.empty(batch.B), torch.zeros(batch.B, 3, dtype=torch.float64)
    for i, columns in enumerate(batch.segments):
        text, live = batch.text[:, columns], batch.live[:, columns]
        targets = followers(text, live, batch.scored[:, columns])
        nats = method.unit.nats(method.read(text, live, memory), targets)
        sums += torch.stack([nats.sum, nats.right, (targets >= 0).sum(1)], 1).double().cpu()
        if i < len(batch.cuts) - 1:
            memory = method.compress(text, live, memory)
    told = [[float(x) for x in row] for row in sums]
    return [(row[0], row[1], row[2], float(n)) for row, n in zip(told, memory.lengths, strict=True)]


def read_plain(method: nn.Module, batch: Documents) -> list[tuple[float, float, float, float]]:
    """The same of plain text, whose sums are those of all rows together."""
    totals = cast(Any, method).totals(batch)
    found = [method(piece) for piece in replace(batch, totals=totals).pieces]
    nats, right = (sum(float(step.parts[name]) * totals["scored"] for step in found) for name in ("nats", "right"))
    return [(nats, right, totals["scored"], 0.0)] + [(0.0, 0.0, 0.0, 0.0)] * (batch.B - 1)
