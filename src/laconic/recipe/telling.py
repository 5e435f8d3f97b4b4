"""A reader asked: questions about contexts (E4), and labels behind demonstrations (E3); a line of JSON for each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from laconic.core import keyed
from laconic.core.artifact import canonical
from laconic.core.errors import BadInput
from laconic.core.memory import Memory
from laconic.data.contexts import Asked
from laconic.data.labelled import Labelled, demonstrations
from laconic.data.reasoning import grid
from laconic.recipe.reader import Reader

SHOTS = (1, 2, 3)  # segments of demonstrations
PLAIN = (150, 750)  # tokens of demonstrations as text
SEEDS = 5  # orders of demonstrations
NOTHING = "N/A"  # in place of a prompt's input, for calibration
OPTIONS = 64  # options read at once


@dataclass
class Contexts:
    """Questions about contexts; with `aware` a question stands before its context when that is compressed."""

    reader: Reader
    rows: Sequence[Asked]
    aware: bool
    last: tuple[str, Memory] | None = None

    def lines(self, places: range) -> list[str]:
        """What is said without context, behind its vectors, and behind its text where that fits."""
        return [canonical(self.said(self.rows[i], i)) + "\n" for i in places]

    def said(self, row: Asked, i: int) -> dict[str, Any]:
        """One question."""
        prompt = f"{row.question}\n{row.prefix}"
        memory = self.memory(f"{row.question}\n{row.context}" if self.aware else row.context)
        said = {
            "none": self.text(self.reader.generate([prompt], max_tokens=row.tokens)),
            "compressed": self.text(self.reader.generate([prompt], memory, max_tokens=row.tokens)),
        }
        whole, reader = f"{row.context}\n{prompt}", self.reader
        room = reader.decoder.config.max_position_embeddings
        if len(reader.tokenizer.encode(whole)) + row.tokens <= room:
            said["full"] = self.text(reader.generate([whole], max_tokens=row.tokens))
        vectors = int(memory.lengths[0])
        return {"id": i, "task": row.task, "answers": row.answers, "said": said, "vectors": vectors}

    def memory(self, text: str) -> Memory:
        """The vectors of a text; of one that was just asked about the same."""
        if self.last is None or self.last[0] != text:
            self.last = (text, self.reader.compress([text]))
        return self.last[1]

    @staticmethod
    def text(found: Sequence[Any]) -> str:
        """What one answer says."""
        return found[0].text


@dataclass(frozen=True)
class Turn:
    """A row to be labelled, behind demonstrations in the order of a seed."""

    part: str
    seed: int
    balanced: bool
    row: Labelled


@dataclass(frozen=True)
class Labels:
    """Rows to be labelled, and those that are demonstrations; the same rows for every run."""

    reader: Reader
    shown: Sequence[Labelled]
    asked: Mapping[str, Sequence[Labelled]]

    @cached_property
    def options(self) -> list[str]:
        """All labels."""
        return sorted({row.label for row in self.shown})

    @cached_property
    def turns(self) -> list[Turn]:
        """Every row behind every order of demonstrations; those of an order stand together."""
        return [
            Turn(part, seed, balanced, row)
            for balanced in (False, True)
            for seed in range(SEEDS)
            for part, rows in self.asked.items()
            for row in rows
        ]

    @cached_property
    def held(self) -> dict[tuple[int, bool], dict[str, tuple[Memory | None, list[int]]]]:
        """Of each order of demonstrations and each way: vectors, or ids of text; made when asked for."""
        return {}

    def before(self, seed: int, balanced: bool) -> dict[str, tuple[Memory | None, list[int]]]:
        """What stands before a prompt, by way; ways that the model has no room for are left out."""
        key = (seed, balanced)
        if key not in self.held:
            order = demonstrations(self.shown, seed, balanced=balanced)
            ids = [self.ids(f"{prompt(row.text)} {row.label}\n\n") for row in order]
            segments = packed(ids, self.reader.segment, max(SHOTS))
            found: dict[str, tuple[Memory | None, list[int]]] = {"zero-shot": (None, [])}
            memory = None
            for k, segment in enumerate(segments, 1):
                memory = self.reader.method.compress(self.tensor([segment]), None, memory)
                found[f"{k} segment{'s' * (k > 1)}"] = (memory, [])
            room = self.reader.decoder.config.max_position_embeddings - self.longest
            found |= {f"text {n}": (None, packed(ids, n, 1)[0]) for n in PLAIN if n <= room}
            self.held.clear()
            self.held[key] = found
        return self.held[key]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt with an answer, and places of summaries."""
        rows = [*self.shown, *(row for rows in self.asked.values() for row in rows)]
        texts = [f"{prompt(row.text)} {max(self.options, key=len)}" for row in rows]
        return max(len(self.ids(text)) for text in texts) + self.reader.method.reading.fixed + 2

    def lines(self, places: range) -> list[str]:
        """Nats of every option of some rows, in every way, and without the row's text."""
        return [canonical(self.line(self.turns[i], i)) + "\n" for i in places]

    def line(self, turn: Turn, i: int) -> dict[str, Any]:
        """One row."""
        before = self.before(turn.seed, turn.balanced)
        ends = [self.ids(f" {option}") for option in self.options]
        found = {way: self.nats(prompt(turn.row.text), ends, *held) for way, held in before.items()}
        without = {way: self.nats(prompt(NOTHING), ends, *held) for way, held in before.items()}
        return {
            "id": i, "part": turn.part, "seed": turn.seed, "balanced": turn.balanced, "nats": found,
            "without": without, "tokens": [len(end) for end in ends], "label": self.options.index(turn.row.label),
        }  # fmt: skip

    def nats(self, text: str, ends: Sequence[list[int]], memory: Memory | None, shots: list[int]) -> list[float]:
        """Summed nats of each option behind a prompt."""
        start, method, found = [*shots, *self.ids(text)], self.reader.method, list[float]()
        device = self.reader.decoder.words.weight.device
        for i in range(0, len(ends), OPTIONS):
            some = ends[i : i + OPTIONS]
            ids, live = (x.to(device) for x in grid([start + end for end in some]))
            scored = live & (torch.arange(ids.shape[1], device=device) >= len(start))
            held = None if memory is None else memory.take([0] * len(some))
            found += method.nats(ids, live, scored, held).double().tolist()
        return [round(x, 6) for x in found]

    def ids(self, text: str) -> list[int]:
        """A text as ids, none of them special."""
        return self.reader.tokenizer.encode(text, special=False)

    def tensor(self, rows: Sequence[list[int]]) -> torch.Tensor:
        """Rows of one length."""
        return torch.tensor(rows, device=self.reader.decoder.words.weight.device)


def prompt(text: str) -> str:
    """What is asked of a text."""
    return f"{text}\nlabel:"


def packed(rows: Sequence[list[int]], size: int, most: int) -> list[list[int]]:
    """Whole rows, as many as fit, in segments of at most `size` ids, `most` of them.

    Raises `BadInput` (66) where not one row fits.
    """
    found: list[list[int]] = [[]]
    for row in rows:
        if len(row) > size:
            continue
        if len(found[-1]) + len(row) > size:
            if len(found) == most:
                break
            found.append([])
        found[-1] = found[-1] + row
    if not found[0]:
        raise BadInput(f"demonstrations: none has {size} tokens or fewer; take a run of longer segments")
    return found


def parts(read: Callable[[str], list[Labelled]], rows: int) -> tuple[list[Labelled], dict[str, list[Labelled]]]:
    """Demonstrations, and rows asked: of a file that says no parts, its rows in a drawn order are dealt out."""
    found = {name: read(name) for name in ("train", "valid", "test")}
    if all(row.part is None for row in found["train"]):
        every = found["train"]
        order = [every[i] for i in keyed.index(0, 0, np.arange(len(every)), len(every)).tolist()]
        n = min(rows, len(order) // 3)
        return order[2 * n :], {"valid": order[:n], "test": order[n : 2 * n]}
    asked = {name: drawn(found[name], rows) for name in ("valid", "test")}
    return found["train"], asked


def drawn(rows: Sequence[Labelled], count: int) -> list[Labelled]:
    """Some of the rows, from all over, the same ones every time."""
    places = keyed.index(0, 0, np.arange(min(count, len(rows))), len(rows))
    return [rows[i] for i in places.tolist()]
