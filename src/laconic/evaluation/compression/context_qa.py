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
from laconic.evaluation.compression.perplexity import clustered_standard_error, nan_to_none
from laconic.evaluation.statistics import Estimate

JsonRows = Sequence[Mapping[str, Any]]


def normalize_words(text: str) -> list[str]:
    """Words in lower case, without articles and punctuation, as question answering compares them (SQuAD)."""
    plain = re.sub(r"[^\w\s]", "", text.lower())
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 where the words are those of one of the answers."""
    return float(any(normalize_words(prediction) == normalize_words(answer) for answer in answers))


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """The harmonic mean of precision and recall over words, of the answer that it is highest for."""
    return max(word_overlap_f1(normalize_words(prediction), normalize_words(answer)) for answer in answers)


def word_overlap_f1(a: Sequence[str], b: Sequence[str]) -> float:
    """F1 of two lists of words; of two empty ones 1."""
    common = sum((Counter(a) & Counter(b)).values())
    return float(a == b) if not (a and b) else 2 * common / (len(a) + len(b))


def substring_match(prediction: str, answers: Sequence[str]) -> float:
    """The share of the answers whose text occurs in what was said, in either case."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


METRICS = {"match": exact_match, "F1": f1_score, "answers contained": substring_match}


class MetricResult(NamedTuple):
    """A score of a way over questions, and what it is more than without context, paired.

    Standard errors are over contexts: the questions about one are alike.
    """

    mean: Estimate
    se: float
    gain: float
    gain_se: float


class ConditionScores(NamedTuple):
    """A way of a context: what stood before a question, in the mean, and each score."""

    condition: str
    context_size: float
    metrics: Mapping[str, MetricResult]


class ICLScore(NamedTuple):
    """A way of demonstrations on test rows; `sd` is over orders of demonstrations, of all runs.

    `how` are the variants chosen for each run on its validation rows, and `on_validation` what they had right there.
    """

    condition: str
    context_size: float
    accuracy: float
    std: float | None
    accuracies: tuple[float, ...]
    variants: tuple[str, ...]
    validation_accuracy: float


@dataclass(frozen=True)
class ContextTaskResult:
    """A run, of one seed or several, on a file of questions or of labelled texts: the lines of each seed.

    `row` is that of a paper's table which the run's recipe names.
    """

    run: str
    file: str
    kind: Literal["answers", "labels"]
    query_aware: bool
    seeds: tuple[int, ...]
    lines: Sequence[Sequence[str]]
    paper_row: str | None = None

    @cached_property
    def rows(self) -> list[JsonRows]:
        """The lines as objects, those of a run in the order of their ids."""
        return [sorted(map(json.loads, lines), key=lambda row: row["id"]) for lines in self.lines]

    @cached_property
    def condition_scores(self) -> list[ConditionScores]:
        """Of questions, each way that every one was asked in."""
        return [score_answers(self.rows, way) for way in common_conditions(self.rows)]

    @cached_property
    def icl_scores(self) -> list[ICLScore]:
        """Of labelled texts, each way."""
        return [score_labels(self.rows, way) for way in common_conditions(self.rows)]

    @property
    def majority_accuracy(self) -> float:
        """The share of test rows that have the commonest label: what is right without reading."""
        test = select_rows(self.rows[0], "test", False)
        return Counter(row["label"] for row in test).most_common(1)[0][1] / len(test)

    @property
    def num_labels(self) -> int:
        """Labels to choose from."""
        return len(self.rows[0][0]["tokens"])

    @property
    def num_contexts(self) -> int:
        """Contexts that were asked about."""
        return len({row["context"] for row in self.rows[0]})

    @property
    def num_items(self) -> int:
        """Questions, or rows that are to be labelled in the test."""
        rows = self.rows[0]
        return len(rows) if self.kind == "answers" else len({row["id"] for row in rows if is_first_order(row)})

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it."""
        found: dict[str, Any] = {"run": self.run, "file": self.file, "kind": self.kind, "query_aware": self.query_aware,
                                 "seeds": list(self.seeds), "rows": self.num_items}  # fmt: skip
        if self.kind == "labels":
            return found | {
                "floor": self.majority_accuracy,
                "options": self.num_labels,
                "ways": [w._asdict() for w in self.icl_scores],
            }
        plain = [
            w._asdict() | {"scores": {k: x._asdict() | {"mean": x.mean._asdict()} for k, x in w.metrics.items()}}
            for w in self.condition_scores
        ]
        return nan_to_none(found | {"contexts": self.num_contexts, "ways": plain})


def is_first_order(row: Mapping[str, Any]) -> bool:
    """Whether a row is of the test behind the first order of demonstrations."""
    return (row["part"], row["seed"], row["balanced"]) == ("test", 0, False)


def common_conditions(runs: Sequence[JsonRows]) -> list[str]:
    """The ways that every row of every run was asked in, in their order."""
    there = [{each["way"] for each in row["ways"]} for rows in runs for row in rows]
    return [each["way"] for each in runs[0][0]["ways"] if all(each["way"] in names for names in there)]


def get_condition(row: Mapping[str, Any], condition: str) -> Mapping[str, Any]:
    """What a row has of a way."""
    return next(each for each in row["ways"] if each["way"] == condition)


def mean_context_size(runs: Sequence[JsonRows], condition: str) -> float:
    """Vectors or tokens before what was asked, in the mean."""
    return float(np.mean([get_condition(row, condition)["held"] for rows in runs for row in rows]))


def score_answers(runs: Sequence[JsonRows], condition: str) -> ConditionScores:
    """A way of contexts."""
    groups = [str(row["context"]) for row in runs[0]]
    scores: dict[str, MetricResult] = {}
    for name, score in METRICS.items():
        here, none = (
            np.array([[score(get_condition(row, w)["said"], row["answers"]) for row in rows] for rows in runs])
            for w in (condition, "none")
        )
        apart = here - none
        se, apart_se = (clustered_standard_error(x, groups) for x in (here, apart))
        scores[name] = MetricResult(statistics.estimate_proportion(here), se, float(apart.mean()), apart_se)
    return ConditionScores(condition, mean_context_size(runs, condition), scores)


def choose_label(row: Mapping[str, Any], condition: str, calibrated: bool) -> int:
    """Eq. AC11: the option of the least mean nats, less those without the inputs where that is calibrated."""
    found = get_condition(row, condition)
    mean = np.array(found["nats"]) / np.array(row["tokens"])
    return int((mean - np.array(found["without"]) / np.array(row["tokens"]) if calibrated else mean).argmin())


def label_accuracy(rows: JsonRows, condition: str, calibrated: bool) -> float:
    """Share of rows whose option is the label's."""
    return float(np.mean([choose_label(row, condition, calibrated) == row["label"] for row in rows]))


def score_labels(runs: Sequence[JsonRows], condition: str) -> ICLScore:
    """A way of demonstrations: its variant chosen on validation rows, its accuracy on test rows by their order."""
    each, how, valid = list[float](), list[str](), list[float]()
    for rows in runs:
        scores = {
            (balanced, calibrated): label_accuracy(select_rows(rows, "valid", balanced), condition, calibrated)
            for balanced in (False, True)
            for calibrated in (False, True)
        }
        balanced, calibrated = max(scores, key=lambda variant: scores[variant])
        test = select_rows(rows, "test", balanced)
        seeds = sorted({row["seed"] for row in test})
        each += [label_accuracy([row for row in test if row["seed"] == seed], condition, calibrated) for seed in seeds]
        names = [name for name, is_so in (("balanced", balanced), ("calibrated", calibrated)) if is_so]
        how.append(" and ".join(names) or "neither")
        valid.append(scores[(balanced, calibrated)])
    sd = float(np.std(each, ddof=1)) if len(each) > 1 else None
    return ICLScore(
        condition,
        mean_context_size(runs, condition),
        float(np.mean(each)),
        sd,
        tuple(each),
        tuple(how),
        float(np.mean(valid)),
    )


def select_rows(rows: JsonRows, split: str, balanced: bool) -> list[Mapping[str, Any]]:
    """The rows of a part that were asked with demonstrations of one kind."""
    return [row for row in rows if (row["part"], row["balanced"]) == (split, balanced)]
