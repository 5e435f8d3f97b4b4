"""What inspection found: the figures that are made of it, as JSON and as lines for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.evaluation import statistics
from laconic.evaluation.inspection.dataset import DatasetInspection
from laconic.evaluation.inspection.interventions import InterventionSpec
from laconic.evaluation.inspection.question import QuestionInspection
from laconic.evaluation.report.runs_table import format_interval, format_percent
from laconic.evaluation.statistics import Difference, Estimate

BASELINE_LABELS = {"chain": "with the chain", "kept": "with the tokens kept of it"}


@dataclass(frozen=True)
class QuestionSummary:
    """One question, its chain and where that comes from, and what each run makes of it; the first is the one meant."""

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
    """A set of questions, and what each run makes of it; the first is the one meant."""

    name: str
    protocol: AnswerProtocol
    majority_baseline: tuple[str, float]
    runs: Sequence[DatasetInspection]
    notes: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()

    @property
    def num_questions(self) -> int:
        """How many questions were asked."""
        return len(self.runs[0].baseline.is_correct)


class InterventionEffect(NamedTuple):
    """An edit of one run: its accuracy, the paired change, whether that may be called one, the share of answers that
    became the donor's (of other edits than swap: that would be its donor's, by chance), and the change less that of
    the first run."""

    spec: InterventionSpec
    accuracy: Estimate
    change: Difference
    is_significant: bool
    donor_share: Estimate | None
    difference_to_first: Difference | None


def compute_effects(
    run: DatasetInspection, first: DatasetInspection | None, protocol: AnswerProtocol
) -> list[InterventionEffect]:
    """The edits of a run, with Holm's correction over them; `first` is the run that it is compared with."""
    plain = run.baseline.correct
    each = [statistics.paired_difference(answered.correct, plain) for answered in run.by_intervention.values()]
    claims = statistics.find_significant(each)
    made: list[InterventionEffect] = []
    for (key, answered), change, claim in zip(run.by_intervention.items(), each, claims, strict=True):
        became, apart = run.changed_to_donor(key, protocol), None
        if first is not None:
            other = first.by_intervention[key].correct - first.baseline.correct
            apart = statistics.paired_difference(answered.correct - plain, other)
        donor = statistics.estimate_proportion(became) if len(became) else None
        made.append(
            InterventionEffect(key, statistics.estimate_proportion(answered.correct), change, claim, donor, apart)
        )
    return made


def chain_word_rates(run: DatasetInspection) -> dict[str, dict[str, float | int]]:
    """How far thoughts name their chain, for right answers, for wrong ones, and for all; those with a chain count."""
    right, there = run.baseline.correct > 0, ~np.isnan(run.chain_word_rates[:, 0])
    found: dict[str, dict[str, float | int]] = {}
    for name, some in (("right", there & right), ("wrong", there & ~right), ("all", there)):
        if some.any():
            spoken, elsewhere, common = (float(x) for x in run.chain_word_rates[some].mean(0))
            found[name] = {"questions": int(some.sum()), "spoken": spoken, "elsewhere": elsewhere, "common": common}
    return found


def estimate_map_statistics(run: DatasetInspection) -> dict[tuple[str, str], tuple[Estimate, Estimate]]:
    """Contrast and look-ahead of each map, mean over questions with their intervals."""
    return {
        key: (statistics.estimate_mean(x[:, 0]), statistics.estimate_mean(x[:, 1]))
        for key, x in run.map_statistics.items()
    }


def list_caveats(summary: DatasetSummary) -> list[str]:
    """What the accuracy itself does not allow to say, then the notes on the set."""
    made: list[str] = []
    for side in summary.runs:
        base = statistics.estimate_proportion(side.baseline.correct)
        if base.low <= summary.majority_baseline[1]:
            made.append(
                f"{side.name} is not shown to be above the majority floor ({format_percent(base.mean)} % right, floor "
                f"{format_percent(summary.majority_baseline[1])} %): where little is right, that an edit costs nothing says nothing."
            )
    return [*made, *summary.notes]


def spec_to_json(spec: InterventionSpec) -> dict[str, Any]:
    """An intervention as JSON holds it; slots count from 1."""
    at = None if spec.slots is None else [m + 1 for m in spec.slots]
    return {"edit": spec.kind, "where": spec.target, "slots": at}


def summary_to_json(summary: QuestionSummary | DatasetSummary) -> dict[str, Any]:
    """All figures as JSON holds them."""
    return question_to_json(summary) if isinstance(summary, QuestionSummary) else dataset_to_json(summary)


def question_to_json(summary: QuestionSummary) -> dict[str, Any]:
    """One question."""
    about = {
        "question": summary.text,
        "chain": summary.chain,
        "chain_source": summary.chain_source,
        "gold": summary.gold,
    }
    return {
        "schema": 1,
        **about,
        "teacher": summary.teacher_output,
        "runs": [
            {
                "run": side.name,
                "method": side.method,
                "answer": side.answer,
                "passes": [[[g._asdict() for g in slot] for slot in row] for row in side.lens.passes],
                "spoken": side.lens.share_in_chain,
                "common": side.lens.lcs_ratio,
                "matched": side.matched_layers,
                "maps": [map._asdict() for map in side.maps],
                "token_classes": side.token_classes,
                "selector": side.policy,
                "scores": side.scores and side.scores._asdict(),
                "kept": {each.name: each.mask.astype(int).tolist() for each in side.selections},
                "edits": [spec_to_json(e.spec) | {"answer": e.answer, "donor": e.donor_answer} for e in side.effects],
                "alone": [
                    spec_to_json(e.spec) | {"answer": e.answer, "donor": e.donor_answer} for e in side.slot_effects
                ],
            }
            for side in summary.runs
        ],
        "notes": list(summary.notes),
    }


def dataset_to_json(summary: DatasetSummary) -> dict[str, Any]:
    """A set."""
    first = summary.runs[0]
    floor = {"answer": summary.majority_baseline[0], "share": summary.majority_baseline[1]}
    about = {"set": summary.name, "questions": summary.num_questions, "protocol": summary.protocol.name, "floor": floor}
    return {
        "schema": 1,
        **about,
        "runs": [
            {
                "run": side.name,
                "method": side.method,
                "accuracy": statistics.estimate_proportion(side.baseline.correct)._asdict(),
                "edits": [
                    spec_to_json(c.spec)
                    | {
                        "accuracy": c.accuracy._asdict(),
                        "change": c.change._asdict() | {"claim": c.is_significant},
                        "became_donors": c.donor_share and c.donor_share._asdict(),
                        "less_first": c.difference_to_first and c.difference_to_first._asdict(),
                    }
                    for c in compute_effects(side, None if side is first else first, summary.protocol)
                ],
                "rounds": {
                    str(n): statistics.estimate_proportion(x.correct)._asdict() for n, x in side.by_iterations.items()
                },
                "trained_rounds": side.trained_iterations,
                "words": chain_word_rates(side),
                "likeness": [
                    {"what": what, "against": against, "contrast": a._asdict(), "ahead": b._asdict()}
                    for (what, against), (a, b) in estimate_map_statistics(side).items()
                ],
                "near": [
                    {"what": what, "map": map.tolist(), "questions": side.num_full_chains}
                    for (what, _), map in side.mean_maps.items()
                ],
                "selectors": [habit._asdict() for habit in side.selector_statistics],
                "kept_whole": side.num_unreduced_chains,
            }
            for side in summary.runs
        ],
        "notes": list_caveats(summary),
    }


def format_summary(summary: QuestionSummary | DatasetSummary) -> str:
    """What a terminal shows."""
    return "\n".join(format_question(summary) if isinstance(summary, QuestionSummary) else format_dataset(summary))


def format_question(summary: QuestionSummary) -> list[str]:
    """One question in lines."""
    lines = [summary.text, f"chain, {summary.chain_source}: {''.join(summary.chain) or 'none'}"]
    if summary.teacher_output is not None:
        lines.append(f"the teacher writes: {summary.teacher_output}")
    for side in summary.runs:
        lines += [
            "",
            f"{side.name} ({side.method}) answers {side.answer.strip()}{correctness_suffix(side.answer, summary)}",
        ]
        for name, row in zip(name_passes(side), side.lens.passes, strict=True):
            lines.append(f"  {name:<13}" + " ".join(f"{slot[0].token.strip() or '␣'}" for slot in row))
        if summary.chain:
            lines.append(
                f"  {format_percent(side.lens.share_in_chain)} % of the slots name a word of the chain; in order, "
                f"{format_percent(side.lens.lcs_ratio)} % of it"
            )
        lines += [
            f"  {map.space} {BASELINE_LABELS[map.baseline]}: diagonal less rest {map.diagonal_contrast:+.3f}, looking ahead "
            f"{format_percent(map.look_ahead)} %"
            for map in side.maps
        ]
        lines += [
            f"  {e.spec.kind} in {e.spec.target}: {e.answer.strip()}"
            + (f" (the donor's is {e.donor_answer.strip()})" if e.donor_answer else "")
            for e in side.effects
        ]
    return [*lines, "", *summary.notes]


def format_dataset(summary: DatasetSummary) -> list[str]:
    """A set in lines."""
    first = summary.runs[0]
    floor = f'majority floor {format_percent(summary.majority_baseline[1])} % (always "{summary.majority_baseline[0]}")'
    lines = [f"{summary.num_questions:,} questions of {summary.name}, judged by {summary.protocol.name}; {floor}"]
    for side in summary.runs:
        base = statistics.estimate_proportion(side.baseline.correct)
        lines += ["", f"{side.name} ({side.method}): {format_percent(base.mean)} % right ({format_interval(base)})"]
        for c in compute_effects(side, None if side is first else first, summary.protocol):
            became = (
                f"; {format_percent(c.donor_share.mean)} % become the donor's"
                if c.donor_share and c.spec.kind == "swap"
                else ""
            )
            apart = (
                f"; less {first.name}'s: {format_difference(c.difference_to_first)}" if c.difference_to_first else ""
            )
            where = f"{c.spec.kind} in {c.spec.target}"
            sentence = statistics.describe_difference(c.change, c.is_significant)
            lines.append(f"  {where:<18}{format_percent(c.accuracy.mean):>6} %  {sentence}{became}{apart}")
        swept = ", ".join(f"{n}: {format_percent(float(x.correct.mean()))} %" for n, x in side.by_iterations.items())
        lines += [f"  right by rounds: {swept}"] if swept else []
        lines += [
            f"  {name} answers ({x['questions']}): {format_percent(x['spoken'])} % of slots name a word of the chain, "
            f"{format_percent(x['elsewhere'])} % one of another question's; in order, {format_percent(x['common'])} % of the chain"
            for name, x in chain_word_rates(side).items()
        ]
    return [*lines, "", *list_caveats(summary)]


def correctness_suffix(answer: str, summary: QuestionSummary) -> str:
    """Whether an answer is the one given, by the protocol."""
    if summary.gold is None:
        return ""
    prediction = summary.protocol.extract(answer)
    right = prediction is not None and summary.protocol.is_correct(prediction, summary.gold)
    return ", right" if right else f", asked was {summary.gold.strip()}"


def name_passes(run: QuestionInspection) -> list[str]:
    """What the passes over the slots are called; thoughts made one after the other have one."""
    rounds = [f"round {t}" for t in range(1, len(run.lens.passes))]
    return ["in turn"] if run.num_iterations is None else ["placeholders", *rounds]


def format_difference(difference: Difference) -> str:
    """A difference in points with its interval."""
    low, high = statistics.format_points(difference.low), statistics.format_points(difference.high)
    return f"{statistics.format_points(difference.mean)} ({low} to {high})"
