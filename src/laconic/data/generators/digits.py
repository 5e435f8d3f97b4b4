"""Generate the built-in digits task as text for any tokenizer: `8*1*5-9*5=`, steps `<8>` `<0>` `<1>` `<5>`, answer 5.

Operations go from left to right and keep the last digit. A question that ends in `:` asks for the results alone,
without brackets; with `chain="results"` no chain has brackets, and no question a mark. SmolLM2 reads every digit,
operator and bracket as one token, except `><` between two steps.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from laconic.config.data import DigitsConfig, SplitName
from laconic.data.generators.write_jsonl import example_to_row
from laconic.data.synthetic.digits import generate_digit_examples

DigitChain = Literal["brackets", "results"]


def iter_digit_rows(
    num_rows: int,
    seed: int,
    *,
    num_operations: int,
    part: SplitName,
    min_operations: int | None = None,
    chain: DigitChain = "brackets",
    results_only_fraction: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """Yield rows of one split; no problem occurs twice, or in two splits.

    Args:
        num_rows: Number of rows.
        seed: Seed of their order, and of the rows with results only.
        num_operations: Largest number of operations of a problem.
        part: Split.
        min_operations: Smallest number of operations, as many problems of each; None: all have `num_operations`.
        chain: Whether results stand in brackets.
        results_only_fraction: Mean fraction of rows whose questions end in `:`.

    Raises:
        InputError: The split has fewer problems.
    """
    rng = random.Random(seed)
    config = DigitsConfig(num_operations=num_operations, min_operations=min_operations)
    for example in generate_digit_examples(seed, num_rows, config, part):
        is_terse = rng.random() < results_only_fraction
        question = example.question.replace(" ", "") + (":" if is_terse else "")
        steps = example.steps if is_terse or chain == "results" else tuple(f"<{result}>" for result in example.steps)
        yield example_to_row(replace(example, question=question, steps=steps))
