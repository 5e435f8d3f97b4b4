"""What selectors keep: kinds of tokens, and shares by hand."""

from typing import Any

import pytest
import torch

from laconic.evaluation.inspection import kv_selection
from laconic.evaluation.inspection.inspected_run import TeacherChain
from laconic.evaluation.inspection.kv_selection import classify_tokens
from laconic.latent.rkv import SelectedColumns


@pytest.mark.parametrize(
    ("words", "results", "kinds"),
    [
        ("<< 16 - 3 = 13 >>", "13", "bracket operand operator operand operator result bracket"),
        ("< < 7 > >", "7", "bracket bracket result bracket bracket"),
        ("1 3 =7", "=7", "operand operand result"),  # one token for sign and number
        ("so 3 dogs", "3", "word result word"),
        ("1 , 200 − 1 = 5 %", "5", "operand word operand operator operand operator result operator"),
    ],
)
def test_classify_tokens(words: str, results: str, kinds: str) -> None:
    tokens = words.split()
    assert classify_tokens(tokens, [token == results for token in tokens]) == tuple(kinds.split())


def left(chosen: dict[str, list[list[int]]], M: int, matched: tuple[int, ...] = (0,)) -> TeacherChain:
    """Columns kept by each head of the one layer, or of two layers that are alike."""

    def choice(heads: list[list[int]]) -> tuple[SelectedColumns, ...]:
        index = torch.tensor([[head + [0] * (M - len(head)) for head in heads]])
        live = torch.tensor([[[m < len(head) for m in range(M)] for head in heads]])
        return (SelectedColumns(index, live),) * 2

    built: Any = {name: choice(heads) for name, heads in chosen.items()}
    return TeacherChain(built, built, built, "rkv", matched, True)


def test_chain_selections_are_of_the_matched_layers() -> None:
    result = kv_selection.chain_selections(left({"rkv": [[0, 2], [1]]}, 3), 4)
    assert result["rkv"].tolist() == [[[True, False, True, False], [False, True, False, False]]]
    assert kv_selection.chain_selections(left({"rkv": [[0]]}, 1, (0, 1)), 2)["rkv"].shape == (2, 1, 2)
