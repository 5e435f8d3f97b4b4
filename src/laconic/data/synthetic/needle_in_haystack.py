"""Needle in a haystack: the six retrieval tasks of RULER (arXiv:2404.06654), in our own words.

An item is a haystack with one fact or four in it, a question, and the answer, which alone is scored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch

from laconic.batches import DocumentBatch
from laconic.data.documents.tokenize import TokenArray, hash_token_arrays
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError
from laconic.rng import hash64, uniform

NeedleKind = Literal["S-1", "S-2", "S-3", "MK", "MV", "MQ"]
NEEDLE_KINDS: tuple[NeedleKind, ...] = ("S-1", "S-2", "S-3", "MK", "MV", "MQ")
FILLER = "The road goes on over the hill. A river runs beside it. Nobody is out today. "
ADJECTIVES = ("amber", "brass", "cedar", "copper", "flint", "ivory", "linen", "marble", "oaken", "silver", "velvet",
              "wicker")  # fmt: skip
NOUNS = ("anchor", "basket", "candle", "drum", "engine", "feather", "garden", "hammer", "kettle", "lantern", "mirror",
         "wagon")  # fmt: skip
NUM_FACTS = 4  # of the kinds that have several
NAME_KEY, DEPTH_KEY, DIGIT_KEY, START_KEY = range(4)  # purposes of random numbers


class HiddenFact(NamedTuple):
    """The number of a thing, at a share of the haystack; `is_target` says whether the question is about it."""

    key: str
    value: str
    depth: float
    is_target: bool

    def to_sentence(self) -> str:
        return f" The number of the {self.key} is {self.value}. "


class EncodedItem(NamedTuple):
    """The tokens of an item without its haystack, for which there is `room`; `scored` marks tokens of the answer."""

    bos: list[int]
    sentences: list[tuple[float, list[int]]]  # with their share of the haystack
    question: list[int]
    answer: list[int]
    scored: list[bool]
    room: int


@dataclass(frozen=True)
class NeedleDataset:
    """Items of each kind, length and depth, named KIND@LENGTH@DEPTH#N (batches.TrainingData).

    S-1 hides a number of seven digits in a filler text, S-2 in a book, S-3 a UUID in a book. MK asks for one of four
    facts, MV for all four numbers of one key in order, MQ for those of four keys.

    Lengths are tokens of a whole item. Books are read from random positions. Depths are shares of the haystack before a
    fact, for MK the target; other facts are anywhere. Raises `InputError` if a length leaves no room for a haystack, or
    a kind needs a book and none is given.
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
            raise InputError("needle: all kinds but S-1 need a book to hide facts in; give one, or use S-1")
        for row in range(len(self)):
            self.encode_item(row)  # raises if it does not fit

    @property
    def fingerprint(self) -> str:
        source = {
            "kinds": self.kinds,
            "lengths": self.lengths,
            "depths": self.depths,
            "count": self.items_per_cell,
            "seed": self.seed,
            "tokens": self.tokenizer.fingerprint,
        }
        return hash_token_arrays(source, self.books)

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    def __len__(self) -> int:
        return len(self.cells) * self.items_per_cell

    def draw_facts(self, row: int, kind: NeedleKind, depth: float) -> list[HiddenFact]:
        """Return the hidden facts in the order of the haystack; one of them is at `depth`."""
        others = uniform(self.seed, DEPTH_KEY, row, np.arange(NUM_FACTS - 1 if kind in ("MK", "MV", "MQ") else 0))
        depths = sorted([depth, *others.tolist()])
        order = uniform(self.seed, NAME_KEY, row, np.arange(len(ADJECTIVES) * len(NOUNS))).argsort()
        names = [f"{ADJECTIVES[i // len(NOUNS)]} {NOUNS[i % len(NOUNS)]}" for i in order[: len(depths)].tolist()]
        return [
            HiddenFact(
                key=names[0 if kind == "MV" else i],
                value=draw_value(kind, self.seed, row, i),
                depth=fact_depth,
                is_target=kind != "MK" or fact_depth == depth,
            )
            for i, fact_depth in enumerate(depths)
        ]

    def build_item(self, row: int) -> tuple[list[int], list[int], list[bool]]:
        """Return haystack and question, the answer, and which tokens of the answer are scored."""
        item = self.encode_item(row)
        hay = self.build_haystack(row, self.cells[row // self.items_per_cell][1], item.room)
        ids, start = item.bos, 0
        for depth, sentence in item.sentences:
            position = round(depth * item.room)
            ids = ids + hay[start:position] + sentence
            start = position
        return ids + hay[start:] + item.question, item.answer, item.scored

    def encode_item(self, row: int) -> EncodedItem:
        """Encode an item without its haystack. Raises `InputError` if the length leaves no room for one."""
        length, kind, depth = self.cells[row // self.items_per_cell]
        facts = self.draw_facts(row, kind, depth)
        targets = [fact for fact in facts if fact.is_target]
        answer: list[int] = []
        scored: list[bool] = []
        for i, fact in enumerate(targets):
            comma = self.encode(",") if i else []
            value = self.encode(f" {fact.value}")
            answer += comma + value
            scored += [False] * len(comma) + [True] * len(value)
        sentences = [(fact.depth, self.encode(fact.to_sentence())) for fact in facts]
        question = self.encode(format_question(targets))
        bos = self.tokenizer.encode("")[:1]
        room = length - len(answer) - len(question) - len(bos) - sum(len(ids) for _, ids in sentences)
        if room < len(facts):
            needed = length - room + len(facts)
            raise InputError(f"needle: length {length} leaves no haystack; an item of {kind} needs {needed} tokens")
        return EncodedItem(bos, sentences, question, answer, scored, room)

    def build_haystack(self, row: int, kind: NeedleKind, room: int) -> list[int]:
        """Return `room` tokens: the filler repeated, or a book from a random position, continued at its start."""
        if kind == "S-1":
            filler = self.encode(FILLER)
            return (filler * (room // len(filler) + 1))[:room]
        book = self.books[int(hash64(self.seed, row)) % len(self.books)]
        start = int(uniform(self.seed, START_KEY, row) * len(book))
        return book.take(np.arange(start, start + room), mode="wrap").tolist()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        """Return a batch in which all prompts end at the same column, the first segment end."""
        items = [self.build_item(row) for row in rows]
        C, A = max(len(prompt) for prompt, _, _ in items), max(len(answer) for _, answer, _ in items)
        input_ids, mask, loss_mask = (np.zeros((len(items), C + A), dtype=t) for t in (np.int64, bool, bool))
        for b, (prompt, answer, scored) in enumerate(items):
            columns = slice(C - len(prompt), C + len(answer))
            input_ids[b, columns] = prompt + answer
            mask[b, columns] = True
            loss_mask[b, C : C + len(answer)] = scored
        return DocumentBatch(
            input_ids=torch.from_numpy(input_ids),
            attention_mask=torch.from_numpy(mask),
            loss_mask=torch.from_numpy(loss_mask),
            segment_ends=(C, C + A),
            row_index=torch.as_tensor(rows, dtype=torch.long),
            document_ids=tuple(self.item_name(row) for row in rows),
            epoch=epoch,
            step=step,
        )

    def item_name(self, row: int) -> str:
        length, kind, depth = self.cells[row // self.items_per_cell]
        return f"{kind}@{length}@{depth:g}#{row % self.items_per_cell}"


def draw_value(kind: NeedleKind, seed: int, row: int, i: int) -> str:
    """Return seven random digits, or a UUID for S-3."""
    if kind != "S-3":
        return str(1_000_000 + int(uniform(seed, DIGIT_KEY, row, i) * 9_000_000))
    digits = f"{int(hash64(seed, DIGIT_KEY, row, i)):016x}{int(hash64(seed, DIGIT_KEY, row, i, 1)):016x}"
    return "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))


def format_question(targets: Sequence[HiddenFact]) -> str:
    """Return the question and the beginning of the answer."""
    keys = list(dict.fromkeys(fact.key for fact in targets))
    if len(targets) == 1:
        return f" What is the number of the {keys[0]}? The number of the {keys[0]} is"
    names = ", ".join(f"the {key}" for key in keys)
    return f" What are all the numbers of {names}? The numbers of {names} are"
