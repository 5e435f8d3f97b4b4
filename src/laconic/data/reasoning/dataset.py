"""Reasoning examples as padded batches: filter rows by length, store them as ids, and collate."""

import hashlib
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.batches import IGNORE_INDEX, ReasoningBatch, ReasoningExample
from laconic.batches.padding import pad_rows
from laconic.config.data import DataConfig
from laconic.console import ProgressFn
from laconic.data.reasoning.chat import has_history
from laconic.data.reasoning.encode import EncodedExample, ReasoningEncoder
from laconic.data.strict_jsonl import RowProblem, format_problems, is_within_skip_limit
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError


def answer_prefix_ids(tokenizer: Tokenizer, config: DataConfig) -> list[int]:
    """Return the ids between the latent thoughts (or the question) and the answer at inference."""
    encoder = ReasoningEncoder(tokenizer, config)
    if config.format == "icot" or (config.format == "codi" and config.separator == "eos"):
        return [encoder.eos_token_id]
    return list(encoder.answer_prompt_ids) if config.format in ("pccot", "digits") else []


@dataclass
class FilterCounts:
    num_read: int = 0
    num_without_leading_digit: int = 0
    num_too_long: int = 0
    num_invalid: int = 0
    num_used: int = 0
    num_truncated: int = 0
    num_without_chain: int = 0
    num_short_chain: int = 0
    num_unknown_tokens: int = 0
    num_documents: int = 0

    def describe(self, num_latents: int) -> list[str]:
        counts = {
            "rows without a chain": self.num_without_chain,
            f"rows whose chain has fewer than {num_latents} tokens, one per latent": self.num_short_chain,
            "unknown tokens in questions and chains": self.num_unknown_tokens,
            "rows with a document": self.num_documents,
        }
        lines = [f"{text}: {count:,}" for text, count in counts.items() if count]
        return [f"{self.num_used:,} of {self.num_read:,} rows are used", *self.describe_left_out(), *lines]

    def describe_left_out(self, num_skipped: int = 0) -> tuple[str, ...]:
        """Return a line with the rows that filters left out or truncated, if any; `num_skipped` before, on reading."""
        reasons = {
            'too long (on_too_long = "drop")': self.num_too_long,
            "without a leading digit (require_leading_digit)": self.num_without_leading_digit,
            'invalid (on_invalid_row = "skip")': self.num_invalid + num_skipped,
        }
        parts = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
        notes: list[str] = []
        if parts:
            total = self.num_read + num_skipped
            notes.append(f"{sum(reasons.values()):,} of {total:,} rows left out: {', '.join(parts)}")
        if self.num_truncated:
            notes.append(f"{self.num_truncated:,} questions truncated")
        return ("; ".join(notes),) if notes else ()


def remove_file_name(id: str, files: Collection[str]) -> str:
    """Return the id of a row; only its number if it is that of a row without an id, `FILE:NUMBER`."""
    name, colon, number = id.rpartition(":")
    return colon + number if name in files and number.isdecimal() else id


class ReasoningDataset:
    """Encoded examples as batches (batches.TrainingData).

    Args:
        examples: Rows; those that are used are in `self.examples`, and `self.counts` says what happened to the others.
        tokenizer: Tokenizer of the model.
        config: Format of a row, its token limit, and what happens to invalid or long rows.
        max_positions: Positions of the model, if rows have to fit: a row takes its question, its chain or latent
            thoughts with their begin and end vectors, whichever is longer, its answer, and the memory of its document.
        num_latents: M, latent thoughts of the method.
        min_rows: Rows of a batch.
        count_memory_positions: Positions of the memory of a document of some tokens; None if documents are not read.
        progress: Called with a label, the rows encoded and their total, every thousand rows.

    Raises:
        InputError: For rows that cannot be encoded or do not fit, unless they may be dropped, if fewer than `min_rows`
            are left, and for conversations of several messages if the format is not "chat".
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
        count_memory_positions: Callable[[int], int] | None = None,
        progress: ProgressFn | None = None,
    ) -> None:
        self.config, self.max_positions, self.num_latents = config, max_positions, num_latents
        self.count_memory_positions = count_memory_positions
        conversation = None if config.format == "chat" else next(filter(has_history, examples), None)
        if conversation is not None:
            raise InputError(f'row {conversation.label}: a conversation of several messages; set data.format = "chat"')
        encoder = ReasoningEncoder(tokenizer, config)
        self.counts = FilterCounts(num_read=len(examples))
        self.examples: list[ReasoningExample] = []
        self.documents: list[NDArray[np.int32]] = []
        packed: list[NDArray[np.int32]] = []
        problems: list[RowProblem] = []
        for number, example in enumerate(examples):
            if progress and number % 1000 == 0:
                progress("rows encoded", number, len(examples))
            try:
                row = self._fit_row(example, encoder)
            except InputError as error:
                problems.append(RowProblem(0, "that cannot be encoded or do not fit", str(error)))
                continue
            if row is not None:
                self.examples.append(example)
                packed.append(pack_row(row))
                self.documents.append(np.array(row.document_ids, dtype=np.int32))
                self.counts.num_used += 1
                self.counts.num_without_chain += not row.chain_ids
                self.counts.num_short_chain += 0 < len(row.chain_ids) < num_latents
                self.counts.num_unknown_tokens += row.num_unknown
                self.counts.num_documents += bool(row.document_ids)
        if problems and not (config.on_invalid_row == "skip" and is_within_skip_limit(len(problems), len(examples))):
            raise InputError(format_problems(problems, ""))
        self.counts.num_invalid = len(problems)
        had_chain = sum(bool(example.steps) for example in self.examples)
        if had_chain and self.counts.num_without_chain == len(self.examples):
            message = f'chain_steps="{config.chain_steps}" leaves no row with a chain; set chain_steps="all"'
            warnings.warn(message, stacklevel=2)
        if len(packed) < min_rows:
            count = f"{len(packed)} of {len(examples)} rows are usable, fewer than a batch of {min_rows:,}"
            reasons = "; ".join((count, *self.counts.describe_left_out()))
            raise InputError(f"{reasons}; give more rows, or a smaller train.batch_size")
        self.starts = np.cumsum([0, *map(len, packed)])
        self.packed = np.concatenate(packed) if packed else np.zeros(0, np.int32)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rows' names and ids, and of their documents if there are any; files may be renamed."""
        files = {Path(name).name for name in (self.config.path, *(self.config.name or ())) if name}
        names = "\n".join(remove_file_name(example.id, files) for example in self.examples).encode()
        digest = hashlib.sha256(names + self.packed.astype("<i4").tobytes())
        if self.counts.num_documents:
            for ids in self.documents:
                digest.update(len(ids).to_bytes(4, "little") + ids.astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of question, chain and answer of each row, [n, 3]."""
        return self.packed[self.starts[:-1, None] + np.arange(3)]

    @property
    def max_length(self) -> int:
        return int(self.lengths[:, 1].max(initial=0))

    def __len__(self) -> int:
        return len(self.examples)

    def get_row(self, index: int) -> EncodedExample:
        row = unpack_row(self.examples[index].id, self.packed[self.starts[index] : self.starts[index + 1]])
        return replace(row, document_ids=tuple(self.documents[index].tolist()))

    def batch(self, rows: Sequence[int], epoch: int = 0, step: int = 0) -> ReasoningBatch:
        return collate([self.get_row(int(i)) for i in rows], rows, epoch, step)

    def _fit_row(self, example: ReasoningExample, encoder: ReasoningEncoder) -> EncodedExample | None:
        """Encode a row and apply the length limits; None if it is dropped."""
        if self.config.require_leading_digit and not example.answer[:1].isdigit():
            self.counts.num_without_leading_digit += 1
            return None
        row = encoder.encode_example(example)
        excess, limit = self._find_excess(row)
        if excess <= 0:
            return row
        if self.config.on_too_long == "drop":
            self.counts.num_too_long += 1
            return None
        prefix = row.question_ids[: row.num_prefix_tokens]
        question = row.question_ids[row.num_prefix_tokens :]
        if self.config.on_too_long == "truncate_question" and len(question) > excess:  # so that a token remains
            self.counts.num_truncated += 1
            return replace(row, question_ids=prefix + question[excess:])
        parts = f"{len(row.question_ids)} + {len(row.chain_ids)} + {len(row.answer_ids)}"
        hint = 'set data.on_too_long = "drop" or "truncate_question"'
        hint = f"raise it, or {hint}" if limit.startswith("data.") else hint
        hint = hint if self.config.on_too_long == "error" else "chains and answers are not truncated"
        raise InputError(
            f"row {example.label}: {parts} tokens of question, chain and answer are {excess} more than {limit}; {hint}"
        )

    def _find_excess(self, row: EncodedExample) -> tuple[int, str]:
        """Return by how many tokens a row is too long, and the limit that it exceeds."""
        excess = [(0, "")]
        if self.config.max_tokens is not None:
            excess.append((len(row) - self.config.max_tokens, f"data.max_tokens = {self.config.max_tokens}"))
        if self.max_positions is not None:
            latents = self.num_latents + 2 if self.num_latents else 0
            total = len(row.question_ids) + max(len(row.chain_ids), latents) + len(row.answer_ids)
            limit = f"the model's {self.max_positions} positions, with {self.num_latents} latents"
            if row.document_ids and self.count_memory_positions is not None:
                memory = self.count_memory_positions(len(row.document_ids))
                total += memory
                limit = f"{limit} and {memory} for the memory of the document"
            excess.append((total - self.max_positions, limit))
        return max(excess)


def pack_row(row: EncodedExample) -> NDArray[np.int32]:
    """Store a row as one array: 8 numbers (lengths, columns, counts), then the ids."""
    lengths = len(row.question_ids), len(row.chain_ids), len(row.answer_ids)
    head = (*lengths, *row.number_span, row.distill_column, row.num_prefix_tokens, row.num_unknown)
    chain = *row.chain_ids, *row.chain_step_index, *row.chain_result_mask
    return np.array([*head, *row.question_ids, *chain, *row.answer_ids], dtype=np.int32)


def unpack_row(id: str, packed: NDArray[np.int32]) -> EncodedExample:
    num_question, num_chain, num_answer, first, last, distill_column, num_prefix, num_unknown = packed[:8].tolist()
    parts = np.split(packed[8:], np.cumsum([num_question, *[num_chain] * 3, num_answer])[:-1])
    question, chain, step_index, is_result, answer = (tuple(part.tolist()) for part in parts)
    return EncodedExample(
        id,
        question_ids=question,
        chain_ids=chain,
        chain_step_index=step_index,
        chain_result_mask=tuple(map(bool, is_result)),
        answer_ids=answer,
        number_span=(first, last),
        distill_column=distill_column,
        num_prefix_tokens=num_prefix,
        num_unknown=num_unknown,
    )


def collate(rows: Sequence[EncodedExample], index: Sequence[int], epoch: int = 0, step: int = 0) -> ReasoningBatch:
    """Pad rows to a batch: questions on the left, chains and answers on the right.

    Each target stands at the position that predicts it. Documents are padded on the right. `index` are the indices of
    the rows in the data set.
    """
    targets = [(*row.chain_ids, *row.answer_ids, IGNORE_INDEX) for row in rows]
    chain_ends = [len(row.chain_ids) + 1 for row in rows]
    question_ids, question_mask = pad_rows([row.question_ids for row in rows], pad_left=True)
    chain_ids, chain_mask = pad_rows([row.chain_ids for row in rows])
    answer_ids, answer_mask = pad_rows([row.answer_ids for row in rows])
    chain_targets = [target[1:end] for target, end in zip(targets, chain_ends, strict=True)]
    answer_targets = [target[end:] for target, end in zip(targets, chain_ends, strict=True)]
    column = torch.arange(answer_ids.shape[1])
    first, last = (torch.tensor([row.number_span[i] for row in rows])[:, None] for i in (0, 1))
    documents = pad_rows([row.document_ids for row in rows]) if any(row.document_ids for row in rows) else (None, None)
    return ReasoningBatch(
        question_ids=question_ids,
        question_mask=question_mask,
        chain_ids=chain_ids,
        chain_mask=chain_mask,
        chain_step_index=pad_rows([row.chain_step_index for row in rows])[0],
        answer_ids=answer_ids,
        answer_mask=answer_mask,
        question_target=torch.tensor([target[0] for target in targets]),
        chain_targets=pad_rows(chain_targets, IGNORE_INDEX)[0],
        answer_targets=pad_rows(answer_targets, IGNORE_INDEX)[0],
        distill_column=torch.tensor([row.distill_column for row in rows]),
        answer_number_mask=(column >= first) & (column < last),
        row_index=torch.as_tensor(index, dtype=torch.long),
        ids=tuple(row.id for row in rows),
        epoch=epoch,
        step=step,
        document_ids=documents[0],
        document_mask=documents[1],
        chain_result_mask=pad_rows([row.chain_result_mask for row in rows])[0].bool(),
    )
