"""Read llama2.c checkpoints (karpathy/llama2.c, version 0 of its format).

RoPE pairs are neighbouring rows of q and k there; Hugging Face's layout splits each head in halves.

Symbols: D width, F feed-forward, L layers, H query heads, G KV heads, V vocabulary, P positions, E head size.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from laconic.errors import InputError, translate_os_errors
from laconic.models.checkpoints.checkpoint_files import refuse_pickle
from laconic.models.checkpoints.hf_fields import MAX_LAYERS
from laconic.storage import atomic, safetensors_header
from laconic.storage.file_names import check_is_file

LLAMA2C_LAYER_WEIGHTS = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj",
)  # fmt: skip
LLAMA2C_CONSTANTS = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu"}  # run.c supports no others
LLAMA2C_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
HEADER_BYTES = 28


def read_llama2c(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors in Hugging Face's names and layout, memory-mapped except for q and k."""
    check_is_file(path)
    if path.name.startswith("pytorch_model"):
        refuse_pickle(path.parent, path.name)
    with translate_os_errors(path), path.open("rb") as file:
        start = file.read(8)
        size = path.stat().st_size
    if start[2:4] != bytes(2):  # the header of a model of width 640 begins like a pickle
        safetensors_header.check_not_pickle(path.name, start)
    if size < HEADER_BYTES or size % 4:
        raise InputError(f"{path.name}: {size:,} bytes are not a llama2.c file")
    numbers = torch.from_file(str(path), shared=False, size=size // 4, dtype=torch.float32)
    header = [int(n) for n in numbers[:7].view(torch.int32)]
    config = config_from_header(path.name, header, size)
    shapes = dict(llama2c_shapes(config))
    expected = HEADER_BYTES + 4 * sum(math.prod(shape) for shape in shapes.values())
    if expected != size:
        raise InputError(f"{path.name}: the header implies {expected:,} bytes, not {size:,}; download it again")
    parts = torch.tensor_split(numbers[7:], list(accumulate(map(math.prod, shapes.values())))[:-1])
    tensors: dict[str, Tensor] = {}
    for (name, shape), part in zip(shapes.items(), parts, strict=True):
        if name:
            heads = num_heads_of(name, config)
            tensors[name] = half_split(part.view(shape), heads) if heads else part.view(shape)
            atomic.check_finite(name, tensors[name])
    return config, tensors


def config_from_header(name: str, header: list[int], size: int) -> dict[str, Any]:
    """Return a config.json for the seven numbers of the header. A negative vocabulary means an untied head."""
    sizes = dict(zip(LLAMA2C_SIZES, [*header[:5], abs(header[5]), header[6]], strict=True))
    D, H, G = header[0], header[3], header[4]
    fits = min(sizes.values()) >= 1 and max(sizes.values()) <= size and sizes["num_hidden_layers"] <= MAX_LAYERS
    if not fits or D % (2 * H) or H % G:
        raise InputError(f"{name}: header {header} does not describe a Llama; is it a llama2.c file of version 0?")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        **LLAMA2C_CONSTANTS,
        "tie_word_embeddings": header[5] > 0,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def llama2c_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes in the order of the file; the RoPE table has an empty name."""
    D, F, L, H, G, V, P = (config[name] for name in LLAMA2C_SIZES)
    E = D // H
    shapes = ((D,), (D, D), (G * E, D), (G * E, D), (D, D), (D,), (F, D), (D, F), (F, D))
    yield "model.embed_tokens.weight", (V, D)
    for part, shape in zip(LLAMA2C_LAYER_WEIGHTS, shapes, strict=True):
        for l in range(L):
            yield f"model.layers.{l}.{part}.weight", shape
    yield "model.norm.weight", (D,)
    yield "", (2, P, E // 2)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (V, D)


def num_heads_of(name: str, config: Mapping[str, Any]) -> int:
    """Return the number of heads of a q or k projection, whose rows must be permuted; 0 for other weights."""
    key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    return config[key] if key else 0


def half_split(w: Shaped[Tensor, "NE *rest"], heads: int) -> Shaped[Tensor, "NE *rest"]:
    """Eq. C7: out[h, j E/2 + i] = w[h, 2 i + j], j in {0, 1}: from neighbouring RoPE pairs to half-split pairs."""
    return w.reshape(heads, -1, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)
