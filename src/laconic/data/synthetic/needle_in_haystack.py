"""Needles in haystacks, RULER-like (arXiv:2404.06654): its six kinds of retrieval in words of our own, not its texts.

An item is a haystack of tokens with one fact or four in it, a question, and the answer, which alone is scored.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch

from laconic.batches import DocumentBatch
from laconic.data.documents.tokenize import TokenArray
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError
from laconic.rng import hash64, uniform
from laconic.storage.strict_json import to_canonical_json

NeedleKind = Literal["S-1", "S-2", "S-3", "MK", "MV", "MQ"]
NEEDLE_KINDS: tuple[NeedleKind, ...] = ("S-1", "S-2", "S-3", "MK", "MV", "MQ")
FILLER = "The road goes on over the hill. A river runs beside it. Nobody is out today. "
ADJECTIVES = (
    "amber",
    "brass",
    "cedar",
    "copper",
    "flint",
    "ivory",
    "linen",
    "marble",
    "oaken",
    "silver",
    "velvet",
    "wicker",
)
NOUNS = ("anchor", "basket", "candle", "drum", "engine", "feather", "garden", "hammer", "kettle", "lantern", "mirror",
          "wagon")  # fmt: skip
NUM_FACTS = 4  # facts of the kinds that have several
NAME_KEY, DEPTH_KEY, DIGIT_KEY, START_KEY = range(4)  # what is drawn


class HiddenFact(NamedTuple):
    """Whose number, and what it is; `asked` says whether the question is about it."""

    key: str
    value: str
    is_target: bool

    def to_sentence(self) -> str:
        """As it stands in the haystack."""
        return f" The number of the {self.key} is {self.value}. "


@dataclass(frozen=True)
class NeedleDataset:
    """`count` items of each kind, length and depth (contract.Source), named KIND@LENGTH@DEPTH#N.

    S-1 hides a number of seven digits in a filler, S-2 in a book, S-3 a UUID in a book; MK asks for one of four facts,
    MV for all four numbers of one key in their order, MQ for those of four keys. `lengths` are tokens of a whole item;
    a depth is the share of the haystack before the fact that is asked for, or before one of them, and the others lie
    anywhere. `books` are read from drawn places on. Raises `BadInput` (66) for a length without room, and for kinds
    that need a book where there is none.
    """

    tokenizer: Tokenizer
    books: Sequence[TokenArray] = ()
    kinds: tuple[NeedleKind, ...] = NEEDLE_KINDS
    lengths: tuple[int, ...] = (4096, 8192, 16384)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    items_per_cell: int = 20
    seed: int = 0
    cells: list[tuple[int, NeedleKind, float]] = field(init=False)

    def __post_init__(self) -> None:
        cells = [(n, kind, depth) for n in self.lengths for kind in self.kinds for depth in self.depths]
        object.__setattr__(self, "cells", cells)
        if any(kind != "S-1" for kind in self.kinds) and not any(len(book) for book in self.books):
            raise InputError("needle: no book to hide facts in, which all kinds but S-1 need; give one, or ask for S-1")
        for at in range(0, len(self), self.items_per_cell):
            self.build_item(at)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the items are a function of."""
        said = {"kinds": self.kinds, "lengths": self.lengths, "depths": self.depths, "count": self.items_per_cell}
        digest = hashlib.sha256(
            to_canonical_json({**said, "seed": self.seed, "tokens": self.tokenizer.fingerprint}).encode()
        )
        for book in self.books:
            digest.update(len(book).to_bytes(8, "little") + book.astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def max_length(self) -> int:
        """Tokens of the longest item."""
        return max(self.lengths)

    def __len__(self) -> int:
        return len(self.cells) * self.items_per_cell

    def fact_depths(self, row: int, kind: NeedleKind, depth: float) -> list[float]:
        """Of the haystack before each fact, ascending; one of them is the depth."""
        others = uniform(self.seed, DEPTH_KEY, row, np.arange(NUM_FACTS - 1 if kind in ("MK", "MV", "MQ") else 0))
        return sorted([depth, *others.tolist()])

    def draw_facts(self, row: int, kind: NeedleKind, depth: float) -> list[HiddenFact]:
        """What is hidden, in the order in which it stands in the haystack."""
        shares = self.fact_depths(row, kind, depth)
        keys = (
            uniform(self.seed, NAME_KEY, row, np.arange(len(ADJECTIVES) * len(NOUNS))).argsort()[: len(shares)].tolist()
        )
        names = [f"{ADJECTIVES[i // len(NOUNS)]} {NOUNS[i % len(NOUNS)]}" for i in keys]
        found: list[HiddenFact] = []
        for i, share in enumerate(shares):
            key, asked = names[0 if kind == "MV" else i], kind != "MK" or share == depth
            found.append(HiddenFact(key, draw_value(kind, self.seed, row, i), asked))
        return found

    def build_item(self, row: int) -> tuple[list[int], list[int], list[bool]]:
        """Haystack and question; the answer; which of its tokens are scored."""
        length, kind, depth = self.cells[row // self.items_per_cell]
        facts = self.draw_facts(row, kind, depth)
        asked = [fact for fact in facts if fact.is_target]
        told: list[int] = []
        scored: list[bool] = []
        for i, fact in enumerate(asked):
            for text, is_value in ((",", False), (f" {fact.value}", True)):
                ids = self.encode(text) if is_value or i else []
                told, scored = told + ids, scored + [is_value] * len(ids)
        hidden = [self.encode(fact.to_sentence()) for fact in facts]
        question, first = self.encode(format_question(asked)), self.tokenizer.encode("")[:1]
        room = length - len(told) - len(question) - len(first) - sum(map(len, hidden))
        if room < len(facts):
            raise InputError(
                f"needle: length {length} leaves no haystack beside the {length - room} tokens of an item of {kind}; "
                "ask for more"
            )
        return first + self.insert_facts(row, kind, depth, hidden, room) + question, told, scored

    def insert_facts(
        self, row: int, kind: NeedleKind, depth: float, hidden: Sequence[list[int]], room: int
    ) -> list[int]:
        """`room` tokens of haystack with the facts between them."""
        hay, found, before = self.build_haystack(row, kind, room), list[int](), 0
        for share, fact in zip(self.fact_depths(row, kind, depth), hidden, strict=True):
            place = round(share * room)
            found += hay[before:place] + fact
            before = place
        return found + hay[before:]

    def build_haystack(self, row: int, kind: NeedleKind, room: int) -> list[int]:
        """So many tokens: the filler again and again, or a book from a drawn place on, behind its end the start."""
        if kind == "S-1":
            filler = self.encode(FILLER)
            return (filler * (room // len(filler) + 1))[:room]
        book = self.books[int(hash64(self.seed, row)) % len(self.books)]
        start = int(uniform(self.seed, START_KEY, row) * len(book))
        return book.take(np.arange(start, start + room), mode="wrap").tolist()

    def encode(self, text: str) -> list[int]:
        """A text without what begins one."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        """The items of some places: prompts end at the same column, which is the first cut."""
        made = [self.build_item(row) for row in rows]
        C, A = max(len(prompt) for prompt, _, _ in made), max(len(told) for _, told, _ in made)
        text, live, scored = (np.zeros((len(made), C + A), dtype=t) for t in (np.int64, bool, bool))
        for b, (prompt, told, which) in enumerate(made):
            text[b, C - len(prompt) : C + len(told)] = prompt + told
            live[b, C - len(prompt) : C + len(told)] = True
            scored[b, C : C + len(told)] = which
        return DocumentBatch(
            torch.from_numpy(text), torch.from_numpy(live), torch.from_numpy(scored), (C, C + A),
            torch.as_tensor(rows, dtype=torch.long), tuple(self.item_name(row) for row in rows), epoch, step,
        )  # fmt: skip

    def item_name(self, row: int) -> str:
        """KIND@LENGTH@DEPTH#N."""
        length, kind, depth = self.cells[row // self.items_per_cell]
        return f"{kind}@{length}@{depth:g}#{row % self.items_per_cell}"


def draw_value(kind: NeedleKind, seed: int, row: int, i: int) -> str:
    """Seven digits, or a UUID."""
    if kind != "S-3":
        return str(1_000_000 + int(uniform(seed, DIGIT_KEY, row, i) * 9_000_000))
    digits = f"{int(hash64(seed, DIGIT_KEY, row, i)):016x}{int(hash64(seed, DIGIT_KEY, row, i, 1)):016x}"
    return "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))


def format_question(asked: Sequence[HiddenFact]) -> str:
    """The question, up to where the answer begins."""
    keys = list(dict.fromkeys(fact.key for fact in asked))
    if len(asked) == 1:
        return f" What is the number of the {keys[0]}? The number of the {keys[0]} is"
    whose = ", ".join(f"the {key}" for key in keys)
    return f" What are all the numbers of {whose}? The numbers of {whose} are"
