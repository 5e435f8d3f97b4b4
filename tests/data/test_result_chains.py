"""Chains of results: the results of the equations, marked or alone, and rows that have none left as they are."""

import pytest

from laconic.batches import ReasoningExample
from laconic.data.generators.result_chains import convert_chain, shorten_chains


def build_row(*steps: str) -> ReasoningExample:
    return ReasoningExample("row", "How many?", steps, "6")


def test_marked_results_have_two_digits_for_each_step():
    example = build_row("<<8*3=24>>", "<<30-24=6>>")
    assert convert_chain(example) == ReasoningExample("row", "How many? =", (" #2 #4 #", " #0 #6 #"), "6")


@pytest.mark.parametrize("steps", [(), ("<<50*2=100>>",), ("<<5/2=2.5>>",), ("<<3-5=-2>>",), ("two",)])
def test_marked_results_need_whole_results_to_99(steps: tuple[str, ...]):
    assert convert_chain(build_row(*steps)) is None


def test_shortened_chains_have_results_alone():
    example = build_row("<<50*3=150>>", "<<156-150=6>>")
    assert list(shorten_chains([example], 1, 0)) == [ReasoningExample("row", "How many? :", ("150", "6"), "6")]


@pytest.mark.parametrize("steps", [(), ("<<5/2=2.5>>",), ("<<3*2=6>>", "<<3-5=-2>>"), ("two",)])
def test_other_chains_are_not_shortened(steps: tuple[str, ...]):
    assert list(shorten_chains([build_row(*steps)] * 20, 1, 0)) == [build_row(*steps)] * 20


def test_fraction_of_shortened_chains_is_random():
    rows = [build_row("<<8*3=24>>")] * 400
    mixed = list(shorten_chains(rows, 0.25, 0))
    assert 70 < sum(row.question.endswith(" :") for row in mixed) < 130
    assert mixed == list(shorten_chains(rows, 0.25, 0)) != list(shorten_chains(rows, 0.25, 1))
    assert list(shorten_chains(rows, 0, 0)) == rows
