"""Chains parsed by Python's own parser and computed in fractions."""

import ast
import re
from fractions import Fraction


def value(node: ast.AST, text: str) -> Fraction:
    """Evaluate + - * / and numbers without rounding."""
    if isinstance(node, ast.Expression):
        return value(node.body, text)
    if isinstance(node, ast.Constant):
        return Fraction(str(ast.get_source_segment(text, node)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand, text)
    assert isinstance(node, ast.BinOp), ast.dump(node)
    a, b = value(node.left, text), value(node.right, text)
    return {ast.Add: a.__add__, ast.Sub: a.__sub__, ast.Mult: a.__mul__, ast.Div: a.__truediv__}[type(node.op)](b)


def operands(text: str) -> list[Fraction]:
    """Return the numbers of an expression in order."""
    result = [node for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Constant)]
    result.sort(key=lambda node: node.col_offset)
    return [Fraction(str(ast.get_source_segment(text, node))) for node in result]


def numbers(question: str) -> list[Fraction]:
    """Return every number of a question, with or without thousands separators."""
    return [Fraction(text.replace(",", "")) for text in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", question)]


def chain(steps: list[str]) -> list[Fraction]:
    """Return the results of a chain; fail if a step is wrong."""
    results: list[Fraction] = []
    for step in steps:
        assert step[:2] + step[-2:] == "<<>>", step
        expression, _, stated = step[2:-2].rpartition("=")
        result = value(ast.parse(expression, mode="eval"), expression)
        assert result == Fraction(stated), step
        results.append(result)
    return results
