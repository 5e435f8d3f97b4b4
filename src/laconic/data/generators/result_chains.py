"""Rewrite chains of equations as chains of their results, for models that are to compute without writing equations.

With marked results, `<<8*3=24>>` becomes ` #2 #4 #`, and the question ends in ` =`. KaVa's selection by redundancy then
finds the results, because it drops the repeated mark. Two digits for every result give each step as many latents.
Results alone, `24`, follow a question that ends in ` :`.
"""

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from laconic.batches import ReasoningExample

RESULT_PATTERN = re.compile(r"=(\d+)>>$")
MAX_MARKED_RESULT = 99


def convert_chain(example: ReasoningExample) -> ReasoningExample | None:
    """Return a row with marked results as its chain; None if it has no steps, or results beyond whole numbers to 99."""
    results = list_results(example)
    if not results or max(map(int, results)) > MAX_MARKED_RESULT:
        return None
    steps = tuple(f" #{int(result) // 10} #{int(result) % 10} #" for result in results)
    return replace(example, question=f"{example.question} =", steps=steps)


def shorten_chains(examples: Iterable[ReasoningExample], fraction: float, seed: int) -> Iterator[ReasoningExample]:
    """Yield rows, a random fraction of them with results alone; rows with other than whole results stay as they are."""
    rng = random.Random(seed)
    for example in examples:
        results = list_results(example) if rng.random() < fraction else ()
        yield replace(example, question=f"{example.question} :", steps=results) if results else example


def list_results(example: ReasoningExample) -> tuple[str, ...]:
    """Return the results of a chain of equations; none if one is not a whole number."""
    matches = [RESULT_PATTERN.search(step) for step in example.steps]
    return tuple(match[1] for match in matches if match) if all(matches) else ()
