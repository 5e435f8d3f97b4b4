"""Equations C9 and C11 to C16 against their oracles: projections, scores, masks, probabilities, values."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from laconic.models.attention import visibility_mask
from laconic.models.ops.attention_backends import (
    apply_bias_and_mask,
    attention_probabilities,
    attention_scores,
    weighted_values,
)
from tests.models.fixtures import qkv_parameters, random_block
from tests.oracles.compare import agree, distance
from tests.oracles.llama_attention import MISREAD, ORACLE

B, H, G, T, P, E = 2, 4, 2, 3, 5, 3


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.equation("llama", "C9")
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "opt"])
def test_project_qkv(family: str) -> None:
    block = random_block(family)
    config, y = block.config, torch.randn(2, 3, block.config.hidden_size, dtype=torch.float64)
    grouped, biased = config.num_attention_heads != config.num_key_value_heads, config.qkv_bias
    misread = {
        name: wrong
        for name, wrong in MISREAD["C9"].items()
        if not (grouped and name.startswith("order k")) and (biased or name != "bias dropped")
    }
    counts = config.num_attention_heads, config.num_key_value_heads
    agree(lambda y, *_: block.project_qkv(y), ORACLE["C9"], misread, y, *qkv_parameters(block), *counts, margin=1e-2)
    y = normal(1, 2, config.hidden_size)
    assert gradcheck(block.project_qkv, y, fast_mode=True)


@pytest.mark.equation("llama", "C11")
def test_attention_scores() -> None:
    q, k = normal(B, H, T, E), normal(B, G, P, E)
    agree(attention_scores, ORACLE["C11"], MISREAD["C11"], q, k, E**-0.5, margin=1e-1)
    assert gradcheck(lambda q, k: attention_scores(q, k, 0.5), (q, k))


VALID = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 1, 1, 1, 0]]).bool()


@pytest.mark.equation("llama", "C12")
@pytest.mark.parametrize("S", [0, 3, 7])
@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_visibility_mask(S: int, window: int | None) -> None:
    expected = ORACLE["C12"](VALID, S, window)
    assert torch.equal(visibility_mask(VALID, S, window), expected)
    if (S, window) == (3, 3):
        for name, wrong in MISREAD["C12"].items():
            assert not torch.equal(wrong(VALID, S, window), expected), name
    if window == 1:
        only_self = torch.eye(8).bool()[S:] & VALID[:, None]
        assert torch.equal(visibility_mask(VALID, S, window)[VALID[:, S:]], only_self[VALID[:, S:]])


def visible() -> Tensor:
    """Return a mask of three queries on five slots; one query sees nothing."""
    result = torch.ones(B, T, P).tril(P - T).bool()
    result[0, 1] = False
    result[1, :, 1] = False
    return result


@pytest.mark.equation("llama", "C13")
def test_apply_bias_and_mask() -> None:
    a, bias = normal(B, H, T, P), normal(B, T, P)
    agree(apply_bias_and_mask, ORACLE["C13"], MISREAD["C13"], a, visible(), bias, margin=1e-1)
    agree(apply_bias_and_mask, ORACLE["C13"], {}, a, visible(), None)
    expanded = apply_bias_and_mask(a, visible()[:1].expand(B, T, P), bias[:1, :1])
    assert torch.equal(apply_bias_and_mask(a, visible()[:1], bias[:1, :1]), expanded)
    hidden = ~visible()[:, None]
    assert gradcheck(lambda a, bias: apply_bias_and_mask(a, visible(), bias).masked_fill(hidden, 0.0), (a, bias))


@pytest.mark.equation("llama", "C14")
def test_attention_probabilities() -> None:
    a = normal(B, H, T, P)
    masked = a.detach().masked_fill(~visible()[:, None], -math.inf)
    agree(attention_probabilities, ORACLE["C14"], MISREAD["C14"], masked)
    assert (attention_probabilities(masked)[0, :, 1] == 0).all()
    assert gradcheck(lambda a: attention_probabilities(a.masked_fill(~visible()[:, None], -math.inf)), a)


@pytest.mark.equation("llama", "C14")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_probabilities_accumulate_in_float32(dtype: torch.dtype) -> None:
    a = (torch.randn(1, 1, 4, 300) * 3).to(dtype)
    assert torch.equal(attention_probabilities(a), a.float().softmax(-1).to(dtype))
    exp = (a - a.amax(-1, keepdim=True)).exp()
    narrow = exp / exp.cumsum(-1)[..., -1:]
    assert not torch.equal(attention_probabilities(a), narrow)


@pytest.mark.equation("llama", "C14")
def test_masking_by_an_infinite_bias_has_nan_gradients_and_by_visibility_has_not() -> None:
    """Why slots are removed by mask and not by bias: the gradient of log s at s = 0 is NaN."""
    s = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    a = torch.zeros(1, 1, 1, 3, dtype=torch.float64)
    everything = torch.ones(1, 1, 3).bool()
    (nan,) = torch.autograd.grad(
        attention_probabilities(apply_bias_and_mask(a, everything, s.log()[None, None]))[0, 0, 0, 0], s
    )
    assert nan.isnan().any()
    safe = torch.where(s > 0, s, 1.0).log()[None, None]
    (finite,) = torch.autograd.grad(
        attention_probabilities(apply_bias_and_mask(a, s[None, None] > 0, safe))[0, 0, 0, 0], s
    )
    assert finite.isfinite().all()


@pytest.mark.equation("llama", "C15")
def test_weighted_values() -> None:
    p, v = normal(B, H, T, P).softmax(-1).detach().requires_grad_(), normal(B, G, P, E)
    agree(weighted_values, ORACLE["C15"], MISREAD["C15"], p, v, margin=1e-1)
    assert gradcheck(weighted_values, (p, v))


@pytest.mark.equation("llama", "C16")
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_project_output(family: str) -> None:
    block = random_block(family)
    o, c = block.submodule("o"), normal(2, 3, block.config.num_attention_heads * block.config.head_dim)
    assert isinstance(o, nn.Linear)
    misread = {name: wrong for name, wrong in MISREAD["C16"].items() if o.bias is not None}
    agree(lambda c, *_: block.project_output(c), ORACLE["C16"], misread, c, o.weight, o.bias, margin=1e-2)
    assert gradcheck(block.project_output, c, fast_mode=True)


def test_visibility_mask_is_aligned_to_the_lower_right() -> None:
    """Two queries on three cached slots see the same as the last two of five."""
    valid = torch.ones(1, 5).bool()
    assert torch.equal(visibility_mask(valid, 3, None), visibility_mask(valid, 0, None)[:, 3:])
    assert distance(visibility_mask(valid, 3, None)[0, 0], torch.tensor([1, 1, 1, 1, 0]).bool()) == 0
