"""Chains read by Python's own parser and worked out in fractions, from the rules of the steps alone."""

import ast
import re
from fractions import Fraction


def value(node: ast.AST, text: str) -> Fraction:
    """An expression of + - * / and numbers as they are written, without a float between."""
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
    """The numbers of an expression, in order."""
    found = [node for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Constant)]
    found.sort(key=lambda node: node.col_offset)
    return [Fraction(str(ast.get_source_segment(text, node))) for node in found]


def numbers(question: str) -> list[Fraction]:
    """Every number of a question, thousands by commas or not."""
    return [Fraction(text.replace(",", "")) for text in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", question)]


def chain(steps: list[str]) -> list[Fraction]:
    """The results of a chain; fails where a step is wrong."""
    results: list[Fraction] = []
    for step in steps:
        assert step[:2] + step[-2:] == "<<>>", step
        expression, _, said = step[2:-2].rpartition("=")
        found = value(ast.parse(expression, mode="eval"), expression)
        assert found == Fraction(said), step
        results.append(found)
    return results
