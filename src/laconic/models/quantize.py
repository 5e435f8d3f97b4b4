"""Weight-only int8: a decoder whose linear layers store int8 weights, so that decoding reads a quarter of the bytes.

Symbols: W = diag(s) Q with Q in [-127, 127] and one scale s per output channel; y = diag(s) Q x + b.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor, nn

from laconic.errors import UsageError
from laconic.models.block import Block, LayerNorm, Namespace, RMSNorm
from laconic.models.decoder import Decoder
from laconic.models.weights import has_fast_bfloat16

# Private, but torch has no public weight-only kernel for CPUs, and torchao's is slower than float32 unless compiled.
INT8_MATMUL: Any = torch.ops.aten._weight_int8pack_mm
MAX_KERNEL_ROWS = 16  # for more rows, a matrix product with dequantised weights is faster
KERNEL_ALIGNMENT = 16  # torch's kernel reads past the end of rows of other lengths
QUANTIZED_ROWS = 512  # output channels quantised at once, which bounds temporary memory
PLAIN_MODULES = (nn.ModuleList, Namespace, Block, nn.Linear, nn.Embedding, RMSNorm, LayerNorm)


class Int8Linear(nn.Module):
    """Linear layer with constant int8 weights. Gradients flow to its input.

    Activations are rounded to bfloat16 wherever no gradient is needed, as torch's int8 kernel requires it. Its
    relative error of 2^-9 is small beside that of the weights (about 1%).
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
    def from_float(cls, weight: Float[Tensor, "N D"], bias: Tensor | None = None) -> "Int8Linear":
        """Quantise a float weight to the nearest int8 value per output channel."""
        weight = weight.detach()
        parts = [quantize_rows(weight[i : i + QUANTIZED_ROWS]) for i in range(0, len(weight), QUANTIZED_ROWS)]
        values, scales = zip(*parts, strict=True)
        return cls(torch.cat(values), torch.cat(scales), None if bias is None else bias.detach().clone())

    @classmethod
    def concat(cls, layers: "Sequence[Int8Linear]") -> "Int8Linear":
        """Return layers of one input as one layer, with a copy of their weights."""
        biases = [torch.zeros_like(layer.scale) if layer.bias is None else layer.bias for layer in layers]
        has_bias = any(layer.bias is not None for layer in layers)
        weight, scale = torch.cat([layer.weight for layer in layers]), torch.cat([layer.scale for layer in layers])
        return cls(weight, scale, torch.cat(biases) if has_bias else None)

    def dequantize(self, dtype: torch.dtype) -> Float[Tensor, "N D"]:
        """Return the weights as floats."""
        return self.weight.to(dtype) * self.scale.to(dtype)[:, None]

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows N"]:
        if x.requires_grad and torch.is_grad_enabled():
            return F.linear(x, self.dequantize(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return self.multiply(x.reshape(-1, x.shape[-1])).to(x.dtype).view(*x.shape[:-1], -1)

    def multiply(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B N"]:
        """Return the output without a gradient: in bfloat16 where that is fast, else in x's dtype."""
        B, D = x.shape
        if x.device.type == "cpu" and B <= MAX_KERNEL_ROWS and D % KERNEL_ALIGNMENT == 0:
            y = INT8_MATMUL(x.to(torch.bfloat16), self.weight, self.scale.to(torch.bfloat16))
        else:
            dtype = torch.bfloat16 if has_fast_bfloat16(x.device) else x.dtype
            y = F.linear(x.to(dtype), self.weight.to(dtype)) * self.scale.to(dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def quantize_rows(weight: Float[Tensor, "N D"]) -> tuple[Int8[Tensor, "N D"], Tensor]:
    """Return int8 values and one scale per row, in bfloat16: the largest absolute value becomes 127."""
    w = weight.float()
    scale = (w.abs().amax(1) / 127).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    return (w / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def quantize_decoder(decoder: Decoder) -> Decoder:
    """Return a decoder with the weights of all linear layers in int8, one scale per output channel.

    With SmolLM2-135M on one CPU thread, decoding one row was 1.6 times as fast as in float32, and the loss on book text
    changed by less than 0.01 nats per token. The token embedding stays as it is; a tied head becomes an int8 copy of
    it. Caches and memories serve the decoder and its int8 form alike: both have the same fingerprint.

    Args:
        decoder: A decoder without adapters. It is not modified, and can be deleted.

    Returns:
        A decoder in eval mode. Its int8 weights are constants: it passes gradients to embeddings and memories, but
        cannot be fine-tuned, adapted with LoRA, or saved.

    Raises:
        UsageError: The decoder has adapters or other replaced modules, or is quantised already (exit code 2).

    Example:
        >>> import laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> quantized = laconic.quantize_decoder(decoder)
        >>> quantized.fingerprint == decoder.fingerprint
        True
        >>> config = laconic.GenerationConfig(max_tokens=3, eos_token_ids=())
        >>> len(laconic.generate(quantized, input_ids=[[1, 17]], config=config)[0].token_ids)
        3
    """
    check_plain(decoder)
    names, tied = decoder.weight_names, decoder.config.tie_word_embeddings
    with torch.device("meta"):
        quantized = Decoder(replace(decoder.config, tie_word_embeddings=False), seed=None)
    with torch.no_grad():
        for name, module in named_modules(decoder):
            if isinstance(module, nn.Linear):
                quantized.set_submodule(name, Int8Linear.from_float(module.weight, module.bias))
        if tied:
            quantized.set_submodule(names.head, Int8Linear.from_float(decoder.token_embedding.weight))
        expected = {name for name, _ in quantized.named_parameters()}
        # Copies, because a parameter can keep the mapping of a whole checkpoint file alive.
        state = {name: p.detach().clone() for name, p in decoder.named_parameters() if name in expected}
    quantized.load_state_dict(state, strict=False, assign=True)
    quantized.requires_grad_(False)
    quantized.source_folder, quantized.name_or_path = decoder.source_folder, decoder.name_or_path
    quantized._cached_fingerprint = (decoder.fingerprint, quantized.parameter_version())  # pyright: ignore[reportPrivateUsage]
    return quantized.eval()


def check_plain(decoder: Decoder) -> None:
    """Raise UsageError for a decoder with modules that its constructor did not make."""
    if type(decoder) is not Decoder:
        raise UsageError(f"{type(decoder).__name__} cannot be quantised; pass a Decoder")
    for name, module in named_modules(decoder):
        if isinstance(module, Int8Linear):
            raise UsageError("the decoder is quantised already; pass the float decoder")
        if name and type(module) not in PLAIN_MODULES:
            raise UsageError(f"{name} is a {type(module).__name__}; merge adapters before quantising")


def named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all modules with their dotted names."""
    return list(root.named_modules())  # pyright: ignore[reportUnknownArgumentType]
