"""The scores of KV cache selection against their oracles, and the ranks made of them."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from laconic.compression.kv import scores as kv_scores
from tests.oracles.compare import agree
from tests.oracles.kv_selection import MISREAD, ORACLE

B, H, G, E, N, T = 2, 4, 2, 4, 9, 3


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(params=[2**24, 1], ids=["whole", "blocks"], autouse=True)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute attention at once, and one query at a time."""
    monkeypatch.setattr(kv_scores, "BLOCK_LOGITS", request.param)


@pytest.mark.equation("kv-selection", "SK1")
def test_snapkv_scores_equation() -> None:
    agree(kv_scores.snapkv_scores, ORACLE["SK1"], MISREAD["SK1"], normal(B, H, T, E), 2 * normal(B, G, N, E), 0.6)


@pytest.mark.equation("rkv", "2")
def test_key_redundancy_equation() -> None:
    k = normal(B, G, N, E)
    k[:, :, 6] = k[:, :, 1] + 0.1 * k[:, :, 6]
    agree(kv_scores.key_redundancy, ORACLE["2"], MISREAD["2"], k)


@pytest.mark.medium
@pytest.mark.equation("rkv", "1")
def test_rkv_scores_equation() -> None:
    q, k = 3 * normal(B, H, T, E), 2 * normal(B, G, 14, E)
    agree(kv_scores.rkv_scores, ORACLE["1"], MISREAD["1"], q, k, 0.6)


@pytest.mark.equation("kv-selection", "HH1")
def test_accumulated_attention_equation() -> None:
    def compute(q: Tensor, k: Tensor, scale: float) -> Tensor:
        first = kv_scores.accumulated_attention(q[:, :, :5], k[:, :, :5], scale)  # in two pieces
        total = kv_scores.accumulated_attention(q[:, :, 5:], k, scale)
        total[..., :5] += first
        return total / torch.arange(N, 0, -1)

    agree(compute, ORACLE["HH1"], MISREAD["HH1"], normal(B, H, N, E), normal(B, G, N, E), 0.6)


@pytest.mark.equation("kv-selection", "EA1")
def test_average_rotation_equation() -> None:
    factor, angle = normal(B, H, E, E), torch.arange(5)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    covariance = factor @ factor.transpose(-1, -2)
    cos, sin = angle.cos().double(), angle.sin().double()
    agree(kv_scores.average_rotation, ORACLE["EA1"], MISREAD["EA1"], normal(B, H, E), covariance, cos, sin)


@pytest.mark.equation("kv-selection", "EA2")
def test_expected_attention_scores_equation() -> None:
    factor, k, v = normal(B, H, E, E), normal(B, G, N, E), normal(B, G, N, E)
    covariance = factor @ factor.transpose(-1, -2)
    mean = normal(B, H, E)
    agree(kv_scores.expected_attention_scores, ORACLE["EA2"], MISREAD["EA2"], mean, covariance, k, v, 0.6)


@pytest.mark.equation("kv-selection", "KZ1")
@pytest.mark.parametrize("repeated", [T, T + 2], ids=["one pass", "second pass"])
@pytest.mark.parametrize("num_others", [0, 4])
def test_attend_and_score_kvzip_equation(repeated: int, num_others: int) -> None:
    def compute(q: Tensor, sinks: Tensor, k: Tensor, k_repeat: Tensor, scale: float) -> Tensor:
        others = 3 * normal(B, G, num_others, E)  # keys between sinks and piece, which the scores leave out
        keys = torch.cat([sinks, others, k, k_repeat], 2)
        start, index = 2 + num_others, torch.arange(keys.shape[2])
        left_out = (index >= 2) & (index < start) if num_others else None
        scores = list[Tensor]()
        for queries, head in zip(q.chunk(G, 1), keys.split(1, 1), strict=True):
            values = normal(*head.shape)
            piece = slice(start, start + N)
            context, best = kv_scores.attend_and_score(queries, head, values, scale, piece, left_out)
            visible = index <= index[-T:, None]
            expected = scaled_dot_product_attention(queries, head, values, visible, scale=scale, enable_gqa=True)
            torch.testing.assert_close(context, expected.transpose(1, 2).flatten(2))
            scores.append(best)
        return torch.stack(scores, 1)

    q, sinks, k = 2 * normal(B, H, T, E), normal(B, G, 2, E), normal(B, G, N, E)
    agree(compute, ORACLE["KZ1"], MISREAD["KZ1"], q, sinks, k, normal(B, G, repeated, E), 0.6)


@pytest.mark.equation("kv-selection", "KN1")
def test_key_norm_scores_equation() -> None:
    agree(kv_scores.key_norm_scores, ORACLE["KN1"], MISREAD["KN1"], normal(B, G, N, E))


@pytest.mark.parametrize("num_recent", [0, 3])
@pytest.mark.parametrize("equal_heads", [True, False])
def test_rank_slots_keeps_sinks_recent_and_best(num_recent: int, equal_heads: bool) -> None:
    L, keys, sinks = 2, 12, 2
    scores, recent = torch.rand(L, 1, G, keys), torch.arange(keys) >= keys - num_recent
    ranks = kv_scores.rank_slots(scores, sinks, recent, equal_heads)
    order = scores[..., sinks : keys - num_recent].flatten().sort(descending=True).values
    for size in range(1, keys + 1):
        selected = ranks < size
        assert int(selected.sum()) == size * L * G
        assert bool(selected[..., : min(size, sinks)].all())
        newest = min(num_recent, max(0, -(-(size - sinks) // 2)))
        newest = max(newest, size - sinks - (keys - sinks - num_recent))
        assert bool(selected[..., keys - newest :].all() if newest else True)
        if equal_heads:
            assert bool((selected.sum(-1) == size).all())
        best = scores[..., sinks : keys - num_recent][selected[..., sinks : keys - num_recent]]
        if not equal_heads:
            assert torch.equal(best.sort(descending=True).values, order[: len(best)])
