"""Packed weights: the same results as unpacked ones, used where they may be, and replaced when weights change."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import laconic
from laconic import Decoder, GenerationConfig
from laconic.errors import UsageError
from laconic.generation.static_cache import fuse_weights
from laconic.models.checkpoints.weight_memory import stack_rows
from laconic.models.ops.packed_linear import PackedLinear, has_onednn_packing
from laconic.models.quantize import quantize_decoder
from tests.models.fixtures import fresh
from tests.tolerances import error

FAMILIES = ("llama", "llama, one head of keys, tied", "gpt2", "opt", "qwen2", "qwen3")
IDS = torch.tensor([[5, 9, 3, 17, 60, 8, 33, 2, 41]])
ROUNDING = 1e-5


class Products(TorchDispatchMode):
    """Counts products by packed weights."""

    num_packed = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.num_packed += "_linear_pointwise" in str(func) and any(isinstance(x, Tensor) and x.is_mkldnn for x in args)
        return func(*args, **(kwargs or {}))


pytestmark = pytest.mark.skipif(not has_onednn_packing(torch.device("cpu")), reason="this torch has no oneDNN")


def packed(name: str) -> Decoder:
    decoder = fresh(name)
    laconic.pack_weights(decoder)
    return decoder


def read(decoder: Decoder) -> tuple[Tensor, int]:
    """Return hidden states, and the number of products by packed weights."""
    with torch.no_grad(), Products() as products:
        return decoder(decoder.embed(IDS)).hidden_states, products.num_packed


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_decoder_computes_the_same(name: str) -> None:
    decoder = packed(name)
    num_layers = sum(type(module) is PackedLinear for module in decoder.modules())
    expected, num_unpacked = read(fresh(name))
    actual, num_packed = read(decoder)
    assert error(actual, expected) < ROUNDING
    assert num_unpacked == 0
    assert num_packed >= 4 * decoder.config.num_hidden_layers
    assert num_layers >= num_packed
    config = GenerationConfig(max_tokens=4, eos_token_ids=())
    prompts = [[5, 6, 7], [8, 9], [3], [4, 4], [17, 5]]
    texts = [
        [g.token_ids for g in laconic.generate(d, input_ids=prompts, config=config)] for d in (decoder, fresh(name))
    ]
    assert texts[0] == texts[1]


def test_packed_decoder_has_the_gradients_of_its_weights() -> None:
    gradients = list[Tensor]()
    for decoder in (packed("llama"), fresh("llama")):
        decoder(decoder.embed(IDS)).hidden_states.square().sum().backward()
        weight = decoder.layers[0].submodule("up").weight
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is not None
        gradients.append(weight.grad)
    assert error(*gradients) < ROUNDING


def test_packed_weights_are_not_used_after_a_change_until_packed_again() -> None:
    decoder, expected = packed("llama"), fresh("llama")
    for d in (decoder, expected):
        with torch.no_grad():
            d.layers[0].submodule("up").weight.mul_(1.5)
    before = read(packed("llama"))[1]
    actual, num_packed = read(decoder)
    assert error(actual, read(expected)[0]) < ROUNDING
    assert num_packed == before - 1
    laconic.pack_weights(decoder)
    assert read(decoder)[1] == before


def train_with_fused_adamw(decoder: Decoder) -> Decoder:
    decoder(decoder.embed(IDS)).hidden_states.square().sum().backward()
    torch.optim.AdamW(decoder.parameters(), fused=True).step()  # which does not count its changes
    return decoder


def add_to_data(decoder: Decoder) -> Decoder:
    for p in decoder.parameters():
        p.data.add_(0.1)  # as peft merges adapters
    return decoder


def round_in_place(decoder: Decoder) -> Decoder:
    """As after `.bfloat16().float()`, which may bring the weights back to the same addresses."""
    for p in decoder.parameters():
        p.data.copy_(p.data.bfloat16())
    return decoder


@pytest.mark.parametrize("change", [train_with_fused_adamw, add_to_data, round_in_place])
def test_packed_weights_are_not_used_after_a_change_that_torch_does_not_count(change: Callable[..., Decoder]) -> None:
    actual, num_packed = read(change(packed("llama")))
    assert num_packed == 0
    assert error(actual, read(change(fresh("llama")))[0]) < ROUNDING


def test_copy_of_a_packed_decoder_is_packed_anew_to_decode_batches() -> None:
    decoder = packed("llama")
    assert isinstance(fuse_weights(decoder, num_rows=4).lm_head, PackedLinear)
    assert not isinstance(fuse_weights(copy.deepcopy(decoder), num_rows=4).lm_head, PackedLinear)


def test_int8_weights_of_a_packed_decoder_are_neighbours() -> None:
    block: Any = quantize_decoder(packed("llama")).layers[0]
    assert stack_rows([block.mlp.gate_proj.weight, block.mlp.up_proj.weight]) is not None


@pytest.mark.parametrize("change", [copy.deepcopy, lambda d: d.double(), quantize_decoder], ids=["copy", "to", "int8"])
def test_copies_and_other_types_of_a_packed_decoder_are_as_of_an_unpacked_one(change: object) -> None:
    actual, num_packed = read(change(packed("llama")))
    assert actual.equal(read(change(fresh("llama")))[0])
    assert num_packed == 0


def test_pack_weights_refuses_other_types() -> None:
    with pytest.raises(UsageError, match="float32"):
        laconic.pack_weights(fresh("llama").bfloat16())
    with pytest.raises(UsageError, match=r"such as model\.decoder, not LanguageModel"):
        laconic.pack_weights(laconic.load("stories260k"))
