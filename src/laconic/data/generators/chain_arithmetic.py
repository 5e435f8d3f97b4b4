"""Chains as arithmetic: steps `<<expr=value>>` read in fractions, and what each operand of a step stands for."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import permutations

STEP_PATTERN = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
TOKEN_PATTERN = re.compile(r"\d+(?:\.\d+)?|\.\d+|[-+*/()]|\s+|.")
VALUE_PATTERN = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
CONSTANTS = frozenset(map(Fraction, (2, 3, 4, 7, 12, 24, 30, 52, 60, 100, 365, 1000)))
NEGATED = "~"  # a minus before an operand
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, NEGATED: 3}
OperandRef = int | Fraction  # a place in the question's numbers and the results after them, or a constant
ExpressionPart = tuple[str, OperandRef | None]  # of an expression: text, and what an operand stands for


@dataclass(frozen=True)
class ChainStep:
    """A step: its texts around the values written anew, the places of those, and its expression in postfix."""

    texts: tuple[str, ...]
    value_refs: tuple[int, ...]
    postfix: tuple[OperandRef | str, ...]
    is_integer: bool


class ChainParser:
    """The steps of a row as they are read: which operand is which number of the question, or which result."""

    def __init__(self, numbers: Sequence[Fraction]) -> None:
        self.question_numbers = {number: i for i, number in enumerate(numbers)}
        self.values = list(numbers)
        self.latest_result: dict[Fraction, int] = {}
        self.used_numbers: set[int] = set()
        self.parsed_steps: list[tuple[list[ExpressionPart], list[OperandRef | str]]] = []

    @cached_property
    def derived_values(self) -> set[Fraction]:
        """Sums, differences, products and quotients of two numbers of the question."""
        pairs = list(permutations(self.question_numbers, 2))
        return {c for a, b in pairs for c in (a + b, a - b, a * b)} | {a / b for a, b in pairs if b}

    @property
    def results(self) -> list[Fraction]:
        """The values of the steps read so far."""
        return self.values[len(self.question_numbers) :]

    def parse_step(self, step: str) -> bool:
        """Reads a step; False where it is no arithmetic, is wrong, or has an operand that stands for two things."""
        found = STEP_PATTERN.fullmatch(step)
        parts = None if found is None or VALUE_PATTERN.fullmatch(found[2]) is None else self.parse_expression(found[1])
        postfix = None if parts is None else to_postfix(parts)
        if found is None or parts is None or postfix is None:
            return False
        value = evaluate_postfix(postfix, self.values)
        if value is None or value != Fraction(found[2]):
            return False
        self.used_numbers |= {ref for _, ref in parts if isinstance(ref, int) and ref < len(self.question_numbers)}
        self.latest_result[value] = len(self.values)
        self.values.append(value)
        self.parsed_steps.append((parts, postfix))
        return True

    def parse_expression(self, expression: str) -> list[ExpressionPart] | None:
        """An expression cut into operands and signs."""
        parts: list[ExpressionPart] = []
        for text in TOKEN_PATTERN.findall(expression):
            number = text[-1].isdigit()
            ref = self.resolve_operand(Fraction(text)) if number else None
            if (number and ref is None) or not (number or text in "+-*/()" or text.isspace()):
                return None
            parts.append((text, ref))
        return parts

    def resolve_operand(self, value: Fraction) -> OperandRef | None:
        """What an operand is; None where that is open."""
        asked, result = self.question_numbers.get(value), self.latest_result.get(value)
        if asked is not None and result is not None:
            return None
        if asked is not None or result is not None:
            return asked if result is None else result
        return value if value in CONSTANTS and value not in self.derived_values else None

    def build_steps(self, replaced_numbers: set[int]) -> Iterator[ChainStep]:
        """The steps with places where a drawn number or a result stands; the rest of their text stays."""
        first = len(self.question_numbers)
        for (parts, postfix), value in zip(self.parsed_steps, self.results, strict=True):
            texts, places = ["<<"], []
            for text, ref in parts:
                if isinstance(ref, int) and (ref in replaced_numbers or ref >= first):
                    places.append(ref)
                    texts.append("")
                else:
                    texts[-1] += text
            texts[-1] += "="
            yield ChainStep((*texts, ">>"), tuple(places), tuple(postfix), value.denominator == 1)


def to_postfix(parts: Sequence[ExpressionPart]) -> list[OperandRef | str] | None:
    """An expression in postfix (Dijkstra's shunting yard); None where it is none."""
    out: list[OperandRef | str] = []
    held: list[str] = []
    operand = True  # whether an operand is to come
    for text, ref in parts:
        if text.isspace():
            continue
        if ref is not None or text == "(":
            if not operand:
                return None
            operand = ref is None
            out += [] if ref is None else [ref]
            held += ["("] if ref is None else []
            continue
        if operand:
            if text != "-":
                return None
            held.append(NEGATED)
            continue
        operand = text != ")"
        while held and held[-1] != "(" and (text == ")" or PRECEDENCE[held[-1]] >= PRECEDENCE[text]):
            out.append(held.pop())
        if text != ")":
            held.append(text)
        elif not held or held.pop() != "(":
            return None
    return None if operand or "(" in held else [*out, *reversed(held)]


def evaluate_postfix(postfix: Sequence[OperandRef | str], values: Sequence[Fraction]) -> Fraction | None:
    """The value of an expression; None where it divides by 0."""
    stack: list[Fraction] = []
    for item in postfix:
        if not isinstance(item, str):
            stack.append(values[item] if isinstance(item, int) else item)
            continue
        b, a = stack.pop(), Fraction(0) if item == NEGATED else stack.pop()
        if item == "/" and not b:
            return None
        stack.append(a + b if item == "+" else a * b if item == "*" else a / b if item == "/" else a - b)
    return stack[0]


def format_number(value: Fraction) -> str:
    """A positive number of at most two decimals, without zeros at its end."""
    if value.denominator == 1:
        return str(value.numerator)
    whole, cents = divmod(int(value * 100), 100)
    return f"{whole}.{cents:02d}".rstrip("0")
