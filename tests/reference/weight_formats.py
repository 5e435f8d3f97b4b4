"""Weight layouts of other programs: writing llama2.c files, and the names of GGUF's.

Only tests use these: they hold `half_split` (Eq. C7) and `read_llama2c` to independent inverses.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from laconic.models.checkpoints.llama2c import (
    HEADER_BYTES,
    LLAMA2C_CONSTANTS,
    LLAMA2C_SIZES,
    llama2c_shapes,
    num_heads_of,
)
from laconic.models.config import DecoderConfig
from laconic.models.rope import frequencies
from laconic.storage import atomic

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


def interleave(w: Shaped[Tensor, "NE *rest"], heads: int) -> Shaped[Tensor, "NE *rest"]:
    """Invert `half_split` (C7): out[h, 2 i + j] = w[h, j E/2 + i], j in {0, 1}."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def hf_to_gguf(tensors: Mapping[str, Tensor], family: str, H: int, G: int) -> dict[str, Tensor]:
    """Convert Hugging Face's names to GGUF's, and the rows of q (H heads) and k (G heads) to the family's pairs."""
    table = {hf: name for name, hf in GGUF_NAMES.items()}
    heads = {"attn_q": H, "attn_k": G} if family in GGUF_INTERLEAVED_FAMILIES else {}
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        layer = re.search(r"(?<=\.)\d+(?=\.)", stem)
        new = table[stem.replace(f".{layer[0]}.", ".{}.", 1) if layer else stem].format(layer and layer[0])
        num_heads = heads.get(new.rpartition(".")[2], 0)
        renamed[f"{new}.{kind}"] = interleave(tensor, num_heads) if num_heads else tensor
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
