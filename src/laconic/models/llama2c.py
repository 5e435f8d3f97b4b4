"""Llama weights under other names and pairings: llama2.c files, and the names of Meta's and GGUF checkpoints.

karpathy/llama2.c, version 0 of its file; RoPE pairs are neighbours there, in Meta's files, and in GGUF's of Llama.
D width, F feed-forward, L layers, H query heads, G key/value heads, V words, P positions, E per head.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.errors import InputError, translate_os_errors
from laconic.models.config import DecoderConfig
from laconic.models.folder import refuse_pickle
from laconic.models.rope import RopeConfig, frequencies
from laconic.models.weights import half_split, interleave
from laconic.storage import atomic
from laconic.storage.strict_json import check_not_pickle

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
GGUF_INTERLEAVED_FAMILIES = (
    "llama",
    "mistral",
)  # families whose GGUF rows are interleaved; qwen2's and qwen3's are half-split
ROPE_TABLES = ("rope.freqs", "rope_freqs.weight")  # made anew from the configuration
LLAMA2C_PER_LAYER = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj",
)  # fmt: skip
LLAMA2C_THETA = 10000.0
LLAMA2C_FIXED = {"rms_norm_eps": 1e-5, "rope_theta": LLAMA2C_THETA, "hidden_act": "silu"}  # run.c knows no other
LLAMA2C_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
LLAMA2C_LATER_MAGIC = 0x616B3432  # "ak42", the first word of llama2.c's later versions

PermuteRows = Callable[[Tensor, int], Tensor]


def meta_to_hf(tensors: Mapping[str, Tensor], H: int, G: int) -> dict[str, Tensor]:
    """Meta's names and neighbouring pairs to Hugging Face's names and half-split pairs."""
    return _rename_tensors(tensors, META_NAMES, half_split, H, G)


def hf_to_meta(tensors: Mapping[str, Tensor], H: int, G: int) -> dict[str, Tensor]:
    """The inverse of `meta_to_hf`."""
    return _rename_tensors(tensors, {hf: name for name, hf in META_NAMES.items()}, interleave, H, G)


def gguf_to_hf(tensors: Mapping[str, Tensor], family: str, H: int, G: int) -> dict[str, Tensor]:
    """GGUF's names, and the pairs its rows have in this family, to Hugging Face's."""
    return _rename_tensors(tensors, GGUF_NAMES, half_split if family in GGUF_INTERLEAVED_FAMILIES else None, H, G)


def hf_to_gguf(tensors: Mapping[str, Tensor], family: str, H: int, G: int) -> dict[str, Tensor]:
    """The inverse of `gguf_to_hf`."""
    table = {hf: name for name, hf in GGUF_NAMES.items()}
    return _rename_tensors(tensors, table, interleave if family in GGUF_INTERLEAVED_FAMILIES else None, H, G)


def _rename_tensors(
    tensors: Mapping[str, Tensor], table: Mapping[str, str], turn: PermuteRows | None, H: int, G: int
) -> dict[str, Tensor]:
    """Every tensor under its other name; rows of q re-ordered in H heads, of k in G, if there is a `turn`."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in ROPE_TABLES:
            continue
        stem, _, kind = name.rpartition(".")
        layer = re.search(r"(?<=\.)\d+(?=\.)", stem)
        key = stem.replace(f".{layer[0]}.", ".{}.", 1) if layer else stem
        if key not in table:
            raise InputError(f"{name}: no such name in this format; known: {', '.join(table)}")
        heads = next(
            (n for end, n in (("q", H), ("k", G)) if re.search(rf"(\b{end}_proj|attn_{end}|w{end})$", stem)), 0
        )
        new = f"{table[key].format(layer[0] if layer else '')}.{kind}"
        found[new] = turn(tensor, heads) if turn and heads else tensor
    return found


def read_llama2c(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json and the tensors, Hugging Face's names and pairs, of a llama2.c file; mapped where untouched."""
    if not path.is_file():
        raise InputError(f"no {path.name} in {path.parent}")
    if path.name.startswith("pytorch_model"):
        refuse_pickle(path.parent, path.name)
    with translate_os_errors(path), path.open("rb") as file:
        start, size = file.read(8), path.stat().st_size
    if start[2:4] != bytes(2):  # a file of width 640 begins as a pickle does
        check_not_pickle(path.name, start)
    if size < 28 or size % 4:
        raise InputError(f"{path.name}: {size:,} bytes are no llama2.c file")
    numbers = torch.from_file(str(path), shared=False, size=size // 4, dtype=torch.float32)
    header = [int(n) for n in numbers[:7].view(torch.int32)]
    if header[0] == LLAMA2C_LATER_MAGIC:
        raise InputError(f"{path.name} is of a later version of llama2.c's file; export version 0")
    config = _config_from_header(path.name, header, size)
    shapes = dict(_llama2c_shapes(config))
    asked = 28 + 4 * sum(math.prod(shape) for shape in shapes.values())
    if asked != size:
        raise InputError(f"{path.name}: header promises {asked:,} bytes, file has {size:,}; fetch it again")
    parts = torch.tensor_split(numbers[7:], list(accumulate(map(math.prod, shapes.values())))[:-1])
    tensors = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True) if name}
    tensors = {name: _permute_qk(name, tensor, config, half_split) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        atomic.check_finite(name, tensor)
    return config, tensors


def _config_from_header(name: str, header: list[int], size: int) -> dict[str, Any]:
    sizes = dict(zip(LLAMA2C_SIZES, [*header[:5], abs(header[5]), header[6]], strict=True))
    D, H, G = header[0], header[3], header[4]
    if min(sizes.values()) < 1 or max(sizes.values()) > size or D % (2 * H) or H % G:
        raise InputError(f"{name}: sizes {header} are of no Llama; is it a llama2.c file?")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        **LLAMA2C_FIXED,
        "tie_word_embeddings": header[5] > 0,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def _llama2c_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the order of the file; the two tables of angles are nameless."""
    D, F, L, H, G, V, P = (config[name] for name in LLAMA2C_SIZES)
    E = D // H
    shapes = ((D,), (D, D), (G * E, D), (G * E, D), (D, D), (D,), (F, D), (D, F), (F, D))
    yield "model.embed_tokens.weight", (V, D)
    for part, shape in zip(LLAMA2C_PER_LAYER, shapes, strict=True):
        for l in range(L):
            yield f"model.layers.{l}.{part}.weight", shape
    yield "model.norm.weight", (D,)
    yield "", (2, P, E // 2)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (V, D)


def _permute_qk(name: str, tensor: Tensor, config: Mapping[str, Any], turn: PermuteRows) -> Tensor:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    return turn(tensor, config[heads]) if heads else tensor


def write_llama2c(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A llama2.c file of a plain Llama under Hugging Face's names; `BadInput` for what the format cannot say."""
    held = DecoderConfig.from_dict(config)
    rope = held.rope or RopeConfig()
    E = held.hidden_size // held.num_attention_heads
    for name, value, only in (
        ("family", held.family, "llama"),
        ("act", held.activation, "silu"),
        ("eps", held.norm_eps, LLAMA2C_FIXED["rms_norm_eps"]),
        ("rope", rope.kind, "default"),
        ("theta", rope.theta, LLAMA2C_THETA),
        ("head_dim", held.head_dim, E),
    ):
        if value != only:
            raise InputError(f"{name} {value!r}: llama2.c knows only {only!r}")
    sizes = {**vars(held)}
    shapes = dict(_llama2c_shapes(sizes))
    odd = sorted(
        {name for name in tensors if tensors[name].shape != shapes.get(name)} | (shapes.keys() - {""} - tensors.keys())
    )
    if odd:
        raise InputError(f"{len(odd)} tensors are missing, unknown or of another shape ({', '.join(odd[:10])})")
    header = [sizes[key] for key in LLAMA2C_SIZES]
    header[5] *= 1 if held.tie_word_embeddings else -1

    def write(new: Path) -> None:
        with new.open("wb") as file:
            file.write(torch.tensor(header, dtype=torch.int32).numpy().tobytes())
            for name, shape in shapes.items():
                part = _permute_qk(name, tensors[name], sizes, interleave) if name else _rope_table(shape, E)
                file.write(part.detach().float().cpu().contiguous().numpy().data)

    atomic.write_file_atomically(path, write, 4 * (7 + sum(map(math.prod, shapes.values()))))


def _rope_table(shape: tuple[int, ...], E: int) -> Tensor:
    """Cosines, then sines, of every position's angles."""
    angles = torch.outer(torch.arange(shape[1], dtype=torch.float32), frequencies(LLAMA2C_THETA, E))
    return torch.stack([angles.cos(), angles.sin()])
