"""Answer every question as trained and under each condition of an audit, as a job whose results are stored."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic.batches import ReasoningBatch
from laconic.errors import InputError
from laconic.evaluation.audit.verdict import AS_TRAINED
from laconic.evaluation.inspection import interventions
from laconic.evaluation.inspection.dataset import load_batch, reference_means_of
from laconic.evaluation.inspection.inspected_run import InspectedRun
from laconic.evaluation.inspection.interventions import InterventionInputs, InterventionSpec, ReferenceMeans
from laconic.evaluation.paired_proportions import min_questions
from laconic.evaluation.reasoning.evaluate import AnswerRecord, match_answers
from laconic.evaluation.reasoning.question_sets import QuestionSet
from laconic.evaluation.reasoning.run import budget_warnings, decoding_for, gold_hash
from laconic.evaluation.results_store import EvalItem, EvalJob, ReportFraction
from laconic.evaluation.suite import describe_evaluation, run_name
from laconic.experiment.from_recipe.cost import count_cache_bytes
from laconic.experiment.load_run import LoadedRun
from laconic.latent.rollout import LatentRollout

AUDIT_SEED = 0  # of donors, shuffles and noise


class AuditCondition(NamedTuple):
    """A change of the thoughts: its key in stored results, and what returns the rollout before the answers."""

    name: str
    apply: Callable[[InspectedRun, ReasoningBatch, InterventionInputs], LatentRollout]


def replace_thoughts(spec: InterventionSpec) -> AuditCondition:
    """Replace the thoughts by an intervention of `laconic inspect`: as vectors, or as keys and values in the cache."""
    return AuditCondition(
        f"{spec.kind} {spec.target}",
        lambda run, batch, inputs: interventions.run_intervention(run, batch, spec, inputs),
    )


def cut_thoughts(n: int) -> AuditCondition:
    """Cut all thoughts but the first `n` off the cache."""

    def apply(run: InspectedRun, batch: ReasoningBatch, inputs: InterventionInputs) -> LatentRollout:
        rollout = inputs.rollout
        return rollout._replace(cache=rollout.cache.crop(rollout.cache.S - rollout.latents.shape[1] + n))

    return AuditCondition(f"first {n}", apply)


def limit_iterations(n: int) -> AuditCondition:
    """Think with fewer Jacobi iterations than in training; after 0, the thoughts are the placeholders."""
    return AuditCondition(f"{n} iterations", lambda run, batch, inputs: run.think(batch, iterations=n))


def list_conditions(num_latents: int, num_iterations: int | None) -> list[AuditCondition]:
    """Return the conditions of an audit, for M thoughts and T Jacobi iterations of training, if there are any."""
    replaced = map(replace_thoughts, interventions.list_interventions(num_latents))
    lengths = dict.fromkeys((num_latents // 2, 0))
    iterations = dict.fromkeys((num_iterations // 2, 0)) if num_iterations else ()
    return [*replaced, *map(cut_thoughts, lengths), *map(limit_iterations, iterations)]


def build_audit_job(run: LoadedRun, questions: QuestionSet, *, limit: int | None, batch_size: int) -> EvalJob:
    """Return the audit of a run on a question set that was loaded with `limit`.

    Raises:
        InputError: There are too few questions for any effect to be significant.
        UsageError: The run's method has no latents, or this step of the run has none yet.
    """
    decoding = decoding_for(run, questions)
    inspected = InspectedRun(run, run_name(run.folder), decoding)
    first = load_batch(inspected, questions.source, np.array([0]))
    with torch.no_grad():
        conditions = list_conditions(inspected.think(first).latents.shape[1], inspected.num_iterations)
    fewest = min_questions(len(conditions))
    if len(questions.examples) < fewest:
        raise InputError(
            f"{questions.name}: {len(questions.examples)} questions; with {len(conditions)} tests no effect could "
            f"be significant on fewer than {fewest}; raise --limit or use a larger --task, best with 200 or more"
        )
    donors = interventions.choose_donors(len(questions.examples), AUDIT_SEED).tolist()
    figures = {"protocol": questions.protocol.name, "bytes_per_position": count_cache_bytes(run.parts.decoder, 1)}

    @cache
    def means() -> ReferenceMeans:
        return reference_means_of(inspected, questions.source, batch_size)

    @torch.no_grad()
    def evaluate(indices: Sequence[int], report: ReportFraction) -> list[list[EvalItem]]:
        rows = list(indices)
        return [[x] for x in audit_batch(inspected, questions, conditions, donors, rows, means(), report)]

    key = {
        "data": questions.source.fingerprint,
        "gold": gold_hash(questions),
        "max_tokens": str(decoding.max_tokens),
        "conditions": ", ".join(condition.name for condition in conditions),
    }
    variant = {"protocol": questions.protocol.name}
    return EvalJob(
        describe_evaluation(run, "audit", questions.name, limit=limit, variant=variant, key=key),
        len(questions.examples),
        evaluate,
        batch_size,
        questions.order,
        lambda _: figures,
        (*questions.notes, *budget_warnings(run, questions)),
        questions,
        reports_fraction=True,
    )


def audit_batch(
    run: InspectedRun,
    questions: QuestionSet,
    conditions: Sequence[AuditCondition],
    donors: Sequence[int],
    rows: list[int],
    means: ReferenceMeans,
    report: ReportFraction,
) -> list[EvalItem]:
    """Return the answers to some questions as trained and under each condition; `report` the share that is done.

    An item has the whole record of the answer as trained. Of the other answers it has the text, the prediction and
    whether it is correct, and with a swap the id of the question that the thoughts come from.
    """
    examples, indices = [questions.examples[i] for i in rows], np.array(rows)
    donor_rows = [donors[i] for i in rows]
    batch = load_batch(run, questions.source, indices)
    donor_rollout = run.think(load_batch(run, questions.source, np.array(donor_rows)), record_passes=True)
    run = run.with_questions(batch)
    rollout = run.think(batch, record_passes=True)
    inputs = InterventionInputs(rollout, indices, AUDIT_SEED, donor_rollout, means)

    def answer_after(rollout: LatentRollout) -> list[AnswerRecord]:
        return match_answers(run.answer(batch, rollout), examples, questions.protocol)

    trained = answer_after(rollout)
    answers: list[dict[str, Mapping[str, Any]]] = [dict(r.to_item(AS_TRAINED).conditions) for r in trained]
    for n, condition in enumerate(conditions, 1):
        report(n / (len(conditions) + 1))
        changed = answer_after(condition.apply(run, batch, inputs))
        for by_condition, record, donor in zip(answers, changed, donor_rows, strict=True):
            metrics = {"output": record.output, "prediction": record.prediction, "is_correct": record.is_correct}
            donor_id = {"donor": questions.examples[donor].id} if condition.name.startswith("swap") else {}
            by_condition[condition.name] = metrics | donor_id
    return [EvalItem(example.id, by_condition) for example, by_condition in zip(examples, answers, strict=True)]
