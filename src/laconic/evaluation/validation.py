"""Validation during training: held-out problems answered as the method answers, and by chain with the same weights."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from laconic.config.recipe import DOCUMENT_SOURCES, Recipe
from laconic.data.reasoning.answer_matching import AnswerProtocol, check_gold
from laconic.evaluation.reasoning.evaluate import match_answers
from laconic.evaluation.validation_documents import build_document_validation
from laconic.experiment.build_data import load_held_out
from laconic.experiment.build_model import ModelParts
from laconic.experiment.methods import answer_decoding, answer_questions, set_stage
from laconic.training.ranks import Ranks, SingleProcess, map_over_ranks

COT_TEACHER_METHODS = ("codi", "pccot", "kava")  # methods that also learn to write the chain


def build_validation(
    recipe: Recipe, parts: ModelParts, method: nn.Module, device: torch.device, ranks: Ranks | None = None
) -> Callable[[int], Mapping[str, float]] | None:
    """Gives an epoch's `accuracy`, and that of the chain as `teacher_accuracy`; None where a recipe asks for none.

    Several `ranks` share the problems, and all get the same numbers.
    """
    how = recipe.validation
    if how is None:
        return None
    if recipe.data.source in DOCUMENT_SOURCES:
        return build_document_validation(recipe, parts, method, device, ranks or SingleProcess())
    rows = load_held_out(recipe, parts.tokenizer, parts.decoder.config.max_position_embeddings, "valid", how.max_rows)
    protocol = cast(AnswerProtocol, rows.answer_matcher)  # None only for documents, which no method answers
    check_gold(protocol, rows.examples, "data.valid", 'set data.answer_type = "text", or mend the row')
    asked = answer_decoding(parts, recipe, how.max_tokens)
    both = how.with_cot and recipe.method in COT_TEACHER_METHODS

    def right(places: list[int], teacher: bool) -> list[bool]:
        found: list[bool] = []
        for at in range(0, len(places), how.batch_size):
            some = places[at : at + how.batch_size]
            answers = answer_questions(
                method, cast(Any, rows.source.batch(some, 0, 0)).to(device), asked, with_cot=teacher
            )
            found += [row.is_correct for row in match_answers(answers, [rows.examples[i] for i in some], protocol)]
        return found

    def share(teacher: bool) -> float:
        found = map_over_ranks(ranks or SingleProcess(), len(rows.examples), lambda places: right(places, teacher))
        return sum(found) / len(found)

    def shares(epoch: int) -> Mapping[str, float]:
        set_stage(method, epoch)
        return {"accuracy": share(False)} | ({"teacher_accuracy": share(True)} if both else {})

    return shares
