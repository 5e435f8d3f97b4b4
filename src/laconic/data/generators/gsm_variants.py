"""Generate variants of GSM8K questions with other numbers.

Rows whose chain is arithmetic on the numbers of their question become templates. A variant puts random numbers into a
template's question and recomputes its chain exactly. The random numbers are keyed by the seed and the id of the
template's row, so they depend neither on the order of rows nor on how many variants are generated.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from laconic.batches import ReasoningExample
from laconic.data.generators.chain_arithmetic import (
    VALUE_PATTERN,
    ChainParser,
    ChainStep,
    evaluate_formula,
    format_number,
)
from laconic.rng import hash64, uniform

NUMBER_PATTERN = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
# Characters that touch a number which is not an amount: 3pm, 1/2, 10:30.
ATTACHED_BEFORE = re.compile(r"(?:[^\W\d_]|[:/]|\d[.,])$")
ATTACHED_AFTER = re.compile(r"[^\W\d_]|[:/]|[.,]\d")
PERCENT_PATTERN = re.compile(r"\s?(?:%|percent)")
# Words from which a chain may have a number. If a question contains both 2 and "twice", a 2 in its chain may be either,
# and replacing it would make the chain wrong.
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
DRAW_BLOCK = 16  # random draws computed at once
MAX_MISSES = 100  # consecutive draws without a new variant, after which a template is exhausted
DRAW_KEY, HOLD_OUT_KEY, NEW_NUMBERS_KEY = 1, 2, 3  # purposes of random numbers


@dataclass(frozen=True)
class NumberSlot:
    index: int  # among the numbers of the question
    low: int
    high: int
    has_commas: bool  # whether it is written with thousands separators
    suffix: str  # zeros after the point, as in $5.00

    def format_value(self, value: int) -> str:
        return (f"{value:,}" if self.has_commas else str(value)) + self.suffix


@dataclass(frozen=True)
class QuestionTemplate:
    """A row in which the numbers that its chain uses can be replaced."""

    id: str  # of the row
    texts: tuple[str, ...]  # texts of the question around the slots
    numbers: tuple[Fraction, ...]  # all of the question
    slots: tuple[NumberSlot, ...]
    steps: tuple[ChainStep, ...]
    masked_question: str  # question without its numbers; decides whether the template is held out
    is_ambiguous: bool  # whether a word of the question, such as "twice", may mean a replaced number


def build_templates(examples: Iterable[ReasoningExample]) -> list[QuestionTemplate]:
    return [template for template in map(build_template, examples) if template is not None]


def build_template(example: ReasoningExample) -> QuestionTemplate | None:
    """Return the template of a row; None if its chain does not determine the effect of other numbers."""
    matches = find_numbers(example.question)
    numbers = tuple(map(parse_number, matches))
    if len(set(numbers)) < len(numbers):
        return None
    chain = ChainParser(numbers)
    if not all(chain.parse_step(step) for step in example.steps) or not chain.used_numbers:
        return None
    if VALUE_PATTERN.fullmatch(example.answer) is None or chain.results[-1] != Fraction(example.answer):
        return None
    replaced = [i for i in sorted(chain.used_numbers) if numbers[i].denominator == 1 and numbers[i]]
    starts = [0, *(matches[i].end() for i in replaced)]
    ends = [*(matches[i].start() for i in replaced), len(example.question)]
    masked = mask_numbers(example.question)
    return QuestionTemplate(
        id=example.id,
        texts=tuple(example.question[a:b] for a, b in zip(starts, ends, strict=True)),
        numbers=numbers,
        slots=tuple(make_slot(i, matches[i], example.question) for i in replaced),
        steps=tuple(chain.build_steps(set(replaced))),
        masked_question=masked,
        is_ambiguous=any(numbers[i] in WORD_NUMBERS.get(word, ()) for word in masked.split() for i in replaced),
    )


def find_numbers(question: str) -> list[re.Match[str]]:
    """Return the numbers of a question that touch no letter, `:`, `/` or other number."""
    return [
        match
        for match in NUMBER_PATTERN.finditer(question)
        if not ATTACHED_AFTER.match(question, match.end())
        and not ATTACHED_BEFORE.search(question[max(0, match.start() - 2) : match.start()])
    ]


def parse_number(match: re.Match[str]) -> Fraction:
    return Fraction(match[0].replace(",", ""))


def make_slot(index: int, match: re.Match[str], question: str) -> NumberSlot:
    """Return a slot from half the number to twice; a percentage stays within 100, one beyond 200 unchanged."""
    n = int(parse_number(match))
    low = max(1, -(-n // 2))
    high = 2 * n
    if PERCENT_PATTERN.match(question, match.end()):
        high = min(high, 100)
    if low > high:
        low = high = n
    _, point, zeros = match[0].partition(".")
    return NumberSlot(index, low, high, "," in match[0], point + zeros)


def mask_numbers(question: str) -> str:
    """Return a question in lower case with each number as 0 and each run of other characters as a space."""
    return " ".join(re.sub(r"\W+", " ", NUMBER_PATTERN.sub("0", question).lower()).split())


def iter_variants(template: QuestionTemplate, seed: int, max_value: int | None = None) -> Iterator[ReasoningExample]:
    """Yield the different variants of a template, without the original question, with results up to `max_value`."""
    original = tuple(int(template.numbers[slot.index]) for slot in template.slots)
    seen, misses = {original}, 0
    for draw, numbers in iter_draws(template, seed):
        variant = None
        if numbers not in seen:
            variant = build_variant(template, numbers, f"{template.id}-s{seed}-{draw}", max_value)
            seen.add(numbers)
        if variant is not None:
            misses = 0
            yield variant
        else:
            misses += 1
            if misses >= MAX_MISSES:
                return


def iter_draws(template: QuestionTemplate, seed: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield draw numbers and random values of the slots endlessly."""
    key, n = text_key(template.id), len(template.slots)
    low = np.array([slot.low for slot in template.slots], np.uint64)
    high = np.array([slot.high for slot in template.slots], np.uint64)
    start = 0
    while True:
        draws = np.arange(start, start + DRAW_BLOCK)
        hashes = hash64(seed, DRAW_KEY, key, draws[:, None], np.arange(n)[None, :])
        values = (low + hashes % (high - low + np.uint64(1))).tolist()
        for draw, row in zip(draws.tolist(), values, strict=True):
            yield draw, tuple(row)
        start += DRAW_BLOCK


def text_key(text: str) -> int:
    """Return 64 bits of a text's SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def build_variant(
    template: QuestionTemplate, numbers: Sequence[int], id: str, max_value: int | None = None
) -> ReasoningExample | None:
    """Return the row with other numbers; None if a result is not positive, no longer whole, or over `max_value`."""
    values = list(template.numbers)
    for slot, number in zip(template.slots, numbers, strict=True):
        values[slot.index] = Fraction(number)
    steps: list[str] = []
    for step in template.steps:
        try:
            value = evaluate_formula(step.formula, step.operands, values)
        except ZeroDivisionError:
            return None
        if value <= 0 or 100 % value.denominator or (step.is_integer and value.denominator > 1):
            return None
        if max_value is not None and value > max_value:
            return None
        values.append(value)
        step_values = [*(format_number(values[ref]) for ref in step.value_refs), format_number(value)]
        steps.append(interleave(step.texts, step_values))
    slot_values = [slot.format_value(n) for slot, n in zip(template.slots, numbers, strict=True)]
    question = interleave(template.texts, slot_values)
    answer = format_number(values[-1])
    return ReasoningExample(id, question, tuple(steps), answer, {"template": template.id})


def largest_result(steps: Iterable[str]) -> float:
    """Return the largest result of a chain, 0 if it is empty, and infinity if a result is not a number."""
    results = [step.rstrip(">").rpartition("=")[2] for step in steps]
    return max((float(r) if VALUE_PATTERN.fullmatch(r) else math.inf for r in results), default=0)


def interleave(texts: Sequence[str], values: Sequence[str]) -> str:
    return "".join(text + value for text, value in zip(texts, [*values, ""], strict=True))


def interleave_variants(
    templates: Sequence[QuestionTemplate], seed: int, excluded: Iterable[str] = (), max_value: int | None = None
) -> Iterator[ReasoningExample]:
    """Yield one variant of each template in turn until all are exhausted, without repeated and excluded questions."""
    seen = set(excluded)
    active = [iter_variants(template, seed, max_value) for template in templates]
    while active:
        remaining: list[Iterator[ReasoningExample]] = []
        for variants in active:
            variant = next((example for example in variants if example.question not in seen), None)
            if variant is not None:
                seen.add(variant.question)
                remaining.append(variants)
                yield variant
        active = remaining


def is_held_out(text: str, share: float, key: int = HOLD_OUT_KEY) -> bool:
    """Return whether a template with this masked question, or a variant, is held out; the seed does not matter."""
    return bool(uniform(key, text_key(text)) < share)
