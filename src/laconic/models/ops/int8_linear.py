"""Weight-only int8: linear layers that store int8 weights, so that decoding reads a quarter of the bytes.

Symbols: W = diag(s) Q with Q in [-127, 127] and one scale s per output channel; y = diag(s) Q x + b.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor, nn

from laconic.models.checkpoints.weight_memory import WeightMemory, stack_rows
from laconic.models.checkpoints.weights import has_fast_bfloat16, is_linear_weight
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.init import add_submodule

# Private, but torch has no public weight-only kernel for CPUs, and torchao's is slower than float32 unless compiled.
INT8_MATMUL: Any = torch.ops.aten._weight_int8pack_mm
INT8_PRODUCT: Any = torch.ops.aten._int_mm
HAS_VNNI = getattr(torch.cpu, "_is_vnni_supported", bool)()  # else products of int8 matrices are slow
DIGIT = 254  # values of the second digit of an activation for each of the first
MAX_KERNEL_ROWS = 4  # for more rows, `Int8Linear.multiply_digits` is faster
MAX_DIGIT_ROWS = 32  # for more rows, a matrix product with dequantised weights is faster
KERNEL_ALIGNMENT = 16  # torch's kernel reads past the end of rows of other lengths
QUANTIZED_ROWS = 512  # output channels quantised at once, which bounds temporary memory


class Int8Linear(nn.Module):
    """Linear layer with constant int8 weights. Gradients flow to its input.

    Wherever no gradient is needed, activations are rounded to bfloat16 or to two digits of int8, as kernels require it.
    Their relative error, at most 2^-9, is small beside that of the weights (about 1%).
    """

    def __init__(self, weight: Int8[Tensor, "N D"], scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight: Tensor
        self.scale: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    @classmethod
    def from_float(
        cls, weight: Float[Tensor, "N D"], bias: Tensor | None = None, memory: WeightMemory | None = None
    ) -> "Int8Linear":
        """Quantise a float weight to the nearest int8 value per output channel; on a CPU into `memory`."""
        weight = weight.detach()
        if weight.device.type == "cpu":
            values = (memory or WeightMemory(0, huge_pages=True)).empty(weight.shape, torch.int8)
        else:
            values = torch.empty_like(weight, dtype=torch.int8)
        scales = weight.new_empty(len(weight), dtype=torch.bfloat16)
        for i in range(0, len(weight), QUANTIZED_ROWS):
            rows = slice(i, i + QUANTIZED_ROWS)
            values[rows], scales[rows] = quantize_rows(weight[rows])
        return cls(values, scales, None if bias is None else bias.detach().clone())

    @classmethod
    def concat(cls, layers: "Sequence[Int8Linear]") -> "Int8Linear":
        """Return layers of one input as one layer, with a copy of their weights unless these are neighbours."""
        biases = [torch.zeros_like(layer.scale) if layer.bias is None else layer.bias for layer in layers]
        has_bias = any(layer.bias is not None for layer in layers)
        weight = stack_rows([layer.weight for layer in layers])
        weight = torch.cat([layer.weight for layer in layers]) if weight is None else weight
        scale = torch.cat([layer.scale for layer in layers])
        return cls(weight, scale, torch.cat(biases) if has_bias else None)

    def dequantize(self, dtype: torch.dtype) -> Float[Tensor, "N D"]:
        return self.weight.to(dtype) * self.scale.to(dtype)[:, None]

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows N"]:
        if x.requires_grad and torch.is_grad_enabled():
            return F.linear(x, self.dequantize(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return self.multiply(x.reshape(-1, x.shape[-1])).to(x.dtype).view(*x.shape[:-1], len(self.weight))

    def multiply(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B N"]:
        """Return the output without a gradient, in bfloat16 or in x's dtype, as the fastest kernel has it."""
        B, D = x.shape
        if x.device.type == "cpu" and B <= MAX_KERNEL_ROWS and D % KERNEL_ALIGNMENT == 0:
            y = INT8_MATMUL(x.to(torch.bfloat16), self.weight, self.scale.to(torch.bfloat16))
        elif x.device.type == "cpu" and B <= MAX_DIGIT_ROWS and HAS_VNNI:
            y = self.multiply_digits(x).to(x.dtype)
        else:
            dtype = torch.bfloat16 if has_fast_bfloat16(x.device) else x.dtype
            y = F.linear(x.to(dtype), self.weight.to(dtype)) * self.scale.to(dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def multiply_digits(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B N"]:
        """Return W x from a product of int8 matrices, without bias, in float32.

        Each row of activations becomes two rows of int8: its leading digits, and their remainders as second digits,
        with an error below 2^-15 of the row's largest value. Most of the time goes into reading the weights.
        """
        B = len(x)
        x = x.float()
        step = (x.abs().amax(-1, keepdim=True) / 127).clamp_min_(torch.finfo(torch.float32).tiny)
        digits = x / step
        leading = digits.round()
        digits = torch.cat([leading, digits.sub_(leading).mul_(DIGIT)]).to(torch.int8)
        y = INT8_PRODUCT(digits, self.weight.t()) * self.scale.float()
        return torch.add(y[:B], y[B:], alpha=1 / DIGIT).mul_(step)


def quantize_rows(weight: Float[Tensor, "N D"]) -> tuple[Int8[Tensor, "N D"], Tensor]:
    """Return int8 values and one scale per row, in bfloat16: the largest absolute value becomes 127."""
    w = weight.float()
    scale = (w.abs().amax(1) / 127).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    return (w / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def quantize_layers(root: nn.Module, names: Collection[str], memory: WeightMemory | None = None) -> None:
    for name in names:
        if is_linear_weight(root, name):
            layer_name = name.removesuffix(".weight")
            layer = cast(nn.Linear, root.get_submodule(layer_name))
            root.set_submodule(layer_name, Int8Linear.from_float(layer.weight, layer.bias, memory))


def quantize_head(root: nn.Module, config: DecoderConfig) -> DecoderConfig:
    """Quantise the head of a decoder; a tied one becomes an int8 copy of the embedding, as the new configuration says.

    Linear layers that are still floats, because they were initialised, are quantised too.
    """
    if config.tie_word_embeddings:
        names = WEIGHT_NAMES[config.family]
        embedding = root.get_parameter(f"{names.token_embedding}.weight")
        add_submodule(root, names.head, Int8Linear.from_float(embedding))
    quantize_layers(root, [name for name, _ in root.named_parameters()])
    root.requires_grad_(False)
    return replace(config, tie_word_embeddings=False)


def int8_memory(root: nn.Module) -> WeightMemory:
    linear = [module for _, module in named_modules(root) if type(module) is nn.Linear]
    return WeightMemory.for_shapes([tuple(module.weight.shape) for module in linear], torch.int8, huge_pages=True)


def named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(root.named_modules())  # pyright: ignore[reportUnknownArgumentType]
