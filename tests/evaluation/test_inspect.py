"""What is read in thoughts of hand-made tensors, and how much of a chain that is."""

import math
from itertools import combinations

import pytest
import torch

from laconic.core.contract import Reasoning
from laconic.core.errors import BadInput
from laconic.core.generate import Passes
from laconic.core.rollout import Rollout, Trace
from laconic.evaluation.inspect import common, inspect, spoken, top_ids

WORDS = "abcdefgh"
B, Nq, Nc, Na, M, D = 1, 3, 4, 2, 2, 8


def batch(rows: int = 1) -> Reasoning:
    def ids(n: int) -> torch.Tensor:
        return torch.arange(n).expand(rows, n)

    chain_live = torch.ones(rows, Nc, dtype=torch.bool)
    chain_live[:, -1] = False
    return Reasoning(
        question=ids(Nq), question_live=torch.tensor([[False, True, True]]).expand(rows, -1),
        chain=ids(Nc), chain_live=chain_live, chain_step=ids(Nc),
        answer=ids(Na), answer_live=torch.ones(rows, Na, dtype=torch.bool),
        next_question=ids(1)[:, 0].repeat(rows)[:rows], next_chain=ids(Nc), next_answer=ids(Na),
        distil=torch.zeros(rows, dtype=torch.long), number=torch.tensor([[False, True]]).expand(rows, -1),
        index=torch.arange(rows),
    )  # fmt: skip


def thought() -> Rollout:
    """Thoughts whose hidden states are one-hot, so that the head, the identity times 9, names them."""
    eye = torch.eye(D)
    passes = tuple(Trace(torch.zeros(1, M, D), eye[[t, t + 2]][None], None) for t in range(3))  # pyright: ignore
    return Rollout(torch.zeros(1, M, D), passes[-1].hidden, eye[None, 7], None, Passes(0, 1, 2, 0), passes)  # pyright: ignore


def head(hidden: torch.Tensor) -> torch.Tensor:
    return 9 * hidden


def test_words_of_each_pass() -> None:
    found = inspect(thought(), batch(), head, WORDS.__getitem__, top=2)
    assert [[guesses[0].word for guesses in row] for row in found.passes] == [["h", *x] for x in ("ac", "bd", "ce")]
    assert found.passes[0][1][0].p == pytest.approx(math.exp(9) / (math.exp(9) + D - 1))
    assert all(len(guesses) == 2 for row in found.passes for guesses in row)
    assert (found.question, found.chain, found.answer) == (("b", "c"), ("a", "b", "c"), "b")
    assert found.spoken == 0.5  # "c" stands in the chain, "e" does not


def longest(a: str, b: str) -> int:
    """The longest common subsequence, by trying every subsequence of the first."""
    found = [0]
    for size in range(1, len(a) + 1):
        for some in combinations(a, size):
            rest = iter(b)
            if all(letter in rest for letter in some):
                found.append(size)
    return max(found)


@pytest.mark.parametrize(
    ("top", "chain"),
    [("ab", "ab"), ("ba", "ab"), ("abcab", "bca"), ("xyz", "abc"), ("aab", "ab"), ("hagbfc", "abcabc")],
)
def test_how_much_of_a_chain_thoughts_name(top: str, chain: str) -> None:
    assert common(top, chain) == longest(top, chain) / len(chain)
    assert spoken(top, chain) == sum(letter in chain for letter in top) / len(top)
    assert common(top, "") == 0.0


def test_top_words_row_by_row() -> None:
    assert top_ids(thought(), head) == ((2, 4),)
    found = inspect(thought(), batch(), head, WORDS.__getitem__)
    assert (found.top, found.common) == (("c", "e"), pytest.approx(1 / 3))


def test_one_question_at_a_time() -> None:
    with pytest.raises(BadInput, match="questions to look into; give one"):
        inspect(thought(), batch(2), head, WORDS.__getitem__)
