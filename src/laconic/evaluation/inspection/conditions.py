"""Answer questions as trained and with changed thoughts, for `laconic audit` and `laconic inspect --task`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.batches import ReasoningBatch
from laconic.errors import InputError
from laconic.evaluation.inspection import interventions
from laconic.evaluation.inspection.inspected_run import InspectedRun
from laconic.evaluation.inspection.interventions import InterventionInputs, ReferenceMeans
from laconic.evaluation.inspection.verdict import AS_TRAINED
from laconic.evaluation.reasoning.evaluate import AnswerRecord, match_answers
from laconic.evaluation.reasoning.question_sets import QuestionSet
from laconic.evaluation.reasoning.run import build_question_job, decoding_for
from laconic.evaluation.results_store import EvalItem, EvalJob, ReportFraction
from laconic.evaluation.statistics import min_questions
from laconic.evaluation.suite import run_name
from laconic.experiment.load_run import LoadedRun
from laconic.interfaces import TrainingData
from laconic.latent.rollout import LatentRollout

NUM_REFERENCE_QUESTIONS = 256  # for the mean of a latent


# Returns the rollout before the answers, with changed thoughts.
ThoughtChange = Callable[[InspectedRun, ReasoningBatch, InterventionInputs], LatentRollout]


def list_replacements(num_latents: int) -> dict[str, ThoughtChange]:
    """Return every intervention by its key in stored results."""
    specs = interventions.list_interventions(num_latents)
    return {" ".join(spec): partial(interventions.run_intervention, spec=spec) for spec in specs}


def list_conditions(num_latents: int, num_iterations: int | None) -> dict[str, ThoughtChange]:
    """Return the conditions of an audit, for M thoughts and T Jacobi iterations of training, if there are any."""
    shortened = {f"first {n}": partial(cut_thoughts, n=n) for n in (num_latents // 2, 0)}
    numbers = (num_iterations // 2, 0) if num_iterations else ()
    fewer = {f"{n} iterations": partial(limit_iterations, n=n) for n in numbers}
    return {**list_replacements(num_latents), **shortened, **fewer}


def cut_thoughts(run: InspectedRun, batch: ReasoningBatch, inputs: InterventionInputs, n: int) -> LatentRollout:
    rollout = inputs.rollout
    return rollout._replace(cache=rollout.cache.crop(rollout.cache.S - rollout.latents.shape[1] + n))


def limit_iterations(run: InspectedRun, batch: ReasoningBatch, inputs: InterventionInputs, n: int) -> LatentRollout:
    """Think with another number of Jacobi iterations than in training; after 0, the thoughts are the placeholders."""
    return run.think(batch, iterations=n)


@torch.no_grad()
def count_latents(run: InspectedRun, source: TrainingData) -> int:
    """Return the number of latents of a question. Raises `UsageError` (2) if this step of the run has none yet."""
    return run.think(load_batch(run, source, np.array([0]))).latents.shape[1]


def load_batch(run: InspectedRun, source: TrainingData, indices: NDArray[np.int64]) -> ReasoningBatch:
    return cast(ReasoningBatch, source.batch([int(i) for i in indices], 0, 0)).to(run.decoder.device)


def reference_means_of(run: InspectedRun, source: TrainingData, batch_size: int) -> ReferenceMeans:
    """Return the means over the first `NUM_REFERENCE_QUESTIONS` rows of a set, or over all if it has fewer."""
    indices = np.arange(min(NUM_REFERENCE_QUESTIONS, len(source)))
    batches = (
        load_batch(run, source, indices[start : start + batch_size]) for start in range(0, len(indices), batch_size)
    )
    return interventions.compute_reference_means(run, batches)


@torch.no_grad()
def answer_under_conditions(
    run: InspectedRun,
    questions: QuestionSet,
    conditions: Mapping[str, ThoughtChange],
    rows: Sequence[int],
    means: ReferenceMeans,
    seed: int = 0,
    report: ReportFraction | None = None,
) -> list[EvalItem]:
    """Return the answers to some questions as trained and under each condition; `report` the share that is done.

    An item has the whole record of the answer as trained. Of the other answers it has the text, the prediction and
    whether it is correct, and with a swap the id of the question that the thoughts come from. `seed` is that of donors,
    shuffles and noise.
    """
    examples = [questions.examples[i] for i in rows]
    indices = np.array(rows)
    donors = interventions.choose_donors(len(questions.examples), seed)[indices]
    batch = load_batch(run, questions.source, indices)
    donor_rollout = run.think(load_batch(run, questions.source, donors), record_passes=True)
    run = run.with_questions(batch)
    rollout = run.think(batch, record_passes=True)
    inputs = InterventionInputs(rollout, indices, seed, donor_rollout, means)

    def answer_after(rollout: LatentRollout) -> list[AnswerRecord]:
        return match_answers(run.answer(batch, rollout), examples, questions.protocol)

    answers: list[dict[str, Mapping[str, Any]]] = [{AS_TRAINED: record._asdict()} for record in answer_after(rollout)]
    for n, (name, change) in enumerate(conditions.items(), 1):
        if report is not None:
            report(n / (len(conditions) + 1))
        changed = answer_after(change(run, batch, inputs))
        for by_condition, record, donor in zip(answers, changed, donors.tolist(), strict=True):
            metrics = {"output": record.output, "prediction": record.prediction, "is_correct": record.is_correct}
            donor_id = {"donor": questions.examples[donor].id} if name.startswith("swap") else {}
            by_condition[name] = metrics | donor_id
    return [EvalItem(example.id, by_condition) for example, by_condition in zip(examples, answers, strict=True)]


def build_audit_job(run: LoadedRun, questions: QuestionSet, *, limit: int | None, batch_size: int) -> EvalJob:
    inspected = InspectedRun(run, run_name(run.folder), decoding_for(run, questions))
    conditions = list_conditions(count_latents(inspected, questions.source), inspected.num_iterations)
    fewest = min_questions(len(conditions))
    if len(questions.examples) < fewest:
        raise InputError(
            f"{questions.name}: {len(questions.examples)} questions; with {len(conditions)} tests no effect could "
            f"be significant on fewer than {fewest}; raise --limit or use a larger --task, best with 200 or more"
        )

    @cache
    def means() -> ReferenceMeans:
        return reference_means_of(inspected, questions.source, batch_size)

    def evaluate(indices: Sequence[int], report: ReportFraction) -> list[list[EvalItem]]:
        items = answer_under_conditions(inspected, questions, conditions, indices, means(), report=report)
        return [[item] for item in items]

    job = build_question_job(run, questions, limit=limit, batch_size=batch_size)
    key = {**job.metadata.key, "conditions": ", ".join(conditions)}
    return replace(job, metadata=replace(job.metadata, kind="audit", key=key), evaluate=evaluate)
