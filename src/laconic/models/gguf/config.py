"""Translate the metadata of a GGUF file into a Hugging Face config.json.

Symbols: D width, H query heads, E head size, f scaling factor of RoPE.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.errors import InputError
from laconic.models.checkpoints.hf_config import rope_to_hf
from laconic.models.checkpoints.hf_fields import FAMILIES
from laconic.models.config import RopeConfig
from laconic.models.gguf.header import GGUFHeader
from laconic.models.ops.rope_scaling import llama3_frequencies
from laconic.models.rope import frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3", "gpt2")  # named as the families of the decoder
# Keys whose features are not implemented, with the values that leave the model unchanged.
NEUTRAL_KEYS = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.clamp_kqv": (0,),
    "use_parallel_residual": (True,),
    "attention.causal": (True,),
}
# llama.cpp's converter writes attention_factor of config.json as yarn_attn_factor, but llama.cpp multiplies it by
# 1 + 0.1 ln f or ignores it, depending on its version. Only 1 changes nothing there.
NEUTRAL_ROPE_SCALING = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
ROPE_FACTORS_TENSOR = "rope_freqs.weight"
LLAMA3_CONTEXTS = (8192, 2048, 4096, 16384, 32768)  # candidates for Llama 3's original_max_position_embeddings


def build_config(header: GGUFHeader, rope_factors: Tensor | None) -> dict[str, Any]:
    """Return the config.json of a file, without `dtype`; `rope_freqs.weight` has Llama 3's scaling."""
    architecture = header.require("general.architecture", str)
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise InputError(f"{header.path.name}: architecture {architecture!r} is not supported; supported: {supported}")
    for key, neutral in NEUTRAL_KEYS.items():
        value = header.metadata.get(f"{architecture}.{key}")
        if value is not None and value not in neutral:
            raise InputError(f"{header.path.name}: {architecture}.{key}={str(value)[:60]} is not supported")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(f"{header.path.name}: no embedding token_embd.weight; is it the first part of a split file?")
    common = {
        "architectures": [FAMILIES[architecture].architecture],
        "model_type": architecture,
        "vocab_size": embedding.shape[0],  # the metadata may count fewer
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    sizes = gpt2_sizes(header) if architecture == "gpt2" else rope_sizes(header, architecture, rope_factors)
    return common | sizes | special_token_ids(header)


def special_token_ids(header: GGUFHeader) -> dict[str, Any]:
    """Return the bos, eos and pad ids; eos is a list if the end of a turn has its own token."""
    ends = [header.get_token_id(role) for role in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(i for i in ends if i is not None))
    return {
        "bos_token_id": header.get_token_id("bos"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": header.get_token_id("padding"),
    }


def gpt2_sizes(header: GGUFHeader) -> dict[str, Any]:
    return {
        "n_layer": header.require("gpt2.block_count", int),
        "n_embd": header.require("gpt2.embedding_length", int),
        "n_head": header.require("gpt2.attention.head_count", int),
        "n_inner": header.get("gpt2.feed_forward_length", int),
        "n_positions": header.require("gpt2.context_length", int),
        "layer_norm_epsilon": read_float(header, "gpt2.attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def rope_sizes(header: GGUFHeader, family: str, rope_factors: Tensor | None) -> dict[str, Any]:
    D = header.require(f"{family}.embedding_length", int)
    H = header.require(f"{family}.attention.head_count", int)
    if min(D, H) < 1:
        raise InputError(f"{header.path.name}: width {D} with {H} heads")
    E = header.get(f"{family}.attention.key_length", int) or D // H
    for key in ("attention.value_length", "rope.dimension_count"):
        value = header.get(f"{family}.{key}", int)
        if value not in (None, E):
            raise InputError(f"{header.path.name}: {family}.{key}={value} is not supported for heads of size {E}")
    sizes = {
        "hidden_size": D,
        "num_hidden_layers": header.require(f"{family}.block_count", int),
        "num_attention_heads": H,
        "num_key_value_heads": header.get(f"{family}.attention.head_count_kv", int) or H,
        "head_dim": E,
        "intermediate_size": header.require(f"{family}.feed_forward_length", int),
        "max_position_embeddings": header.require(f"{family}.context_length", int),
        "rms_norm_eps": read_float(header, f"{family}.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_parameters": build_rope(header, family, E, rope_factors),
    }
    if family == "qwen2":
        return sizes | {"use_sliding_window": False}
    if family == "smollm3":  # files do not say it, and llama.cpp assumes it
        sizes["no_rope_layer_interval"] = 4
    mlp_bias = {"mlp_bias": "blk.0.ffn_up.bias" in header.tensors} if family in ("llama", "smollm3") else {}
    return sizes | mlp_bias | {"attention_bias": "blk.0.attn_q.bias" in header.tensors}


def build_rope(header: GGUFHeader, family: str, E: int, rope_factors: Tensor | None) -> dict[str, Any]:
    """Return `rope_parameters`: none, linear or YaRN scaling from the metadata, or Llama 3's from its tensor."""
    prefix = f"{family}.rope."
    theta = 10000.0 if header.get(f"{prefix}freq_base", float) is None else read_float(header, f"{prefix}freq_base")
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    for name, neutral in NEUTRAL_ROPE_SCALING.items():
        value = header.get(f"{prefix}scaling.{name}", float)
        if value not in (None, neutral):
            key = f"{prefix}scaling.{name}={value:g}"
            raise InputError(
                f"{header.path.name}: {key} is not supported, only {neutral:g}; load the original checkpoint"
            )
    kind = header.get(f"{prefix}scaling.type", str) or "none"
    if rope_factors is not None:
        return llama3_scaling(header, E, theta, rope_factors)
    factor = header.get(f"{prefix}scaling.factor", float) or header.get(f"{prefix}scale_linear", float) or 1.0
    if kind in ("none", "linear") and factor == 1.0:
        return rope
    if kind == "linear" or (kind == "none" and f"{prefix}scale_linear" in header.metadata):
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = header.require(f"{prefix}scaling.original_context_length", int)
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        keys = {name: f"{prefix}scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
        return rope | {name: read_float(header, key) for name, key in keys.items() if key in header.metadata}
    raise InputError(f"{header.path.name}: {prefix}scaling.type={kind!r} is not supported; supported: linear, yarn")


def llama3_scaling(header: GGUFHeader, E: int, theta: float, rope_factors: Tensor) -> dict[str, Any]:
    """Return the settings of Llama 3's scaling, which a file stores only as the resulting factors.

    The original context length is found by trying the published ones.
    """
    for original in LLAMA3_CONTEXTS if rope_factors.shape == (len(range(0, E, 2)),) else ():
        rope = RopeConfig("llama3", theta, float(rope_factors.max()), original_max_position_embeddings=original)
        scaled = llama3_frequencies(rope, E, torch.zeros(1, dtype=torch.long))[0].flatten()
        if torch.allclose(frequencies(theta, E) / rope_factors, scaled, rtol=1e-5, atol=0):
            return rope_to_hf(rope)
    raise InputError(
        f"{header.path.name}: {ROPE_FACTORS_TENSOR} holds a scaling of RoPE that is not Llama 3's; not supported"
    )


def read_float(header: GGUFHeader, key: str) -> float:
    """Return a float32 of the metadata as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(header.require(key, float))))
