"""From text to ids: an example is encoded in pieces, as its format says, and the ids are joined.

The joined text is never encoded again, so a token never reaches over the border of two pieces. What holds the number is
found by character offsets, never by searching ids.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError

NUMBER_PATTERN = re.compile(r"[-+−]?[$]?[.]?\d(?:.*\d)?", re.DOTALL)  # a sign counts; the last digit ends it
PREFIX_PROBES = ("123", "82435")  # two numbers: what both begin with is a prefix space


@dataclass(frozen=True)
class EncodedExample:
    """One row as ids: three parts, the step of each chain token, and the answer's columns [start, end) of the number.

    `distil` is the column before `number`, -1 where the format distils nothing. `unknown` counts tokens of question
    and chain that the tokenizer has no word for; `head` counts the special ones the question begins with.
    """

    id: str
    question_ids: tuple[int, ...]
    chain_ids: tuple[int, ...]
    chain_step_index: tuple[int, ...]
    answer_ids: tuple[int, ...]
    number_span: tuple[int, int]
    distill_column: int
    num_prefix_tokens: int = 0
    num_unknown: int = 0

    def __len__(self) -> int:
        return len(self.question_ids) + len(self.chain_ids) + len(self.answer_ids)


class EncodedText(NamedTuple):
    """A text as ids, and for each the characters [start, end) it stands for."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def token_range(self, start: int, end: int) -> tuple[int, int]:
        """The columns of the tokens that hold a character of [start, end)."""
        held = [i for i, (a, b) in enumerate(self.offsets) if a < end and b > start]
        return (held[0], held[-1] + 1) if held else (0, 0)


class ReasoningEncoder:
    """The pieces of a row by one tokenizer and one format. Raises `BadInput` where a word or eos is missing."""

    def __init__(self, tokenizer: Tokenizer, config: DataConfig) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.unk_token_id = (
            tokenizer.special_token_id("unk_token")
            if tokenizer.special_token_id("unk_token") != tokenizer.eos_token_id
            else None
        )
        self.prefix_space_id = self._prefix()
        self.eos_token_id = find_eos_token_id(tokenizer, config)
        added = tokenizer.backend.get_added_tokens_decoder()
        self.special_ids = {id for id, token in added.items() if token.special and id != self.unk_token_id} | {
            self.eos_token_id
        }
        self.num_eos = {"codi": 3 if config.separator == "eos" else 1, "icot": 3}.get(
            config.format, 1
        )  # eos that we put
        given = {
            "pccot": config.answer_prompt,
            "codi": config.answer_prompt,
            "coconut": "###",
            "icot": "####",
            "digits": "ans",
        }
        self.answer_prompt = given[config.format]
        self.answer_prompt_ids = self.encode_text(self.answer_prompt).ids
        if self.unk_token_id in self.answer_prompt_ids:
            raise InputError(
                f"format {config.format}: the tokenizer has no word for {self.answer_prompt!r}; choose another format"
            )

    def _prefix(self) -> int | None:
        """The id that SentencePiece puts before every text for its prefix space, if it stands alone."""
        first, second = (self.tokenizer.encode(text, add_special_tokens=False) for text in PREFIX_PROBES)
        alone = min(len(first), len(second)) > 1 and first[0] == second[0] != self.unk_token_id
        return first[0] if alone else None

    def encode_text(self, text: str) -> EncodedText:
        """A piece but the question: no special tokens, no prefix space."""
        found = self.tokenizer.backend.encode(text, add_special_tokens=False)
        at = 1 if found.ids and found.ids[0] == self.prefix_space_id else 0
        return EncodedText(found.ids[at:], found.offsets[at:])

    def encode_question(self, text: str) -> tuple[EncodedText, int]:
        """With the tokenizer's own special tokens, those at the end taken off; and how many stand at the head."""
        found = self.tokenizer.backend.encode(text)
        own = [i for i, special in enumerate(found.special_tokens_mask) if not special]
        if not own:
            raise InputError(
                f"question {text[:40]!r}: nothing of it is left by the tokenizer; write it in words it has"
            )
        return EncodedText(found.ids[: own[-1] + 1], found.offsets[: own[-1] + 1]), own[0]

    def encode_example(self, example: ReasoningExample) -> EncodedExample:
        """An example as ids. Raises `BadInput` with its id."""
        try:
            start, end = find_number(example.answer, self.config)
            kept = example.steps[:-1] if self.config.chain_steps == "drop_last" else example.steps
            made = (self._one if self.config.format == "icot" else self._pieces)(example, kept, start, end)
            unknown = self._check(made)
        except InputError as error:
            raise InputError(f"row {example.id}: {error}") from None
        return replace(made, num_unknown=unknown)

    def _check(self, row: EncodedExample) -> int:
        """How many unknown words question and chain have; an answer has none, and no text holds special tokens."""
        if self.unk_token_id in row.answer_ids:
            raise InputError("the tokenizer has no word for a part of the answer; choose another tokenizer")
        if (
            sum(
                id in self.special_ids
                for id in (*row.question_ids[row.num_prefix_tokens :], *row.chain_ids, *row.answer_ids)
            )
            != self.num_eos
        ):
            raise InputError("a special token of the tokenizer stands in the text; take it out")
        return (row.question_ids + row.chain_ids).count(self.unk_token_id) if self.unk_token_id is not None else 0

    def _pieces(self, example: ReasoningExample, kept: tuple[str, ...], start: int, end: int) -> EncodedExample:
        how, eos = self.config, (self.eos_token_id,)
        asked, head = self.encode_question(example.question + ("\n" if how.format == "coconut" else ""))
        between = eos if how.format == "codi" and how.separator == "eos" else ()
        chain, numbers = self._joined(kept) if how.format == "codi" else self._steps(kept)
        said = {"pccot": "", "digits": "", "codi": f"{self.answer_prompt} ", "coconut": f"{self.answer_prompt} "}[
            how.format
        ]
        before = () if said else self.answer_prompt_ids
        answer = self.encode_text(said + example.answer)
        first, last = answer.token_range(len(said) + start, len(said) + end)
        shift = len(between) + len(before)
        return EncodedExample(
            example.id, (*asked.ids, *between), tuple(chain), tuple(numbers), (*between, *before, *answer.ids, *eos),
            (first + shift, last + shift), -1 if how.format == "coconut" else first + shift - 1, head,
        )  # fmt: skip

    def _steps(self, kept: tuple[str, ...]) -> tuple[list[int], list[int]]:
        """One piece a step."""
        end = "\n" if self.config.format == "coconut" else ""
        pieces = [self.encode_text(step + end).ids for step in kept]
        return [id for ids in pieces for id in ids], [i for i, ids in enumerate(pieces) for _ in ids]

    def _joined(self, kept: tuple[str, ...]) -> tuple[list[int], list[int]]:
        """All steps as one piece; prose as CODI's code writes it."""
        prose = self.config.chain_split == "sentences"
        space, end = (". ", ".\n") if prose else (" ", "")
        if not kept:
            return [], []
        chain = self.encode_text(space.join(kept) + end)
        return chain.ids, assign_steps(chain.offsets, kept, len(space), 0)

    def _one(self, example: ReasoningExample, kept: tuple[str, ...], start: int, end: int) -> EncodedExample:
        """iCoT: the row is one string, cut into parts after it is encoded; the answer begins with the chain's eos."""
        eos = self.tokenizer.backend.id_to_token(self.eos_token_id)
        texts = (
            f" {example.question} {eos}",
            f" {' '.join(kept)} ",
            f"{eos} {self.answer_prompt} ",
            example.answer,
            f" {eos}",
        )
        marks = [sum(map(len, texts[:i])) for i in range(6)]
        row, head = self.encode_question("".join(texts))
        # A token belongs to the part in which it ends: in " #### " + "18" the space of "Ġ18" stands before its part.
        first, second = (sum(b <= mark for _, b in row.offsets) for mark in marks[1:3])
        numbers = assign_steps(row.offsets[first:second], kept, 1, marks[1] + 1)
        low, high = row.token_range(marks[3] + start, marks[3] + end)
        return EncodedExample(
            example.id, tuple(row.ids[:first]), tuple(row.ids[first:second]), tuple(numbers),
            tuple(row.ids[second:]), (low - second, high - second), -1, head,
        )  # fmt: skip


def find_number(answer: str, config: DataConfig) -> tuple[int, int]:
    """The characters of the number, its sign included; of the whole answer where answers are text."""
    if config.answer_type == "text":
        return 0, len(answer)
    found = NUMBER_PATTERN.search(answer)
    if found is None:
        raise InputError(f'answer {answer[:40]!r} holds no number; give one, or set data.answer_type = "text"')
    return found.span()


def assign_steps(spans: Sequence[tuple[int, int]], kept: tuple[str, ...], space: int, start: int) -> list[int]:
    """The step in which each token ends; what stands between two steps belongs to the one before."""
    begins = [start + sum(len(s) + space for s in kept[:i]) for i in range(len(kept))]
    return [max(0, sum(begin < end for begin in begins) - 1) for _, end in spans]


def find_eos_token_id(tokenizer: Tokenizer, config: DataConfig) -> int:
    """The id that ends an answer: the tokenizer's eos, or the token that data.eos_token names."""
    if config.eos_token is None and tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    found = tokenizer.backend.token_to_id(config.eos_token) if config.eos_token is not None else None
    if found is None:
        asked = (
            "the tokenizer's files name no eos"
            if config.eos_token is None
            else f"data.eos_token {config.eos_token!r} is none of its tokens"
        )
        there = [t.content for t in tokenizer.backend.get_added_tokens_decoder().values() if t.special]
        raise InputError(
            f"{asked}; set data.eos_token to one of its special tokens: {', '.join(there[:8]) or 'it has none'}"
        )
    return found
