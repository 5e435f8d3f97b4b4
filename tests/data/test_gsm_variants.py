"""GSM variants: which rows become templates, what a variant may change, and that every chain is correct."""

import json
from collections import Counter
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.batches import ReasoningExample
from laconic.data.generators.chain_arithmetic import format_number
from laconic.data.generators.gsm_variants import (
    QuestionTemplate,
    build_template,
    build_templates,
    build_variant,
    interleave_variants,
    is_held_out,
    iter_draws,
    iter_variants,
    mask_numbers,
)
from tests.conftest import shared_dir
from tests.oracles import chain_arithmetic as oracle

CONSTANTS = {2, 3, 4, 7, 12, 24, 30, 52, 60, 100, 365, 1000}
PENS = ReasoningExample(
    "pens", "Tom has 5 boxes of 16 pens and loses 7. How many are left?", ("<<5*16=80>>", "<<80-7=73>>"), "73"
)


def row(question: str, *steps: str, answer: str | None = None, id: str = "row") -> ReasoningExample:
    """Return a row whose answer is the last result, unless given."""
    return ReasoningExample(id, question, steps, answer or steps[-1].rpartition("=")[2].removesuffix(">>"))


def template_of(example: ReasoningExample) -> QuestionTemplate:
    """Return the template of a row that has one."""
    template = build_template(example)
    assert template is not None
    return template


def generate_variants(template: QuestionTemplate, n: int, seed: int) -> list[ReasoningExample]:
    """Return the first n different variants of a template, or fewer if it has no more."""
    return list(islice(iter_variants(template, seed), n))


def check_variant(example: ReasoningExample) -> None:
    """Check chain, operands and answer of a variant by the oracle."""
    results = oracle.chain(list(example.steps))
    numbers, known = set(oracle.numbers(example.question)), list[Fraction]()
    for step, result in zip(example.steps, results, strict=True):
        for operand in oracle.operands(step[2:].rpartition("=")[0]):
            assert operand in numbers or operand in known or operand in CONSTANTS, (step, example.question)
        known.append(result)
        assert result > 0
        assert (result * 100).denominator == 1
    assert Fraction(example.answer) == results[-1]


@pytest.fixture(scope="module")
def real() -> dict[str, list[ReasoningExample]]:
    def rows(path: str, **mark: str) -> list[ReasoningExample]:
        with (shared_dir() / "data" / path).open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        selected = [r for r in rows if all(r[key] == value for key, value in mark.items())]
        return [ReasoningExample(r["id"], r["question"], tuple(r["steps"]), r["answer"]) for r in selected]

    return {"aug": rows("gsm8k-aug/train-subset.jsonl"), "gsm8k": rows("gsm8k/train.jsonl", icot_split="train")}


@pytest.fixture(scope="module")
def real_templates(real: dict[str, list[ReasoningExample]]) -> dict[str, list[QuestionTemplate]]:
    return {name: build_templates(examples) for name, examples in real.items()}


@pytest.mark.slow
def test_build_templates_count_on_gsm8k(real, real_templates):
    assert {name: len(rows) for name, rows in real.items()} == {"aug": 10_432, "gsm8k": 6_973}
    assert {name: len(rows) for name, rows in real_templates.items()} == {"aug": 6_010, "gsm8k": 2_788}
    assert sum(t.is_ambiguous for t in real_templates["aug"]) == 466


def test_generate_variants_of_gsm8k_are_correct(real):
    templates = build_templates([*real["aug"][::30], *real["gsm8k"][::30]])
    examples = [example for t in templates for example in generate_variants(t, 4, seed=3)]
    assert len(examples) > 700
    for example in examples:
        check_variant(example)


@given(
    numbers=st.lists(st.integers(1, 400), min_size=2, max_size=4, unique=True),
    signs=st.lists(st.sampled_from("+-*/"), min_size=3, max_size=3),
    seed=st.integers(0, 9),
)
def test_generate_variants_of_random_rows_are_correct(numbers: list[int], signs: list[str], seed: int) -> None:
    running, steps = Fraction(numbers[0]), list[str]()
    for sign, number in zip(signs, numbers[1:], strict=False):
        before = running
        running = {"+": before + number, "-": before - number, "*": before * number, "/": before / number}[sign]
        if (running * 100).denominator > 1 or running <= 0:
            return
        steps.append(f"<<{format_number(before)}{sign}{number}={format_number(running)}>>")
    example = row("Take " + " and ".join(f"{n:,} of one" for n in numbers) + ".", *steps)
    for changed in generate_variants(t, 6, seed) if (t := build_template(example)) else []:
        check_variant(changed)
        assert changed.question != example.question
        low, high = zip(*((max(1, -(-n // 2)), 2 * n) for n in numbers), strict=True)
        drawn_numbers = oracle.numbers(changed.question)
        assert all(a <= n <= b for a, n, b in zip(low, drawn_numbers, high, strict=True))


def test_generate_variants_changes_only_numbers():
    changed = generate_variants(template_of(PENS), 3, seed=0)
    assert len(changed) == 3
    for example in changed:
        a, b, c = map(int, oracle.numbers(example.question))
        assert example.question == f"Tom has {a} boxes of {b} pens and loses {c}. How many are left?"
        assert example.steps == (f"<<{a}*{b}={a * b}>>", f"<<{a * b}-{c}={a * b - c}>>")
        assert example.metadata == {"template": "pens"}
        assert example.id.startswith("pens-s0-")


@pytest.mark.parametrize(
    "example",
    [
        row("He has 3 cats and 3 dogs and 8 birds.", "<<3+8=11>>"),
        row("He has three cats.", "<<3+4=7>>"),
        row("He has 5 cats.", "<<7*12=84>>"),
        row("He has 5 cats and 8 dogs.", "<<5+8=14>>", answer="14"),
        row("He has 5 cats and 8 dogs.", "<<5+8=13>>", answer="14"),
        row("He has 5 cats and 8 dogs.", "5+8=13"),
        row("He has 5 cats and 8 dogs.", "<<5+8=13>>", "<<5+8=x>>", answer="13"),
        row("He has 5 cats and 8 dogs.", "<<(5+8=13>>"),
        row("He has 5 cats and 8 dogs.", "<<5+8)=13>>"),
        row("He has 5 cats and 8 dogs.", "<<5 8=13>>", answer="13"),
        row("He has 5 cats and 8 dogs.", "<<5**8=390625>>"),
        row("He has 5 cats and 8 dogs.", "<<5%8=5>>"),
        row("He has 5 cats and 8 dogs.", "<<5/(8-8)=1>>"),
        row("He has 5 cats and 8 dogs.", "<<5+8+9=22>>"),
        row("He has 10 cats and 3 dogs.", "<<10/3=3.33>>"),
        row("He has 5 cats, 8 dogs and 13 birds.", "<<5+8=13>>", "<<13+8=21>>"),
        row("He has 5 cats and 2 dogs.", "<<5*7=35>>"),
        row("He has 6 cats and 2 dogs.", "<<6*12=72>>"),
        row("He has 5 cats and 8 dogs.", "<<5+8=13>>", answer="13 pets"),
        ReasoningExample("row", "He has 5 cats.", (), "5"),
    ],
)
def test_build_template_refuses_ambiguous_rows(example: ReasoningExample) -> None:
    assert build_template(example) is None


@pytest.mark.parametrize(
    "example",
    [
        row("He has 5 cats and 8 dogs.", "<<5+8=13>>", "<<13*60=780>>"),
        row("He has 1,200 cats and 8 dogs.", "<<1200/8=150>>"),
        row("At 10:30 he has 5 cats, 1/2 an apple, a 5k run and 8 dogs.", "<<5+8=13>>"),
        row("He has 5 cats and 8 dogs.", "<<5 + ( 8 ) =13>>"),
        row("He has 5 cats and 8 dogs.", "<<-5+8=3>>"),
        row("He has 5 cats and 8 dogs.", "<<-(5-8)*2=6>>"),
        row("He has $5.50 and 8 dogs.", "<<5.50*8=44.00>>", answer="44"),
        row("He has 5 cats and 8 dogs.", "<<5+5=10>>", "<<10+8=18>>", "<<18/10=1.8>>"),
    ],
)
def test_build_template_accepts_rows(example: ReasoningExample) -> None:
    for changed in generate_variants(template_of(example), 5, seed=0):
        check_variant(changed)


def test_chain_parser_uses_the_latest_equal_result():
    example = row("It has 40 cats, 8 dogs, 6 birds.", "<<40/8=5>>", "<<8+6=14>>", "<<14-9=5>>", "<<5*6=30>>")
    assert build_template(example) is None  # 9 is nothing
    again = row("It has 40 cats, 8 dogs, 35 birds.", "<<40/8=5>>", "<<40-35=5>>", "<<5*8=40>>", "<<5+40=45>>")
    assert build_template(again) is None  # 40 is asked and a result
    twice = row("It has 36 cats, 9 dogs, 32 birds.", "<<36/9=4>>", "<<36-32=4>>", "<<4+9=13>>")
    changed = generate_variants(template_of(twice), 1, seed=0)[0]
    first, second, third = oracle.chain(list(changed.steps))
    assert third == second + oracle.numbers(changed.question)[1]
    assert first != second


def test_number_slot_format():
    example = row("A car of $8,000 and a pen of $40.00 at 25% off and 150 percent.", "<<8000+40=8040>>",
                  "<<8040*25/100=2010>>", "<<2010+150=2160>>")  # fmt: skip
    for changed in generate_variants(template_of(example), 40, seed=1):
        price, pen, share, more = oracle.numbers(changed.question)
        assert f"${int(price):,} and a pen of ${int(pen)}.00 at {int(share)}% off" in changed.question
        assert 4000 <= price <= 16_000
        assert 20 <= pen <= 80
        assert 13 <= share <= 50
        assert 75 <= more <= 100


def test_build_template_keeps_unused_numbers():
    example = row("In 1990 he paid $2.75 for each of 8 pens.", "<<2.75*8=22.00>>", answer="22")
    variants = generate_variants(template_of(example), 3, seed=0)
    assert variants
    assert all(e.question.startswith("In 1990 he paid $2.75 for each of ") for e in variants)
    assert all(e.steps[0].startswith("<<2.75*") for e in variants)


def test_build_variant_keeps_results_whole_and_positive():
    example = row("He shares 40 cats among 8 dogs but for 3.", "<<40/8=5>>", "<<5-3=2>>")
    for changed in generate_variants(template_of(example), 10, seed=0):
        assert all(r.denominator == 1 and r > 0 for r in oracle.chain(list(changed.steps)))
    assert build_variant(template_of(example), (41, 8, 3), "x") is None
    assert build_variant(template_of(example), (40, 8, 5), "x") is None
    assert build_variant(template_of(example), (48, 8, 5), "x") is not None
    assert build_variant(template_of(row("He has 9 cats and 4 dogs.", "<<9/4=2.25>>")), (9, 8), "x") is None  # 1.125


def test_generate_variants_is_a_function_of_seed_and_id(real):
    some = build_templates(real["aug"][:80])[:40]
    first = [generate_variants(t, 5, seed=7) for t in some]
    assert [generate_variants(t, 5, seed=7) for t in reversed(some)] == first[::-1]
    assert [generate_variants(t, 3, seed=7) for t in some] == [examples[:3] for examples in first]
    assert [generate_variants(t, 5, seed=8) for t in some] != first
    again = generate_variants(template_of(row(PENS.question, *PENS.steps, id="other")), 5, seed=0)
    assert [e.question for e in again] != [e.question for e in generate_variants(template_of(PENS), 5, seed=0)]


GOLDEN = [("pens-s0-0", 7, 8, 10, "46"), ("pens-s0-1", 7, 31, 12, "205"), ("pens-s0-2", 7, 27, 9, "180")]


def test_generate_variants_golden():
    """The variants of a seed are the same on every machine and in every release."""
    variants = [
        (e.id, *map(int, oracle.numbers(e.question)), e.answer) for e in generate_variants(template_of(PENS), 3, seed=0)
    ]
    assert variants == GOLDEN


def test_iter_draws_is_uniform_and_independent():
    numbers = np.array([row for _, row in islice(iter_draws(template_of(PENS), seed=0), 8000)])
    for column, (low, high) in zip(numbers.T, [(3, 10), (8, 32), (4, 14)], strict=True):
        assert (column.min(), column.max()) == (low, high)
        counts, mean = np.bincount(column - low), len(column) / (high - low + 1)
        assert abs(counts - mean).max() < 5 * mean**0.5
    assert abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.05


def test_iter_variants_ends():
    one = template_of(row("He has 1 cat.", "<<1*60=60>>"))
    assert [e.answer for e in iter_variants(one, seed=0)] == ["120"]
    assert generate_variants(template_of(row("He pays $2.75.", "<<2.75*4=11>>")), 5, seed=0) == []


def test_interleave_variants(real):
    some = build_templates(real["gsm8k"][:80])[:30]
    able = [t for t in some if generate_variants(t, 2, seed=0)]
    first = list(islice(interleave_variants(some, seed=0), len(able)))
    assert [e.metadata["template"] for e in first] == [t.id for t in able]
    taken = {first[0].question, first[3].question}
    other = list(islice(interleave_variants(some, 0, taken), 200))
    assert not taken & {e.question for e in other}
    assert len({e.question for e in other}) == 200
    twins = [template_of(row(PENS.question, *PENS.steps, id=id)) for id in "ab"]
    assert max(Counter(e.question for e in islice(interleave_variants(twins, 0), 300)).values()) == 1


def test_is_held_out_by_text(real):
    first, second = (template_of(row(f"He has {n} cats, and 8 DOGS.", f"<<{n}+8={n + 8}>>")) for n in (5, 6))
    assert first.masked_question == second.masked_question == mask_numbers("he has 1,000 cats and 9.5 dogs")
    every = {mask_numbers(example.question) for example in real["gsm8k"][::4]}
    few, more = ({text for text in every if is_held_out(text, share)} for share in (0.05, 0.2))
    assert few < more
    assert 0.03 < len(few) / len(every) < 0.07
    assert not any(is_held_out(text, 0) for text in every)


def test_build_template_is_ambiguous():
    assert template_of(row("Bread is $2, milk twice as much.", "<<2*2=4>>")).is_ambiguous
    assert template_of(row("He runs 7 miles a day for 5 weeks.", "<<7*7=49>>", "<<49*5=245>>")).is_ambiguous
    assert not template_of(row("Bread is $5, milk twice as much.", "<<5*2=10>>")).is_ambiguous
