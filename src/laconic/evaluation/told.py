"""Answers about contexts (E4), and labels told from demonstrations (E3), judged; every figure is of the lines kept.

Symbols: C options of a label; a way is how demonstrations or contexts stood before what was asked.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.contexts import standard_error
from laconic.evaluation.statistics import Estimate


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


def answers(lines: Sequence[str]) -> dict[str, dict[str, tuple[Estimate, float]]]:
    """Of each way each score over questions, with its standard error."""
    rows = [json.loads(line) for line in lines]
    found: dict[str, dict[str, tuple[Estimate, float]]] = {}
    for way in rows[0]["said"]:
        each = {name: np.array([[score(row["said"][way], row["answers"]) for row in rows]]) for name, score in
                SCORES.items()}  # fmt: skip
        found[way] = {name: (statistics.share(scores), standard_error(scores)) for name, scores in each.items()}
    return found


def chosen(row: Mapping[str, Any], way: str, calibrated: bool) -> int:
    """Eq. AC11: the option of the least mean nats, less those without the inputs where that is calibrated."""
    mean = np.array(row["nats"][way]) / np.array(row["tokens"])
    return int((mean - np.array(row["without"][way]) / np.array(row["tokens"]) if calibrated else mean).argmin())


def accuracy(rows: Sequence[Mapping[str, Any]], way: str, calibrated: bool) -> float:
    """Share of rows whose option is the label's."""
    return float(np.mean([chosen(row, way, calibrated) == row["label"] for row in rows]))


def labels(lines: Sequence[str]) -> dict[str, Any]:
    """Of each way the variant chosen on validation rows, and its accuracy on test rows over seeds of demonstrations."""
    rows = [json.loads(line) for line in lines]
    ways: dict[str, Any] = {}
    for way in rows[0]["nats"]:
        scores = {
            (balanced, calibrated): accuracy(of(rows, "valid", balanced), way, calibrated)
            for balanced in (False, True)
            for calibrated in (False, True)
        }
        balanced, calibrated = max(scores, key=lambda variant: scores[variant])
        test = of(rows, "test", balanced)
        seeds = sorted({row["seed"] for row in test})
        each = [accuracy([row for row in test if row["seed"] == seed], way, calibrated) for seed in seeds]
        sd = float(np.std(each, ddof=1)) if len(each) > 1 else None
        ways[way] = {
            "accuracy": float(np.mean(each)), "sd": sd, "seeds": each, "balanced": balanced, "calibrated": calibrated,
            "on_validation": scores[(balanced, calibrated)],
        }  # fmt: skip
    test = of(rows, "test", False)
    label, count = Counter(row["label"] for row in test).most_common(1)[0]
    return {"ways": ways, "floor": {"label": label, "share": count / len(test)}, "rows": len(test)}


def of(rows: Sequence[Mapping[str, Any]], part: str, balanced: bool) -> list[Mapping[str, Any]]:
    """The rows of a part that were asked with demonstrations of one kind."""
    return [row for row in rows if (row["part"], row["balanced"]) == (part, balanced)]
