"""What selectors keep: kinds of tokens, shares and overlaps by hand and by loops."""

from typing import Any

import numpy as np
import pytest
import torch

from laconic.evaluation.inspection import kv_selection
from laconic.evaluation.inspection.inspected_run import SelectorChoice, TeacherChain
from laconic.evaluation.inspection.kv_selection import ChainSelection, classify_tokens
from laconic.latent.rkv import SelectedColumns


@pytest.mark.parametrize(
    ("words", "steps", "kinds"),
    [
        ("<< 16 - 3 = 13 >>", "0000000", "bracket operand operator operand operator result bracket"),
        ("<< 2 * 4 = 8 >> << 8 + 1 = 9 >>", "00000001111111",
         "bracket operand operator operand operator result bracket " * 2),
        ("<< 7 > >", "0000", "bracket result bracket bracket"),  # a step that is its result alone
        ("7 4 ;", "012", "result result word"),
        ("1 3 =7", "000", "operand operand result"),  # one token for sign and number
        ("so 3 dogs", "000", "word result word"),
        ("1 , 200 − 1 = 5 %", "00000000", "operand word operand operator operand operator result operator"),
    ],
)  # fmt: skip
def test_classify_tokens(words: str, steps: str, kinds: str) -> None:
    assert classify_tokens(words.split(), [int(step) for step in steps]) == tuple(kinds.split())


def left(chosen: dict[str, list[list[int]]], M: int, matched: tuple[int, ...] = (0,)) -> TeacherChain:
    """Columns kept by each head of the one layer, or of two layers that are alike."""

    def choice(heads: list[list[int]]) -> SelectorChoice:
        index = torch.tensor([[head + [0] * (M - len(head)) for head in heads]])
        live = torch.tensor([[[m < len(head) for m in range(M)] for head in heads]])
        return SelectorChoice((SelectedColumns(index, live),) * 2, ())

    built: Any = {name: choice(heads) for name, heads in chosen.items()}
    return TeacherChain((), (), (), (), (), built, "rkv", matched, True)


def test_chain_selections_are_of_the_matched_layers() -> None:
    (result,) = kv_selection.chain_selections(left({"rkv": [[0, 2], [1]]}, 3), 0, 4)
    assert result.policy == "rkv"
    assert result.mask.tolist() == [[[True, False, True, False], [False, True, False, False]]]
    assert result.token_shares == (0.5, 0.5, 0.5, 0.0)
    assert kv_selection.chain_selections(left({"rkv": [[0]]}, 1, (0, 1)), 0, 2)[0].mask.shape == (2, 1, 2)


def random_mask(heads: int, n: int, selected: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([np.isin(np.arange(n), rng.permutation(n)[:selected]) for _ in range(heads)])[None]


def test_selection_overlap_against_loops() -> None:
    a, b = random_mask(4, 9, 3, 1), random_mask(4, 9, 3, 2)
    sets = [set(np.flatnonzero(head)) for head in a[0]]
    pairs = [len(x & y) / 3 for i, x in enumerate(sets) for j, y in enumerate(sets) if i != j]
    assert kv_selection.selection_overlap(a) == pytest.approx(sum(pairs) / len(pairs))
    others = [set(np.flatnonzero(head)) for head in b[0]]
    assert kv_selection.selection_overlap(a, b) == pytest.approx(
        sum(len(x & y) / 3 for x, y in zip(sets, others, strict=True)) / 4
    )
    assert kv_selection.selection_overlap(a[:, :1]) == 1.0
    assert kv_selection.selection_overlap(a, a) == 1.0


def test_selection_overlap_of_independent_draws_is_chance() -> None:
    result = [kv_selection.selection_overlap(random_mask(2, 12, 4, seed)) for seed in range(2000)]
    assert np.mean(result) == pytest.approx(4 / 12, abs=0.02)


def test_compute_selector_statistics_by_hand() -> None:
    kinds = ("bracket", "operand", "operator", "result", "bracket")
    rkv = ChainSelection("rkv", np.array([[[False, True, False, True, False], [False, False, True, True, False]]]))
    random = ChainSelection("random", np.array([[[True, True, False, False, False]] * 2]))
    whole = (ChainSelection("rkv", np.ones((1, 2, 2), bool)), ChainSelection("random", np.ones((1, 2, 2), bool)))
    result = kv_selection.compute_selector_statistics(
        [(kinds, (rkv, random)), (("result", "word"), whole), ((), whole)]
    )
    first, second = result
    assert (first.policy, second.policy, first.num_chains) == ("rkv", "random", 1)
    assert first.class_shares == {"operand": 0.5, "operator": 0.5, "result": 1.0, "bracket": 0.0}
    assert first.part_shares == (0.0, 0.5, 0.5, 1.0, 0.0)
    assert (first.head_overlap, first.random_overlap, first.chance_overlap) == (0.5, 0.25, 0.4)
    assert (second.head_overlap, second.random_overlap) == (1.0, 1.0)
    assert kv_selection.compute_selector_statistics([(("result", "word"), whole)]) == ()
