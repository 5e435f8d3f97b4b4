"""Weight layouts of other programs: writing llama2.c files, and the names of Meta's and GGUF's checkpoints.

Only tests use these: they hold `half_split` (Eq. C7) and `read_llama2c` to independent inverses.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from laconic.errors import InputError
from laconic.models.checkpoints.llama2c import (
    HEADER_BYTES,
    LLAMA2C_CONSTANTS,
    LLAMA2C_SIZES,
    llama2c_shapes,
    num_heads_of,
)
from laconic.models.config import DecoderConfig
from laconic.models.rope import frequencies, half_split
from laconic.storage import atomic

PermuteRows = Callable[[Tensor, int], Tensor]
META_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.wq": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.wk": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.wv": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}
GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "output_norm": "model.norm",
    "output": "lm_head",
}
GGUF_INTERLEAVED_FAMILIES = ("llama", "mistral", "smollm3")  # qwen2 and qwen3 store half-split rows
ROPE_TABLES = ("rope.freqs", "rope_freqs.weight")  # computed from the configuration instead


def interleave(w: Shaped[Tensor, "NE *rest"], heads: int) -> Shaped[Tensor, "NE *rest"]:
    """Invert `half_split` (C7): out[h, 2 i + j] = w[h, j E/2 + i], j in {0, 1}."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def meta_to_hf(tensors: Mapping[str, Tensor], H: int, G: int) -> dict[str, Tensor]:
    """Convert Meta's names and interleaved pairs to Hugging Face's names and half-split pairs."""
    return _rename_tensors(tensors, META_NAMES, half_split, H, G)


def hf_to_meta(tensors: Mapping[str, Tensor], H: int, G: int) -> dict[str, Tensor]:
    """Invert `meta_to_hf`."""
    return _rename_tensors(tensors, {hf: name for name, hf in META_NAMES.items()}, interleave, H, G)


def gguf_to_hf(tensors: Mapping[str, Tensor], family: str, H: int, G: int) -> dict[str, Tensor]:
    """Convert GGUF's names, and the pairs that this family has there, to Hugging Face's."""
    return _rename_tensors(tensors, GGUF_NAMES, half_split if family in GGUF_INTERLEAVED_FAMILIES else None, H, G)


def hf_to_gguf(tensors: Mapping[str, Tensor], family: str, H: int, G: int) -> dict[str, Tensor]:
    """Invert `gguf_to_hf`."""
    table = {hf: name for name, hf in GGUF_NAMES.items()}
    return _rename_tensors(tensors, table, interleave if family in GGUF_INTERLEAVED_FAMILIES else None, H, G)


def _rename_tensors(
    tensors: Mapping[str, Tensor], table: Mapping[str, str], permute: PermuteRows | None, H: int, G: int
) -> dict[str, Tensor]:
    """Rename every tensor; permute the rows of q (H heads) and k (G heads)."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in ROPE_TABLES:
            continue
        stem, _, kind = name.rpartition(".")
        layer = re.search(r"(?<=\.)\d+(?=\.)", stem)
        key = stem.replace(f".{layer[0]}.", ".{}.", 1) if layer else stem
        if key not in table:
            raise InputError(f"{name}: no such name in this format")
        heads = next((n for x, n in (("q", H), ("k", G)) if re.search(rf"(\b{x}_proj|attn_{x}|w{x})$", stem)), 0)
        new = f"{table[key].format(layer[0] if layer else '')}.{kind}"
        renamed[new] = permute(tensor, heads) if permute and heads else tensor
    return renamed


def write_llama2c(path: Path, source: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a llama2.c file of a Llama with Hugging Face's names."""
    config = DecoderConfig.from_dict(source)
    sizes = {**vars(config)}
    E = config.hidden_size // config.num_attention_heads
    shapes = dict(llama2c_shapes(sizes))
    header = [sizes[key] for key in LLAMA2C_SIZES]
    header[5] *= 1 if config.tie_word_embeddings else -1

    def write(new: Path) -> None:
        with new.open("wb") as file:
            file.write(torch.tensor(header, dtype=torch.int32).numpy().tobytes())
            for name, shape in shapes.items():
                heads = num_heads_of(name, sizes) if name else 0
                part = tensors[name] if name else _rope_table(shape, E)
                part = interleave(part, heads) if heads else part
                file.write(part.detach().float().cpu().contiguous().numpy().data)

    atomic.write_file_atomically(path, write, HEADER_BYTES + 4 * sum(map(math.prod, shapes.values())))


def _rope_table(shape: tuple[int, ...], E: int) -> Tensor:
    """Return cosines, then sines, of every position's angles."""
    theta = float(LLAMA2C_CONSTANTS["rope_theta"])
    angles = torch.outer(torch.arange(shape[1], dtype=torch.float32), frequencies(theta, E))
    return torch.stack([angles.cos(), angles.sin()])
