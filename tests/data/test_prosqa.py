"""Problems like ProsQA's: fields, answers that follow from the graph, sizes near the published ones."""

import json
import statistics
from itertools import islice, pairwise
from typing import Any

import pytest

from laconic.data.generators.prosqa import NAMES, NOUNS, generate_problem, iter_problems, random_order, weighted_choice
from tests.conftest import shared_dir

GENERATED = list(islice(iter_problems(seed=0), 300))


def count_steps(edges: list[list[int]], nodes: int) -> list[list[float]]:
    """Return the steps between all nodes (Floyd-Warshall)."""
    far = [[0 if a == b else float("inf") for b in range(nodes)] for a in range(nodes)]
    for a, b in edges:
        far[a][b] = 1
    for k in range(nodes):
        for a in range(nodes):
            for b in range(nodes):
                far[a][b] = min(far[a][b], far[a][k] + far[k][b])
    return far


def sentence(row: dict[str, Any], a: int, b: int) -> str:
    symbols = row["idx_to_symbol"]
    return f"{'' if symbols[a] in NAMES else 'Every '}{symbols[a]} is a {symbols[b]}."


def check_problem(row: dict[str, Any]) -> tuple[int, int, int]:
    """Check that nodes, edges and steps of a row are consistent."""
    symbols, edges, root = row["idx_to_symbol"], row["edges"], row["root"]
    far = count_steps(edges, len(symbols))
    assert len(set(symbols)) == len(symbols)
    assert {i for i, s in enumerate(symbols) if s in NAMES} == set(range(len(symbols))) - {b for _, b in edges}
    assert root in (0, 1)
    assert 3 <= far[root][row["target"]] == len(row["steps"]) <= 6
    assert far[root][row["neg_target"]] == far[1 - root][row["target"]] == float("inf")
    assert far[1 - root][row["neg_target"]] < float("inf")
    assert not {row["target"], row["neg_target"]} & {a for a, _ in edges}
    assert all(a < b for a, b in edges)
    assert len({tuple(edge) for edge in edges}) == len(edges)
    assert [b for _, b in edges] == sorted(b for _, b in edges)
    *facts, question = row["question"].replace(". ", ".\n").split("\n")
    assert sorted(facts) == sorted(sentence(row, a, b) for a, b in edges)
    target, other = (symbols[row[key]] for key in ("target", "neg_target"))
    assert question in (f"Is {symbols[root]} a {a} or {b}?" for a, b in ((target, other), (other, target)))
    assert row["answer"] == f"{symbols[root]} is a {target}."
    assert set(row["steps"]) <= set(facts)
    words = [step.removeprefix("Every ").rstrip(".").split(" is a ") for step in row["steps"]]
    assert [words[0][0], words[-1][1]] == [symbols[root], target]
    assert all(a[1] == b[0] for a, b in pairwise(words))
    return len(symbols), len(edges), len(row["steps"])


def test_generate_problem_is_valid():
    for row in GENERATED[:60]:
        check_problem(row)


@pytest.fixture(scope="module")
def published() -> list[dict[str, Any]]:
    text = (shared_dir() / "data" / "prosqa" / "valid.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_published_prosqa_obeys_the_same_rules(published):
    for row in published[:60]:
        check_problem(row)
    assert list(GENERATED[0]) == list(published[0])
    assert {symbol for row in published for symbol in row["idx_to_symbol"]} == {*NAMES, *NOUNS}


def test_generate_problem_matches_published_sizes(published):
    def means(rows: list[dict[str, Any]]) -> list[float]:
        sizes = ([len(row[key]) for row in rows] for key in ("idx_to_symbol", "edges", "steps"))
        return [statistics.mean(size) for size in sizes]

    for ours, theirs in zip(means(GENERATED), means(published), strict=True):
        assert abs(ours / theirs - 1) < 0.04


def test_generate_problem_has_no_shortcut():
    first = sum(row["question"].split()[-3] == row["answer"].split()[-1].rstrip(".") for row in GENERATED)
    root = sum(row["root"] for row in GENERATED)
    assert all(110 < count < 190 for count in (first, root))
    assert len({row["answer"] for row in GENERATED}) > 200
    places = [row["question"].index(row["steps"][0]) / len(row["question"]) for row in GENERATED]
    assert 0.42 < statistics.mean(places) < 0.56


def test_generate_problem_is_a_function_of_seed_and_number():
    assert generate_problem(0, 17) == GENERATED[17]
    assert generate_problem(1, 17) != generate_problem(0, 17)
    assert len({row["question"] for row in GENERATED}) == len(GENERATED)
    assert GENERATED[0]["steps"] == [
        "Gabriel is a numpus.",
        "Every numpus is a brimpus.",
        "Every brimpus is a sterpus.",
    ]


def test_weighted_choice():
    assert [weighted_choice([1, 0, 3], draw) for draw in (0.0, 0.2, 0.3, 0.999999)] == [0, 0, 2, 2]
    assert sorted(random_order(9, 1, 2)) == list(range(9))
