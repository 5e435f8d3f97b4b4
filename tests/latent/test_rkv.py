"""Laws of what is kept: sums, padding, order, selectors, rows, the block of attention that is made and no more."""

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
from laconic.latent import codi, rkv
from laconic.latent.rkv import (
    answer_logits,
    importance,
    redundancy,
    score,
    select_tokens,
    select_top_m,
)
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput
from tests.core.readings import decoder_of, noise, same
from tests.methods.batches import reasoning

G, H, E, NA = 2, 4, 3, 2


def scores(k: Tensor, q: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    I = importance(answer_logits(q, k, 0.5), live, torch.ones(len(q), q.shape[2]).bool())
    R = redundancy(k, live)
    return I, R, score(I, R, 0.1)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, queries, and which columns are live; rows may have none."""
    live = torch.tensor(draw(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3)))
    seed = draw(st.integers(0, 10**6))
    return noise(seed, len(live), G, 6, E), noise(seed + 1, len(live), H, NA, E), live


@given(chains())
def test_scores_sum_to_one_over_live_columns(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    for x in scores(*drawn):
        same(x.sum(-1), drawn[2].any(1)[:, None].expand(-1, G).double())
        assert not x.masked_select(~drawn[2][:, None].expand_as(x)).any()


@given(chains(), st.permutations(range(6)))
def test_permuted_columns_have_permuted_scores(drawn: tuple[Tensor, Tensor, Tensor], order: list[int]) -> None:
    k, q, live = drawn
    for x, y in zip(scores(k[:, :, order], q, live[:, order]), scores(k, q, live), strict=True):
        same(x, y[..., order])


@given(chains(), st.integers(1, 8))
def test_pads_change_neither_scores_nor_what_is_kept(drawn: tuple[Tensor, Tensor, Tensor], M: int) -> None:
    k, q, live = drawn
    wide = [torch.cat([noise(3, len(k), G, 2, E), k, noise(4, len(k), G, 1, E)], 2), q]
    alive = torch.nn.functional.pad_token_id(live, (2, 1))
    for x, y in zip(scores(wide[0], q, alive), scores(k, q, live), strict=True):
        same(x[..., 2:-1], y)
    narrow = select_top_m(scores(k, q, live)[2], live, M)
    kept = select_top_m(torch.nn.functional.pad_token_id(scores(k, q, live)[2], (2, 1)), alive, M)
    assert torch.equal(kept.valid, narrow.valid)
    assert torch.equal(kept.index, (narrow.index + 2).where(narrow.valid, 0))


@given(chains(), st.floats(0.01, 100.0))
def test_the_size_of_keys_does_not_matter_to_redundancy(drawn: tuple[Tensor, Tensor, Tensor], size: float) -> None:
    k, _, live = drawn
    torch.testing.assert_close(redundancy(size * k, live), redundancy(k, live), atol=1e-5, rtol=1e-5)


@given(chains(), st.integers(6, 9))
def test_a_short_chain_is_kept_whole_in_time(drawn: tuple[Tensor, Tensor, Tensor], M: int) -> None:
    kept = select_top_m(scores(*drawn)[2], drawn[2], M)
    for b, live in enumerate(drawn[2]):
        columns = live.nonzero()[:, 0].tolist()
        for g in range(G):
            assert kept.index[b, g, kept.valid[b, g]].tolist() == columns


@pytest.mark.parametrize("Nc", [0, 1])
def test_no_chain_and_a_chain_of_one(Nc: int) -> None:
    k, q, live = noise(0, 2, G, Nc, E), noise(1, 2, H, NA, E), torch.ones(2, Nc).bool()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        I, R, S = scores(k, q, live)
        kept = select_top_m(S, live, 3)
        others = redundancy(k, live, "others")
    assert I.shape == R.shape == S.shape == (2, G, Nc)
    assert all(bool((x == 1).all()) for x in (I, R, others))
    assert kept.valid.sum(-1).tolist() == [[Nc] * G] * 2
    taken = rkv.gather_selected(k, kept)
    assert torch.equal(taken[:, :, :Nc], k)
    assert not taken[:, :, Nc:].any()


def test_no_answer_row_counts_for_nothing() -> None:
    k, q, live = noise(0, 1, G, 4, E), noise(1, 1, H, NA, E), torch.ones(1, 4).bool()
    assert not importance(answer_logits(q, k, 1.0), live, torch.zeros(1, NA).bool()).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_float32_under_autocast_too(dtype: torch.dtype) -> None:
    k, q, live = noise(0, 2, G, 6, E, dtype=dtype), noise(1, 2, H, NA, E, dtype=dtype), torch.ones(2, 6).bool()
    with torch.autocast("cpu", torch.bfloat16):
        found = scores(k, q, live)
    for x, y in zip(found, scores(k.float(), q.float(), live), strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, y)


def taught(family: str, batch: ReasoningBatch, want: tuple[str, ...] = ("q_rot", "k")) -> tuple[Decoder, DecoderOutput]:
    decoder = decoder_of(family)
    return decoder, codi.encode_chain(decoder, batch, codi.encode_question(decoder, batch).cache, want)


def selected(select: str, M: int = 3, **more: Any) -> list[list[list[int]]]:
    """Columns kept by row and head of one layer of a small Llama."""
    batch = replace(reasoning(((3, 7, 3), (3, 2, 3))), epoch=more.pop("epoch", 0))
    layer, seed = more.pop("layer", 0), more.pop("seed", 0)
    decoder, teacher = taught("llama", batch)
    found = select_tokens(decoder, batch, teacher, layer, KVSelectionConfig(policy=select, **more), M, seed)  # type: ignore[arg-type]
    return [[i[alive].tolist() for i, alive in zip(*row, strict=True)]
            for row in zip(found.columns.index, found.columns.valid, strict=True)]  # fmt: skip


def test_crop_uniform_and_boundary() -> None:
    assert selected("crop") == [[[0, 1, 2]] * 2, [[0, 1]] * 2]
    assert selected("uniform") == [[[0, 3, 6]] * 2, [[0, 1]] * 2]
    assert selected("uniform", 1) == [[[0]] * 2, [[0]] * 2]
    assert selected("uniform", 4)[0] == [[0, 2, 4, 6]] * 2
    bounded = selected("boundary", 4)
    assert all(columns[0] == 0 and columns[-1] == 6 for columns in bounded[0])
    assert selected("boundary", 1) == selected("rkv", 1)


def test_rkv_is_cosine_at_0_and_attention_at_1() -> None:
    assert selected("rkv", lam=0.0) == selected("cosine")
    assert selected("rkv", lam=1.0) == selected("attention")
    assert selected("cosine") != selected("attention")


def test_random_is_drawn_by_its_key() -> None:
    """Seed, epoch and row, and layer and head unless they share it; the same key draws the same."""
    own: dict[str, Any] = {"M": 3, "random_shared": False}
    draws = {(s, e, l): selected("random", seed=s, epoch=e, layer=l, **own)[0] for s, e, l in product((0, 1), repeat=3)}
    assert len({str(x) for x in draws.values()}) == 8
    assert any(heads[0] != heads[1] for heads in draws.values())
    assert draws[0, 0, 0] == selected("random", **own)[0]
    shared = selected("random")[0]
    assert shared[0] == shared[1] == selected("random", layer=1)[0][0]
    assert shared != selected("random", epoch=1)[0]


def test_random_does_not_depend_on_padding_or_company() -> None:
    batch = reasoning(((3, 7, 3), (3, 5, 3)))
    alone = rkv.draw_random_scores(batch.select_rows([1]), 0, 0, G, False)
    assert torch.equal(rkv.draw_random_scores(batch, 0, 0, G, False)[1:, :, :5], alone[:, :, :5])


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that was made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


def test_only_the_block_of_answer_and_chain_is_made() -> None:
    """With a long question and chain: no more numbers at once than that block has, or the keys on the chain."""
    batch = reasoning(((60, 50, 3),) * 2)
    decoder, teacher = taught("llama", batch)
    c = decoder.config
    with Largest() as seen:
        select_tokens(decoder, batch, teacher, 0, KVSelectionConfig(), 8, 0)
    keys = c.num_key_value_heads * 50 * c.head_dim
    assert seen.numbers <= 2 * max(c.num_attention_heads * 3 * 50, keys)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"select": "cosine"}, (False, True)),
        ({"lam": 0.0}, (False, True)),
        ({"lam": 1.0}, (True, False)),
        ({"select": "attention"}, (True, False)),
        ({}, (True, True)),
        ({"select": "boundary", "lam": 0.0}, (False, True)),
        *(({"select": name}, (False, False)) for name in ("crop", "uniform", "random")),
    ],
)
def test_what_is_not_asked_for_is_not_computed(
    settings: dict[str, Any], asked: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, called = reasoning(), set[str]()
    decoder, teacher = taught("llama", batch)
    for name in ("importance_in", "redundancy"):
        whole = getattr(rkv, name)
        monkeypatch.setattr(rkv, name, lambda *a, n=name, f=whole: (called.add(n), f(*a))[1])
    select_tokens(decoder, batch, teacher, 0, KVSelectionConfig(**settings), 3, 0)
    assert (
        ("importance_in" in called, "redundancy" in called)
        == asked
        == rkv.get_needed_scores(KVSelectionConfig(**settings))
    )


def test_what_is_kept_has_no_gradient() -> None:
    batch = reasoning()
    decoder, teacher = taught("llama", batch)
    state = KVCache(*(tuple(x.clone().requires_grad_() for x in xs) for xs in (teacher.cache.keys, teacher.cache.values)),
                  teacher.cache.positions, teacher.cache.valid)  # fmt: skip
    found = select_tokens(decoder, batch, teacher._replace(cache=state), 0, KVSelectionConfig(), 3, 0)
    assert not any(x.requires_grad for x in (found.k_t, found.v_t, found.I, found.R, found.S))
