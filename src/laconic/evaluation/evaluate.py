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

from laconic.core.artifact import canonical
from laconic.core.contract import Answers, Example, Source
from laconic.core.errors import BadInput
from laconic.core.generate import Passes
from laconic.evaluation import kept, protocols, statistics

Answer = Callable[[Any], Answers]
Show = Callable[[str, int, int], None]
Said = TypeVar("Said")


class Ranks(Protocol):
    """The processes that share the questions, as `training.ranks` has them."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def exchange(self, value: Said) -> list[Said]: ...
    def first(self, function: Callable[[], Said]) -> Said: ...


class Alone:
    """One process."""

    rank, world = 0, 1

    def exchange(self, value: Said) -> list[Said]:
        return [value]

    def first(self, function: Callable[[], Said]) -> Said:
        return function()


ALONE = Alone()


class Row(NamedTuple):
    """One question: `question` is the SHA-256 of its text, `held` the cache slots when its answer began and ended."""

    id: str
    question: str
    gold: str
    text: str
    prediction: str | None
    right: bool
    passes: Passes
    held: tuple[int, int]

    def line(self) -> str:
        """The row as one line of JSON."""
        return canonical(self._asdict() | {"passes": self.passes._asdict()}) + "\n"


def row_of(line: str) -> Row:
    """The row that `line` wrote."""
    found = json.loads(line)
    return Row(**found | {"passes": Passes(**found["passes"]), "held": tuple(found["held"])})


@dataclass(frozen=True)
class Result:
    """The rows of an evaluation; every figure is a mean over them. `bytes_each` is what one cache slot takes."""

    rows: tuple[Row, ...]
    protocol: str
    bytes_each: int = 0

    @property
    def right(self) -> statistics.Scores:
        """1 for each right answer, [N]."""
        return np.array([row.right for row in self.rows], dtype=np.float64)

    @property
    def floor(self) -> tuple[str, float]:
        """The most frequent answer, and the share it has: what is right without reading a question."""
        answer, count = Counter(row.gold for row in self.rows).most_common(1)[0]
        return answer, count / len(self.rows)

    @property
    def passes(self) -> tuple[float, float, float, float]:
        """Decoder calls of a question by part: read, place, think, answer."""
        read, place, think, answer = np.array([row.passes for row in self.rows], dtype=np.float64).mean(0).tolist()
        return read, place, think, answer

    @property
    def held(self) -> tuple[float, float]:
        """Cache slots when the answer began, and at its end."""
        begin, end = np.array([row.held for row in self.rows], dtype=np.float64).mean(0).tolist()
        return begin, end

    def to_json(self) -> dict[str, Any]:
        """The figures, without the rows."""
        found, (answer, share) = statistics.share(self.right), self.floor
        return {
            "schema": 1,
            "protocol": self.protocol,
            "questions": len(self.rows),
            "accuracy": found.mean,
            "interval": [found.low, found.high],
            "floor": {"answer": answer, "share": share},
            "unanswered": sum(row.prediction is None for row in self.rows),
            "passes": dict(zip(Passes._fields, self.passes, strict=True)) | {"total": sum(self.passes)},
            "held": {"begin": self.held[0], "end": self.held[1], "bytes": self.held[1] * self.bytes_each},
        }


def evaluate(
    answer: Answer,
    source: Source,
    examples: Sequence[Example],
    protocol: protocols.Protocol,
    *,
    batch: int = 64,
    bytes_each: int = 0,
    folder: Path | None = None,
    key: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    show: Show | None = None,
    order: Sequence[int] | None = None,
    ranks: Ranks = ALONE,
    between: Callable[[], None] | None = None,
) -> Result:
    """Asks every question and judges what comes; row i of `source` is question i of `examples`.

    With a `folder` (evaluations/NAME), rows go to `.part-NAME` while it runs: asked again with the same `key`, it goes
    on after the last whole line. At the end the folder is committed with `texts`, files to lie beside. A folder that is
    there is read, not made again. `order` is that of asking (questions of a length side by side); rows come back in
    theirs. Several `ranks` share each batch, `batch` questions for each; the first one writes. `between` is called
    before each, and may raise. Raises `Busy` (73) where folder or part belong to another key, `BadInput` (66).
    """
    if not examples or len(source) < len(examples):
        raise BadInput(f"{len(examples)} questions, {len(source)} rows to ask; give a row for each, and at least one")
    about = {"data": source.fingerprint, "protocol": protocol.name, "questions": str(len(examples))}
    mark = canonical({**(key or {}), **about})
    if folder is not None and (lines := ranks.first(lambda: kept.committed(folder, mark))):
        return Result(tuple(map(row_of, lines)), protocol.name, bytes_each)
    part = None if folder is None else kept.part_of(folder)
    rows = [] if part is None else [row_of(line) for line in ranks.first(lambda: kept.begun(part, mark))]
    order = range(len(examples)) if order is None else order
    with (part / kept.ROWS).open("a", encoding="utf-8") if part and ranks.rank == 0 else io.StringIO() as file:
        while len(rows) < len(examples):
            if between:
                between()
            places = order[len(rows) : len(rows) + batch * ranks.world]
            lines = answered(answer, source, examples, protocol, places, ranks)
            file.writelines(lines)
            file.flush()
            rows += map(row_of, lines)
            if show:
                show(protocol.name, len(rows), len(examples))
    in_place = sorted(zip(order, rows, strict=True), key=lambda placed: placed[0])
    result = Result(tuple(row for _, row in in_place), protocol.name, bytes_each)
    if folder is not None:
        made = [row.line() for row in result.rows]
        ranks.first(lambda: kept.commit(folder, made, result.to_json(), texts or {}))
    return result


def answered(
    answer: Answer,
    source: Source,
    examples: Sequence[Example],
    protocol: protocols.Protocol,
    places: Sequence[int],
    ranks: Ranks,
) -> list[str]:
    """The lines of the questions at some places; each rank asks its share, and all get every line."""
    mine = places[ranks.rank :: ranks.world]
    found = judged(answer(source.batch(mine, 0, 0)), [examples[i] for i in mine], protocol) if mine else []
    return dealt(ranks.exchange([row.line() for row in found]), len(places))


def dealt(hands: Sequence[Sequence[str]], count: int) -> list[str]:
    """What was dealt out to ranks one by one, in one row again."""
    return [hands[i % len(hands)][i // len(hands)] for i in range(count)]


def judged(answers: Answers, examples: Sequence[Example], protocol: protocols.Protocol) -> list[Row]:
    """The rows of one batch."""
    made = zip(examples, answers.texts, answers.passes, answers.held, strict=True)
    found: list[Row] = []
    for example, text, passes, held in made:
        prediction = protocol.predict(text)
        right = prediction is not None and protocol.right(prediction, example.answer)
        question = sha256(example.question.encode()).hexdigest()
        found.append(Row(example.id, question, example.answer, text, prediction, right, passes, held))
    return found


def read_rows(folder: Path) -> tuple[Row, ...]:
    """The rows of an evaluation that is done. Raises `Damaged` (76) if a file is not as it was written."""
    return tuple(map(row_of, kept.lines_of(folder)))
