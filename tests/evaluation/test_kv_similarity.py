"""Cosines of slots with a chain against loops in float64, and the two figures of a map by hand."""

import math

import pytest
import torch

from laconic.evaluation.inspection import kv_similarity
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
    result = kv_similarity.cosine_maps(list(student), list(teacher))
    for l in range(L):
        for m in range(M):
            for i in range(N):
                entry = [cosine(student[l, g, m], teacher[l, g, i]) for g in range(G)]
                assert result[l, m, i].item() == pytest.approx(sum(entry) / G, abs=ORACLE)
    low = kv_similarity.cosine_maps(list(student.bfloat16()), list(teacher.bfloat16()))
    assert low.dtype == torch.float32


def test_diagonal_contrast_and_look_ahead_by_hand() -> None:
    map = torch.tensor([[0.5, 0.9, 0.1], [0.2, 0.4, 0.3]])
    assert kv_similarity.diagonal_contrast(map) == pytest.approx((0.5 + 0.4) / 2 - (0.9 + 0.1 + 0.2 + 0.3) / 4)
    assert kv_similarity.look_ahead_share(map) == 0.5  # slot 1 is likest to column 2, slot 2 to its own
    # of three slots two have a column, and slot 3 cannot look ahead
    assert kv_similarity.look_ahead_share(map.T) == 0.0
    assert kv_similarity.diagonal_contrast(torch.ones(1, 1)) == 0.0
    shifted = torch.eye(4).roll(1, 1)  # each slot the next column, the last one the first
    assert kv_similarity.look_ahead_share(shifted) == 0.75


def test_similarity_maps_with_the_chain_and_with_each_heads_selection() -> None:
    """Two of three slots hold a token, other ones in each head; the mean is of layer 1 alone, which is matched."""
    index = torch.tensor([[[0, 2, 0], [1, 3, 0], [2, 4, 0]]])
    live = torch.tensor([True, True, False]).expand(1, G, 3)
    keys = tuple(random_tensor(1, G, N, E) for _ in range(L))
    chain_kv = KeysValues(keys, tuple(2 * k for k in keys), tuple(-k for k in keys))
    choices = {"rkv": (SelectedColumns(index, live),) * L}
    built = TeacherChain(chain_kv, choices, ((), (), ()), "rkv", (1,), True)
    slots = KeysValues(*(tuple(random_tensor(1, G, 3, E) for _ in range(L)) for _ in range(3)))
    maps = {(map.space, map.baseline): map for map in kv_similarity.similarity_maps(slots, built, 5)}
    assert set(maps) == {(what, against) for what in kv_similarity.KV_SPACES for against in ("chain", "selected")}
    for latents, theirs, what in zip(slots, chain_kv, kv_similarity.KV_SPACES, strict=True):
        chain, selected = maps[what, "chain"], maps[what, "selected"]
        assert (len(chain.mean), len(chain.mean[0])) == (3, 5)  # the sixth column is padding
        assert (len(selected.mean), len(selected.mean[0])) == (3, 2)
        assert chain.mean == chain.layers[1]
        for l in range(L):
            for m in range(3):
                for j in range(2):
                    entry = [cosine(latents[l][0, g, m], theirs[l][0, g, int(index[0, g, j])]) for g in range(G)]
                    assert selected.layers[l][m][j] == pytest.approx(sum(entry) / G, abs=ORACLE)
        assert chain.diagonal_contrast == kv_similarity.diagonal_contrast(torch.tensor(chain.mean, dtype=torch.float64))
