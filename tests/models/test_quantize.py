"""Int8 weights: their error, independence of rows, gradients, and what a quantised decoder refuses."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import nn

from laconic.errors import InputError, UsageError
from laconic.experiment.lora import lora
from laconic.generation import backends as generation_backends
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.ops.int8_linear import KERNEL_ALIGNMENT, MAX_DIGIT_ROWS, MAX_KERNEL_ROWS, Int8Linear, quantize_rows
from laconic.models.quantize import quantize_decoder
from tests.models.fixtures import fresh
from tests.tolerances import error

BFLOAT16 = 2.0**-7  # outputs rounded to bfloat16, after inputs rounded to bfloat16
FAMILIES = ("llama", "llama, one head of keys, tied", "gpt2", "opt", "qwen2", "qwen3")
IDS = torch.tensor([[5, 9, 3, 17, 60, 8, 33, 2, 41]])


def test_quantize_rows_rounds_to_the_nearest_value() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 40)[:, None]
    values, scale = quantize_rows(weight)
    assert values.abs().amax(1).ge(126).all()
    assert (weight - values * scale.float()[:, None]).abs().le(0.51 * scale.float()[:, None]).all()


def test_quantize_rows_keeps_rows_of_zeros() -> None:
    values, scale = quantize_rows(torch.zeros(3, 16))
    assert (values * scale.float()[:, None]).eq(0).all()


@pytest.mark.parametrize("num_rows", [1, MAX_KERNEL_ROWS, MAX_KERNEL_ROWS + 1, MAX_DIGIT_ROWS, MAX_DIGIT_ROWS + 1])
@pytest.mark.parametrize("width", [4 * KERNEL_ALIGNMENT, 4 * KERNEL_ALIGNMENT - 4])
def test_int8_linear_equals_its_dequantized_weights(num_rows: int, width: int) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(width, 33), torch.randn(num_rows, width)
    layer = Int8Linear.from_float(linear.weight, linear.bias)
    assert error(layer(x), F.linear(x, layer.dequantize(torch.float32), linear.bias)) < BFLOAT16
    assert error(layer(x), linear(x)) < 2 * BFLOAT16


def test_int8_linear_rows_are_independent() -> None:
    layer, x = Int8Linear.from_float(torch.randn(33, 64)), torch.randn(MAX_KERNEL_ROWS, 64)
    assert layer(x).equal(torch.cat([layer(row[None]) for row in x]))
    x = torch.randn(MAX_DIGIT_ROWS, 64) * torch.logspace(-6, 6, MAX_DIGIT_ROWS)[:, None]
    assert layer.multiply_digits(x).equal(torch.cat([layer.multiply_digits(row[None]) for row in x]))


def test_int8_linear_multiply_digits_is_exact_to_15_bits() -> None:
    torch.manual_seed(0)
    layer, x = Int8Linear.from_float(torch.randn(33, 64)), torch.randn(3, 64)
    x[1] = 0
    assert error(layer.multiply_digits(x), F.linear(x, layer.dequantize(torch.float32))) < 2.0**-13
    assert layer.multiply_digits(x)[1].eq(0).all()


def test_int8_linear_quantizes_large_weights_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(33, 16)
    whole = Int8Linear.from_float(weight)
    monkeypatch.setattr("laconic.models.ops.int8_linear.QUANTIZED_ROWS", 10)
    assert Int8Linear.from_float(weight).dequantize(torch.float32).equal(whole.dequantize(torch.float32))


def test_int8_linear_passes_the_gradient_of_its_dequantized_weights() -> None:
    layer, x = Int8Linear.from_float(torch.randn(8, 16), torch.randn(8)), torch.randn(3, 16, requires_grad=True)
    layer(x).square().sum().backward()
    expected = 2 * F.linear(x, layer.dequantize(torch.float32), layer.bias) @ layer.dequantize(torch.float32)
    assert x.grad is not None
    assert error(x.grad, expected) < 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_decoder_is_near_the_float_decoder(name: str) -> None:
    decoder = fresh(name)
    quantized = quantize_decoder(decoder)
    with torch.no_grad():
        outputs = [d.logits(d(d.embed(IDS)).hidden_states) for d in (quantized, decoder)]
    assert 1e-4 < error(*outputs) < 0.1  # int8 changes the logits, but not by much
    assert not next(iter(quantized.parameters())).requires_grad


@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_decoder_static_cache_equals_the_decoder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = quantize_decoder(fresh(name))
    config = GenerationConfig(max_tokens=20, eos_token_ids=(), min_tokens=20)
    fast = generate(quantized, input_ids=IDS.tolist(), config=config)[0]
    monkeypatch.setattr(generation_backends, "is_stock_decoder", lambda decoder: False)
    slow = generate(quantized, input_ids=[IDS[0].tolist() + fast.token_ids[:-1]], config=GenerationConfig(max_tokens=1))
    assert error(fast.last_hidden, slow[0].last_hidden) < 4 * BFLOAT16


@pytest.mark.parametrize("name", FAMILIES)
def test_from_pretrained_quantizes_while_reading(name: str, tmp_path: Path) -> None:
    fresh(name).save_pretrained(tmp_path / "model")
    expected = quantize_decoder(Decoder.from_pretrained(tmp_path / "model"))
    quantized = Decoder.from_pretrained(tmp_path / "model", quantize="int8")
    assert quantized.fingerprint == expected.fingerprint
    assert quantized.config == expected.config
    state = quantized.state_dict()
    assert state.keys() == expected.state_dict().keys()
    assert all(tensor.equal(state[key]) for key, tensor in expected.state_dict().items())
    assert not any(p.requires_grad for p in quantized.parameters())


def test_from_pretrained_quantizes_layers_that_are_missing(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    fresh("llama").save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model/model.safetensors")
    with pytest.warns(UserWarning, match=r"up_proj.*randomly initialised"):
        quantized = Decoder.from_pretrained(tmp_path / "model", allow_missing=(name,), quantize="int8")
    assert not any(isinstance(module, nn.Linear) for module in quantized.modules())
    assert quantized.state_dict()[name].dtype == torch.int8


def test_quantized_decoder_reads_the_cache_of_the_float_decoder_which_stays_unchanged() -> None:
    decoder, before = fresh("llama"), fresh("llama").state_dict()
    decoder.attn_implementation = "eager"
    quantized = quantize_decoder(decoder)
    assert all(tensor.equal(before[name]) for name, tensor in decoder.state_dict().items())
    assert quantized.attn_implementation == "eager"
    assert quantized.fingerprint == decoder.fingerprint
    with torch.no_grad():
        cache = decoder(decoder.embed(IDS[:, :-1])).cache
        hidden = quantized(quantized.embed(IDS[:, -1:]), cache).hidden_states
        assert error(hidden, decoder(decoder.embed(IDS[:, -1:]), cache).hidden_states) < 0.1


def test_quantized_decoder_passes_gradients_to_embeddings() -> None:
    quantized = quantize_decoder(fresh("llama"))
    embeds = quantized.embed(IDS).requires_grad_()
    quantized.logits(quantized(embeds).hidden_states).logsumexp(-1).sum().backward()
    assert embeds.grad is not None
    assert embeds.grad.abs().sum() > 0


def test_quantize_decoder_refuses_what_it_cannot_quantize(tmp_path: Path) -> None:
    quantized, adapted = quantize_decoder(fresh("llama")), fresh("llama")
    with pytest.raises(UsageError, match="quantised already"):
        quantize_decoder(quantized)
    adapted.layers[0].mlp = nn.Identity()
    with pytest.raises(UsageError, match=r"layers\.0\.mlp is a Identity; merge adapters"):
        quantize_decoder(adapted)
    with pytest.raises(UsageError, match="int8 weights cannot be saved"):
        quantized.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_from_pretrained_refuses_another_quantization(tmp_path: Path) -> None:
    Decoder(DecoderConfig.tiny("llama")).save_pretrained(tmp_path / "a")
    with pytest.raises(Exception, match="int4"):  # UsageError, or that of the type checks of these tests
        Decoder.from_pretrained(tmp_path / "a", quantize="int4")  # pyright: ignore[reportArgumentType]


def test_quantized_decoder_refuses_lora() -> None:
    with pytest.raises(InputError, match="quantise it after training"):
        lora.target_module_names(quantize_decoder(fresh("llama")), ["q_proj"])
