"""Latents beside a chain: cosines against loops in float64, figures of a map by hand, kinds and shares of tokens."""

import math
from typing import Any

import pytest
import torch

from laconic.evaluation.inspection import chain_comparison
from laconic.evaluation.inspection.inspected_run import KeysValues, TeacherChain
from laconic.latent.rkv import SelectedColumns
from tests.tolerances import ORACLE

L, G, M, N, E = 2, 3, 4, 6, 5


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    dot = sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))
    return dot / math.sqrt(sum(x * x for x in a.tolist())) / math.sqrt(sum(y * y for y in b.tolist()))


def test_cosine_maps_against_loops() -> None:
    student, teacher = random_tensor(L, G, M, E), random_tensor(L, G, N, E)
    result = chain_comparison.cosine_maps(list(student), list(teacher))
    for l in range(L):
        for m in range(M):
            for i in range(N):
                entry = [cosine(student[l, g, m], teacher[l, g, i]) for g in range(G)]
                assert result[l, m, i].item() == pytest.approx(sum(entry) / G, abs=ORACLE)
    low = chain_comparison.cosine_maps(list(student.bfloat16()), list(teacher.bfloat16()))
    assert low.dtype == torch.float32


def test_diagonal_contrast_and_look_ahead_by_hand() -> None:
    map = torch.tensor([[0.5, 0.9, 0.1], [0.2, 0.4, 0.3]])
    assert chain_comparison.diagonal_contrast(map) == pytest.approx((0.5 + 0.4) / 2 - (0.9 + 0.1 + 0.2 + 0.3) / 4)
    assert chain_comparison.look_ahead_share(map) == 0.5  # slot 1 is likest to column 2, slot 2 to its own
    # of three slots two have a column, and slot 3 cannot look ahead
    assert chain_comparison.look_ahead_share(map.T) == 0.0
    assert chain_comparison.diagonal_contrast(torch.ones(1, 1)) == 0.0
    shifted = torch.eye(4).roll(1, 1)  # each slot the next column, the last one the first
    assert chain_comparison.look_ahead_share(shifted) == 0.75


def test_similarity_maps_with_the_chain_and_with_each_heads_selection() -> None:
    """Two of three slots hold a token, other ones in each head; the mean is of layer 1 alone, which is matched."""
    index = torch.tensor([[[0, 2, 0], [1, 3, 0], [2, 4, 0]]])
    live = torch.tensor([True, True, False]).expand(1, G, 3)
    keys = tuple(random_tensor(1, G, N, E) for _ in range(L))
    chain_kv = KeysValues(keys, tuple(2 * k for k in keys), tuple(-k for k in keys))
    choices = {"rkv": (SelectedColumns(index, live),) * L}
    built = TeacherChain(chain_kv, choices, ((), (), ()), "rkv", (1,), True)
    slots = KeysValues(*(tuple(random_tensor(1, G, 3, E) for _ in range(L)) for _ in range(3)))
    maps = {(map.space, map.baseline): map for map in chain_comparison.similarity_maps(slots, built, 5)}
    assert set(maps) == {(what, against) for what in chain_comparison.KV_SPACES for against in ("chain", "selected")}
    for latents, theirs, what in zip(slots, chain_kv, chain_comparison.KV_SPACES, strict=True):
        chain, selected = maps[what, "chain"], maps[what, "selected"]
        assert (len(chain.mean), len(chain.mean[0])) == (3, 5)  # the sixth column is padding
        assert (len(selected.mean), len(selected.mean[0])) == (3, 2)
        assert chain.mean == chain.layers[1]
        for l in range(L):
            for m in range(3):
                for j in range(2):
                    entry = [cosine(latents[l][0, g, m], theirs[l][0, g, int(index[0, g, j])]) for g in range(G)]
                    assert selected.layers[l][m][j] == pytest.approx(sum(entry) / G, abs=ORACLE)
        assert chain.diagonal_contrast == chain_comparison.diagonal_contrast(
            torch.tensor(chain.mean, dtype=torch.float64)
        )


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
    assert chain_comparison.classify_tokens(tokens, [token == results for token in tokens]) == tuple(kinds.split())


def left(chosen: dict[str, list[list[int]]], M: int, matched: tuple[int, ...] = (0,)) -> TeacherChain:
    """Columns kept by each head of the one layer, or of two layers that are alike."""

    def choice(heads: list[list[int]]) -> tuple[SelectedColumns, ...]:
        index = torch.tensor([[head + [0] * (M - len(head)) for head in heads]])
        live = torch.tensor([[[m < len(head) for m in range(M)] for head in heads]])
        return (SelectedColumns(index, live),) * 2

    built: Any = {name: choice(heads) for name, heads in chosen.items()}
    return TeacherChain(built, built, built, "rkv", matched, True)


def test_chain_selections_are_of_the_matched_layers() -> None:
    result = chain_comparison.chain_selections(left({"rkv": [[0, 2], [1]]}, 3), 4)
    assert result["rkv"].tolist() == [[[True, False, True, False], [False, True, False, False]]]
    assert chain_comparison.chain_selections(left({"rkv": [[0]]}, 1, (0, 1)), 2)["rkv"].shape == (2, 1, 2)
