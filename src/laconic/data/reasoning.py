"""From examples to batches: rows within their budget, laid on a grid where every part begins at the same column."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.core.contract import UNSCORED, Example, Reasoning
from laconic.core.errors import BadInput
from laconic.data.pieces import Encoded, Encoder
from laconic.data.problems import Problem, report, within_skips
from laconic.data.settings import Data
from laconic.data.tokens import Tokenizer


def encode(example: Example, tokenizer: Tokenizer, how: Data) -> Encoded:
    """One example as ids."""
    return Encoder(tokenizer, how).row(example)


def prompt_ids(tokenizer: Tokenizer, how: Data) -> list[int]:
    """What is given between thoughts (or question) and answer at inference."""
    encoder = Encoder(tokenizer, how)
    if how.format == "icot" or (how.format == "codi" and how.separator == "eos"):
        return [encoder.eos]
    return list(encoder.given_ids) if how.format in ("pccot", "digits") else []


@dataclass
class Counts:
    """What became of the rows that were read."""

    read: int = 0
    negative: int = 0
    long: int = 0
    bad: int = 0
    kept: int = 0
    cut: int = 0
    empty: int = 0
    short: int = 0
    unknown: int = 0

    def lines(self, thoughts: int = 0) -> list[str]:
        """One line for each count that is not 0, for the log and the report."""
        said = {
            "read": "rows read",
            "negative": "rows left out: the answer does not begin with a digit (drop_negative)",
            "long": 'rows left out: over their budget of tokens (too_long = "drop")',
            "bad": 'rows left out: they cannot be encoded (on_bad = "skip")',
            "kept": "rows kept",
            "cut": 'questions cut at their left (too_long = "cut-question")',
            "empty": "rows without a chain",
            "short": f"rows whose chain has fewer than {thoughts} tokens, one a thought",
            "unknown": "tokens of questions and chains that the tokenizer has no word for",
        }
        return [f"{count:,} {said[f.name]}" for f in fields(self) if (count := getattr(self, f.name))]


class Questions:
    """Examples as batches (contract.Source); `examples` are those kept, `counts` what became of all.

    `context` are the positions a model has, `thoughts` the M of a method: a row takes its question, its chain or bot,
    M thoughts and eot, whichever is longer, and its answer. Raises `BadInput` for rows that cannot be encoded or do not
    fit, as `data.on_bad` and `data.too_long` say, and where fewer than `least` rows are left. `show` is told how far it
    is, every thousand rows: a tokenizer takes some thousands of rows a second.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        how: Data,
        *,
        context: int | None = None,
        thoughts: int = 0,
        least: int = 1,
        show: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.how, self.context, self.thoughts = how, context, thoughts
        self.encoder = Encoder(tokenizer, how)
        self.counts = Counts(read=len(examples))
        self.examples: list[Example] = []
        packed: list[NDArray[np.int32]] = []
        problems: list[Problem] = []
        for number, example in enumerate(examples):
            if show and number % 1000 == 0:
                show("rows encoded", number, len(examples))
            try:
                row = self._row(example)
            except BadInput as error:
                problems.append(Problem(0, 0, "that cannot be encoded or do not fit", str(error)))
                continue
            if row is not None:
                self.examples.append(example)
                packed.append(pack(row))
                self._count(row)
        if problems and not (how.on_bad == "skip" and within_skips(len(problems), len(examples))):
            raise BadInput(report(problems, ""))
        self.counts.bad = len(problems)
        if len(packed) < least:
            raise BadInput(
                f"{len(packed)} of {len(examples)} rows are left, a batch asks for {least}; give more rows than that"
            )
        self.starts = np.cumsum([0, *map(len, packed)])
        self.packed = np.concatenate(packed) if packed else np.zeros(0, np.int32)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rows as ids, with their names."""
        names = "\n".join(example.id for example in self.examples).encode()
        return hashlib.sha256(names + self.packed.astype("<i4").tobytes()).hexdigest()

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of question, chain and answer of each row, [n, 3]."""
        return self.packed[self.starts[:-1, None] + np.arange(3)]

    @property
    def longest(self) -> int:
        """Tokens of the longest chain."""
        return int(self.lengths[:, 1].max(initial=0))

    def __len__(self) -> int:
        return len(self.examples)

    def row(self, index: int) -> Encoded:
        """One row as ids."""
        return unpack(self.examples[index].id, self.packed[self.starts[index] : self.starts[index + 1]])

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Reasoning:
        """The rows on a grid."""
        return collate([self.row(int(i)) for i in rows], rows, epoch, step)

    def _row(self, example: Example) -> Encoded | None:
        """A row within its budget, or None for one that is left out."""
        if self.how.drop_negative and not example.answer[:1].isdigit():
            self.counts.negative += 1
            return None
        row = self.encoder.row(example)
        over, held = self._over(row)
        spare = len(row.question) - row.head - 1  # one token of the question stays
        if over <= 0:
            return row
        if self.how.too_long == "drop":
            self.counts.long += 1
            return None
        if self.how.too_long == "cut-question" and over <= spare:
            self.counts.cut += 1
            return replace(row, question=row.question[: row.head] + row.question[row.head + over :])
        parts = f"{len(row.question)} + {len(row.chain)} + {len(row.answer)}"
        say = (
            'set data.too_long = "drop", or "cut-question"' if self.how.too_long == "error" else "an answer is not cut"
        )
        raise BadInput(f"row {row.id}: question, chain and answer of {parts} tokens, {over} more than {held}; {say}")

    def _over(self, row: Encoded) -> tuple[int, str]:
        """By how many tokens a row is too long, and for what."""
        thinking = self.thoughts + 2 if self.thoughts else 0
        over = [(0, "")]
        if self.how.max_tokens is not None:
            over.append((len(row) - self.how.max_tokens, f"data.max_tokens = {self.how.max_tokens}"))
        if self.context is not None:
            longest = len(row.question) + max(len(row.chain), thinking) + len(row.answer)
            over.append(
                (longest - self.context, f"the model's {self.context} positions hold with {self.thoughts} thoughts")
            )
        return max(over)

    def _count(self, row: Encoded) -> None:
        self.counts.kept += 1
        self.counts.empty += not row.chain
        self.counts.short += 0 < len(row.chain) < self.thoughts
        self.counts.unknown += row.unknown


def pack(row: Encoded) -> NDArray[np.int32]:
    """A row as one array: lengths, marks, ids."""
    head = (len(row.question), len(row.chain), len(row.answer), *row.number, row.distil, row.head, row.unknown)
    return np.array([*head, *row.question, *row.chain, *row.chain_step, *row.answer], dtype=np.int32)


def unpack(id: str, packed: NDArray[np.int32]) -> Encoded:
    """The row of an array."""
    asked, chain, answer, first, last, distil, head, unknown = packed[:8].tolist()
    parts = np.split(packed[8:], np.cumsum([asked, chain, chain, answer])[:-1])
    question, chain, numbers, answer = (tuple(part.tolist()) for part in parts)
    return Encoded(id, question, chain, numbers, answer, (first, last), distil, head, unknown)


def collate(rows: Sequence[Encoded], index: Sequence[int], epoch: int = 0, step: int = 0) -> Reasoning:
    """Rows on a grid: questions padded left, chains and answers right; each target stands where it is predicted."""
    follows = [(*row.chain, *row.answer, UNSCORED) for row in rows]
    question, question_live = grid([row.question for row in rows], left=True)
    chain, chain_live = grid([row.chain for row in rows])
    answer, answer_live = grid([row.answer for row in rows])
    chains = [len(row.chain) for row in rows]
    column = torch.arange(answer.shape[1])
    first, last = (torch.tensor([row.number[i] for row in rows])[:, None] for i in (0, 1))
    return Reasoning(
        question=question, question_live=question_live, chain=chain, chain_live=chain_live,
        chain_step=grid([row.chain_step for row in rows])[0], answer=answer, answer_live=answer_live,
        next_question=torch.tensor([after[0] for after in follows]),
        next_chain=grid([after[1 : n + 1] for after, n in zip(follows, chains, strict=True)], UNSCORED)[0],
        next_answer=grid([after[n + 1 :] for after, n in zip(follows, chains, strict=True)], UNSCORED)[0],
        distil=torch.tensor([row.distil for row in rows]), number=(column >= first) & (column < last),
        index=torch.as_tensor(index, dtype=torch.long), ids=tuple(row.id for row in rows), epoch=epoch, step=step,
    )  # fmt: skip


def grid(rows: Sequence[Sequence[int]], fill: int = 0, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """[B, longest] and which of it is live; what fills the rest means nothing."""
    width = max(map(len, rows), default=0)
    ids, live = torch.full((len(rows), width), fill), torch.zeros(len(rows), width, dtype=torch.bool)
    for b, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[b, place], live[b, place] = torch.tensor(row, dtype=torch.long), True
    return ids, live
