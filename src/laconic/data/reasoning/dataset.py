"""From examples to batches: rows within their budget, laid on a grid where every part begins at the same column."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.batches import IGNORE_INDEX, ReasoningBatch, ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.problems import RowProblem, format_problems, is_within_skip_limit
from laconic.data.reasoning.encode import EncodedExample, ReasoningEncoder
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError


def encode_example(example: ReasoningExample, tokenizer: Tokenizer, config: DataConfig) -> EncodedExample:
    """One example as ids."""
    return ReasoningEncoder(tokenizer, config).encode_example(example)


def answer_prefix_ids(tokenizer: Tokenizer, config: DataConfig) -> list[int]:
    """What is given between thoughts (or question) and answer at inference."""
    encoder = ReasoningEncoder(tokenizer, config)
    if config.format == "icot" or (config.format == "codi" and config.separator == "eos"):
        return [encoder.eos_token_id]
    return list(encoder.answer_prompt_ids) if config.format in ("pccot", "digits") else []


@dataclass
class FilterCounts:
    """What became of the rows that were read."""

    num_read: int = 0
    num_without_leading_digit: int = 0
    num_too_long: int = 0
    num_invalid: int = 0
    num_used: int = 0
    num_truncated: int = 0
    num_without_chain: int = 0
    num_short_chain: int = 0
    num_unknown_tokens: int = 0

    def describe(self, num_latents: int = 0) -> list[str]:
        """One line for each count that is not 0, for the log and the report."""
        said = {
            "read": "rows read",
            "negative": "rows left out: the answer does not begin with a digit (drop_negative)",
            "long": 'rows left out: over their budget of tokens (too_long = "drop")',
            "bad": 'rows left out: they cannot be encoded (on_bad = "skip")',
            "kept": "rows kept",
            "cut": 'questions cut at their left (too_long = "truncate_question")',
            "empty": "rows without a chain",
            "short": f"rows whose chain has fewer than {num_latents} tokens, one a thought",
            "unknown": "tokens of questions and chains that the tokenizer has no word for",
        }
        return [f"{count:,} {said[f.name]}" for f in fields(self) if (count := getattr(self, f.name))]


class ReasoningDataset:
    """Examples as batches (contract.Source); `examples` are those kept, `counts` what became of all.

    `context` are the positions a model has, `thoughts` the M of a method: a row takes its question, its chain or bot,
    M thoughts and eot, whichever is longer, and its answer. Raises `BadInput` for rows that cannot be encoded or do not
    fit, as `data.on_invalid_row` and `data.on_too_long` say, and where fewer than `least` rows are left. `show` is told how far it
    is, every thousand rows: a tokenizer takes some thousands of rows a second.
    """

    def __init__(
        self,
        examples: Sequence[ReasoningExample],
        tokenizer: Tokenizer,
        config: DataConfig,
        *,
        max_positions: int | None = None,
        num_latents: int = 0,
        min_rows: int = 1,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.config, self.max_positions, self.num_latents = config, max_positions, num_latents
        self.encoder = ReasoningEncoder(tokenizer, config)
        self.counts = FilterCounts(num_read=len(examples))
        self.examples: list[ReasoningExample] = []
        packed: list[NDArray[np.int32]] = []
        problems: list[RowProblem] = []
        for number, example in enumerate(examples):
            if progress and number % 1000 == 0:
                progress("rows encoded", number, len(examples))
            try:
                row = self._row(example)
            except InputError as error:
                problems.append(RowProblem(0, 0, "that cannot be encoded or do not fit", str(error)))
                continue
            if row is not None:
                self.examples.append(example)
                packed.append(pack_row(row))
                self._count(row)
        if problems and not (config.on_invalid_row == "skip" and is_within_skip_limit(len(problems), len(examples))):
            raise InputError(format_problems(problems, ""))
        self.counts.num_invalid = len(problems)
        if len(packed) < min_rows:
            raise InputError(
                f"{len(packed)} of {len(examples)} rows are left, a batch asks for {min_rows}; give more rows than that"
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
    def max_length(self) -> int:
        """Tokens of the longest chain."""
        return int(self.lengths[:, 1].max(initial=0))

    def __len__(self) -> int:
        return len(self.examples)

    def get_row(self, index: int) -> EncodedExample:
        """One row as ids."""
        return unpack_row(self.examples[index].id, self.packed[self.starts[index] : self.starts[index + 1]])

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> ReasoningBatch:
        """The rows on a grid."""
        return collate([self.get_row(int(i)) for i in rows], rows, epoch, step)

    def _row(self, example: ReasoningExample) -> EncodedExample | None:
        """A row within its budget, or None for one that is left out."""
        if self.config.require_leading_digit and not example.answer[:1].isdigit():
            self.counts.num_without_leading_digit += 1
            return None
        row = self.encoder.encode_example(example)
        over, held = self._over(row)
        spare = len(row.question_ids) - row.num_prefix_tokens - 1  # one token of the question stays
        if over <= 0:
            return row
        if self.config.on_too_long == "drop":
            self.counts.num_too_long += 1
            return None
        if self.config.on_too_long == "truncate_question" and over <= spare:
            self.counts.num_truncated += 1
            return replace(
                row,
                question_ids=row.question_ids[: row.num_prefix_tokens]
                + row.question_ids[row.num_prefix_tokens + over :],
            )
        parts = f"{len(row.question_ids)} + {len(row.chain_ids)} + {len(row.answer_ids)}"
        say = (
            'set data.on_too_long = "drop", or "truncate_question"'
            if self.config.on_too_long == "error"
            else "an answer is not cut"
        )
        raise InputError(f"row {row.id}: question, chain and answer of {parts} tokens, {over} more than {held}; {say}")

    def _over(self, row: EncodedExample) -> tuple[int, str]:
        """By how many tokens a row is too long, and for what."""
        thinking = self.num_latents + 2 if self.num_latents else 0
        over = [(0, "")]
        if self.config.max_tokens is not None:
            over.append((len(row) - self.config.max_tokens, f"data.max_tokens = {self.config.max_tokens}"))
        if self.max_positions is not None:
            longest = len(row.question_ids) + max(len(row.chain_ids), thinking) + len(row.answer_ids)
            over.append(
                (
                    longest - self.max_positions,
                    f"the model's {self.max_positions} positions hold with {self.num_latents} thoughts",
                )
            )
        return max(over)

    def _count(self, row: EncodedExample) -> None:
        self.counts.num_used += 1
        self.counts.num_without_chain += not row.chain_ids
        self.counts.num_short_chain += 0 < len(row.chain_ids) < self.num_latents
        self.counts.num_unknown_tokens += row.num_unknown


def pack_row(row: EncodedExample) -> NDArray[np.int32]:
    """A row as one array: lengths, marks, ids."""
    head = (
        len(row.question_ids),
        len(row.chain_ids),
        len(row.answer_ids),
        *row.number_span,
        row.distill_column,
        row.num_prefix_tokens,
        row.num_unknown,
    )
    return np.array([*head, *row.question_ids, *row.chain_ids, *row.chain_step_index, *row.answer_ids], dtype=np.int32)


def unpack_row(id: str, packed: NDArray[np.int32]) -> EncodedExample:
    """The row of an array."""
    asked, chain, answer, first, last, distil, head, unknown = packed[:8].tolist()
    parts = np.split(packed[8:], np.cumsum([asked, chain, chain, answer])[:-1])
    question, chain, numbers, answer = (tuple(part.tolist()) for part in parts)
    return EncodedExample(id, question, chain, numbers, answer, (first, last), distil, head, unknown)


def collate(rows: Sequence[EncodedExample], index: Sequence[int], epoch: int = 0, step: int = 0) -> ReasoningBatch:
    """Rows on a grid: questions padded left, chains and answers right; each target stands where it is predicted."""
    follows = [(*row.chain_ids, *row.answer_ids, IGNORE_INDEX) for row in rows]
    question, question_live = pad_rows([row.question_ids for row in rows], pad_left=True)
    chain, chain_live = pad_rows([row.chain_ids for row in rows])
    answer, answer_live = pad_rows([row.answer_ids for row in rows])
    chains = [len(row.chain_ids) for row in rows]
    column = torch.arange(answer.shape[1])
    first, last = (torch.tensor([row.number_span[i] for row in rows])[:, None] for i in (0, 1))
    return ReasoningBatch(
        question_ids=question, question_mask=question_live, chain_ids=chain, chain_mask=chain_live,
        chain_step_index=pad_rows([row.chain_step_index for row in rows])[0], answer_ids=answer, answer_mask=answer_live,
        question_target=torch.tensor([after[0] for after in follows]),
        chain_targets=pad_rows([after[1 : n + 1] for after, n in zip(follows, chains, strict=True)], IGNORE_INDEX)[0],
        answer_targets=pad_rows([after[n + 1 :] for after, n in zip(follows, chains, strict=True)], IGNORE_INDEX)[0],
        distill_column=torch.tensor([row.distill_column for row in rows]), answer_number_mask=(column >= first) & (column < last),
        row_index=torch.as_tensor(index, dtype=torch.long), ids=tuple(row.id for row in rows), epoch=epoch, step=step,
    )  # fmt: skip


def pad_rows(rows: Sequence[Sequence[int]], pad_value: int = 0, *, pad_left: bool = False) -> tuple[Tensor, Tensor]:
    """[B, longest] and which of it is live; what fills the rest means nothing."""
    width = max(map(len, rows), default=0)
    ids, live = torch.full((len(rows), width), pad_value), torch.zeros(len(rows), width, dtype=torch.bool)
    for b, row in enumerate(rows):
        place = slice(width - len(row), width) if pad_left else slice(0, len(row))
        ids[b, place], live[b, place] = torch.tensor(row, dtype=torch.long), True
    return ids, live
