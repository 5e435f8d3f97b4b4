"""How a text is judged: as CODI's code does, and by the whole text. Figures of two protocols are never put together."""

import re

from laconic.evaluation.evaluate import Protocol

NUMBER = re.compile(r"-?\d+\.?\d*")


def last_number(text: str) -> str | None:
    """The last number of a text, its commas removed."""
    found = NUMBER.findall(text.replace(",", ""))
    return found[-1] if found else None


def equal_floats(prediction: str, gold: str) -> bool:
    """Whether the last number of the gold answer is the one predicted; a gold answer without one is never right."""
    asked = last_number(gold)
    return asked is not None and float(prediction) == float(asked)


def last_line(text: str) -> str | None:
    """What stands behind the last `:` or line end of a text, or all of it."""
    return re.split(r"[:\n]", text.strip())[-1].strip() or None


CODI = Protocol("codi", last_number, equal_floats)
TEXT = Protocol("text", last_line, lambda prediction, gold: prediction == gold.strip())
