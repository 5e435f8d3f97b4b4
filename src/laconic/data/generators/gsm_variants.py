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

from laconic.batches import ReasoningExample
from laconic.data.generators.chain_arithmetic import (
    VALUE_PATTERN,
    ChainParser,
    ChainStep,
    evaluate_postfix,
    format_number,
)
from laconic.rng import hash64, uniform

NUMBER_TEXT = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"  # in a question
NUMBER_PATTERN = re.compile(NUMBER_TEXT)
ATTACHED_BEFORE = re.compile(
    r"(?:[^\W\d_]|[:/]|\d[.,])$"
)  # what touches a number, so that it is no amount: 3pm, 1/2, 10:30
ATTACHED_AFTER = re.compile(r"[^\W\d_]|[:/]|[.,]\d")
PERCENT_PATTERN = re.compile(r"\s?(?:%|percent)")
# Words by the number that a chain may have from them. Where 2 stands in a question beside "twice", a 2 in its chain may
# be either, and one new number for both would make the chain wrong.
NUMBER_WORDS = {
    2: "two twice double doubled doubles doubling half halves pair pairs couple", 4: "four quarter quarters fourth",
    3: "three triple tripled thrice third thirds", 5: "five fifth", 6: "six sixth", 7: "seven week weeks weekly daily",
    8: "eight eighth", 9: "nine ninth", 10: "ten tenth", 11: "eleven", 15: "fifteen", 20: "twenty", 50: "fifty",
    12: "twelve dozen dozens month months monthly year years yearly annual annually foot feet inch inches",
    24: "day days daily hour hours", 30: "thirty month months monthly", 52: "week weeks weekly year years yearly",
    60: "sixty hour hours hourly minute minutes seconds", 365: "year years yearly day days daily",
    100: "hundred dollar dollars cent cents percentage meter meters",
    1000: "thousand kilogram kilograms gram grams kilometers meters liter liters",
}  # fmt: skip
WORD_NUMBERS = {
    word: {n for n in NUMBER_WORDS if word in NUMBER_WORDS[n].split()}
    for words in NUMBER_WORDS.values()
    for word in words.split()
}
DRAW_BLOCK = 16  # draws made at once
MAX_MISSES = 100  # draws in succession that give nothing new, after which a template gives no more
DRAW_KEY, HOLD_OUT_KEY = 1, 2  # purposes of keys


@dataclass(frozen=True)
class NumberSlot:
    """A number that is drawn anew: its place among the question's, its bounds, and how the question writes it."""

    index: int
    low: int
    high: int
    has_commas: bool
    suffix: str  # the zeros of $5.00

    def format_value(self, value: int) -> str:
        """As the question writes it."""
        return (f"{value:,}" if self.has_commas else str(value)) + self.suffix


@dataclass(frozen=True)
class QuestionTemplate:
    """A row with slots where its question has numbers that its chain uses; `texts` stand around the slots.

    `numbers` are all of the question's; `masked` is the question without them, by which templates are held out. It is
    `doubtful` where a drawn number may be meant by a word of the question too, as 2 by "twice".
    """

    id: str
    texts: tuple[str, ...]
    numbers: tuple[Fraction, ...]
    slots: tuple[NumberSlot, ...]
    steps: tuple[ChainStep, ...]
    masked_question: str
    is_ambiguous: bool


def build_templates(examples: Iterable[ReasoningExample]) -> list[QuestionTemplate]:
    """The rows that become templates, in their order."""
    return [made for example in examples if (made := build_template(example)) is not None]


def build_template(example: ReasoningExample) -> QuestionTemplate | None:
    """The template of a row; None where its chain leaves open what another number in the question would change."""
    found = find_numbers(example.question)
    numbers = tuple(map(parse_number, found))
    if len(set(numbers)) < len(numbers):
        return None
    chain = ChainParser(numbers)
    if not all(map(chain.parse_step, example.steps)) or not chain.used_numbers:
        return None
    if VALUE_PATTERN.fullmatch(example.answer) is None or chain.results[-1] != Fraction(example.answer):
        return None
    drawn = [i for i in sorted(chain.used_numbers) if numbers[i].denominator == 1 and numbers[i]]
    slots = tuple(make_slot(i, found[i], example.question) for i in drawn)
    ends = [0, *(found[i].end() for i in drawn)]
    begins = [*(found[i].start() for i in drawn), len(example.question)]
    texts = tuple(example.question[a:b] for a, b in zip(ends, begins, strict=True))
    plain = mask_numbers(example.question)
    doubtful = any(numbers[i] in WORD_NUMBERS.get(word, ()) for word in plain.split() for i in drawn)
    return QuestionTemplate(example.id, texts, numbers, slots, tuple(chain.build_steps(set(drawn))), plain, doubtful)


def find_numbers(question: str) -> list[re.Match[str]]:
    """The numbers of a question that touch no letter, `:`, `/` or other number."""
    return [
        match
        for match in NUMBER_PATTERN.finditer(question)
        if not ATTACHED_AFTER.match(question, match.end())
        and not ATTACHED_BEFORE.search(question[max(0, match.start() - 2) : match.start()])
    ]


def parse_number(match: re.Match[str]) -> Fraction:
    """The value of a number in a question."""
    return Fraction(match[0].replace(",", ""))


def make_slot(place: int, match: re.Match[str], question: str) -> NumberSlot:
    """From half the number to twice; a percentage stays within 100, and one beyond 200 as it is."""
    n = int(parse_number(match))
    low, high = max(1, -(-n // 2)), 2 * n
    if PERCENT_PATTERN.match(question, match.end()):
        high = min(high, 100)
    if low > high:
        low = high = n
    _, point, zeros = match[0].partition(".")
    return NumberSlot(place, low, high, "," in match[0], point + zeros)


def mask_numbers(question: str) -> str:
    """The question in small letters, each number a 0, each run of what is no word a space."""
    return " ".join(re.sub(r"\W+", " ", NUMBER_PATTERN.sub("0", question).lower()).split())


def generate_variants(template: QuestionTemplate, n: int, seed: int) -> list[ReasoningExample]:
    """The first n different variants of a template; fewer where it has no more."""
    return list(islice(iter_variants(template, seed), n))


def iter_variants(template: QuestionTemplate, seed: int) -> Iterator[ReasoningExample]:
    """Its variants one after another, each question once, never the first one's own."""
    first = tuple(int(template.numbers[slot.index]) for slot in template.slots)
    seen, missed = {first}, 0
    for draw, numbers in iter_draws(template, seed):
        made = None if numbers in seen else build_variant(template, numbers, f"{template.id}-s{seed}-{draw}")
        missed = 0 if made else missed + 1
        seen.add(numbers)
        if made:
            yield made
        if missed >= MAX_MISSES:
            return


def iter_draws(template: QuestionTemplate, seed: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Number after number of draws with the slots' values, without an end."""
    key, n = text_key(template.id), len(template.slots)
    low, high = (np.array([getattr(slot, end) for slot in template.slots], np.uint64) for end in ("low", "high"))
    begin = 0
    while True:
        at = np.arange(begin, begin + DRAW_BLOCK)
        words = hash64(seed, DRAW_KEY, key, at[:, None], np.arange(n)[None, :])
        for draw, row in zip(at.tolist(), (low + words % (high - low + np.uint64(1))).tolist(), strict=True):
            yield draw, tuple(row)
        begin += DRAW_BLOCK


def text_key(text: str) -> int:
    """64 bits of a text, as a key."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def build_variant(template: QuestionTemplate, numbers: Sequence[int], id: str) -> ReasoningExample | None:
    """The row with these numbers; None where a result is not positive, loses its wholeness or has a third decimal."""
    values = list(template.numbers)
    for slot, number in zip(template.slots, numbers, strict=True):
        values[slot.index] = Fraction(number)
    steps: list[str] = []
    for step in template.steps:
        value = evaluate_postfix(step.postfix, values)
        if value is None or value <= 0 or 100 % value.denominator or (step.is_integer and value.denominator > 1):
            return None
        values.append(value)
        steps.append(
            interleave(step.texts, [*(format_number(values[place]) for place in step.value_refs), format_number(value)])
        )
    question = interleave(
        template.texts, [slot.format_value(n) for slot, n in zip(template.slots, numbers, strict=True)]
    )
    return ReasoningExample(id, question, tuple(steps), format_number(values[-1]), {"template": template.id})


def interleave(texts: Sequence[str], between: Sequence[str]) -> str:
    """The texts with the values between them."""
    return "".join(text + value for text, value in zip(texts, [*between, ""], strict=True))


def interleave_variants(
    templates: Sequence[QuestionTemplate], seed: int, excluded: Iterable[str] = ()
) -> Iterator[ReasoningExample]:
    """One variant of each template, round after round until none gives more; no question twice, and none of `taken`."""
    seen = set(excluded)
    under = [iter_variants(template, seed) for template in templates]
    while under:
        still: list[Iterator[ReasoningExample]] = []
        for variants in under:
            made = next((example for example in variants if example.question not in seen), None)
            if made is not None:
                seen.add(made.question)
                still.append(variants)
                yield made
        under = still


def is_held_out(masked_question: str, share: float) -> bool:
    """Whether the templates of a text are held out: by the text without numbers alone, so that all seeds agree."""
    return bool(uniform(HOLD_OUT_KEY, text_key(masked_question)) < share)
