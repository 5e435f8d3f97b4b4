"""Decoder.forward refuses arguments of another shape, dtype or range."""

from typing import Any

import pytest
import torch

from laconic.errors import InputError
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from tests.models.fixtures import FAMILIES, decoder_of, fresh, noise

pytestmark = pytest.mark.usefixtures("unchecked")


def x(*shape: int) -> torch.Tensor:
    return noise(1, *shape, dtype=torch.float32)


OTHER_CACHE = KVCache.empty(DecoderConfig.tiny("llama", num_hidden_layers=3, num_key_value_heads=4, head_dim=8), 2)
MASK, POSITIONS = "attention_mask", "position_ids"
REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("llama", (torch.ones(2, 5, 48, dtype=torch.long),), {}, r"int64; did you mean decoder.embed"),
    ("llama", ("hello",), {}, r"str; did you mean decoder.embed"),
    ("llama", (x(5, 48),), {}, r"are \[5, 48\]; expected \[B, T, 48\]"),
    ("llama", (x(2, 5, 64),), {}, r"are \[2, 5, 64\]; expected \[B, T, 48\]"),
    ("llama", (x(2, 0, 48),), {}, "B and T must be at least 1"),
    ("llama", (x(1, 5, 48).double(),), {}, "float64, weights torch.float32"),
    ("llama", (x(2, 5, 48),), {MASK: torch.ones(2, 4).bool()}, r"attention_mask: shape \[2, 4\]"),
    ("gpt2", (x(2, 5, 48),), {MASK: torch.ones(2, 5)}, r"give booleans, or integers 0 and 1"),
    ("llama", (x(2, 5, 48),), {POSITIONS: torch.zeros(2, 1).long()}, r"position_ids: shape \[2, 1\]"),
    ("llama", (x(1, 5, 48),), {POSITIONS: torch.arange(5.0)[None]}, "float32; pass integers"),
    ("llama", (x(2, 5, 48), OTHER_CACHE), {}, r"\(3, 4, 8\), the decoder \(2, 2, 16\)"),
    ("llama", (x(3, 5, 48), KVCache.empty(DecoderConfig.tiny("llama"), 2)), {}, "cache has 2 rows, the inputs 3"),
    ("llama", (x(2, 5, 48),), {"attention_bias": x(2, 5, 9)}, r"does not broadcast to \[2, 5, 5\]"),
    ("llama", (x(2, 5, 48),), {"attention_bias": x(5, 5)}, r"does not broadcast to \[2, 5, 5\]"),
    ("llama", (x(1, 1, 48),), {POSITIONS: torch.tensor([[-1]])}, "needs learned positions"),
    ("opt", (x(1, 1, 48),), {POSITIONS: torch.tensor([[-2]])}, "must be ≥ -1"),
    ("opt", (x(1, 1, 48),), {POSITIONS: torch.tensor([[128]])}, "position 128 exceeds the 128"),
    ("gpt2", (x(1, 129, 48),), {}, "position 128 exceeds the 128"),
    ("llama", (x(1, 1, 48),), {"capture": ("q_rott",)}, "did you mean q_rot"),
    ("llama", (x(1, 1, 48),), {"capture": ("k.2",)}, r"did you mean k\.1"),
    ("gpt2", (x(1, 1, 48),), {"capture": ("gate",)}, "no such activation"),
    ("llama", (x(1, 1, 48),), {"capture": ("k.9",)}, r"capture k\.9: .*did you mean k\."),
    ("llama", (x(1, 1, 48),), {"capture": ("hidden.x",)}, r"capture hidden\.x: .*did you mean hidden\."),
    ("llama", (x(1, 1, 48),), {"capture": ("logits.0",)}, r"capture logits\.0: .*did you mean logits"),
]


@pytest.mark.parametrize(("name", "arguments", "options", "message"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_forward_refuses(name: str, arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fresh(name)(*arguments, **options)


def test_forward_measures_a_bias_with_the_cache() -> None:
    decoder = decoder_of("llama", torch.float32)
    cache = decoder(x(2, 7, 48)).cache
    decoder(x(2, 5, 48), cache, attention_bias=x(1, 1, 12))
    with pytest.raises(ValueError, match=r"does not broadcast to \[2, 5, 12\]"):
        decoder(x(2, 5, 48), cache, attention_bias=x(2, 5, 9))


def test_forward_refuses_an_unknown_backend() -> None:
    decoder = fresh("llama")
    decoder.attn_implementation = "flash"
    with pytest.raises(ValueError, match="use one of sdpa, eager, flex"):
        decoder(x(1, 1, 48))


@pytest.mark.parametrize("token", [700, -1])
def test_embed_refuses_an_id_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ValueError, match=rf"\[0, 3\] = {token} is outside the vocabulary of 97"):
        decoder_of("llama").embed(torch.tensor([[1, 2, 3, token]]))


def test_forward_refuses_a_cache_of_transformers() -> None:
    cache: Any = type("DynamicCache", (), {})()
    with pytest.raises(ValueError, match=r"cache is a DynamicCache; pass None, or the laconic.KVCache"):
        decoder_of("llama")(x(1, 1, 48), cache)


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        ([[1, 2]], "list"),
        (torch.ones(1, 2), "torch.float32"),
        (torch.ones(1, 2, dtype=torch.int16), "torch.int16"),
        (torch.ones(1, 2, dtype=torch.bool), "torch.bool"),
    ],
)
def test_embed_refuses_what_is_no_tensor_of_integers(ids: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"input_ids are of type {kind}; pass int64 or int32: torch.tensor"):
        decoder_of("llama").embed(ids)


def test_config_refuses_sizes_that_do_not_divide() -> None:
    with pytest.raises(InputError, match="does not divide"):
        DecoderConfig.tiny("llama", num_attention_heads=8, num_key_value_heads=3)


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_forward_refuses_dtypes_exactly_where_torch_does(name: str, weights: torch.dtype) -> None:
    decoder = fresh(name).to(weights)
    for dtype in DTYPES:
        if torch.promote_types(dtype, weights) == weights:
            assert decoder(x(1, 2, 48).to(dtype)).hidden_states.dtype == weights
        else:
            with pytest.raises(ValueError, match="convert one"):
                decoder(x(1, 2, 48).to(dtype))
            with pytest.raises(RuntimeError, match=r"same dtype|expected scalar type|mixed dtype"):
                decoder.layers[0].submodule("up")(x(1, 2, 48).to(dtype))  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_forward_accepts_both_dtypes_under_autocast(weights: torch.dtype) -> None:
    decoder = fresh("llama").to(weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            assert decoder(x(1, 2, 48).to(dtype)).hidden_states.isfinite().all()
