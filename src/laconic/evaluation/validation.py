"""Validation during training: answer held-out problems as the method does, and with the chain written out."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from laconic.config.recipe import COT_TEACHER_METHODS, DOCUMENT_SOURCES, FULL_CHAIN_METHODS, Recipe
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.errors import UsageError
from laconic.evaluation.reasoning.evaluate import match_answers
from laconic.evaluation.validation_documents import build_document_validation
from laconic.experiment.from_recipe.build_data import load_validation_questions
from laconic.experiment.from_recipe.build_model import ModelParts
from laconic.experiment.from_recipe.methods import answer_decoding, answer_questions, set_stage
from laconic.interfaces import AnswersQuestions
from laconic.training.ranks import Ranks


class Validation(NamedTuple):
    """The validation of a run: called with the epoch, it returns metrics; the notes are about the held-out rows."""

    function: Callable[[int], Mapping[str, float]]
    notes: tuple[str, ...] = ()

    def __call__(self, epoch: int) -> Mapping[str, float]:
        return self.function(epoch)


def build_validation(
    recipe: Recipe, parts: ModelParts, method: nn.Module, device: torch.device, ranks: Ranks | None = None
) -> Validation | None:
    """Return the validation of a recipe, or None if it has none.

    It takes the epoch and returns `accuracy`, and `teacher_accuracy` for answers with the chain written out.
    Several ranks share the problems and get the same numbers. For documents, see `build_document_validation`.

    Raises:
        InputError: If a gold answer cannot be judged.
        UsageError: If the method does not answer questions, or an answer would not fit into the position table.
    """
    config = recipe.validation
    if config is None:
        return None
    if recipe.data.source in DOCUMENT_SOURCES:
        return Validation(build_document_validation(recipe, parts, method, device, ranks or Ranks()))
    if not isinstance(method, AnswersQuestions):
        raise UsageError(
            f"validation: {type(method).__name__} does not answer questions; give it a method `answer`, or remove "
            "[validation]"
        )
    rows = load_validation_questions(recipe, parts.tokenizer, parts.decoder.config)
    protocol = cast(AnswerProtocol, rows.protocol)  # None only for documents
    decoding = answer_decoding(parts.tokenizer, recipe.data, config.max_tokens)
    with_teacher = config.with_cot and recipe.method in COT_TEACHER_METHODS

    def answer_rows(indices: list[int], with_cot: bool) -> list[bool]:
        correct: list[bool] = []
        judge = protocol.for_chain() if with_cot or recipe.method in FULL_CHAIN_METHODS else protocol
        for start in range(0, len(indices), config.batch_size):
            chosen = indices[start : start + config.batch_size]
            batch = cast(Any, rows.source.batch(chosen, 0, 0)).to(device)
            answers = answer_questions(method, batch, decoding, with_cot=with_cot)
            records = match_answers(answers, [rows.examples[i] for i in chosen], judge)
            correct += [record.is_correct for record in records]
        return correct

    def compute_accuracy(with_cot: bool) -> float:
        correct = (ranks or Ranks()).map_indices(len(rows.examples), lambda chosen: answer_rows(chosen, with_cot))
        return sum(correct) / len(correct)

    def validate(epoch: int) -> Mapping[str, float]:
        set_stage(method, epoch)
        metrics = {"accuracy": compute_accuracy(with_cot=False)}
        return metrics | ({"teacher_accuracy": compute_accuracy(with_cot=True)} if with_teacher else {})

    return Validation(validate, tuple(f"validation: {note}" for note in rows.notes))
