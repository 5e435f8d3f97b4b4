"""The models `tiny:FAMILY`: a few thousand seeded weights, in a plain variant and one for each option of the family."""

import zlib
from dataclasses import replace
from typing import Any

import torch

from laconic.errors import InputError
from laconic.models.config import WEIGHT_NAMES, DecoderConfig, RopeConfig
from laconic.models.decoder import Decoder

TINY_PREFIX = "tiny:"
ROPE_VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "original_max_position_embeddings": 64,
        "short_factor": (1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6),
        "long_factor": (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0),
    },
}


def tiny_configs(family: str) -> dict[str, DecoderConfig]:
    """Return the configurations of a family's tiny models by variant; "" is the plain one."""
    if family not in WEIGHT_NAMES:
        known = ", ".join(TINY_PREFIX + name for name in WEIGHT_NAMES)
        raise InputError(f"tiny:{family}: unknown family; expected one of {known}")
    plain = DecoderConfig.tiny(family)
    if plain.position_encoding == "table":
        configs = {"": plain, "long": replace(plain, max_position_embeddings=4096)}
        if family == "gpt2":
            scales = tuple(plain.head_dim**-0.5 / (l + 1) for l in range(plain.num_hidden_layers))
            return configs | {"by layer": replace(plain, attention_scales=scales, activation="gelu")}
        without_bias = replace(plain, qkv_bias=False, o_bias=False, mlp_bias=False, tie_word_embeddings=False)
        return configs | {"no bias": without_bias}
    configs = {"": plain}
    assert plain.rope is not None
    for kind, values in ROPE_VARIANTS.items():
        rope = RopeConfig(kind, max_position_embeddings=plain.max_position_embeddings, **values)
        configs[kind] = replace(plain, rope=rope)
    configs["tied"] = replace(plain, tie_word_embeddings=True)
    if family in ("qwen2", "qwen3", "smollm3"):
        configs["window"] = replace(plain, sliding_windows=(None, 6))
    if family == "mistral":
        configs["no window"] = replace(plain, sliding_windows=(None, None))
    if family in ("llama", "qwen3"):
        configs["biases"] = replace(plain, qkv_bias=True, o_bias=True, mlp_bias=family == "llama")
    return configs


def build_tiny_decoder(family: str, variant: str = "") -> Decoder:
    """Build a tiny model with norm weights away from 1 and biases away from 0, so that leaving one out shows."""
    decoder = Decoder(tiny_configs(family)[variant], seed=None).eval()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{family} {variant}".encode()))
    with torch.no_grad():
        for name, p in sorted(decoder.named_parameters()):
            integers = torch.randint(0, 2048, (4, *p.shape), generator=generator)  # the same bits on every machine
            noise = (integers.sum(0) - 4094).float() / 1182.0  # approximately normal
            is_norm_weight = p.ndim == 1 and not name.endswith("bias")
            is_embedding = len(p) >= decoder.config.vocab_size  # of tokens or positions
            if p.ndim == 1:
                scale = 0.3
            else:
                scale = 0.5 if is_embedding else 0.15
            p.copy_(scale * noise + float(is_norm_weight))
    decoder.name_or_path = f"{TINY_PREFIX}{family}"
    return decoder
