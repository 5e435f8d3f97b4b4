"""A reader asked: questions about contexts (E4), and labels behind demonstrations (E3); a line of JSON for each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic.core import keyed
from laconic.core.artifact import canonical
from laconic.core.errors import BadInput
from laconic.core.generate import generate
from laconic.core.memory import Memory
from laconic.data.contexts import Asked, by_context
from laconic.data.labelled import Labelled, demonstrations
from laconic.data.reasoning import grid
from laconic.methods import segments
from laconic.recipe.reader import Reader

SHOTS = 3  # segments of demonstrations, at most
PLAIN = (150, 750)  # tokens of demonstrations as text
SEEDS = 5  # orders of demonstrations
NOTHING = "N/A"  # in place of a prompt's input, for calibration
OPTIONS = 64  # options read at once


@dataclass
class Contexts:
    """Questions about contexts; with `aware` a question stands before its context when that is compressed.

    Questions about one context stand together, so that it is compressed once.
    """

    reader: Reader
    rows: Sequence[Asked]
    aware: bool
    last: tuple[str, Memory] | None = None

    @cached_property
    def order(self) -> list[tuple[int, int]]:
        """The place of each question, and the number of its context."""
        return [(i, n) for n, places in enumerate(by_context(self.rows).values()) for i in places]

    def lines(self, places: range) -> list[str]:
        """What is said without context, behind vectors, behind as many last tokens, and behind all where it fits."""
        return [canonical(self.line(*self.order[i])) + "\n" for i in places]

    def line(self, i: int, number: int) -> dict[str, Any]:
        """One question; `held` are the vectors, or tokens of context, that stood before it."""
        row = self.rows[i]
        asked = f"{row.question}\n{row.prefix}"
        memory = self.memory(f"{row.question}\n{row.context}" if self.aware else row.context)
        context, n = self.reader.tokenizer.encode(f"{row.context}\n", special=False), int(memory.lengths[0])
        (behind,) = self.reader.generate([asked], memory, max_tokens=row.tokens)
        found = [
            ("none", self.after([], asked, row.tokens), 0),
            ("compressed", behind.text, n),
            ("truncated", self.after(context[-n:], asked, row.tokens), min(n, len(context))),
            ("full", self.after(context, asked, row.tokens), len(context)),
        ]
        ways = [{"way": way, "said": said, "held": held} for way, said, held in found if said is not None]
        return {"id": i, "context": number, "task": row.task, "answers": row.answers, "ways": ways}

    def memory(self, text: str) -> Memory:
        """The vectors of a text; of one that was just asked about the same."""
        if self.last is None or self.last[0] != text:
            self.last = (text, self.reader.compress([text]))
        return self.last[1]

    def after(self, context: Sequence[int], asked: str, tokens: int) -> str | None:
        """What is said behind ids of a text, as `Reader.generate` says it; None where the model has no room for them.

        Special ids that a tokenizer puts before a prompt come first.
        """
        reader = self.reader
        own, bare = reader.tokenizer.encode(asked), reader.tokenizer.encode(asked, special=False)
        ids = [*own[: len(own) - len(bare)], *context, *bare]
        if context and len(ids) + tokens > reader.decoder.config.max_position_embeddings:
            return None
        with reader.reading():
            (found,) = generate(reader.decoder, reader.tokenizer, ids=[ids], eos=reader.ends, max_tokens=tokens)
        return found.text


@dataclass(frozen=True)
class Turn:
    """A row to be labelled, behind demonstrations in the order of a seed."""

    part: str
    seed: int
    balanced: bool
    row: Labelled


class Shots(NamedTuple):
    """What stands before a prompt: vectors, and ids of text."""

    way: str
    memory: Memory
    ids: list[int]

    @property
    def held(self) -> int:
        """Vectors and tokens."""
        return int(self.memory.lengths[0]) + len(self.ids)


@dataclass(frozen=True)
class Labels:
    """Rows to be labelled, and those that are demonstrations; the same rows for every run."""

    reader: Reader
    shown: Sequence[Labelled]
    asked: Mapping[str, Sequence[Labelled]]

    @cached_property
    def options(self) -> list[str]:
        """All labels."""
        return sorted({row.label for rows in (self.shown, *self.asked.values()) for row in rows})

    @cached_property
    def ends(self) -> list[list[int]]:
        """Each label as ids."""
        return [self.ids(f" {option}") for option in self.options]

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
    def held(self) -> dict[tuple[int, bool], list[tuple[Shots, list[float]]]]:
        """Of the last order of demonstrations: what stands before a prompt, and nats of each label without inputs."""
        return {}

    def before(self, seed: int, balanced: bool) -> list[tuple[Shots, list[float]]]:
        """The ways of an order of demonstrations, each with nats of every label behind a prompt without inputs."""
        key = (seed, balanced)
        if key not in self.held:
            self.held.clear()
            nothing = self.ids(prompt(NOTHING))
            self.held[key] = [(shots, self.nats(shots, nothing)) for shots in self.ways(seed, balanced)]
        return self.held[key]

    def ways(self, seed: int, balanced: bool) -> list[Shots]:
        """No demonstrations; vectors of 1, 2, 3 segments of them, as many last tokens of those, and all their text.

        Then the plain text of the paper's lengths; texts that the model has no room for are left out.
        """
        order, method = demonstrations(self.shown, seed, balanced=balanced), self.reader.method
        texts = packed((self.ids(f"{prompt(row.text)} {row.label}\n\n") for row in order), self.reader.segment, SHOTS)
        none = memory = method.unit.empty(1)
        found, before = [Shots("zero-shot", none, [])], list[int]()
        for k, text in enumerate(texts, 1):
            memory = method.compress(self.tensor([text]), None, memory)
            method.unit.check(memory, self.longest, writes=False)
            before, n, named = [*before, *text], int(memory.lengths[0]), f"{k} segment{'s' * (k > 1)}"
            found += [Shots(f"vectors of {named}", memory, []), Shots(f"last tokens of {named}", none, before[-n:])]
            found += [Shots(f"text of {named}", none, before)]
        for n in PLAIN:
            ids = packed((self.ids(f"{prompt(row.text)} {row.label}\n\n") for row in order), n, 1)[0]
            found.append(Shots(f"text of {n} tokens", none, ids))
        room = self.reader.decoder.config.max_position_embeddings - self.longest - method.unit.lead
        return [shots for shots in found if len(shots.ids) <= room]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest label."""
        rows = [row for rows in self.asked.values() for row in rows]
        return max(len(self.ids(prompt(row.text))) for row in rows) + max(map(len, self.ends))

    def lines(self, places: range) -> list[str]:
        """Nats of every label of some rows, in every way, and without the row's text."""
        return [canonical(self.line(self.turns[i], i)) + "\n" for i in places]

    def line(self, turn: Turn, i: int) -> dict[str, Any]:
        """One row."""
        asked = self.ids(prompt(turn.row.text))
        ways = [
            {"way": shots.way, "nats": self.nats(shots, asked), "without": without, "held": shots.held}
            for shots, without in self.before(turn.seed, turn.balanced)
        ]
        return {
            "id": i, "part": turn.part, "seed": turn.seed, "balanced": turn.balanced, "ways": ways,
            "tokens": [len(end) for end in self.ends], "label": self.options.index(turn.row.label),
        }  # fmt: skip

    @torch.inference_mode()
    def nats(self, shots: Shots, asked: Sequence[int]) -> list[float]:
        """Summed nats of each label behind a prompt, which is read once."""
        unit, decoder, text = self.reader.method.unit, self.reader.decoder, self.tensor([[*shots.ids, *asked]])
        live, found = torch.ones_like(text, dtype=torch.bool), list[float]()
        at = segments.prompt(decoder, unit.reading, shots.memory, unit.bos, live).positions
        with self.reader.reading():
            seen = segments.read(decoder, unit.reading, shots.memory, decoder.embed(text), live, None, unit.bos)
            for i in range(0, len(self.ends), OPTIONS):
                ids, live = (x.to(text.device) for x in grid(self.ends[i : i + OPTIONS]))
                n, T = ids.shape
                places = None if at is None else (at[:, -1:] + 1 + torch.arange(T, device=ids.device)).expand(n, -1)
                after = decoder(decoder.embed(ids), seen.state.fork(n), live=live, positions=places).hidden
                states = torch.cat([seen.text[:, -1:].expand(n, -1, -1), after[:, :-1]], 1)
                each = decoder.logits(states).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
                found += (-each.masked_fill(~live, 0.0).double().sum(1)).tolist()
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


def packed(rows: Iterable[list[int]], size: int, most: int) -> list[list[int]]:
    """Whole rows, as many as fit, in segments of at most `size` ids, `most` of them; no more rows are taken than that.

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


def parts(every: Sequence[Labelled], rows: int) -> tuple[list[Labelled], dict[str, list[Labelled]]]:
    """Demonstrations, and `rows` that are asked as valid and as test, drawn from all over, the same ones every time.

    What a file names no rows for is taken out of those for training.
    """
    train = drawn([row for row in every if row.part in ("train", None)], len(every))
    n = min(rows, len(train) // 3)
    asked: dict[str, list[Labelled]] = {}
    for part in ("valid", "test"):
        own = [row for row in every if row.part == part]
        asked[part] = drawn(own, rows) if own else train[:n]
        train = train if own else train[n:]
    return train, asked


def drawn(rows: Sequence[Labelled], count: int) -> list[Labelled]:
    """Some of the rows, from all over, the same ones every time."""
    places = keyed.index(0, 0, np.arange(min(count, len(rows))), len(rows))
    return [rows[i] for i in places.tolist()]
