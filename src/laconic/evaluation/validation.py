"""Validation during training: answers to held-out problems, with the chain written out too, and held-out documents.

Documents are read with inference-time lengths; a warning says when learned lengths collapse.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from laconic.batches import IGNORE_INDEX, DocumentBatch, next_token_targets
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.halting.inference import add_uniforms, default_rule
from laconic.config.recipe import COT_TEACHER_METHODS, DOCUMENT_SOURCES, FULL_CHAIN_METHODS, Recipe
from laconic.data.documents.stateful_batches import StatefulBatches
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.errors import UsageError
from laconic.evaluation.reasoning.evaluate import match_answers
from laconic.experiment.from_recipe.build_data import load_held_out_rows, load_validation_questions
from laconic.experiment.from_recipe.build_model import ModelParts
from laconic.experiment.from_recipe.methods import answer_decoding, answer_questions, set_stage
from laconic.halting.estimators import penalty_ramp
from laconic.interfaces import AnswersQuestions, MethodState, NormalizesLoss, StepOutput
from laconic.models.modes import eval_no_grad
from laconic.training.ranks import JsonT, Ranks

COLLAPSED_SPREAD = 0.05  # standard deviation of lengths, in vectors, below which they count as equal
NEVER_STOPS_FRACTION = 0.99  # mean length as a fraction of the largest, above which nothing ever stops


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
    """
    config = recipe.validation
    if config is None:
        return None
    if recipe.data.source in DOCUMENT_SOURCES:
        return Validation(build_document_validation(recipe, parts, method, device, ranks or Ranks()))
    if not isinstance(method, AnswersQuestions):
        problem = f"{type(method).__name__} does not answer questions"
        raise UsageError(f"validation: {problem}; give it a method `answer`, or remove [validation]")
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
        correct = split_over_ranks(ranks or Ranks(), len(rows.examples), lambda chosen: answer_rows(chosen, with_cot))
        return sum(correct) / len(correct)

    def validate(epoch: int) -> Mapping[str, float]:
        set_stage(method, epoch)
        metrics = {"accuracy": compute_accuracy(with_cot=False)}
        return metrics | ({"teacher_accuracy": compute_accuracy(with_cot=True)} if with_teacher else {})

    return Validation(validate, tuple(f"validation: {note}" for note in rows.notes))


def split_over_ranks(ranks: Ranks, count: int, work: Callable[[list[int]], list[JsonT]]) -> list[JsonT]:
    """Split the indices 0 … count - 1 over ranks and return the results of all, in order."""
    results = ranks.all_gather(work(list(range(ranks.rank, count, ranks.world_size))))
    return [results[i % ranks.world_size][i // ranks.world_size] for i in range(count)]


class DocumentScore(NamedTuple):
    """Summed NLL, correct and scored tokens of a document, and the number of vectors of each compression."""

    nll: float
    num_correct: float
    num_scored: float
    lengths: tuple[int, ...] = ()


EMPTY_SCORE = DocumentScore(0.0, 0.0, 0.0)


def build_document_validation(
    recipe: Recipe, parts: ModelParts, method: nn.Module, device: torch.device, ranks: Ranks
) -> Callable[[int], Mapping[str, float]]:
    """Return the validation function of a recipe with documents.

    The function takes the update and returns `nats` per scored token and `accuracy`, the fraction of correct tokens;
    for an AutoCompressor also the mean number of `vectors` per document and the standard deviation `spread` of lengths.
    Methods without memory read each window alone; stateful methods carry their state through a document.
    """
    assert recipe.validation is not None
    config, context = recipe.validation, parts.decoder.config.max_position_embeddings
    rows = load_held_out_rows(recipe, parts.tokenizer, context, "valid", config.max_rows)

    def score_rows(indices: list[int]) -> list[DocumentScore]:
        scores: list[DocumentScore] = []
        for start in range(0, len(indices), config.batch_size):
            batch = cast(Any, rows.source.batch(indices[start : start + config.batch_size], 0, 0)).to(device)
            with eval_no_grad(method):
                if isinstance(method, AutoCompressor):
                    scores += score_segments(method, batch)
                else:
                    scores += score_without_memory(method, batch)
        return scores

    def validate(step: int) -> Mapping[str, float]:
        source = rows.source
        if isinstance(source, StatefulBatches):  # each batch needs the state after the one before
            scores = ranks.run_on_rank_zero(lambda: score_lanes(method, source, device))
        else:
            scores = split_over_ranks(ranks, len(source), score_rows)
        n = sum(score.num_scored for score in scores) or 1.0
        metrics = {"nats": sum(s.nll for s in scores) / n, "accuracy": sum(s.num_correct for s in scores) / n}
        if not isinstance(method, AutoCompressor):
            return metrics
        lengths = [length for score in scores for length in score.lengths]
        if ranks.rank == 0 and has_stop_head_started(method, step):
            warn_collapsed_lengths(lengths, method.config.fixed_length)
        return metrics | {"vectors": sum(lengths) / len(scores), "spread": pstdev(lengths) if lengths else 0.0}

    return validate


def has_stop_head_started(method: AutoCompressor, step: int) -> bool:
    """Return whether the stop head has been trained and its length cost has reached its full value."""
    config, u = method.stop_head_config, method.summaries.u
    if config is None or method.config.length_policy != "stop_head" or (u is not None and not bool(u.detach().any())):
        return False
    if method.training_phase(step) == "joint":
        return penalty_ramp(step, method.total_steps, config.cost_start, config.cost_ramp) == 1.0
    return step > method.head_only_step


def warn_collapsed_lengths(lengths: Sequence[int], max_length: int) -> None:
    if not lengths:
        return
    mean = fmean(lengths)
    if mean > NEVER_STOPS_FRACTION * max_length:
        warnings.warn(
            f"the stop head never stops: {mean:.2f} of {max_length} vectors per segment; raise stop_head.length_cost"
        )
    elif pstdev(lengths) < COLLAPSED_SPREAD:
        warnings.warn(
            f"lengths collapsed: every segment has about {mean:.2f} vectors; change stop_head.length_cost or "
            "stop_head.estimator"
        )


def score_segments(method: AutoCompressor, batch: DocumentBatch) -> list[DocumentScore]:
    """Score each document segment by segment on the memory of the previous ones; a segment's first token is not."""
    memory = method.segment_model.empty_memory(batch.B)
    sums = torch.zeros(batch.B, 3, dtype=torch.float64)
    lengths: list[list[int]] = [[] for _ in range(batch.B)]
    for i, columns in enumerate(batch.segment_slices):
        text, mask = batch.input_ids[:, columns], batch.attention_mask[:, columns]
        targets = next_token_targets(text, mask, batch.loss_mask[:, columns])
        loss = method.segment_model.segment_loss(method.read_text(text, mask, memory), targets)
        sums += torch.stack([loss.nll, loss.num_correct, (targets != IGNORE_INDEX).sum(1)], 1).double().cpu()
        if i < len(batch.segment_ends) - 1:
            rule = default_rule(method.segment_model)
            rule = add_uniforms(rule, method.seed, batch.row_index, i, method.config.fixed_length)
            memory = method.compress(text, mask, memory, rule)
            for row, has_text, n in zip(lengths, mask.any(1), memory.vectors_per_segment[:, -1], strict=True):
                row += [int(n)] if has_text else []
    nll, correct, scored = (column.tolist() for column in sums.unbind(1))
    return [DocumentScore(*row) for row in zip(nll, correct, scored, map(tuple, lengths), strict=True)]


def score_lanes(method: nn.Module, source: StatefulBatches, device: torch.device) -> list[DocumentScore]:
    """Score batches in order, each on the state of the one before; the sums of a batch are given to its first row."""
    scores: list[DocumentScore] = []
    state = cast(MethodState | None, None)
    for time in range(source.num_steps):
        rows = range(time * source.num_lanes, (time + 1) * source.num_lanes)
        batch = source.batch(rows, 0, 0).to(device)
        denominators = cast(NormalizesLoss, method).loss_denominators(batch)
        with eval_no_grad(method):
            output: StepOutput = method(replace(batch, loss_denominators=denominators), state)
        scores += _sum_metrics([output], denominators["scored"], batch.B)
        state = None if output.state is None else output.state.detach()
    return scores


def score_without_memory(method: nn.Module, batch: DocumentBatch) -> list[DocumentScore]:
    """Score windows that each stand alone; the sums of the batch are given to its first row."""
    denominators = cast(NormalizesLoss, method).loss_denominators(batch)
    outputs = [method(part) for part in replace(batch, loss_denominators=denominators).sequential_parts]
    return _sum_metrics(outputs, denominators["scored"], batch.B)


def _sum_metrics(outputs: Sequence[StepOutput], num_scored: float, num_rows: int) -> list[DocumentScore]:
    """Turn mean metrics back into sums, in the first of `num_rows` scores."""
    nll, correct = (
        sum(float(output.metrics[name]) for output in outputs) * num_scored for name in ("nats", "accuracy")
    )
    return [DocumentScore(nll, correct, num_scored), *[EMPTY_SCORE] * (num_rows - 1)]
