"""The fixtures `tiny:FAMILY`: a few thousand seeded weights, once plain and once for each choice a family has."""

import zlib
from dataclasses import replace
from typing import Any

import torch

from laconic.errors import InputError
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.rope import RopeConfig

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
    """The plain fixture under "", then each variant by name. Raises `BadInput` for a family there is not."""
    if family not in WEIGHT_NAMES:
        raise InputError(f"tiny:{family}: known are {', '.join(TINY_PREFIX + name for name in WEIGHT_NAMES)}")
    small = DecoderConfig.tiny(family)
    if small.position_encoding == "table":
        E, L = small.head_dim, small.num_hidden_layers
        more = {"gpt2": {"score_scale": tuple(E**-0.5 / (l + 1) for l in range(L)), "act": "gelu"}}
        plain = {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
        return {
            "": small,
            "long": replace(small, max_position_embeddings=4096),
            "by layer" if family == "gpt2" else "no bias": replace(small, **more.get(family, plain)),
        }
    found = {"": small}
    assert small.rope is not None
    for kind, values in ROPE_VARIANTS.items():
        how = RopeConfig(kind, max_position_embeddings=small.max_position_embeddings, **values)
        found[kind] = replace(small, rope=how)
    found["tied"] = replace(small, tie_word_embeddings=True)
    if family in ("qwen2", "qwen3"):
        found["window"] = replace(small, sliding_windows=(None, 6))
    if family == "mistral":
        found["no window"] = replace(small, sliding_windows=(None, None))
    if family in ("llama", "qwen3"):
        found["biases"] = replace(small, qkv_bias=True, o_bias=True, mlp_bias=family == "llama")
    return found


def build_tiny_decoder(family: str, variant: str = "") -> Decoder:
    """A variant's decoder, in which no part can be left out unseen: norms away from 1, biases away from 0."""
    config = tiny_configs(family)[variant]
    decoder = Decoder(config, seed=None).eval()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{family} {variant}".encode()))
    with torch.no_grad():
        for name, p in sorted(decoder.named_parameters()):
            noise = approx_normal(p.shape, generator)
            one = p.ndim == 1 and not name.endswith("bias")
            p.copy_(noise * (0.3 if p.ndim == 1 else 0.15 if p.shape[0] < 97 else 0.5) + float(one))
    decoder.name_or_path = f"{TINY_PREFIX}{family}"
    return decoder


def approx_normal(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Nearly normal numbers made of integers, so that every machine draws the same bits."""
    return (torch.randint(0, 2048, (4, *shape), generator=generator).sum(0) - 4094).float() / 1182.0
