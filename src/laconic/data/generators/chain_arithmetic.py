"""Parse chains of steps `<<expression=value>>` exactly, and find what each operand refers to."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import count, permutations

STEP_PATTERN = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
TOKEN_PATTERN = re.compile(r"\d+(?:\.\d+)?|\.\d+|[-+*/()]|\s+|.")
VALUE_PATTERN = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
# Numbers that chains take from common knowledge, such as days of a week: variants of a question keep them.
CONSTANTS = frozenset(map(Fraction, (2, 3, 4, 7, 12, 24, 30, 52, 60, 100, 365, 1000)))
OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
OperandRef = int | Fraction  # an index into the question's numbers and the results after them, or a constant
ExpressionPart = tuple[str, OperandRef | None]  # text, and what an operand refers to


@dataclass(frozen=True)
class ChainStep:
    texts: tuple[str, ...]  # texts around the replaceable values
    value_refs: tuple[int, ...]  # what each of them refers to
    formula: ast.expr  # expression, whose i-th operand is named x{i}
    operands: tuple[OperandRef, ...]  # what the operands refer to
    is_integer: bool  # whether the result is an integer


class ChainParser:
    """Parses the steps of a row one after another, given the numbers of its question."""

    def __init__(self, numbers: Sequence[Fraction]) -> None:
        self.question_numbers = {number: i for i, number in enumerate(numbers)}
        self.values = list(numbers)
        self.latest_result: dict[Fraction, int] = {}
        self.used_numbers: set[int] = set()
        self.parsed_steps: list[tuple[list[ExpressionPart], ast.expr, tuple[OperandRef, ...]]] = []

    @cached_property
    def derived_values(self) -> set[Fraction]:
        """Sums, differences, products and quotients of two numbers of the question, which need not have a step."""
        pairs = list(permutations(self.question_numbers, 2))
        return {c for a, b in pairs for c in (a + b, a - b, a * b)} | {a / b for a, b in pairs if b}

    @property
    def results(self) -> list[Fraction]:
        return self.values[len(self.question_numbers) :]

    def parse_step(self, step: str) -> bool:
        """Parse a step; return False if it is not arithmetic, is wrong, or has an ambiguous operand."""
        match = STEP_PATTERN.fullmatch(step)
        if match is None or VALUE_PATTERN.fullmatch(match[2]) is None:
            return False
        parts = self.parse_expression(match[1])
        if parts is None:
            return False
        operands = tuple(ref for _, ref in parts if ref is not None)
        try:
            formula = parse_formula(parts)
            value = evaluate_formula(formula, operands, self.values)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return False
        if value != Fraction(match[2]):
            return False
        num_question = len(self.question_numbers)
        self.used_numbers |= {ref for _, ref in parts if isinstance(ref, int) and ref < num_question}
        self.latest_result[value] = len(self.values)
        self.values.append(value)
        self.parsed_steps.append((parts, formula, operands))
        return True

    def parse_expression(self, expression: str) -> list[ExpressionPart] | None:
        """Split an expression into operands and operators; None if it has other text or an ambiguous operand."""
        parts: list[ExpressionPart] = []
        for text in TOKEN_PATTERN.findall(expression):
            ref = None
            if text[-1].isdigit():
                ref = self.resolve_operand(Fraction(text))
                if ref is None:
                    return None
            elif text not in "+-*/()" and not text.isspace():
                return None
            parts.append((text, ref))
        return parts

    def resolve_operand(self, value: Fraction) -> OperandRef | None:
        """Return the number of the question, result or constant that an operand is; None if that is ambiguous."""
        indices = [index[value] for index in (self.question_numbers, self.latest_result) if value in index]
        if indices:
            return indices[0] if len(indices) == 1 else None
        return value if value in CONSTANTS and value not in self.derived_values else None

    def build_steps(self, replaced_numbers: set[int]) -> Iterator[ChainStep]:
        """Yield the steps, in which the given numbers of the question and all results can be replaced."""
        num_question = len(self.question_numbers)
        for (parts, formula, operands), value in zip(self.parsed_steps, self.results, strict=True):
            texts = ["<<"]
            refs: list[int] = []
            for text, ref in parts:
                if isinstance(ref, int) and (ref in replaced_numbers or ref >= num_question):
                    refs.append(ref)
                    texts.append("")
                else:
                    texts[-1] += text
            texts[-1] += "="
            yield ChainStep((*texts, ">>"), tuple(refs), formula, operands, value.denominator == 1)


def parse_formula(parts: Sequence[ExpressionPart]) -> ast.expr:
    """Parse an expression, whose i-th operand is named x{i}. Raises SyntaxError."""
    names = (f"x{i}" for i in count())
    source = "".join(text if ref is None else next(names) for text, ref in parts)
    return ast.parse(" ".join(source.split()), mode="eval").body  # on one line


def evaluate_formula(formula: ast.expr, operands: Sequence[OperandRef], values: Sequence[Fraction]) -> Fraction:
    """Return the value of an expression. Raises ValueError for other than arithmetic, ZeroDivisionError."""
    if isinstance(formula, ast.Name):
        ref = operands[int(formula.id[1:])]
        return values[ref] if isinstance(ref, int) else ref
    if isinstance(formula, ast.UnaryOp) and isinstance(formula.op, ast.USub):
        return -evaluate_formula(formula.operand, operands, values)
    if not isinstance(formula, ast.BinOp) or type(formula.op) not in OPERATORS:
        raise ValueError("not arithmetic")
    left, right = (evaluate_formula(side, operands, values) for side in (formula.left, formula.right))
    return OPERATORS[type(formula.op)](left, right)


def format_number(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    whole, cents = divmod(int(value * 100), 100)
    return f"{whole}.{cents:02d}".rstrip("0")
