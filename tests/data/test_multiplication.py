"""Multiplication: equal to the published rows, no repeated pair, no held-out pair."""

import json
import re
from itertools import islice

import pytest

from laconic.data.generators.multiplication import build_row, iter_products


def number(digits: str) -> int:
    return int("".join(digits.split())[::-1])


@pytest.mark.parametrize("n", [4, 5, 7, 9])
def test_build_row_reproduces_published_rows(shared, n):
    for part in ("valid", "test"):
        text = (shared / "data" / "multiplication" / f"{n}x{n}-{part}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        assert len(rows) == 1000
        assert [list(build_row(r["a"], r["b"], n, r["id"]).items()) for r in rows] == [list(r.items()) for r in rows]


@pytest.mark.parametrize("n", [2, 4, 9])
def test_format_partial_products_add_up(n):
    for row in islice(iter_products(n, seed=1), 50):
        assert number(row["question"].split("*")[0]) * number(row["question"].split("*")[1]) == row["product"]
        parts = re.sub(r"\(.*?\)", "", row["cot"]).split("+")
        sums = [number(text) for text in re.findall(r"\((.*?)\)", row["cot"])]
        assert len(parts) == n
        assert sum(map(number, parts)) == row["product"] == number(row["answer"])
        assert sums == [sum(map(number, parts[: k + 1])) for k in range(1, n - 1)]
        assert all(len(str(row[factor])) == n for factor in "ab")


def test_iter_products_yields_every_pair_once():
    left = [(3, 7), (5, 5)]
    rows = list(iter_products(1, seed=0, excluded=left))
    pairs = {(row["a"], row["b"]) for row in rows}
    assert len(rows) == len(pairs) == 81 - 3
    assert not pairs & {(3, 7), (7, 3), (5, 5)}
    assert len({row["id"] for row in rows}) == len(rows)


def test_iter_products_is_a_function_of_the_seed():
    first = list(islice(iter_products(4, seed=0), 1500))
    assert list(islice(iter_products(4, seed=0), 30)) == first[:30]
    assert list(islice(iter_products(4, seed=1), 30)) != first[:30]
    assert len({(row["a"], row["b"]) for row in first}) == 1500
    assert first[0]["question"] == "2 0 5 9 * 4 1 0 4"
