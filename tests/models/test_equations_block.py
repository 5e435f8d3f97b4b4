"""Equations C1, C2, C10 and C17 to C19 against their oracles: norms, MLPs and the block."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.models.attention import build_attention_mask
from laconic.models.block import Block, ForwardContext, gated_mlp_hidden, layer_norm, plain_mlp_hidden, rms_norm
from laconic.models.ops.activation_functions import ACTIVATIONS
from laconic.models.rope import cos_sin_tables, frequencies, rotate_pairs
from tests import tolerances
from tests.models.fixtures import qkv_parameters, random_block
from tests.oracles import llama_block
from tests.oracles.compare import agree, distance
from tests.oracles.llama_block import MISREAD, ORACLE, TANH_GELUS


def normal(*shape: int, scale: float = 1.0, around: float = 0.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale + around).requires_grad_()


@pytest.mark.equation("llama", "C1")
def test_rms_norm() -> None:
    x, weight = normal(2, 3, 6, scale=0.1, around=0.05), normal(6, around=1.0)
    agree(rms_norm, ORACLE["C1"], MISREAD["C1"], x, weight, 1e-2, margin=1e-2)
    agree(rms_norm, ORACLE["C1"], {}, x * 1e-3, weight, 1e-5)
    assert gradcheck(lambda x, w: rms_norm(x, w, 1e-2), (x, weight))


@pytest.mark.equation("llama", "C1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_casts_before_the_weight(dtype: torch.dtype) -> None:
    """In low precision the order shows; in float32 both orders give the same bits."""
    x, weight = torch.randn(64, 48).to(dtype), (torch.randn(48) * 0.1 + 1).to(dtype)
    u = x.float()
    u = u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + 1e-5)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    assert torch.equal(got, weight * u.to(dtype))
    assert torch.equal(got, (weight.float() * u).to(dtype)) == (dtype == torch.float32)


@pytest.mark.equation("llama", "C2")
def test_layer_norm() -> None:
    x, weight, bias = normal(2, 3, 6, scale=0.2, around=0.3), normal(6, around=1.0), normal(6)
    agree(layer_norm, ORACLE["C2"], MISREAD["C2"], x, weight, bias, 1e-2, margin=1e-2)
    assert gradcheck(lambda x, w, b: layer_norm(x, w, b, 1e-2), (x, weight, bias))


@pytest.mark.equation("llama", "C10")
def test_norm_of_heads() -> None:
    x, weight = normal(2, 3, 4, 6), normal(6, around=1.0)
    agree(rms_norm, ORACLE["C10"], MISREAD["C10"], x, weight, 1e-2, margin=1e-2)
    assert gradcheck(lambda x, w: rms_norm(x, w, 1e-2), (x, weight))


@pytest.mark.equation("llama", "C10")
def test_qk_norm_is_applied_before_rotation_with_separate_weights() -> None:
    block = random_block("qwen3")
    cos, sin = cos_sin_tables(torch.arange(3)[None], frequencies(1e4, block.config.head_dim), 1.0, torch.float64)
    y = normal(1, 3, block.config.hidden_size)
    q, k, _ = block.project_qkv(y)
    normed = block.qkv_heads(y)
    for raw, actual, name, other in zip((q, k), normed, ("q_norm", "k_norm"), ("k_norm", "q_norm"), strict=False):
        weight, eps = block.submodule(name).weight, block.config.norm_eps
        expected = llama_block.head_norm(raw, weight, eps)
        assert distance(actual, expected) < tolerances.ORACLE
        assert distance(llama_block.head_norm(raw, block.submodule(other).weight, eps), expected) > 1e-2
        after = llama_block.head_norm(rotate_pairs(raw, cos, sin), weight, eps)
        assert distance(after, rotate_pairs(expected, cos, sin)) > 1e-2


@pytest.mark.equation("llama", "C17")
@pytest.mark.parametrize("act", ["silu", "swish"])
def test_gated_mlp_hidden(act: str) -> None:
    gate, up = normal(2, 3, 5, scale=2.0), normal(2, 3, 5)
    agree(lambda *x: gated_mlp_hidden(*x), ORACLE["C17"], MISREAD["C17"], gate, up, act, margin=1e-2)
    assert gradcheck(lambda gate, up: gated_mlp_hidden(gate, up, act), (gate, up))


@pytest.mark.equation("llama", "C18")
@pytest.mark.parametrize("act", list(ACTIVATIONS))
def test_plain_mlp_hidden(act: str) -> None:
    up = (torch.linspace(-4, 4, 42, dtype=torch.float64).reshape(2, 3, 7) + 0.01).requires_grad_()
    misread = MISREAD["C18"] if act in TANH_GELUS else {}
    agree(plain_mlp_hidden, ORACLE["C18"], misread, up, act, margin=5e-5)
    assert gradcheck(lambda up: plain_mlp_hidden(up, act), up)


def weights(block: Block) -> dict[str, Any]:
    """Return weight and bias of every role, in the form of the oracle."""
    gated = ("gate",) if block.config.gated_mlp else ()
    pairs = {role: block.submodule(role) for role in ("o", "up", "down", *gated)}
    parameters: dict[str, Any] = {role: (part.weight, part.bias) for role, part in pairs.items()}
    parameters |= dict(zip("qkv", qkv_parameters(block), strict=True))
    return parameters | {role: dict(block.submodule(role).named_parameters()) for role in ("norm1", "norm2")}


@pytest.mark.equation("llama", "C19")
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_block(family: str) -> None:
    block = random_block(family)
    config, T = block.config, 3
    cos, sin = cos_sin_tables(torch.tensor([[0, 1, 5]]), frequencies(1e4, config.head_dim), 1.0, torch.float64)
    cos, sin = (cos, sin) if config.rope is not None else (None, None)
    valid = torch.ones(1, T).bool()
    mask = build_attention_mask(valid, 0, all_valid=True, window=None, bias=None, sdpa_only=False, dtype=torch.float64)
    context = ForwardContext(cos, sin, (mask,) * config.num_hidden_layers, "eager")
    sizes = {"H": config.num_attention_heads, "G": config.num_key_value_heads, "scale": config.head_dim**-0.5}
    sizes |= {"cos": cos, "sin": sin, "eps": config.norm_eps, "act": config.activation}
    x = normal(1, T, config.hidden_size)
    misread = dict(MISREAD["C19"])
    agree(lambda x, *_: block(x, None, context)[0], ORACLE["C19"], misread, x, weights(block), sizes, margin=1e-2)
    assert gradcheck(lambda x: block(x, None, context)[0], x, fast_mode=True)
