"""Digit rows as text: chains recomputed from the question, results only where they are asked for."""

import re

from laconic.data.generators.digits import iter_digit_rows

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def solve(question: str) -> list[int]:
    """Return the last digit of each result, from left to right."""
    terms = re.findall(r"[-+*]|\d", question)
    results = [int(terms[0])]
    for operator, digit in zip(terms[1::2], terms[2::2], strict=True):
        results.append(OPERATIONS[operator](results[-1], int(digit)) % 10)
    return results[1:]


def test_chains_follow_the_question():
    for row in iter_digit_rows(100, 1, num_operations=3, part="train"):
        assert re.fullmatch(r"\d([-+*]\d){3}=", row["question"])
        assert row["steps"] == [f"<{result}>" for result in solve(row["question"])]
        assert row["steps"][-1] == f"<{row['answer']}>"


def test_equations_use_the_result_before():
    rows = list(iter_digit_rows(100, 0, num_operations=3, part="train", chain="equations", results_only_fraction=0.3))
    assert 10 < sum(row["question"].endswith(":") for row in rows) < 50
    for row in rows:
        results = list(map(str, solve(row["question"])))
        if row["question"].endswith(":"):
            assert row["steps"] == results
            continue
        operations = re.findall(r"[-+*]\d", row["question"])
        before = [row["question"][0], *results]
        assert row["steps"] == [f"{a}{op}={r};" for a, op, r in zip(before, operations, results, strict=False)]


def test_a_colon_asks_for_results_only():
    plain = list(iter_digit_rows(300, 0, num_operations=4, part="valid"))
    mixed = list(iter_digit_rows(300, 0, num_operations=4, part="valid", results_only_fraction=0.5))
    assert 100 < sum(row["question"].endswith(":") for row in mixed) < 200
    for a, b in zip(plain, mixed, strict=True):
        is_terse = b["question"].endswith(":")
        assert b["question"].rstrip(":") == a["question"]
        assert b["steps"] == [step.strip("<>") for step in a["steps"]] if is_terse else a["steps"]


def test_numbers_of_operations_take_turns_with_results_alone():
    rows = list(iter_digit_rows(25, 0, num_operations=6, min_operations=2, part="valid", chain="results"))
    assert [len(row["steps"]) for row in rows] == [2, 3, 4, 5, 6] * 5
    for row in rows:
        assert row["question"].endswith("=")
        assert row["steps"] == [str(result) for result in solve(row["question"])]
