"""What inspection found: the figures that are made of it, as JSON and as lines for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.edits import Intervention
from laconic.evaluation.looked import Looked
from laconic.evaluation.protocols import Protocol
from laconic.evaluation.report import interval, percent
from laconic.evaluation.statistics import Difference, Estimate
from laconic.evaluation.survey import Survey

AGAINST = {"chain": "with the chain", "kept": "with the tokens kept of it"}


@dataclass(frozen=True)
class Question:
    """One question, its chain and where that comes from, and what each run makes of it; the first is the one meant."""

    text: str
    source: str
    chain: tuple[str, ...]
    gold: str | None
    teacher: str | None
    sides: Sequence[Looked]
    protocol: Protocol
    notes: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Questions:
    """A set of questions, and what each run makes of it; the first is the one meant."""

    name: str
    protocol: Protocol
    floor: tuple[str, float]
    sides: Sequence[Survey]
    notes: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()

    @property
    def count(self) -> int:
        """How many questions were asked."""
        return len(self.sides[0].plain.hits)


class Change(NamedTuple):
    """An edit of one run: its accuracy, the paired change, whether that may be called one, the share of answers that
    became the donor's (of other edits than swap: that would be its donor's, by chance), and the change less that of
    the first run."""

    intervention: Intervention
    found: Estimate
    change: Difference
    claim: bool
    donor: Estimate | None
    apart: Difference | None


def changes(side: Survey, first: Survey | None, protocol: Protocol) -> list[Change]:
    """The edits of a run, with Holm's correction over them; `first` is the run that it is compared with."""
    plain = side.plain.right
    each = [statistics.difference(answered.right, plain) for answered in side.edited.values()]
    claims = statistics.shown(each)
    made: list[Change] = []
    for (key, answered), change, claim in zip(side.edited.items(), each, claims, strict=True):
        became, apart = side.became(key, protocol), None
        if first is not None:
            other = first.edited[key].right - first.plain.right
            apart = statistics.difference(answered.right - plain, other)
        donor = statistics.share(became) if len(became) else None
        made.append(Change(key, statistics.share(answered.right), change, claim, donor, apart))
    return made


def words_of(side: Survey) -> dict[str, dict[str, float | int]]:
    """How far thoughts name their chain, for right answers, for wrong ones, and for all; those with a chain count."""
    right, there = side.plain.right > 0, ~np.isnan(side.reads[:, 0])
    found: dict[str, dict[str, float | int]] = {}
    for name, some in (("right", there & right), ("wrong", there & ~right), ("all", there)):
        if some.any():
            spoken, elsewhere, common = (float(x) for x in side.reads[some].mean(0))
            found[name] = {"questions": int(some.sum()), "spoken": spoken, "elsewhere": elsewhere, "common": common}
    return found


def figures(side: Survey) -> dict[tuple[str, str], tuple[Estimate, Estimate]]:
    """Contrast and look-ahead of each map, mean over questions with their intervals."""
    return {key: (statistics.estimate(x[:, 0]), statistics.estimate(x[:, 1])) for key, x in side.figures.items()}


def limits(found: Questions) -> list[str]:
    """What the accuracy itself does not allow to say, then the notes on the set."""
    made: list[str] = []
    for side in found.sides:
        base = statistics.share(side.plain.right)
        if base.low <= found.floor[1]:
            made.append(
                f"{side.name} is not shown to be above the majority floor ({percent(base.mean)} % right, floor "
                f"{percent(found.floor[1])} %): where little is right, that an edit costs nothing says nothing."
            )
    return [*made, *found.notes]


def edit_json(intervention: Intervention) -> dict[str, Any]:
    """An intervention as JSON holds it; slots count from 1."""
    at = None if intervention.at is None else [m + 1 for m in intervention.at]
    return {"edit": intervention.kind, "where": intervention.where, "slots": at}


def plain(found: Question | Questions) -> dict[str, Any]:
    """All figures as JSON holds them."""
    return plain_question(found) if isinstance(found, Question) else plain_set(found)


def plain_question(found: Question) -> dict[str, Any]:
    """One question."""
    about = {"question": found.text, "chain": found.chain, "chain_source": found.source, "gold": found.gold}
    return {
        "schema": 1,
        **about,
        "teacher": found.teacher,
        "runs": [
            {
                "run": side.name,
                "method": side.method,
                "answer": side.answer,
                "passes": [[[g._asdict() for g in slot] for slot in row] for row in side.words.passes],
                "spoken": side.words.spoken,
                "common": side.words.common,
                "matched": side.matched,
                "maps": [map._asdict() for map in side.maps],
                "token_classes": side.kinds,
                "selector": side.own,
                "scores": side.scores and side.scores._asdict(),
                "kept": {each.name: each.held.astype(int).tolist() for each in side.selections},
                "edits": [edit_json(e.intervention) | {"answer": e.answer, "donor": e.donor} for e in side.effects],
                "alone": [edit_json(e.intervention) | {"answer": e.answer, "donor": e.donor} for e in side.alone],
            }
            for side in found.sides
        ],
        "notes": list(found.notes),
    }


def plain_set(found: Questions) -> dict[str, Any]:
    """A set."""
    first = found.sides[0]
    floor = {"answer": found.floor[0], "share": found.floor[1]}
    about = {"set": found.name, "questions": found.count, "protocol": found.protocol.name, "floor": floor}
    return {
        "schema": 1,
        **about,
        "runs": [
            {
                "run": side.name,
                "method": side.method,
                "accuracy": statistics.share(side.plain.right)._asdict(),
                "edits": [
                    edit_json(c.intervention)
                    | {
                        "accuracy": c.found._asdict(),
                        "change": c.change._asdict() | {"claim": c.claim},
                        "became_donors": c.donor and c.donor._asdict(),
                        "less_first": c.apart and c.apart._asdict(),
                    }
                    for c in changes(side, None if side is first else first, found.protocol)
                ],
                "rounds": {str(n): statistics.share(x.right)._asdict() for n, x in side.swept.items()},
                "trained_rounds": side.trained,
                "words": words_of(side),
                "likeness": [
                    {"what": what, "against": against, "contrast": a._asdict(), "ahead": b._asdict()}
                    for (what, against), (a, b) in figures(side).items()
                ],
                "near": [
                    {"what": what, "map": map.tolist(), "questions": side.filled}
                    for (what, _), map in side.near.items()
                ],
                "selectors": [habit._asdict() for habit in side.habits],
                "kept_whole": side.whole,
            }
            for side in found.sides
        ],
        "notes": limits(found),
    }


def said(found: Question | Questions) -> str:
    """What a terminal shows."""
    return "\n".join(said_question(found) if isinstance(found, Question) else said_set(found))


def said_question(found: Question) -> list[str]:
    """One question in lines."""
    lines = [found.text, f"chain, {found.source}: {''.join(found.chain) or 'none'}"]
    if found.teacher is not None:
        lines.append(f"the teacher writes: {found.teacher}")
    for side in found.sides:
        lines += ["", f"{side.name} ({side.method}) answers {side.answer.strip()}{verdict(side.answer, found)}"]
        for name, row in zip(pass_names(side), side.words.passes, strict=True):
            lines.append(f"  {name:<13}" + " ".join(f"{slot[0].word.strip() or '␣'}" for slot in row))
        if found.chain:
            lines.append(
                f"  {percent(side.words.spoken)} % of the slots name a word of the chain; in order, "
                f"{percent(side.words.common)} % of it"
            )
        lines += [
            f"  {map.what} {AGAINST[map.against]}: diagonal less rest {map.contrast:+.3f}, looking ahead "
            f"{percent(map.ahead)} %"
            for map in side.maps
        ]
        lines += [
            f"  {e.intervention.kind} in {e.intervention.where}: {e.answer.strip()}"
            + (f" (the donor's is {e.donor.strip()})" if e.donor else "")
            for e in side.effects
        ]
    return [*lines, "", *found.notes]


def said_set(found: Questions) -> list[str]:
    """A set in lines."""
    first = found.sides[0]
    floor = f'majority floor {percent(found.floor[1])} % (always "{found.floor[0]}")'
    lines = [f"{found.count:,} questions of {found.name}, judged by {found.protocol.name}; {floor}"]
    for side in found.sides:
        base = statistics.share(side.plain.right)
        lines += ["", f"{side.name} ({side.method}): {percent(base.mean)} % right ({interval(base)})"]
        for c in changes(side, None if side is first else first, found.protocol):
            became = (
                f"; {percent(c.donor.mean)} % become the donor's" if c.donor and c.intervention.kind == "swap" else ""
            )
            apart = f"; less {first.name}'s: {difference(c.apart)}" if c.apart else ""
            where = f"{c.intervention.kind} in {c.intervention.where}"
            sentence = statistics.sentence(c.change, c.claim)
            lines.append(f"  {where:<18}{percent(c.found.mean):>6} %  {sentence}{became}{apart}")
        swept = ", ".join(f"{n}: {percent(float(x.right.mean()))} %" for n, x in side.swept.items())
        lines += [f"  right by rounds: {swept}"] if swept else []
        lines += [
            f"  {name} answers ({x['questions']}): {percent(x['spoken'])} % of slots name a word of the chain, "
            f"{percent(x['elsewhere'])} % one of another question's; in order, {percent(x['common'])} % of the chain"
            for name, x in words_of(side).items()
        ]
    return [*lines, "", *limits(found)]


def verdict(answer: str, found: Question) -> str:
    """Whether an answer is the one given, by the protocol."""
    if found.gold is None:
        return ""
    prediction = found.protocol.predict(answer)
    right = prediction is not None and found.protocol.right(prediction, found.gold)
    return ", right" if right else f", asked was {found.gold.strip()}"


def pass_names(side: Looked) -> list[str]:
    """What the passes over the slots are called; thoughts made one after the other have one."""
    rounds = [f"round {t}" for t in range(1, len(side.words.passes))]
    return ["in turn"] if side.rounds is None else ["placeholders", *rounds]


def difference(found: Difference) -> str:
    """A difference in points with its interval."""
    low, high = statistics.points(found.low), statistics.points(found.high)
    return f"{statistics.points(found.mean)} ({low} to {high})"
