"""Evaluate a model on questions: match its answers with the gold ones and count forward passes and cache positions."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from laconic.batches import AnswerBatch, PassCounts, ReasoningExample
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.errors import InputError
from laconic.evaluation import statistics
from laconic.evaluation.results_store import EvalMetadata, EvalRecord, ProgressCallback, run_resumable
from laconic.interfaces import TrainingData
from laconic.training.ranks import Ranks

AnswerFunction = Callable[[Any], AnswerBatch]


class AnswerRecord(NamedTuple):
    """The answer to one question.

    Attributes:
        id: Identifier of the question.
        question_hash: SHA-256 of the question's text.
        gold: The gold answer.
        output: The generated text.
        prediction: The answer found in it, or None.
        is_correct: Whether the prediction matches the gold answer.
        passes: Forward passes of the decoder, by part.
        cache_positions: Positions in the cache when the answer began and at its end.
    """

    id: str
    question_hash: str
    gold: str
    output: str
    prediction: str | None
    is_correct: bool
    passes: PassCounts
    cache_positions: tuple[int, int]

    def to_metrics(self) -> dict[str, Any]:
        """Return everything but the identifier, as an `EvalRecord` stores it."""
        metrics = self._asdict() | {"passes": self.passes._asdict()}
        del metrics["id"]
        return metrics

    @classmethod
    def from_record(cls, record: EvalRecord) -> "AnswerRecord":
        """Return the answer that an `EvalRecord` stores."""
        metrics = dict(record.metrics)
        passes, positions = PassCounts(**metrics.pop("passes")), tuple(metrics.pop("cache_positions"))
        return cls(id=record.item, passes=passes, cache_positions=positions, **metrics)


@dataclass(frozen=True)
class ReasoningResult:
    """The answers of one run to one question set; the figures are means over them.

    Attributes:
        records: One record per question.
        protocol: Name of the protocol that matched the answers.
        bytes_per_position: Bytes of one cache position.
    """

    records: tuple[AnswerRecord, ...]
    protocol: str
    bytes_per_position: int = 0

    @property
    def correct(self) -> statistics.ScoreMatrix:
        """1 for each correct answer, [N]."""
        return np.array([record.is_correct for record in self.records], dtype=np.float64)

    @property
    def majority_baseline(self) -> tuple[str, float]:
        """The most frequent gold answer and its share: the accuracy of always giving it."""
        answer, count = Counter(record.gold for record in self.records).most_common(1)[0]
        return answer, count / len(self.records)

    @property
    def mean_passes(self) -> tuple[float, float, float, float]:
        """Forward passes per question: prompt, latent setup, latents, answer."""
        prompt, setup, latent, answer = np.array([record.passes for record in self.records], dtype=np.float64).mean(0)
        return float(prompt), float(setup), float(latent), float(answer)

    @property
    def mean_cache_positions(self) -> tuple[float, float]:
        """Cache positions when the answer begins and at its end."""
        begin, end = np.array([record.cache_positions for record in self.records], dtype=np.float64).mean(0).tolist()
        return begin, end

    def to_json(self) -> dict[str, Any]:
        """Return the figures, without the records."""
        accuracy, (answer, share) = statistics.estimate_proportion(self.correct), self.majority_baseline
        begin, end = self.mean_cache_positions
        return {
            "protocol": self.protocol,
            "bytes_per_position": self.bytes_per_position,
            "questions": len(self.records),
            "accuracy": accuracy.mean,
            "interval": [accuracy.low, accuracy.high],
            "majority_baseline": {"answer": answer, "share": share},
            "unanswered": sum(record.prediction is None for record in self.records),
            "passes": dict(zip(PassCounts._fields, self.mean_passes, strict=True)) | {"total": sum(self.mean_passes)},
            "cache_positions": {"begin": begin, "end": end, "bytes": end * self.bytes_per_position},
        }


def evaluate_questions(
    answer: AnswerFunction,
    source: TrainingData,
    examples: Sequence[ReasoningExample],
    protocol: AnswerProtocol,
    *,
    batch_size: int = 64,
    bytes_per_position: int = 0,
    metadata: EvalMetadata | None = None,
    folder: Path | None = None,
    extra_files: Mapping[str, str] | None = None,
    progress: ProgressCallback | None = None,
    order: Sequence[int] | None = None,
    ranks: Ranks | None = None,
    before_batch: Callable[[], None] | None = None,
) -> ReasoningResult:
    """Ask every question and match the answers.

    Args:
        answer: Answers a batch of questions.
        source: The questions as batches; row i is `examples[i]`.
        examples: The questions with their gold answers.
        protocol: How answers are found in a text and compared.
        batch_size: Questions per batch, on each rank.
        bytes_per_position: Bytes of one cache position, for the figures.
        metadata: What is evaluated; needed with `folder`.
        folder: The run's `evaluations` folder; results are stored there and resumed from there.
        extra_files: Text files to store beside the results.
        progress: Called after each batch.
        order: Order in which the questions are asked, questions of similar length together.
        ranks: Processes that share each batch.
        before_batch: Called before each batch; may raise.

    Raises:
        InputError: There are no questions, or fewer rows than questions.
        BusyError: The stored results belong to another evaluation.
    """
    if not examples or len(source) < len(examples):
        raise InputError(
            f"{len(examples)} questions but {len(source)} rows; give at least one question, a row for each"
        )
    metadata = metadata or EvalMetadata("reasoning", "questions")
    condition = metadata.variant.get("condition", "")

    def evaluate(indices: Sequence[int]) -> list[list[EvalRecord]]:
        answers = match_answers(answer(source.batch(indices, 0, 0)), [examples[i] for i in indices], protocol)
        return [[metadata.new_record(record.id, condition, record.to_metrics())] for record in answers]

    def build_result(records: Sequence[EvalRecord]) -> ReasoningResult:
        return ReasoningResult(tuple(map(AnswerRecord.from_record, records)), protocol.name, bytes_per_position)

    records = run_resumable(
        folder,
        metadata,
        len(examples),
        evaluate,
        batch_size=batch_size,
        order=order,
        summarize=lambda records: build_result(records).to_json(),
        extra_files=extra_files,
        progress=progress,
        before_batch=before_batch,
        ranks=ranks,
    )
    return build_result(records)


def match_answers(
    answers: AnswerBatch, examples: Sequence[ReasoningExample], protocol: AnswerProtocol
) -> list[AnswerRecord]:
    """Compare the answers of a batch with the gold ones."""
    records: list[AnswerRecord] = []
    rows = zip(examples, answers.texts, answers.passes, answers.cache_positions, strict=True)
    for example, text, passes, positions in rows:
        prediction = protocol.extract(text)
        is_correct = prediction is not None and protocol.is_correct(prediction, example.answer)
        digest = sha256(example.question.encode()).hexdigest()
        records.append(
            AnswerRecord(example.id, digest, example.answer, text, prediction, is_correct, passes, positions)
        )
    return records
