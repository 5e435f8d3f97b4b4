"""New numbers for old questions: rows whose chain is arithmetic on the question's own numbers become templates.

A draw puts other numbers into a template's question and works its chain out anew, in fractions. It is keyed by the seed
and the id of the template's row, so neither the order of rows nor how many are made changes what a template gives.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

import numpy as np

from laconic.core.contract import Example
from laconic.core.keyed import mix, uniform
from laconic.data.arithmetic import VALUE, Chain, Step, evaluated, written

WRITTEN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"  # in a question
NUMBER = re.compile(WRITTEN)
BEFORE = re.compile(r"(?:[^\W\d_]|[:/]|\d[.,])$")  # what touches a number, so that it is no amount: 3pm, 1/2, 10:30
AFTER = re.compile(r"[^\W\d_]|[:/]|[.,]\d")
PERCENT = re.compile(r"\s?(?:%|percent)")
# Words by the number that a chain may have from them. Where 2 stands in a question beside "twice", a 2 in its chain may
# be either, and one new number for both would make the chain wrong.
WORDS = {
    2: "two twice double doubled doubles doubling half halves pair pairs couple", 4: "four quarter quarters fourth",
    3: "three triple tripled thrice third thirds", 5: "five fifth", 6: "six sixth", 7: "seven week weeks weekly daily",
    8: "eight eighth", 9: "nine ninth", 10: "ten tenth", 11: "eleven", 15: "fifteen", 20: "twenty", 50: "fifty",
    12: "twelve dozen dozens month months monthly year years yearly annual annually foot feet inch inches",
    24: "day days daily hour hours", 30: "thirty month months monthly", 52: "week weeks weekly year years yearly",
    60: "sixty hour hours hourly minute minutes seconds", 365: "year years yearly day days daily",
    100: "hundred dollar dollars cent cents percentage meter meters",
    1000: "thousand kilogram kilograms gram grams kilometers meters liter liters",
}  # fmt: skip
MEANT = {word: {n for n in WORDS if word in WORDS[n].split()} for words in WORDS.values() for word in words.split()}
BLOCK = 16  # draws made at once
PATIENCE = 100  # draws in succession that give nothing new, after which a template gives no more
DRAW, HOLD = 1, 2  # purposes of keys


@dataclass(frozen=True)
class Slot:
    """A number that is drawn anew: its place among the question's, its bounds, and how the question writes it."""

    place: int
    low: int
    high: int
    commas: bool
    tail: str  # the zeros of $5.00

    def text(self, value: int) -> str:
        """As the question writes it."""
        return (f"{value:,}" if self.commas else str(value)) + self.tail


@dataclass(frozen=True)
class Template:
    """A row with slots where its question has numbers that its chain uses; `texts` stand around the slots.

    `numbers` are all of the question's; `masked` is the question without them, by which templates are held out. It is
    `doubtful` where a drawn number may be meant by a word of the question too, as 2 by "twice".
    """

    id: str
    texts: tuple[str, ...]
    numbers: tuple[Fraction, ...]
    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]
    masked: str
    doubtful: bool


def templates(examples: Iterable[Example]) -> list[Template]:
    """The rows that become templates, in their order."""
    return [made for example in examples if (made := template(example)) is not None]


def template(example: Example) -> Template | None:
    """The template of a row; None where its chain leaves open what another number in the question would change."""
    found = amounts(example.question)
    numbers = tuple(map(value_of, found))
    if len(set(numbers)) < len(numbers):
        return None
    chain = Chain(numbers)
    if not all(map(chain.take, example.steps)) or not chain.used:
        return None
    if VALUE.fullmatch(example.answer) is None or chain.results[-1] != Fraction(example.answer):
        return None
    drawn = [i for i in sorted(chain.used) if numbers[i].denominator == 1 and numbers[i]]
    slots = tuple(slot_of(i, found[i], example.question) for i in drawn)
    ends = [0, *(found[i].end() for i in drawn)]
    begins = [*(found[i].start() for i in drawn), len(example.question)]
    texts = tuple(example.question[a:b] for a, b in zip(ends, begins, strict=True))
    plain = masked(example.question)
    doubtful = any(numbers[i] in MEANT.get(word, ()) for word in plain.split() for i in drawn)
    return Template(example.id, texts, numbers, slots, tuple(chain.steps(set(drawn))), plain, doubtful)


def amounts(question: str) -> list[re.Match[str]]:
    """The numbers of a question that touch no letter, `:`, `/` or other number."""
    return [
        match
        for match in NUMBER.finditer(question)
        if not AFTER.match(question, match.end())
        and not BEFORE.search(question[max(0, match.start() - 2) : match.start()])
    ]


def value_of(match: re.Match[str]) -> Fraction:
    """The value of a number in a question."""
    return Fraction(match[0].replace(",", ""))


def slot_of(place: int, match: re.Match[str], question: str) -> Slot:
    """From half the number to twice; a percentage stays within 100, and one beyond 200 as it is."""
    n = int(value_of(match))
    low, high = max(1, -(-n // 2)), 2 * n
    if PERCENT.match(question, match.end()):
        high = min(high, 100)
    if low > high:
        low = high = n
    _, point, zeros = match[0].partition(".")
    return Slot(place, low, high, "," in match[0], point + zeros)


def masked(question: str) -> str:
    """The question in small letters, each number a 0, each run of what is no word a space."""
    return " ".join(re.sub(r"\W+", " ", NUMBER.sub("0", question).lower()).split())


def variants(template: Template, n: int, seed: int) -> list[Example]:
    """The first n different variants of a template; fewer where it has no more."""
    return list(islice(stream(template, seed), n))


def stream(template: Template, seed: int) -> Iterator[Example]:
    """Its variants one after another, each question once, never the first one's own."""
    first = tuple(int(template.numbers[slot.place]) for slot in template.slots)
    seen, missed = {first}, 0
    for draw, numbers in draws(template, seed):
        made = None if numbers in seen else variant(template, numbers, f"{template.id}-s{seed}-{draw}")
        missed = 0 if made else missed + 1
        seen.add(numbers)
        if made:
            yield made
        if missed >= PATIENCE:
            return


def draws(template: Template, seed: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Number after number of draws with the slots' values, without an end."""
    key, n = key_of(template.id), len(template.slots)
    low, high = (np.array([getattr(slot, end) for slot in template.slots], np.uint64) for end in ("low", "high"))
    begin = 0
    while True:
        at = np.arange(begin, begin + BLOCK)
        words = mix(seed, DRAW, key, at[:, None], np.arange(n)[None, :])
        for draw, row in zip(at.tolist(), (low + words % (high - low + np.uint64(1))).tolist(), strict=True):
            yield draw, tuple(row)
        begin += BLOCK


def key_of(text: str) -> int:
    """64 bits of a text, as a key."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def variant(template: Template, numbers: Sequence[int], id: str) -> Example | None:
    """The row with these numbers; None where a result is not positive, loses its wholeness or has a third decimal."""
    values = list(template.numbers)
    for slot, number in zip(template.slots, numbers, strict=True):
        values[slot.place] = Fraction(number)
    steps: list[str] = []
    for step in template.steps:
        value = evaluated(step.postfix, values)
        if value is None or value <= 0 or 100 % value.denominator or (step.whole and value.denominator > 1):
            return None
        values.append(value)
        steps.append(joined(step.texts, [*(written(values[place]) for place in step.places), written(value)]))
    question = joined(template.texts, [slot.text(n) for slot, n in zip(template.slots, numbers, strict=True)])
    return Example(id, question, tuple(steps), written(values[-1]), {"template": template.id})


def joined(texts: Sequence[str], between: Sequence[str]) -> str:
    """The texts with the values between them."""
    return "".join(text + value for text, value in zip(texts, [*between, ""], strict=True))


def rounds(templates: Sequence[Template], seed: int, taken: Iterable[str] = ()) -> Iterator[Example]:
    """One variant of each template, round after round until none gives more; no question twice, and none of `taken`."""
    seen = set(taken)
    under = [stream(template, seed) for template in templates]
    while under:
        still: list[Iterator[Example]] = []
        for variants in under:
            made = next((example for example in variants if example.question not in seen), None)
            if made is not None:
                seen.add(made.question)
                still.append(variants)
                yield made
        under = still


def is_held(masked: str, share: float) -> bool:
    """Whether the templates of a text are held out: by the text without numbers alone, so that all seeds agree."""
    return bool(uniform(HOLD, key_of(masked)) < share)
