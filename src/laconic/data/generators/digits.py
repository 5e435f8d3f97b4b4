"""Generate the built-in digits task as text for any tokenizer: `8*1*5-9*5=`, steps `<8>` `<0>` `<1>` `<5>`, answer 5.

Operations go from left to right and keep the last digit. Steps can also be equations, `8*1=8;` `8*5=0;` …, or results
alone. A question that ends in `:` asks for results alone whatever the style. SmolLM2 reads every digit, operator and
mark as one token, except `><` between two steps.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from laconic.config.data import DigitsConfig, SplitName
from laconic.data.generators.write_jsonl import example_to_row
from laconic.data.synthetic.digits import DigitsDataset

DigitChain = Literal["brackets", "equations", "results"]


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

    With `min_operations`, there are as many problems of each number of operations. Questions end in `:` in
    `results_only_fraction` of the rows on average. Raises `InputError` if the split has fewer problems.
    """
    rng = random.Random(seed)
    sizes = dict.fromkeys(("train_rows", "valid_rows", "test_rows"), num_rows)
    style = "equations" if chain == "equations" else "results"
    config = DigitsConfig(num_operations=num_operations, min_operations=min_operations, chain_style=style, **sizes)
    for example in DigitsDataset(seed, config, part).generate_examples(num_rows):
        steps = example.steps
        is_terse = rng.random() < results_only_fraction
        if chain == "brackets" and not is_terse:
            steps = tuple(f"<{result}>" for result in steps)
        elif chain == "equations" and is_terse:
            steps = tuple(step.partition("=")[2][0] for step in steps)  # results are single digits
        question = example.question.replace(" ", "") + (":" if is_terse else "")
        yield example_to_row(replace(example, question=question, steps=steps))
