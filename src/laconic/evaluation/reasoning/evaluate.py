"""Answers judged: a row for each question, written as they come, and committed as a folder."""

import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from laconic.batches import AnswerBatch, PassCounts, ReasoningExample
from laconic.data.reasoning import answer_matching
from laconic.errors import InputError
from laconic.evaluation import line_store as results_store
from laconic.evaluation import statistics
from laconic.interfaces import TrainingData
from laconic.storage.strict_json import to_canonical_json

AnswerFunction = Callable[[Any], AnswerBatch]
ProgressCallback = Callable[[str, int, int], None]
Said = TypeVar("Said")


class Ranks(Protocol):
    """The processes that share the questions, as `training.ranks` has them."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def all_gather(self, value: Said) -> list[Said]: ...
    def run_on_rank_zero(self, function: Callable[[], Said]) -> Said: ...


class Alone:
    """One process."""

    rank, world_size = 0, 1

    def all_gather(self, value: Said) -> list[Said]:
        return [value]

    def run_on_rank_zero(self, function: Callable[[], Said]) -> Said:
        return function()


ALONE = Alone()


class AnswerRecord(NamedTuple):
    """One question: `question` is the SHA-256 of its text, `held` the cache slots when its answer began and ended."""

    id: str
    question_hash: str
    gold: str
    output: str
    prediction: str | None
    is_correct: bool
    passes: PassCounts
    cache_positions: tuple[int, int]

    def to_json_line(self) -> str:
        """The row as one line of JSON."""
        return to_canonical_json(self._asdict() | {"passes": self.passes._asdict()}) + "\n"


def parse_answer_record(line: str) -> AnswerRecord:
    """The row that `line` wrote."""
    found = json.loads(line)
    return AnswerRecord(**found | {"passes": PassCounts(**found["passes"]), "held": tuple(found["held"])})


@dataclass(frozen=True)
class ReasoningResult:
    """The rows of an evaluation; every figure is a mean over them. `bytes_each` is what one cache slot takes."""

    records: tuple[AnswerRecord, ...]
    protocol: str
    bytes_per_position: int = 0

    @property
    def correct(self) -> statistics.ScoreMatrix:
        """1 for each right answer, [N]."""
        return np.array([row.is_correct for row in self.records], dtype=np.float64)

    @property
    def majority_baseline(self) -> tuple[str, float]:
        """The most frequent answer, and the share it has: what is right without reading a question."""
        answer, count = Counter(row.gold for row in self.records).most_common(1)[0]
        return answer, count / len(self.records)

    @property
    def mean_passes(self) -> tuple[float, float, float, float]:
        """Decoder calls of a question by part: read, place, think, answer."""
        read, place, think, answer = np.array([row.passes for row in self.records], dtype=np.float64).mean(0).tolist()
        return read, place, think, answer

    @property
    def mean_cache_positions(self) -> tuple[float, float]:
        """Cache slots when the answer began, and at its end."""
        begin, end = np.array([row.cache_positions for row in self.records], dtype=np.float64).mean(0).tolist()
        return begin, end

    def to_json(self) -> dict[str, Any]:
        """The figures, without the rows."""
        found, (answer, share) = statistics.estimate_proportion(self.correct), self.majority_baseline
        return {
            "schema": 1,
            "protocol": self.protocol,
            "questions": len(self.records),
            "accuracy": found.mean,
            "interval": [found.low, found.high],
            "floor": {"answer": answer, "share": share},
            "unanswered": sum(row.prediction is None for row in self.records),
            "passes": dict(zip(PassCounts._fields, self.mean_passes, strict=True)) | {"total": sum(self.mean_passes)},
            "held": {
                "begin": self.mean_cache_positions[0],
                "end": self.mean_cache_positions[1],
                "bytes": self.mean_cache_positions[1] * self.bytes_per_position,
            },
        }


def evaluate_questions(
    answer: AnswerFunction,
    source: TrainingData,
    examples: Sequence[ReasoningExample],
    protocol: answer_matching.AnswerProtocol,
    *,
    batch_size: int = 64,
    bytes_per_position: int = 0,
    folder: Path | None = None,
    key: Mapping[str, str] | None = None,
    extra_files: Mapping[str, str] | None = None,
    progress: ProgressCallback | None = None,
    order: Sequence[int] | None = None,
    ranks: Ranks = ALONE,
    before_batch: Callable[[], None] | None = None,
) -> ReasoningResult:
    """Asks every question and judges what comes; row i of `source` is question i of `examples`.

    With a `folder` (evaluations/NAME), rows go to `.part-NAME` while it runs: asked again with the same `key`, it goes
    on after the last whole line. At the end the folder is committed with `texts`, files to lie beside. A folder that is
    there is read, not made again. `order` is that of asking (questions of a length side by side); rows come back in
    theirs. Several `ranks` share each batch, `batch` questions for each; the first one writes. `between` is called
    before each, and may raise. Raises `Busy` (73) where folder or part belong to another key, `BadInput` (66).
    """
    if not examples or len(source) < len(examples):
        raise InputError(f"{len(examples)} questions, {len(source)} rows to ask; give a row for each, and at least one")
    about = {"data": source.fingerprint, "protocol": protocol.name, "questions": str(len(examples))}
    mark = to_canonical_json({**(key or {}), **about})
    if folder is not None and (lines := ranks.run_on_rank_zero(lambda: results_store.load_committed(folder, mark))):
        return ReasoningResult(tuple(map(parse_answer_record, lines)), protocol.name, bytes_per_position)
    part = None if folder is None else results_store.partial_folder(folder)
    rows = (
        []
        if part is None
        else [
            parse_answer_record(line) for line in ranks.run_on_rank_zero(lambda: results_store.load_partial(part, mark))
        ]
    )
    order = range(len(examples)) if order is None else order
    with (
        (part / results_store.RECORDS_FILE).open("a", encoding="utf-8")
        if part and ranks.rank == 0
        else io.StringIO() as file
    ):
        while len(rows) < len(examples):
            if before_batch:
                before_batch()
            places = order[len(rows) : len(rows) + batch_size * ranks.world_size]
            lines = answer_on_rank(answer, source, examples, protocol, places, ranks)
            file.writelines(lines)
            file.flush()
            rows += map(parse_answer_record, lines)
            if progress:
                progress(protocol.name, len(rows), len(examples))
    in_place = sorted(zip(order, rows, strict=True), key=lambda placed: placed[0])
    result = ReasoningResult(tuple(row for _, row in in_place), protocol.name, bytes_per_position)
    if folder is not None:
        made = [row.to_json_line() for row in result.records]
        ranks.run_on_rank_zero(lambda: results_store.commit_results(folder, made, result.to_json(), extra_files or {}))
    return result


def answer_on_rank(
    answer: AnswerFunction,
    source: TrainingData,
    examples: Sequence[ReasoningExample],
    protocol: answer_matching.AnswerProtocol,
    indices: Sequence[int],
    ranks: Ranks,
) -> list[str]:
    """The lines of the questions at some places; each rank asks its share, and all get every line."""
    mine = indices[ranks.rank :: ranks.world_size]
    found = match_answers(answer(source.batch(mine, 0, 0)), [examples[i] for i in mine], protocol) if mine else []
    return interleave(ranks.all_gather([row.to_json_line() for row in found]), len(indices))


def interleave(parts: Sequence[Sequence[str]], count: int) -> list[str]:
    """What was dealt out to ranks one by one, in one row again."""
    return [parts[i % len(parts)][i // len(parts)] for i in range(count)]


def match_answers(
    answers: AnswerBatch, examples: Sequence[ReasoningExample], protocol: answer_matching.AnswerProtocol
) -> list[AnswerRecord]:
    """The rows of one batch."""
    made = zip(examples, answers.texts, answers.passes, answers.cache_positions, strict=True)
    found: list[AnswerRecord] = []
    for example, text, passes, held in made:
        prediction = protocol.extract(text)
        right = prediction is not None and protocol.is_correct(prediction, example.answer)
        question = sha256(example.question.encode()).hexdigest()
        found.append(AnswerRecord(example.id, question, example.answer, text, prediction, right, passes, held))
    return found


def load_answer_records(folder: Path) -> tuple[AnswerRecord, ...]:
    """The rows of an evaluation that is done. Raises `Damaged` (76) if a file is not as it was written."""
    return tuple(map(parse_answer_record, results_store.read_lines(folder)))
