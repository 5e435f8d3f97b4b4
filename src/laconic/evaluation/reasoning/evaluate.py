"""Answers to questions: matched with the gold ones, with the forward passes and cache positions that they took."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from laconic.batches import AnswerBatch, PassCounts, ReasoningExample
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.evaluation import statistics
from laconic.evaluation.results_store import EvalItem

AnswerFunction = Callable[[Any], AnswerBatch]


class AnswerRecord(NamedTuple):
    """The answer to one question: the generated text, and the prediction found in it, if any.

    Passes are forward passes of the decoder by part; cache positions those when the answer began and at its end.
    """

    id: str
    question: str
    gold: str
    output: str
    prediction: str | None
    is_correct: bool
    passes: PassCounts
    cache_positions: tuple[int, int]

    def to_item(self, condition: str) -> EvalItem:
        """Return the answer as an item with everything but its identifier as metrics."""
        metrics = self._asdict() | {"passes": self.passes._asdict()}
        del metrics["id"]
        return EvalItem(self.id, {condition: metrics})

    @classmethod
    def from_item(cls, item: EvalItem) -> "AnswerRecord":
        metrics = {name: item.shared[name] for name in cls._fields if name != "id"}
        passes, positions = PassCounts(**metrics.pop("passes")), tuple(metrics.pop("cache_positions"))
        return cls(id=item.id, passes=passes, cache_positions=positions, **metrics)


class MajorityBaseline(NamedTuple):
    """The most frequent gold answer and its share: the accuracy of always giving it."""

    answer: str
    share: float


@dataclass(frozen=True)
class ReasoningResult:
    """The answers of one run to one question set, matched by a protocol."""

    records: tuple[AnswerRecord, ...]
    protocol: str
    bytes_per_position: int = 0

    @classmethod
    def from_items(cls, items: Sequence[EvalItem], figures: Mapping[str, Any]) -> "ReasoningResult":
        return cls(tuple(map(AnswerRecord.from_item, items)), figures["protocol"], figures["bytes_per_position"])

    @property
    def correct(self) -> statistics.ScoreMatrix:
        """1 for each correct answer, [N]."""
        return np.array([record.is_correct for record in self.records], dtype=np.float64)

    @property
    def majority_baseline(self) -> MajorityBaseline:
        answer, count = Counter(record.gold for record in self.records).most_common(1)[0]
        return MajorityBaseline(answer, count / len(self.records))


def match_answers(
    answers: AnswerBatch, examples: Sequence[ReasoningExample], protocol: AnswerProtocol
) -> list[AnswerRecord]:
    records: list[AnswerRecord] = []
    rows = zip(examples, answers.texts, answers.passes, answers.cache_positions, strict=True)
    for example, text, passes, positions in rows:
        prediction = protocol.extract(text)
        is_correct = prediction is not None and protocol.is_correct(prediction, example.answer)
        question = example.id, example.question, example.answer
        records.append(AnswerRecord(*question, text, prediction, is_correct, passes, positions))
    return records
