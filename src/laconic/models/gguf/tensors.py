"""Find the weights of a decoder in a GGUF file, and dequantise them.

Files of Llama and SmolLM3 have the rows of q and k in the order of interleaved rotary pairs; Eq. C7
(`llama2c.half_split`) restores the half-split order.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laconic.errors import InputError
from laconic.models.checkpoints.checkpoint_files import transposed_weights
from laconic.models.checkpoints.llama2c import half_split
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.gguf.config import ROPE_FACTORS_TENSOR
from laconic.models.gguf.header import GGUFHeader, GGUFTensor
from laconic.models.parameters import add_parameters

# Names in a GGUF file, and the fields of WeightNames that they correspond to.
MODEL_NAMES = {
    "token_embd": "token_embedding",
    "position_embd": "position_embedding",
    "output_norm": "final_norm",
    "output": "head",
}
LAYER_NAMES = {
    "attn_norm": "norm1",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_qkv": "qkv",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_output": "o",
    "ffn_norm": "norm2",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
CHUNK_ELEMENTS = 2**22  # elements dequantised at a time


def match_weights(header: GGUFHeader, config: DecoderConfig) -> dict[str, GGUFTensor]:
    """Return the tensors of a file by the names of the Hugging Face checkpoint, all of them and no others."""
    names = WEIGHT_NAMES[config.family]
    L = config.num_hidden_layers
    if len(header.tensors) < L:  # before a module of so many layers is built
        count = f"{len(header.tensors)} tensors for {L} layers"
        raise InputError(f"{header.path.name}: {count}; is the file one part of a split model?")
    stems = {gguf: getattr(names, field) for gguf, field in MODEL_NAMES.items()}
    for l in range(L):
        stems |= {f"blk.{l}.{x}": f"{names.layers}.{l}.{getattr(names, field)}" for x, field in LAYER_NAMES.items()}
    module = nn.Module()
    with torch.device("meta"):
        add_parameters(module, config, seed=None)
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    matched: dict[str, GGUFTensor] = {}
    for tensor in header.tensors.values():
        stem, _, kind = tensor.name.rpartition(".")
        name = f"{stems.get(stem)}.{kind}"
        if tensor.name == ROPE_FACTORS_TENSOR:
            continue
        if name not in expected:
            raise InputError(f"{header.path.name}: {tensor.name} does not belong to a {config.family}; not supported")
        if tensor.shape != expected[name]:
            shape = list(tensor.shape)
            required = list(expected[name])
            raise InputError(f"{header.path.name}: {tensor.name} has the shape {shape}, the metadata give {required}")
        matched[name] = tensor
    missing = next((name for name in expected if name not in matched), None)
    if missing:
        raise InputError(f"{header.path.name}: no tensor for {missing}; is the file one part of a split model?")
    return {name: matched[name] for name in expected}


def check_quantizations(header: GGUFHeader) -> None:
    """Raise InputError for a quantisation that the gguf package cannot undo."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    for tensor in {tensor.quantization: tensor for tensor in header.tensors.values()}.values():
        kind = GGMLQuantizationType[tensor.quantization]
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            kind = f"{tensor.quantization}, which the gguf package cannot undo; use a file with Q4_K_M, Q8_0 or F16"
            raise InputError(f"{header.path.name}: {tensor.name} has the quantisation {kind}") from None


def read_tensor(header: GGUFHeader, tensor: GGUFTensor, dtype: torch.dtype) -> Tensor:
    """Read and dequantise a tensor a few rows at a time, without a second copy in memory."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = math.prod(tensor.shape[:-1])
    columns = tensor.shape[-1]
    data: np.ndarray[Any, Any] = np.memmap(header.path, np.uint8, "r", tensor.start, (tensor.end - tensor.start,))
    data = data.reshape(rows, -1)
    kind = GGMLQuantizationType[tensor.quantization]
    result = torch.empty(rows, columns, dtype=dtype)
    step = max(1, CHUNK_ELEMENTS // columns)
    for row in range(0, rows, step):
        chunk = np.require(dequantize(data[row : row + step], kind), np.float32, "W")
        result[row : row + step] = torch.from_numpy(chunk)  # pyright: ignore[reportUnknownMemberType]
    return result.reshape(tensor.shape)


def read_weight(
    name: str, matched: Mapping[str, GGUFTensor], header: GGUFHeader, config: DecoderConfig, dtype: torch.dtype
) -> Tensor:
    tensor = read_tensor(header, matched[name], dtype)
    names = WEIGHT_NAMES[config.family]
    heads = {names.q: config.num_attention_heads, names.k: config.num_key_value_heads}
    num_heads = next((n for part, n in heads.items() if part and f".{part}." in name), 0)
    if config.family in ("llama", "smollm3") and num_heads:
        return half_split(tensor, num_heads)
    return tensor.t().contiguous() if name in transposed_weights(config) else tensor
