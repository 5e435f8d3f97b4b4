"""What is read in thoughts of hand-made tensors, and how much of a chain that is."""

import math
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laconic.batches import PassCounts
from laconic.evaluation.inspection.logit_lens import apply_logit_lens, lcs_ratio, share_in_chain, top_token_ids
from laconic.latent.rollout import LatentRollout, PassRecord

WORDS = "abcdefgh"
M, D = 2, 8


def batch() -> Any:
    """Return a question with a padded column on the left, and a chain with one on the right."""
    ids, chain_mask = torch.arange(4)[None], torch.tensor([[True, True, True, False]])
    question_mask = torch.tensor([[False, True, True]])
    return SimpleNamespace(question_ids=ids[:, :3], question_mask=question_mask, chain_ids=ids, chain_mask=chain_mask)


def thought() -> LatentRollout:
    """Thoughts whose hidden states are one-hot, so that the head, the identity times 9, names them."""
    eye = torch.eye(D)
    passes = tuple(PassRecord(torch.zeros(1, M, D), eye[[t, t + 2]][None], None) for t in range(3))  # pyright: ignore
    return LatentRollout(
        torch.zeros(1, M, D), passes[-1].hidden_states, eye[None, 7], None, PassCounts(0, 1, 2, 0), passes
    )  # pyright: ignore


def head(hidden: torch.Tensor) -> torch.Tensor:
    return 9 * hidden


def test_apply_logit_lens_gives_the_tokens_of_each_pass() -> None:
    result = apply_logit_lens(thought(), batch(), head, WORDS.__getitem__, top=2)
    assert [[guesses[0].token for guesses in row] for row in result.passes] == [["h", *x] for x in ("ac", "bd", "ce")]
    assert result.passes[0][1][0].probability == pytest.approx(math.exp(9) / (math.exp(9) + D - 1))
    assert all(len(guesses) == 2 for row in result.passes for guesses in row)
    assert (result.question, result.chain) == (("b", "c"), ("a", "b", "c"))
    assert result.share_in_chain == 0.5  # "c" stands in the chain, "e" does not


def longest(a: str, b: str) -> int:
    """The longest common subsequence, by trying every subsequence of the first."""
    result = [0]
    for size in range(1, len(a) + 1):
        for some in combinations(a, size):
            rest = iter(b)
            if all(letter in rest for letter in some):
                result.append(size)
    return max(result)


@pytest.mark.parametrize(
    ("top", "chain"),
    [("ab", "ab"), ("ba", "ab"), ("abcab", "bca"), ("xyz", "abc"), ("aab", "ab"), ("hagbfc", "abcabc")],
)
def test_lcs_ratio_and_share_in_chain_against_brute_force(top: str, chain: str) -> None:
    assert lcs_ratio(top, chain) == longest(top, chain) / len(chain)
    assert share_in_chain(top, chain) == sum(letter in chain for letter in top) / len(top)
    assert lcs_ratio(top, "") == 0.0


def test_top_token_ids_row_by_row() -> None:
    assert top_token_ids(thought(), head) == ((2, 4),)
    result = apply_logit_lens(thought(), batch(), head, WORDS.__getitem__)
    assert (result.top_tokens, result.lcs_ratio) == (("c", "e"), pytest.approx(1 / 3))
