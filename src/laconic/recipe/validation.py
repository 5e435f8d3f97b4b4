"""Validation during training: held-out problems answered as the method answers, and by chain with the same weights."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from laconic.evaluation.evaluate import judged
from laconic.recipe.methods import answer, staged, writing
from laconic.recipe.models import Parts
from laconic.recipe.rows import held_out
from laconic.recipe.schema import Recipe

TEACHERS = ("codi", "pccot", "kava")  # methods that also learn to write the chain


def validation(
    recipe: Recipe, parts: Parts, method: nn.Module, device: torch.device
) -> Callable[[int], Mapping[str, float]] | None:
    """Gives an epoch's `accuracy`, and that of the chain as `teacher_accuracy`; None where a recipe asks for none."""
    how = recipe.validation
    if how is None:
        return None
    rows = held_out(recipe, parts.tokenizer, parts.decoder.config.max_position_embeddings, "valid", how.rows)
    asked = writing(parts, recipe, how.max_tokens)
    both = how.teacher and recipe.method in TEACHERS

    def share(teacher: bool) -> float:
        right = 0
        for at in range(0, len(rows.examples), how.batch):
            places = range(at, min(at + how.batch, len(rows.examples)))
            batch = cast(Any, rows.source.batch(places, 0, 0)).to(device)
            answers = answer(method, batch, asked, teacher=teacher)
            right += sum(row.right for row in judged(answers, [rows.examples[i] for i in places], rows.protocol))
        return right / len(rows.examples)

    def shares(epoch: int) -> Mapping[str, float]:
        staged(method, epoch)
        return {"accuracy": share(False)} | ({"teacher_accuracy": share(True)} if both else {})

    return shares
