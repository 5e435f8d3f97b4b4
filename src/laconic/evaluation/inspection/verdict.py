"""Effects of changed thoughts with Holm's correction, as a table, and the verdict: whether the answers use them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from laconic.console import pluralize
from laconic.evaluation import statistics
from laconic.evaluation.reasoning.table import ReasoningRow, ReasoningTable, pair_seeds
from laconic.evaluation.tables import Column, Table, build_table, figures_to_json, format_interval, format_percent

AS_TRAINED = "as trained"  # name of the condition without a change
TARGETS_NOTE = (
    "vectors: replaced before the model reads them, in every iteration; keys and values: replaced in the finished cache"
)
MIN_P = 0.0001  # a smaller p-value is printed as a bound
VerdictName = Literal["used", "positions", "presence", "not shown", "undetermined"]
SWAPS = ("swap vectors", "swap cache")
LABELS = {
    "swap": "another question's thoughts",
    "mean": "mean thoughts",
    "shuffle": "shuffled thoughts",
    "noise": "noise of the same norms",
    "zero": "zeros",
    "vectors": "vectors",
    "cache": "keys and values",
}


class ConditionEffect(NamedTuple):
    """The effect of a condition on a run.

    The change of the accuracy is paired by question; its p-value is adjusted by Holm's correction over all tests of the
    audit. `changed_share` is the share of the answers that differ from those as trained. With a swap, `donor_share` is
    the share of questions that get the donor's answer, among those whose donor has another one.
    """

    name: str
    accuracy: statistics.Estimate
    change: statistics.Difference
    adjusted_p: float
    is_significant: bool
    changed_share: float
    donor_share: float | None


class ControlComparison(NamedTuple):
    """The audited run minus a control on the same questions; the other attributes are those of an effect."""

    name: str
    accuracy: statistics.Estimate
    difference: statistics.Difference
    adjusted_p: float
    is_significant: bool


class Verdict(NamedTuple):
    """The verdict of an audit: a name, and one sentence that gives its figures."""

    name: VerdictName
    text: str


@dataclass(frozen=True)
class ThoughtAudit:
    """The answers of a run as trained and under all conditions, and those of its controls as trained."""

    row: ReasoningRow
    controls: Sequence[ReasoningRow] = ()

    def __post_init__(self) -> None:
        ReasoningTable([self.row, *self.controls])

    @property
    def conditions(self) -> list[str]:
        return [name for name in self.row.items_by_seed[0][0].conditions if name != AS_TRAINED]

    @property
    def num_tests(self) -> int:
        """Number of tests that Holm's correction is over."""
        return len(self.conditions) + len(self.controls)

    @cached_property
    def tests(self) -> list[tuple[statistics.Difference, float, bool]]:
        """The test of each condition, then of each control: difference, adjusted p-value, whether it is significant."""
        pairs = [(self.correct_under(name), self.row.correct) for name in self.conditions]
        pairs += [pair_seeds(self.row, control) for control in self.controls]
        differences = [statistics.compare_answers(*pair) for pair in pairs]
        adjusted = statistics.holm_adjust([difference.p for difference in differences])
        return list(zip(differences, adjusted, statistics.find_significant(differences), strict=True))

    @cached_property
    def effects(self) -> list[ConditionEffect]:
        effects: list[ConditionEffect] = []
        for name, test in zip(self.conditions, self.tests, strict=False):
            accuracy = statistics.estimate_proportion(self.correct_under(name))
            effects.append(ConditionEffect(name, accuracy, *test, self.changed_share(name), self.donor_share(name)))
        return effects

    @cached_property
    def comparisons(self) -> list[ControlComparison]:
        tests = self.tests[len(self.conditions) :]
        return [ControlComparison(x.run, x.accuracy, *test) for x, test in zip(self.controls, tests, strict=True)]

    def correct_under(self, condition: str) -> statistics.ScoreMatrix:
        """Return 1 for each correct answer under a condition, [seeds, questions]."""
        rows = [[item.conditions[condition]["is_correct"] for item in items] for items in self.row.items_by_seed]
        return np.array(rows, dtype=np.float64)

    def changed_share(self, condition: str) -> float:
        pairs = [(item.conditions[condition], item.shared) for items in self.row.items_by_seed for item in items]
        return float(np.mean([changed["prediction"] != trained["prediction"] for changed, trained in pairs]))

    def donor_share(self, condition: str) -> float | None:
        """Return `ConditionEffect.donor_share`; None without a swap, or if all donors have the same answer."""
        changed: list[bool] = []
        for items in self.row.items_by_seed if condition in SWAPS else ():
            trained = {item.id: item.shared["prediction"] for item in items}
            for item in items:
                donor = trained[item.conditions[condition]["donor"]]
                if donor not in (None, trained[item.id]):
                    changed.append(item.conditions[condition]["prediction"] == donor)
        return float(np.mean(changed)) if changed else None

    @property
    def swaps(self) -> tuple[ConditionEffect, ConditionEffect]:
        by_name = {effect.name: effect for effect in self.effects}
        return by_name[SWAPS[0]], by_name[SWAPS[1]]

    @property
    def detectable_loss(self) -> float:
        """The loss of accuracy by a swap that an audit of this size shows in at least four of five cases."""
        n = self.row.accuracy.num_items
        losses: list[float] = []
        for effect in self.swaps:
            gains = float((self.correct_under(effect.name) > self.row.correct).mean())
            losses.append(statistics.detectable_loss(n, self.num_tests, gains))
            if effect.change.num_seeds > 1:
                losses.append(statistics.detectable_loss_over_seeds(effect.change, self.num_tests))
        return max(losses)

    @property
    def verdict(self) -> Verdict:
        name, text = judge_effects(self)
        return Verdict(name, f"{text}{judge_controls(self.comparisons, name)}.")


def label_condition(name: str) -> tuple[str, str]:
    first, _, second = name.partition(" ")
    if first in LABELS:
        return LABELS[first], LABELS[second]
    if second == "iterations":
        return "1 iteration" if first == "1" else name, "vectors"
    count = {"0": "no thoughts", "1": "first thought only"}.get(second, f"first {second} thoughts only")
    return count, "keys and values"


def judge_effects(audit: ThoughtAudit) -> tuple[VerdictName, str]:
    (vectors, cache), floor = audit.swaps, audit.row.majority_baseline.share
    accuracy = audit.row.accuracy
    others = [effect for effect in audit.effects if effect.is_significant]
    if vectors.is_significant:
        return "used", (
            "the answers use what the thoughts say about the question: with another question's thoughts accuracy "
            f"{describe_change(vectors.change)}, from {format_percent(accuracy.mean)} % to "
            f"{format_percent(vectors.accuracy.mean)} %"
        )
    if cache.is_significant:
        return "positions", (
            "the answers use what the model computes at the positions of the thoughts, but no use of the vectors is "
            f"shown, as with pause tokens: with another question's keys and values there, accuracy "
            f"{describe_change(cache.change)}; another question's vectors cost {describe_bound(vectors)}"
        )
    loss = audit.detectable_loss
    bound = max((vectors, cache), key=lambda effect: -effect.change.low)
    if others:
        losses = [effect for effect in others if effect.change.mean < 0]
        cost = f"another question's thoughts cost {describe_bound(bound)}"
        if losses:
            return "presence", (
                f"the answers need something at the positions of the thoughts ({describe_effect(losses)}), but no use "
                f"of what it says about the question is shown: {cost}"
            )
        return "not shown", (
            f"no use of the thoughts is shown; they make the answers worse ({describe_effect(others)}): {cost}"
        )
    changed = max(vectors.changed_share, cache.changed_share)
    if accuracy.low <= floor or accuracy.mean <= loss:
        shares = (
            f"it answers {format_percent(accuracy.mean)} % correctly, always giving the most frequent answer "
            f"{format_percent(floor)} %"
        )
        if changed:
            return "undetermined", (
                f"the run has not learned enough to tell: {shares}; it has little accuracy to lose, though another "
                f"question's thoughts change {format_percent(changed)} % of its answers"
            )
        return "not shown", (
            f"no use of the thoughts is shown: another question's thoughts change none of its {accuracy.num_items} "
            f"answers; but the run has learned little: {shares}"
        )
    return "not shown", (
        "no use of the thoughts is shown: no intervention changes accuracy significantly, and another question's "
        f"thoughts cost {describe_bound(bound)}; at least four of five audits of this size would show a loss of "
        f"{format_percent(loss)} points or more"
    )


def judge_controls(comparisons: Sequence[ControlComparison], name: VerdictName) -> str:
    """Return the rest of the sentence: how the run compares with its controls; empty without any."""
    better, worse, same = "more accurate than", "less accurate than", "not shown to differ in accuracy from"
    names: dict[str, list[str]] = {better: [], worse: [], same: []}
    for c in comparisons:
        if not c.is_significant:
            names[same].append(c.name)
        else:
            names[better if c.difference.mean > 0 else worse].append(c.name)
    parts = [f"{text} {' and '.join(controls)}" for text, controls in names.items() if controls]
    conjunction = "but" if name == "used" and not names[better] else "and"
    return f"; {conjunction} the run is {', '.join(parts)}" if parts else ""


def describe_effect(effects: Sequence[ConditionEffect]) -> str:
    """Return the clearest of some significant effects."""
    effect = min(effects, key=lambda effect: effect.change.p)
    label, place = label_condition(effect.name)
    replaced = f"{label} as {place}" if effect.name.partition(" ")[0] in LABELS else label
    return f"with {replaced}, accuracy {describe_change(effect.change)}"


def describe_change(change: statistics.Difference) -> str:
    """Return a significant change as a verb with points and the interval."""
    low, high = sorted((abs(change.low), abs(change.high)))
    verb = "falls" if change.mean < 0 else "rises"
    points = format_percent(abs(change.mean))
    return f"{verb} by {points} points (95 % interval {format_percent(low)} to {format_percent(high)})"


def describe_bound(effect: ConditionEffect) -> str:
    """Return the largest loss that the interval of an effect leaves possible."""
    return f"at most {format_percent(max(0.0, -effect.change.low))} points (95 % interval)"


def audit_to_json(audit: ThoughtAudit) -> dict[str, Any]:
    return {
        "questions": audit.row.accuracy.num_items,
        "seeds": list(audit.row.seeds),
        "protocol": audit.row.protocol,
        "majority_baseline": audit.row.majority_baseline._asdict(),
        "accuracy": audit.row.accuracy._asdict(),
        "conditions": figures_to_json(audit.effects),
        "controls": figures_to_json(audit.comparisons),
        "num_tests": audit.num_tests,
        "detectable_loss": audit.detectable_loss,
        "verdict": audit.verdict._asdict(),
    }


def format_p(p: float) -> str:
    return f"< {MIN_P}" if p < MIN_P else f"{p:.3g}"


EFFECT_COLUMNS = (
    Column("", lambda effect: label_condition(effect.name)[0], is_text=True),
    Column("in", lambda effect: label_condition(effect.name)[1], is_text=True),
    Column("correct", lambda effect: f"{format_percent(effect.accuracy.mean)} %"),
    Column("change", lambda effect: statistics.format_difference(effect.change)),
    Column("p", lambda effect: format_p(effect.adjusted_p)),
    Column("changed", lambda effect: f"{format_percent(effect.changed_share)} %"),
    Column("donor's", lambda effect: "" if effect.donor_share is None else f"{format_percent(effect.donor_share)} %"),
)


def build_audit_table(audit: ThoughtAudit) -> Table:
    """Return a row as trained, then the conditions, and the controls; a control's change is its accuracy minus ours."""
    table = build_table(EFFECT_COLUMNS, audit.effects)
    accuracy = audit.row.accuracy
    first = [AS_TRAINED, "", f"{format_percent(accuracy.mean)} %", f"({format_interval(accuracy)} %)", "", "", ""]
    controls: list[list[str]] = []
    for control in audit.comparisons:
        d = control.difference
        change = statistics.format_difference(d._replace(mean=-d.mean, low=-d.high, high=-d.low))
        percent = f"{format_percent(control.accuracy.mean)} %"
        controls.append([f"control {control.name}", "", percent, change, format_p(control.adjusted_p), "", ""])
    caption = (
        f"{audit.row.run}: {accuracy.num_items:,} questions of {audit.row.dataset}, "
        f"{pluralize(accuracy.num_seeds, 'seed')}"
    )
    return table._replace(rows=[first, *table.rows, *controls], caption=caption)


def explain_columns(audit: ThoughtAudit) -> list[str]:
    test = statistics.describe_test(audit.row.accuracy.num_seeds)
    return [
        TARGETS_NOTE,
        f"change: in points, paired by question, 95 % interval; p: {test}, Holm's correction over {audit.num_tests} "
        "tests",
        "changed: answers that differ from those as trained; donor's: answers that become the other question's",
    ]
