"""From text to ids: an example is encoded in pieces, as its format says, and the ids are joined.

The joined text is never encoded again, so a token never reaches over the border of two pieces. What holds the number is
found by character offsets, never by searching ids.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from laconic.core.contract import Example
from laconic.core.errors import BadInput
from laconic.data.settings import Data
from laconic.data.tokens import Tokenizer

NUMBER = re.compile(r"[-+−]?[$]?[.]?\d(?:.*\d)?", re.DOTALL)  # a sign counts; the last digit ends it
PROBES = ("123", "82435")  # two numbers: what both begin with is a prefix space


@dataclass(frozen=True)
class Encoded:
    """One row as ids: three parts, the step of each chain token, and the answer's columns [start, end) of the number.

    `distil` is the column before `number`, -1 where the format distils nothing. `unknown` counts tokens of question
    and chain that the tokenizer has no word for; `head` counts the special ones the question begins with.
    """

    id: str
    question: tuple[int, ...]
    chain: tuple[int, ...]
    chain_step: tuple[int, ...]
    answer: tuple[int, ...]
    number: tuple[int, int]
    distil: int
    head: int = 0
    unknown: int = 0

    def __len__(self) -> int:
        return len(self.question) + len(self.chain) + len(self.answer)


class Piece(NamedTuple):
    """A text as ids, and for each the characters [start, end) it stands for."""

    ids: list[int]
    spans: list[tuple[int, int]]

    def within(self, start: int, end: int) -> tuple[int, int]:
        """The columns of the tokens that hold a character of [start, end)."""
        held = [i for i, (a, b) in enumerate(self.spans) if a < end and b > start]
        return (held[0], held[-1] + 1) if held else (0, 0)


class Encoder:
    """The pieces of a row by one tokenizer and one format. Raises `BadInput` where a word or eos is missing."""

    def __init__(self, tokenizer: Tokenizer, how: Data) -> None:
        self.tokenizer, self.how = tokenizer, how
        self.unknown = tokenizer.id_of("unk_token") if tokenizer.id_of("unk_token") != tokenizer.eos else None
        self.prefix = self._prefix()
        self.eos = ending(tokenizer, how)
        added = tokenizer.inner.get_added_tokens_decoder()
        self.special = {id for id, token in added.items() if token.special and id != self.unknown} | {self.eos}
        self.ends = {"codi": 3 if how.separator == "eos" else 1, "icot": 3}.get(how.format, 1)  # eos that we put
        given = {"pccot": how.prompt, "codi": how.prompt, "coconut": "###", "icot": "####", "digits": "ans"}
        self.given = given[how.format]
        self.given_ids = self.piece(self.given).ids
        if self.unknown in self.given_ids:
            raise BadInput(f"format {how.format}: the tokenizer has no word for {self.given!r}; choose another format")

    def _prefix(self) -> int | None:
        """The id that SentencePiece puts before every text for its prefix space, if it stands alone."""
        first, second = (self.tokenizer.encode(text, special=False) for text in PROBES)
        alone = min(len(first), len(second)) > 1 and first[0] == second[0] != self.unknown
        return first[0] if alone else None

    def piece(self, text: str) -> Piece:
        """A piece but the question: no special tokens, no prefix space."""
        found = self.tokenizer.inner.encode(text, add_special_tokens=False)
        at = 1 if found.ids and found.ids[0] == self.prefix else 0
        return Piece(found.ids[at:], found.offsets[at:])

    def question(self, text: str) -> tuple[Piece, int]:
        """With the tokenizer's own special tokens, those at the end taken off; and how many stand at the head."""
        found = self.tokenizer.inner.encode(text)
        own = [i for i, special in enumerate(found.special_tokens_mask) if not special]
        if not own:
            raise BadInput(f"question {text[:40]!r}: nothing of it is left by the tokenizer; write it in words it has")
        return Piece(found.ids[: own[-1] + 1], found.offsets[: own[-1] + 1]), own[0]

    def row(self, example: Example) -> Encoded:
        """An example as ids. Raises `BadInput` with its id."""
        try:
            start, end = number_in(example.answer, self.how)
            kept = example.steps[:-1] if self.how.chain == "drop_last" else example.steps
            made = (self._one if self.how.format == "icot" else self._pieces)(example, kept, start, end)
            unknown = self._check(made)
        except BadInput as error:
            raise BadInput(f"row {example.id}: {error}") from None
        return replace(made, unknown=unknown)

    def _check(self, row: Encoded) -> int:
        """How many unknown words question and chain have; an answer has none, and no text holds special tokens."""
        if self.unknown in row.answer:
            raise BadInput("the tokenizer has no word for a part of the answer; choose another tokenizer")
        if sum(id in self.special for id in (*row.question[row.head :], *row.chain, *row.answer)) != self.ends:
            raise BadInput("a special token of the tokenizer stands in the text; take it out")
        return (row.question + row.chain).count(self.unknown) if self.unknown is not None else 0

    def _pieces(self, example: Example, kept: tuple[str, ...], start: int, end: int) -> Encoded:
        how, eos = self.how, (self.eos,)
        asked, head = self.question(example.question + ("\n" if how.format == "coconut" else ""))
        between = eos if how.format == "codi" and how.separator == "eos" else ()
        chain, numbers = self._joined(kept) if how.format == "codi" else self._steps(kept)
        said = {"pccot": "", "digits": "", "codi": f"{self.given} ", "coconut": f"{self.given} "}[how.format]
        before = () if said else self.given_ids
        answer = self.piece(said + example.answer)
        first, last = answer.within(len(said) + start, len(said) + end)
        shift = len(between) + len(before)
        return Encoded(
            example.id, (*asked.ids, *between), tuple(chain), tuple(numbers), (*between, *before, *answer.ids, *eos),
            (first + shift, last + shift), -1 if how.format == "coconut" else first + shift - 1, head,
        )  # fmt: skip

    def _steps(self, kept: tuple[str, ...]) -> tuple[list[int], list[int]]:
        """One piece a step."""
        end = "\n" if self.how.format == "coconut" else ""
        pieces = [self.piece(step + end).ids for step in kept]
        return [id for ids in pieces for id in ids], [i for i, ids in enumerate(pieces) for _ in ids]

    def _joined(self, kept: tuple[str, ...]) -> tuple[list[int], list[int]]:
        """All steps as one piece; prose as CODI's code writes it."""
        prose = self.how.split == "sentences"
        space, end = (". ", ".\n") if prose else (" ", "")
        if not kept:
            return [], []
        chain = self.piece(space.join(kept) + end)
        return chain.ids, steps_of(chain.spans, kept, len(space), 0)

    def _one(self, example: Example, kept: tuple[str, ...], start: int, end: int) -> Encoded:
        """iCoT: the row is one string, cut into parts after it is encoded; the answer begins with the chain's eos."""
        eos = self.tokenizer.inner.id_to_token(self.eos)
        texts = (f" {example.question} {eos}", f" {' '.join(kept)} ", f"{eos} {self.given} ", example.answer, f" {eos}")
        marks = [sum(map(len, texts[:i])) for i in range(6)]
        row, head = self.question("".join(texts))
        # A token belongs to the part in which it ends: in " #### " + "18" the space of "Ġ18" stands before its part.
        first, second = (sum(b <= mark for _, b in row.spans) for mark in marks[1:3])
        numbers = steps_of(row.spans[first:second], kept, 1, marks[1] + 1)
        low, high = row.within(marks[3] + start, marks[3] + end)
        return Encoded(
            example.id, tuple(row.ids[:first]), tuple(row.ids[first:second]), tuple(numbers),
            tuple(row.ids[second:]), (low - second, high - second), -1, head,
        )  # fmt: skip


def number_in(answer: str, how: Data) -> tuple[int, int]:
    """The characters of the number, its sign included; of the whole answer where answers are text."""
    if how.answers == "text":
        return 0, len(answer)
    found = NUMBER.search(answer)
    if found is None:
        raise BadInput(f'answer {answer[:40]!r} holds no number; give one, or set data.answers = "text"')
    return found.span()


def steps_of(spans: Sequence[tuple[int, int]], kept: tuple[str, ...], space: int, start: int) -> list[int]:
    """The step in which each token ends; what stands between two steps belongs to the one before."""
    begins = [start + sum(len(s) + space for s in kept[:i]) for i in range(len(kept))]
    return [max(0, sum(begin < end for begin in begins) - 1) for _, end in spans]


def ending(tokenizer: Tokenizer, how: Data) -> int:
    """The id that ends an answer: the tokenizer's eos, or the token that data.eos names."""
    if how.eos is None and tokenizer.eos is not None:
        return tokenizer.eos
    found = tokenizer.inner.token_to_id(how.eos) if how.eos is not None else None
    if found is None:
        asked = (
            "the tokenizer's files name no eos" if how.eos is None else f"data.eos {how.eos!r} is none of its tokens"
        )
        there = [t.content for t in tokenizer.inner.get_added_tokens_decoder().values() if t.special]
        raise BadInput(f"{asked}; set data.eos to one of its special tokens: {', '.join(there[:8]) or 'it has none'}")
    return found
