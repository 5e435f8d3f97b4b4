"""Laws of R-KV: sums, padding, order, policies, rows, memory."""

import warnings
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.batches import ReasoningBatch
from laconic.config.methods import KVSelectionConfig
from laconic.errors import UsageError
from laconic.latent import codi, rkv
from laconic.latent.rkv import answer_logits, importance, redundancy, score, select_tokens, select_top_m
from laconic.latent.selection_controls import draw_random_scores
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput
from tests.latent.batches import reasoning_batch
from tests.models.fixtures import assert_close, decoder_of, noise

G, H, E, NA = 2, 4, 3, 2


def scores(k: Tensor, q: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    I = importance(answer_logits(q, k, 0.5), mask, torch.ones(len(q), q.shape[2]).bool())
    R = redundancy(k, mask)
    return I, R, score(I, R, 0.1)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, queries and a mask; rows may be empty."""
    mask = torch.tensor(draw(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3)))
    seed = draw(st.integers(0, 10**6))
    return noise(seed, len(mask), G, 6, E), noise(seed + 1, len(mask), H, NA, E), mask


@given(chains())
def test_rkv_scores_sum_to_one(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    for x in scores(*inputs):
        assert_close(x.sum(-1), inputs[2].any(1)[:, None].expand(-1, G).double())
        assert not x.masked_select(~inputs[2][:, None].expand_as(x)).any()


@given(chains(), st.permutations(range(6)))
def test_rkv_scores_permute_with_columns(inputs: tuple[Tensor, Tensor, Tensor], order: list[int]) -> None:
    k, q, mask = inputs
    for x, y in zip(scores(k[:, :, order], q, mask[:, order]), scores(k, q, mask), strict=True):
        assert_close(x, y[..., order])


@given(chains(), st.integers(1, 8))
def test_rkv_padding_changes_nothing(inputs: tuple[Tensor, Tensor, Tensor], M: int) -> None:
    k, q, mask = inputs
    wide = [torch.cat([noise(3, len(k), G, 2, E), k, noise(4, len(k), G, 1, E)], 2), q]
    alive = torch.nn.functional.pad(mask, (2, 1))
    for x, y in zip(scores(wide[0], q, alive), scores(k, q, mask), strict=True):
        assert_close(x[..., 2:-1], y)
    narrow = select_top_m(scores(k, q, mask)[2], mask, M)
    top = select_top_m(torch.nn.functional.pad(scores(k, q, mask)[2], (2, 1)), alive, M)
    assert torch.equal(top.valid, narrow.valid)
    assert torch.equal(top.index, (narrow.index + 2).where(narrow.valid, 0))


@given(chains(), st.floats(0.01, 100.0))
def test_redundancy_ignores_the_size_of_keys(inputs: tuple[Tensor, Tensor, Tensor], size: float) -> None:
    k, _, mask = inputs
    torch.testing.assert_close(redundancy(size * k, mask), redundancy(k, mask), atol=1e-5, rtol=1e-5)


@given(chains(), st.integers(6, 9))
def test_select_top_m_keeps_a_short_chain_whole(inputs: tuple[Tensor, Tensor, Tensor], M: int) -> None:
    top = select_top_m(scores(*inputs)[2], inputs[2], M)
    for b, mask in enumerate(inputs[2]):
        columns = mask.nonzero()[:, 0].tolist()
        for g in range(G):
            assert top.index[b, g, top.valid[b, g]].tolist() == columns


@pytest.mark.parametrize("Nc", [0, 1])
def test_rkv_empty_chain_and_single_token(Nc: int) -> None:
    k, q, mask = noise(0, 2, G, Nc, E), noise(1, 2, H, NA, E), torch.ones(2, Nc).bool()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        I, R, S = scores(k, q, mask)
        top = select_top_m(S, mask, 3)
    assert I.shape == R.shape == S.shape == (2, G, Nc)
    assert all(bool((x == 1).all()) for x in (I, R))
    assert top.valid.sum(-1).tolist() == [[Nc] * G] * 2
    taken = rkv.gather_selected(k, top)
    assert torch.equal(taken[:, :, :Nc], k)
    assert not taken[:, :, Nc:].any()


def test_importance_without_answer_is_zero() -> None:
    k, q, mask = noise(0, 1, G, 4, E), noise(1, 1, H, NA, E), torch.ones(1, 4).bool()
    assert not importance(answer_logits(q, k, 1.0), mask, torch.zeros(1, NA).bool()).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rkv_scores_are_float32_under_autocast(dtype: torch.dtype) -> None:
    k, q, mask = noise(0, 2, G, 6, E, dtype=dtype), noise(1, 2, H, NA, E, dtype=dtype), torch.ones(2, 6).bool()
    with torch.autocast("cpu", torch.bfloat16):
        selection = scores(k, q, mask)
    for x, y in zip(selection, scores(k.float(), q.float(), mask), strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, y)


def run_teacher(
    family: str, batch: ReasoningBatch, capture: tuple[str, ...] = ("q_rot", "k")
) -> tuple[Decoder, DecoderOutput]:
    decoder = decoder_of(family)
    return decoder, codi.read_chain(decoder, batch, codi.read_question(decoder, batch).cache, capture)


def selected(policy: str, M: int = 3, results: Tensor | None = None, **more: Any) -> list[list[list[int]]]:
    """Selected columns by row and head of one layer of a small Llama."""
    batch = replace(reasoning_batch(((3, 7, 3), (3, 2, 3))), epoch=more.pop("epoch", 0), chain_result_mask=results)
    layer, seed = more.pop("layer", 0), more.pop("seed", 0)
    decoder, teacher = run_teacher("llama", batch)
    selection = select_tokens(decoder, batch, teacher, layer, KVSelectionConfig(policy=policy, **more), M, seed)  # type: ignore[arg-type]
    return [[i[alive].tolist() for i, alive in zip(*row, strict=True)]
            for row in zip(selection.columns.index, selection.columns.valid, strict=True)]  # fmt: skip


def test_policies_crop_and_uniform() -> None:
    assert selected("crop") == [[[0, 1, 2]] * 2, [[0, 1]] * 2]
    assert selected("uniform") == [[[0, 3, 6]] * 2, [[0, 1]] * 2]
    assert selected("uniform", 1) == [[[0]] * 2, [[0]] * 2]
    assert selected("uniform", 4)[0] == [[0, 2, 4, 6]] * 2


def test_policy_results_selects_the_marked_columns_in_order() -> None:
    results = torch.zeros(2, 7, dtype=torch.bool)
    results[0, [2, 4, 6]] = True
    results[1, 1] = True
    assert selected("results", 3, results) == [[[2, 4, 6]] * 2, [[1]] * 2]
    assert selected("results", 2, results) == [[[2, 4]] * 2, [[1]] * 2]
    assert selected("rkv", 3, results) == selected("rkv", 3)
    with pytest.raises(UsageError, match=r'kv_selection\.policy "results".*does not mark'):
        selected("results")


def test_policy_rkv_equals_cosine_at_0_and_attention_at_1() -> None:
    assert selected("rkv", importance_weight=0.0) == selected("cosine")
    assert selected("rkv", importance_weight=1.0) == selected("attention")
    assert selected("cosine") != selected("attention")


def test_policy_random_is_keyed_by_seed_epoch_and_row() -> None:
    draws = {(s, e): selected("random", seed=s, epoch=e)[0] for s, e in product((0, 1), repeat=2)}
    assert len({str(x) for x in draws.values()}) == 4
    assert draws[0, 0] == selected("random", layer=1)[0]
    assert all(heads[0] == heads[1] for heads in draws.values())


def test_random_scores_do_not_depend_on_padding_or_other_rows() -> None:
    batch = reasoning_batch(((3, 7, 3), (3, 5, 3)))
    single = draw_random_scores(batch.select_rows([1]), 0, G)
    assert torch.equal(draw_random_scores(batch, 0, G)[1:, :, :5], single[:, :, :5])


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor created."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


def test_select_tokens_computes_only_answer_times_chain() -> None:
    """With a long question and chain, no tensor is larger than that block or the keys of the chain."""
    batch = reasoning_batch(((60, 50, 3),) * 2)
    decoder, teacher = run_teacher("llama", batch)
    c = decoder.config
    with LargestTensor() as largest:
        select_tokens(decoder, batch, teacher, 0, KVSelectionConfig(), 8, 0)
    keys = c.num_key_value_heads * 50 * c.head_dim
    assert largest.numbers <= 2 * max(c.num_attention_heads * 3 * 50, keys)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"policy": "cosine"}, (False, True)),
        ({"importance_weight": 0.0}, (False, True)),
        ({"importance_weight": 1.0}, (True, False)),
        ({"policy": "attention"}, (True, False)),
        ({}, (True, True)),
        *(({"policy": name}, (False, False)) for name in ("crop", "uniform", "random")),
    ],
)
def test_select_tokens_skips_unneeded_scores(
    settings: dict[str, Any], needed: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, called = reasoning_batch(), set[str]()
    decoder, teacher = run_teacher("llama", batch)
    for name in ("importance", "redundancy"):
        whole = getattr(rkv, name)
        monkeypatch.setattr(rkv, name, lambda *a, n=name, f=whole: (called.add(n), f(*a))[1])
    select_tokens(decoder, batch, teacher, 0, KVSelectionConfig(**settings), 3, 0)
    assert (
        ("importance" in called, "redundancy" in called)
        == needed
        == rkv.get_needed_scores(KVSelectionConfig(**settings))
    )


def test_select_tokens_has_no_gradient() -> None:
    batch = reasoning_batch()
    decoder, teacher = run_teacher("llama", batch)
    keys, values = (tuple(x.clone().requires_grad_() for x in xs) for xs in (teacher.cache.keys, teacher.cache.values))
    state = KVCache(keys, values, teacher.cache.positions, teacher.cache.valid)
    selection = select_tokens(decoder, batch, teacher._replace(cache=state), 0, KVSelectionConfig(), 3, 0)
    assert not any(x.requires_grad for x in (selection.k_t, selection.v_t, selection.I, selection.R, selection.S))
