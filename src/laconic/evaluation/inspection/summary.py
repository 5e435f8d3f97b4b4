"""Results of an inspection: effects of interventions with their significance, as JSON and as text for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.evaluation import statistics
from laconic.evaluation.inspection.dataset import DatasetInspection
from laconic.evaluation.inspection.interventions import InterventionSpec
from laconic.evaluation.inspection.kv_similarity import CHAIN, SELECTED
from laconic.evaluation.inspection.question import QuestionInspection
from laconic.evaluation.paired_proportions import compare_answers
from laconic.evaluation.reasoning.evaluate import MajorityBaseline
from laconic.evaluation.statistics import Difference, Estimate
from laconic.evaluation.tables import figures_to_json, format_percent

BASELINE_LABELS = {CHAIN: "with the chain", SELECTED: "with the selected tokens"}
SIMILARITY_TERMS = (
    "diagonal contrast: mean similarity of latent m and token m, minus that of all other pairs; look-ahead: share of "
    "latents that are most similar to a token after the one with their own index"
)


@dataclass(frozen=True)
class QuestionSummary:
    """One question as each run answers it; the first run is the inspected one, the others are baselines.

    `gold` is the gold answer, if known; `teacher_output` is what the run's teacher generated, if the chain is its own.
    """

    text: str
    chain_source: str
    chain: tuple[str, ...]
    gold: str | None
    teacher_output: str | None
    runs: Sequence[QuestionInspection]
    protocol: AnswerProtocol
    notes: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class DatasetSummary:
    """A set of questions as each run answers it; the first run is the inspected one."""

    name: str
    protocol: AnswerProtocol
    runs: Sequence[DatasetInspection]
    notes: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()

    @property
    def num_questions(self) -> int:
        return len(self.runs[0].baseline.records)

    @property
    def majority_baseline(self) -> MajorityBaseline:
        return self.runs[0].baseline.majority_baseline


class InterventionEffect(NamedTuple):
    """The effect of an intervention on one run.

    The change is paired with the accuracy without it, and significant after Holm's correction. `donor_share` is the
    share of answers that become the donor's; for kinds other than "swap" that is chance. `difference_to_first` is the
    change minus that of the first run.
    """

    spec: InterventionSpec
    accuracy: Estimate
    change: Difference
    is_significant: bool
    donor_share: Estimate | None
    difference_to_first: Difference | None


def compute_effects(
    run: DatasetInspection, first: DatasetInspection | None, protocol: AnswerProtocol
) -> list[InterventionEffect]:
    """Return the effects of all interventions on a run, with Holm's correction, and how they differ from `first`'s."""
    baseline = run.baseline.correct
    changes = [compare_answers(log.correct, baseline) for log in run.by_intervention.values()]
    significant = statistics.find_significant(changes)
    effects: list[InterventionEffect] = []
    for (spec, log), change, is_clear in zip(run.by_intervention.items(), changes, significant, strict=True):
        to_donor, difference = run.changed_to_donor(spec, protocol), None
        if first is not None:
            other = first.by_intervention[spec].correct - first.baseline.correct
            difference = statistics.paired_difference(log.correct - baseline, other)
        donor_share = statistics.estimate_proportion(to_donor) if len(to_donor) else None
        accuracy = statistics.estimate_proportion(log.correct)
        effects.append(InterventionEffect(spec, accuracy, change, is_clear, donor_share, difference))
    return effects


def effects_per_run(summary: DatasetSummary) -> list[list[InterventionEffect]]:
    """Return the effects on every run; those after the first are compared with it."""
    first = summary.runs[0]
    return [compute_effects(run, None if run is first else first, summary.protocol) for run in summary.runs]


def chain_word_rates(run: DatasetInspection) -> dict[str, dict[str, float | int]]:
    """Return how often latents name tokens of their chain, for correct answers, wrong ones and all."""
    is_correct, has_chain = run.baseline.correct > 0, ~np.isnan(run.chain_word_rates[:, 0])
    rates: dict[str, dict[str, float | int]] = {}
    for name, some in (("correct", has_chain & is_correct), ("wrong", has_chain & ~is_correct), ("all", has_chain)):
        if some.any():
            in_chain, other, lcs = (float(x) for x in run.chain_word_rates[some].mean(0))
            rates[name] = {
                "questions": int(some.sum()),
                "share_in_chain": in_chain,
                "share_in_other_chain": other,
                "lcs_ratio": lcs,
            }
    return rates


def list_caveats(summary: DatasetSummary) -> list[str]:
    """Return which conclusions the accuracy does not support, then the notes on the set."""
    floor, caveats = summary.majority_baseline.share, list[str]()
    for run in summary.runs:
        accuracy = statistics.estimate_proportion(run.baseline.correct)
        if accuracy.low <= floor:
            caveats.append(
                f"{run.name} is not shown to be above the majority baseline ({format_percent(accuracy.mean)} % "
                f"correct, baseline {format_percent(floor)} %): an intervention that costs nothing then says nothing."
            )
    return [*caveats, *summary.notes]


def summary_to_json(summary: QuestionSummary | DatasetSummary) -> dict[str, Any]:
    is_question = isinstance(summary, QuestionSummary)
    return figures_to_json(question_to_json(summary) if is_question else inspection_to_json(summary))


def question_to_json(summary: QuestionSummary) -> dict[str, Any]:
    return {
        "schema": 3,
        "question": summary.text,
        "chain": summary.chain,
        "chain_source": summary.chain_source,
        "gold": summary.gold,
        "teacher_output": summary.teacher_output,
        "runs": [
            {
                "run": run.name,
                "method": run.method,
                "answer": run.answer,
                "passes": run.lens.passes,
                "share_in_chain": run.lens.share_in_chain,
                "lcs_ratio": run.lens.lcs_ratio,
                "matched_layers": run.matched_layers,
                "maps": run.maps,
                "token_classes": run.token_classes,
                "policy": run.policy,
                "scores": run.scores,
                "selections": {selection.policy: selection.mask.astype(int).tolist() for selection in run.selections},
                "effects": [
                    {
                        "intervention": e.spec.kind,
                        "target": e.spec.target,
                        "answer": e.answer,
                        "donor_answer": e.donor_answer,
                    }
                    for e in run.effects
                ],
            }
            for run in summary.runs
        ],
        "notes": list(summary.notes),
    }


def inspection_to_json(summary: DatasetSummary) -> dict[str, Any]:
    return {
        "schema": 3,
        "dataset": summary.name,
        "questions": summary.num_questions,
        "protocol": summary.protocol.name,
        "majority_baseline": summary.majority_baseline,
        "runs": [
            {
                "run": run.name,
                "method": run.method,
                "accuracy": statistics.estimate_proportion(run.baseline.correct),
                "effects": [effect_to_json(effect) for effect in effects],
                "iterations": {
                    str(n): statistics.estimate_proportion(log.correct) for n, log in run.by_iterations.items()
                },
                "trained_iterations": run.trained_iterations,
                "chain_words": chain_word_rates(run),
            }
            for run, effects in zip(summary.runs, effects_per_run(summary), strict=True)
        ],
        "notes": list_caveats(summary),
    }


def effect_to_json(effect: InterventionEffect) -> dict[str, Any]:
    return {
        "intervention": effect.spec.kind,
        "target": effect.spec.target,
        "accuracy": effect.accuracy,
        "change": effect.change._asdict() | {"is_significant": effect.is_significant},
        "donor_share": effect.donor_share,
        "difference_to_first": effect.difference_to_first,
    }


def format_inspection(summary: QuestionSummary) -> str:
    lines = [summary.text, f"chain, {summary.chain_source}: {join_words(''.join(summary.chain)) or 'none'}"]
    if summary.teacher_output is not None:
        lines.append(f"the teacher writes: {join_words(summary.teacher_output)}")
    for run in summary.runs:
        lines += [
            "",
            f"{run.name} ({run.method}) answers {run.answer.strip()}{correctness_suffix(run.answer, summary)}",
        ]
        for name, row in zip(name_passes(run), run.lens.passes, strict=True):
            lines.append(f"  {name:<13}" + " ".join(slot[0].token.strip() or "␣" for slot in row))
        if summary.chain:
            lines.append(
                f"  {format_percent(run.lens.share_in_chain)} % of the latents name a token of the chain; in order, "
                f"{format_percent(run.lens.lcs_ratio)} % of it"
            )
        lines += [
            f"  {map.space} {BASELINE_LABELS[map.baseline]}: diagonal contrast {map.diagonal_contrast:+.3f}, "
            f"look-ahead {format_percent(map.look_ahead)} %"
            for map in run.maps
        ]
        if run.maps:
            lines.append(f"  {SIMILARITY_TERMS}")
        lines += [
            f"  {effect.spec.kind} in {effect.spec.target}: {effect.answer.strip()}"
            + (f" (the donor's answer is {effect.donor_answer.strip()})" if effect.donor_answer else "")
            for effect in run.effects
        ]
    return "\n".join([*lines, "", *summary.notes])


def join_words(text: str) -> str:
    return " ".join(text.split())


def correctness_suffix(answer: str, summary: QuestionSummary) -> str:
    """Return whether an answer matches the gold one; empty if that is unknown."""
    if summary.gold is None:
        return ""
    prediction = summary.protocol.extract(answer)
    is_correct = prediction is not None and summary.protocol.is_correct(prediction, summary.gold)
    return ", correct" if is_correct else f", expected {summary.gold.strip()}"


def name_passes(run: QuestionInspection) -> list[str]:
    """Return a name for each pass over the latents; sequential latents have one."""
    iterations = [f"iteration {t}" for t in range(1, len(run.lens.passes))]
    return ["sequential"] if run.num_iterations is None else ["placeholders", *iterations]
