"""Validation during training: held-out problems answered as the method answers, and by chain with the same weights."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from laconic.evaluation.evaluate import judged
from laconic.evaluation.protocols import Protocol, check_gold
from laconic.recipe.methods import answer, staged, writing
from laconic.recipe.models import Parts
from laconic.recipe.rows import held_out
from laconic.recipe.schema import DOCUMENTS, Recipe
from laconic.recipe.watching import documents
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
        return documents(recipe, parts, method, device, ranks or Alone())
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
