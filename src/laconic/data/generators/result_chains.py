"""Rewrite chains of equations as chains of their results, in which KaVa's selection finds the results.

`<<8*3=24>>` becomes ` #2 #4 #`, and the question then ends in ` =`. A question that ends in ` =:` asks for the digits
alone, `24`. The repeated mark is what selection by redundancy drops; two digits for every result give each step as many
latents.
"""

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from laconic.batches import ReasoningExample

ResultStyle = Literal["marked", "digits"]
RESULT_PATTERN = re.compile(r"=0*(\d{1,2})>>$")
STYLES = (None, "marked", "digits")  # None: the equations as they are
STYLE_WEIGHTS = (0.35, 0.2, 0.45)


def convert_chain(example: ReasoningExample, style: ResultStyle) -> ReasoningExample | None:
    """Return a row with its results as the chain; None if it has no steps, or results beyond whole numbers to 99."""
    matches = [RESULT_PATTERN.search(step) for step in example.steps]
    results = [match[1].zfill(2) for match in matches if match]
    if not matches or len(results) < len(matches):
        return None
    if style == "digits":
        return replace(example, question=f"{example.question} =:", steps=tuple(results))
    steps = tuple(f" #{tens} #{ones} #" for tens, ones in results)
    return replace(example, question=f"{example.question} =", steps=steps)


def mix_chains(examples: Iterable[ReasoningExample], seed: int) -> Iterator[ReasoningExample]:
    """Yield every row as equations, marked results or digits alone, at random; as equations if nothing else fits."""
    rng = random.Random(seed)
    for example in examples:
        (style,) = rng.choices(STYLES, STYLE_WEIGHTS)
        yield (style and convert_chain(example, style)) or example
