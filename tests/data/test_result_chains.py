"""Chains of results: the results of the equations, marked or alone, and rows that have none left as they are."""

import pytest

from laconic.batches import ReasoningExample
from laconic.data.generators.result_chains import convert_chain, mix_chains


def build_row(*steps: str) -> ReasoningExample:
    return ReasoningExample("row", "How many?", steps, "6")


def test_result_chains_have_two_digits_for_each_step():
    example = build_row("<<8*3=24>>", "<<30-24=6>>")
    assert convert_chain(example, "marked") == ReasoningExample("row", "How many? =", (" #2 #4 #", " #0 #6 #"), "6")
    assert convert_chain(example, "digits") == ReasoningExample("row", "How many? =:", ("24", "06"), "6")


@pytest.mark.parametrize("steps", [(), ("<<50*2=100>>",), ("<<5/2=2.5>>",), ("<<3-5=-2>>",), ("two",)])
def test_result_chains_need_whole_results_to_99(steps: tuple[str, ...]):
    assert convert_chain(build_row(*steps), "marked") is None
    assert list(mix_chains([build_row(*steps)] * 20, 0)) == [build_row(*steps)] * 20


def test_mixed_chains_have_every_style_and_depend_on_the_seed():
    rows = [build_row("<<8*3=24>>")] * 400
    mixed = list(mix_chains(rows, 0))
    ends = [row.question.removeprefix("How many?") for row in mixed]
    assert {end: round(ends.count(end), -2) for end in set(ends)} == {"": 100, " =": 100, " =:": 200}
    assert mixed == list(mix_chains(rows, 0)) != list(mix_chains(rows, 1))
