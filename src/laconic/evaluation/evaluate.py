"""Answers judged: a row for each question, written as they come, committed as a folder; and the time they take."""

import io
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic.core import manifest
from laconic.core.artifact import canonical, commit_folder, replace_file
from laconic.core.contract import Answers, Example, Source
from laconic.core.errors import BadInput, Busy
from laconic.core.generate import Passes
from laconic.evaluation import statistics

Answer = Callable[[Any], Answers]
Show = Callable[[str, int, int], None]


class Protocol(NamedTuple):
    """How a text is judged; no figure is printed without its name. `predict` gives None where there is no answer."""

    name: str
    predict: Callable[[str], str | None]
    right: Callable[[str, str], bool]


def last_digit(text: str) -> str | None:
    """The last digit of a text."""
    found = re.findall(r"[0-9]", text)
    return found[-1] if found else None


DIGIT = Protocol("last digit", last_digit, lambda prediction, gold: prediction == gold)


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
    protocol: Protocol,
    *,
    batch: int = 64,
    bytes_each: int = 0,
    folder: Path | None = None,
    key: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    show: Show | None = None,
) -> Result:
    """Asks every question and judges what comes; row i of `source` is question i of `examples`.

    With a `folder` (evaluations/NAME), rows go to `.part-NAME` while it runs: asked again with the same `key`, it goes
    on after the last whole line. At the end the folder is committed with `texts`, files to lie beside. A folder that is
    there is read, not made again. Raises `Busy` (73) where either belongs to another key, `BadInput` (66) for no rows.
    """
    if not examples or len(source) < len(examples):
        raise BadInput(
            f"{len(examples)} questions and {len(source)} rows to ask; give a row for each, and at least one"
        )
    about = {"data": source.fingerprint, "protocol": protocol.name, "questions": str(len(examples))}
    mark = canonical({**(key or {}), **about})
    if folder is not None and folder.exists():
        return Result(committed(folder, mark), protocol.name, bytes_each)
    part = None if folder is None else folder.with_name(f".part-{folder.name}")
    rows = [] if part is None else begun(part, mark)
    with (part / "answers.jsonl").open("a", encoding="utf-8") if part else io.StringIO() as file:
        for at in range(len(rows), len(examples), batch):
            places = range(at, min(at + batch, len(examples)))
            found = judged(answer(source.batch(places, 0, 0)), [examples[i] for i in places], protocol)
            file.writelines(row.line() for row in found)
            file.flush()
            rows += found
            if show:
                show(protocol.name, len(rows), len(examples))
    result = Result(tuple(rows), protocol.name, bytes_each)
    if folder is not None and part is not None:
        commit(folder, part, result, texts or {})
    return result


def judged(answers: Answers, examples: Sequence[Example], protocol: Protocol) -> list[Row]:
    """The rows of one batch."""
    made = zip(examples, answers.texts, answers.passes, answers.held, strict=True)
    found: list[Row] = []
    for example, text, passes, held in made:
        prediction = protocol.predict(text)
        right = prediction is not None and protocol.right(prediction, example.answer)
        question = sha256(example.question.encode()).hexdigest()
        found.append(Row(example.id, question, example.answer, text, prediction, right, passes, held))
    return found


def begun(part: Path, mark: str) -> list[Row]:
    """The rows of an evaluation that was stopped; a half last line is cut off."""
    answers, key = part / "answers.jsonl", part / "key.json"
    if not key.exists():
        part.mkdir(parents=True, exist_ok=True)
        replace_file(key, lambda new: new.write_text(mark, encoding="utf-8"))
    elif key.read_text(encoding="utf-8") != mark:
        raise Busy(f"{part} holds answers to other questions or of another step; remove it, or give another name")
    whole = answers.read_text(encoding="utf-8").splitlines(keepends=True) if answers.exists() else []
    if whole and not whole[-1].endswith("\n"):
        whole.pop()
        replace_file(answers, lambda new: new.write_text("".join(whole), encoding="utf-8"))
    return [row_of(line) for line in whole]


def commit(folder: Path, part: Path, result: Result, texts: Mapping[str, str]) -> None:
    """The folder of an evaluation: answers, figures, what they belong to, and a manifest of all that."""
    mark = (part / "key.json").read_text(encoding="utf-8")
    lines = "".join(row.line() for row in result.rows)

    def write(new: Path) -> None:
        files = manifest.Files(new)
        for name, text in {**texts, "key.json": mark, "answers.jsonl": lines}.items():
            files.text(name, text)
        files.json("result.json", result.to_json())
        files.seal("evaluation", 0, {"key": sha256(mark.encode()).hexdigest()})

    commit_folder(folder, write, len(lines))
    shutil.rmtree(part)


def committed(folder: Path, mark: str) -> tuple[Row, ...]:
    """The rows of an evaluation that is done, and that is of this key."""
    rows = read_rows(folder)
    if (folder / "key.json").read_text(encoding="utf-8") != mark:
        raise Busy(f"{folder} is the evaluation of other questions or of another step; give another name")
    return rows


def read_rows(folder: Path) -> tuple[Row, ...]:
    """The rows of an evaluation that is done. Raises `Damaged` (76) if a file is not as it was written."""
    manifest.check(folder, "evaluation")
    return tuple(row_of(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines())


class Latency(NamedTuple):
    """Milliseconds a question takes when it is asked alone, greedy: median and 90 % point of `questions`."""

    median: float
    p90: float
    questions: int


def latencies(
    asked: Sequence[tuple[Answer, Source]], rows: Sequence[int], warm: int = 10, device: str = "cpu"
) -> list[Latency]:
    """One question at a time, after `warm` that do not count; each is put to all in turn, so that none is favoured."""
    seconds = [
        [timed(answer, source.batch([i], 0, 0), device) for answer, source in asked] for i in [*rows[:warm], *rows]
    ]
    kept = 1000 * np.array(seconds[min(warm, len(rows)) :]).reshape(len(rows), len(asked))
    return [Latency(float(np.median(each)), float(np.quantile(each, 0.9)), len(each)) for each in kept.T]


def throughput(answer: Answer, source: Source, rows: Sequence[int], batch: int = 64, device: str = "cpu") -> float:
    """Questions a second in batches of `batch`, the first batch asked once before."""
    batches = [source.batch(rows[at : at + batch], 0, 0) for at in range(0, len(rows), batch)]
    timed(answer, batches[0], device)
    return len(rows) / sum(timed(answer, one, device) for one in batches)


def timed(answer: Answer, batch: Any, device: str) -> float:
    """Seconds of one call, the device's queue empty before and after."""
    settle = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    settle()
    start = time.perf_counter()
    answer(batch)
    settle()
    return time.perf_counter() - start
