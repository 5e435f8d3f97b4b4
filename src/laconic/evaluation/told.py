"""Answers about contexts (E4), and labels told from demonstrations (E3), judged; every figure is of the lines kept.

Symbols: C options of a label, R runs of one recipe, N questions; a way is how demonstrations or contexts stood before
what was asked, and `held` the vectors or tokens of it.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.contexts import standard_error, stated
from laconic.evaluation.statistics import Estimate

Rows = Sequence[Mapping[str, Any]]


def words(text: str) -> list[str]:
    """Words in lower case, without articles and punctuation, as question answering compares them (SQuAD)."""
    plain = re.sub(r"[^\w\s]", "", text.lower())
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def matching(said: str, answers: Sequence[str]) -> float:
    """1 where the words are those of one of the answers."""
    return float(any(words(said) == words(answer) for answer in answers))


def f1(said: str, answers: Sequence[str]) -> float:
    """The harmonic mean of precision and recall over words, of the answer that it is highest for."""
    return max(overlap(words(said), words(answer)) for answer in answers)


def overlap(a: Sequence[str], b: Sequence[str]) -> float:
    """F1 of two lists of words; of two empty ones 1."""
    common = sum((Counter(a) & Counter(b)).values())
    return float(a == b) if not (a and b) else 2 * common / (len(a) + len(b))


def contained(said: str, answers: Sequence[str]) -> float:
    """The share of the answers whose text occurs in what was said, in either case."""
    return sum(answer.lower() in said.lower() for answer in answers) / len(answers)


SCORES = {"match": matching, "F1": f1, "answers contained": contained}


class Score(NamedTuple):
    """A score of a way over questions, and what it is more than without context, paired.

    Standard errors are over contexts: the questions about one are alike.
    """

    mean: Estimate
    se: float
    over_none: float
    over_none_se: float


class Answered(NamedTuple):
    """A way of a context: what stood before a question, in the mean, and each score."""

    way: str
    held: float
    scores: Mapping[str, Score]


class Labelling(NamedTuple):
    """A way of demonstrations on test rows; `sd` is over orders of demonstrations, of all runs.

    `how` are the variants chosen for each run on its validation rows, and `on_validation` what they had right there.
    """

    way: str
    held: float
    accuracy: float
    sd: float | None
    each: tuple[float, ...]
    how: tuple[str, ...]
    on_validation: float


@dataclass(frozen=True)
class Told:
    """A run, of one seed or several, on a file of questions or of labelled texts: the lines of each seed.

    `row` is that of a paper's table which the run's recipe names.
    """

    run: str
    file: str
    kind: Literal["answers", "labels"]
    aware: bool
    seeds: tuple[int, ...]
    lines: Sequence[Sequence[str]]
    row: str | None = None

    @cached_property
    def rows(self) -> list[Rows]:
        """The lines as objects, those of a run in the order of their ids."""
        return [sorted(map(json.loads, lines), key=lambda row: row["id"]) for lines in self.lines]

    @cached_property
    def answered(self) -> list[Answered]:
        """Of questions, each way that every one was asked in."""
        return [answers(self.rows, way) for way in ways(self.rows)]

    @cached_property
    def labelled(self) -> list[Labelling]:
        """Of labelled texts, each way."""
        return [labels(self.rows, way) for way in ways(self.rows)]

    @property
    def floor(self) -> float:
        """The share of test rows that have the commonest label: what is right without reading."""
        test = of(self.rows[0], "test", False)
        return Counter(row["label"] for row in test).most_common(1)[0][1] / len(test)

    @property
    def options(self) -> int:
        """Labels to choose from."""
        return len(self.rows[0][0]["tokens"])

    @property
    def contexts(self) -> int:
        """Contexts that were asked about."""
        return len({row["context"] for row in self.rows[0]})

    @property
    def count(self) -> int:
        """Questions, or rows that are to be labelled in the test."""
        rows = self.rows[0]
        return len(rows) if self.kind == "answers" else len({row["id"] for row in rows if first(row)})

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        found: dict[str, Any] = {"run": self.run, "file": self.file, "kind": self.kind, "query_aware": self.aware,
                                 "seeds": list(self.seeds), "rows": self.count}  # fmt: skip
        if self.kind == "labels":
            return found | {"floor": self.floor, "options": self.options, "ways": [w._asdict() for w in self.labelled]}
        plain = [
            w._asdict() | {"scores": {k: x._asdict() | {"mean": x.mean._asdict()} for k, x in w.scores.items()}}
            for w in self.answered
        ]
        return stated(found | {"contexts": self.contexts, "ways": plain})


def first(row: Mapping[str, Any]) -> bool:
    """Whether a row is of the test behind the first order of demonstrations."""
    return (row["part"], row["seed"], row["balanced"]) == ("test", 0, False)


def ways(runs: Sequence[Rows]) -> list[str]:
    """The ways that every row of every run was asked in, in their order."""
    there = [{each["way"] for each in row["ways"]} for rows in runs for row in rows]
    return [each["way"] for each in runs[0][0]["ways"] if all(each["way"] in names for names in there)]


def way_of(row: Mapping[str, Any], way: str) -> Mapping[str, Any]:
    """What a row has of a way."""
    return next(each for each in row["ways"] if each["way"] == way)


def held(runs: Sequence[Rows], way: str) -> float:
    """Vectors or tokens before what was asked, in the mean."""
    return float(np.mean([way_of(row, way)["held"] for rows in runs for row in rows]))


def answers(runs: Sequence[Rows], way: str) -> Answered:
    """A way of contexts."""
    groups = [str(row["context"]) for row in runs[0]]
    scores: dict[str, Score] = {}
    for name, score in SCORES.items():
        here, none = (
            np.array([[score(way_of(row, w)["said"], row["answers"]) for row in rows] for rows in runs])
            for w in (way, "none")
        )
        apart = here - none
        se, apart_se = (standard_error(x, groups) for x in (here, apart))
        scores[name] = Score(statistics.share(here), se, float(apart.mean()), apart_se)
    return Answered(way, held(runs, way), scores)


def chosen(row: Mapping[str, Any], way: str, calibrated: bool) -> int:
    """Eq. AC11: the option of the least mean nats, less those without the inputs where that is calibrated."""
    found = way_of(row, way)
    mean = np.array(found["nats"]) / np.array(row["tokens"])
    return int((mean - np.array(found["without"]) / np.array(row["tokens"]) if calibrated else mean).argmin())


def accuracy(rows: Rows, way: str, calibrated: bool) -> float:
    """Share of rows whose option is the label's."""
    return float(np.mean([chosen(row, way, calibrated) == row["label"] for row in rows]))


def labels(runs: Sequence[Rows], way: str) -> Labelling:
    """A way of demonstrations: its variant chosen on validation rows, its accuracy on test rows by their order."""
    each, how, valid = list[float](), list[str](), list[float]()
    for rows in runs:
        scores = {
            (balanced, calibrated): accuracy(of(rows, "valid", balanced), way, calibrated)
            for balanced in (False, True)
            for calibrated in (False, True)
        }
        balanced, calibrated = max(scores, key=lambda variant: scores[variant])
        test = of(rows, "test", balanced)
        seeds = sorted({row["seed"] for row in test})
        each += [accuracy([row for row in test if row["seed"] == seed], way, calibrated) for seed in seeds]
        names = [name for name, is_so in (("balanced", balanced), ("calibrated", calibrated)) if is_so]
        how.append(" and ".join(names) or "neither")
        valid.append(scores[(balanced, calibrated)])
    sd = float(np.std(each, ddof=1)) if len(each) > 1 else None
    return Labelling(way, held(runs, way), float(np.mean(each)), sd, tuple(each), tuple(how), float(np.mean(valid)))


def of(rows: Rows, part: str, balanced: bool) -> list[Mapping[str, Any]]:
    """The rows of a part that were asked with demonstrations of one kind."""
    return [row for row in rows if (row["part"], row["balanced"]) == (part, balanced)]
