"""The six families: one frozen configuration for all of them, and the names of their weights on disk."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from laconic.errors import InputError
from laconic.models.fields import ARCHITECTURES, FAMILY_FIELDS
from laconic.models.hf_config import DropoutRates, parse_hf_config, to_hf_config
from laconic.models.rope import RopeConfig
from laconic.storage.strict_json import read_json

__all__ = ["DecoderConfig", "DropoutRates", "WeightNames", "WEIGHT_NAMES"]

TINY_SIZES = {  # the fixture of every family; GPT-2 and OPT have G = H and E = D / H
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}
TINY_FIELDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "sliding_window": 8}
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class DecoderConfig:
    """What a decoder is, in Llama's words: D `hidden_size`, L `num_hidden_layers`, H `num_attention_heads`,
    G `num_key_value_heads`, E `head_dim`, F `intermediate_size`, V `vocab_size`.

    `windows` and `score_scale` have one entry a layer. `source` is the text of the file that was read, empty for a
    configuration made here; two configurations that differ only there are equal. Raises `BadInput` for sizes that
    do not fit one another.
    """

    family: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    intermediate_size: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_type: str
    norm_eps: float
    position_encoding: str
    position_offset: int
    rope: RopeConfig | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    gated_mlp: bool
    activation: str
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    attention_scales: tuple[float, ...]
    dropout: DropoutRates
    initializer_range: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: torch.dtype
    source: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        H, G, E, L = self.num_attention_heads, self.num_key_value_heads, self.head_dim, self.num_hidden_layers
        if H % G:
            raise InputError(f"num_key_value_heads {G} does not divide num_attention_heads {H}")
        for name, length in (
            ("sliding_windows", len(self.sliding_windows)),
            ("attention_scales", len(self.attention_scales)),
        ):
            if length != L:
                raise InputError(f"{name} has {length} entries for {L} layers")
        if self.rope is None:
            return
        if E % 2:
            raise InputError(f"head_dim {E} is odd; RoPE turns pairs of numbers")
        for name, g in (("short_factor", self.rope.short_factor), ("long_factor", self.rope.long_factor)):
            if self.rope.kind == "longrope" and len(g) != E // 2:
                raise InputError(f"{name} has {len(g)} numbers, head_dim {E} needs {E // 2}")

    @classmethod
    def from_folder(cls, folder: Path) -> "DecoderConfig":
        """From the config.json of a folder, and its generation_config.json if there is one."""
        generation = folder / "generation_config.json"
        return cls.from_dict(read_json(folder / "config.json"), read_json(generation) if generation.is_file() else None)

    @classmethod
    def from_dict(cls, source: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "DecoderConfig":
        """From the objects in those files. Raises `BadInput` for a family or a field that is not known here."""
        return cls(**parse_hf_config(source, generation or {}), source=json.dumps(dict(source), ensure_ascii=False))

    @classmethod
    def tiny(cls, family: str, **changes: Any) -> "DecoderConfig":
        """A few thousand weights with the family's shape, `changes` by our own names; without dropout.

        Mistral has a window of 8. The Pmax of `rope` is that of the configuration.
        """
        if family not in FAMILY_FIELDS:
            raise InputError(f'no small "{family}"; known: {", ".join(FAMILY_FIELDS)}')
        row = FAMILY_FIELDS[family]
        file = {row[name][0]: changes.get(name, size) for name, size in TINY_SIZES.items() if name in row}
        made = cls.from_dict({"model_type": family, **TINY_FIELDS, **file})
        if changes.get("rope") is not None:
            changes["rope"] = replace(changes["rope"], max_position_embeddings=made.max_position_embeddings)
        return replace(made, **{"dropout": DropoutRates(), **changes, "source": ""})

    def to_config_json(self) -> dict[str, Any]:
        """The config.json of this configuration: what was read with only the changed fields changed, or a new one.

        Token ids of what was read stay as they are there. Raises `BadInput` if the family's file cannot say it.
        """
        new = {"architectures": [ARCHITECTURES[self.family]], "model_type": self.family}
        file = self.updated_source() if self.source else {**new, **to_hf_config(vars(self))}
        kept = DecoderConfig.from_dict(file)
        lost = [
            name
            for name in differing_fields(self, kept)
            if not (self.source and name in ("bos_token_id", "eos_token_ids", "pad_token_id"))
        ]
        if lost:
            raise InputError(f"a config.json of {self.family} cannot say this {', '.join(lost)}; change it back")
        return file

    def updated_source(self) -> dict[str, Any]:
        """The file as read, with the fields replaced since then; a field keeps the spelling it has."""
        file: dict[str, Any] = json.loads(self.source)
        was, now = to_hf_config(vars(DecoderConfig.from_dict(file))), to_hf_config(vars(self))
        new = {key: value for key, value in now.items() if value != was[key] and key not in TOKEN_KEYS}
        if "rope_parameters" in new:
            for key in ("rope_scaling", "rope_theta", "original_max_position_embeddings"):
                file.pop(key, None)
        if "dtype" in new and "torch_dtype" in file:
            file["torch_dtype"] = new["dtype"] if "dtype" in file else new.pop("dtype")
        return {**file, **new}


def differing_fields(one: DecoderConfig, other: DecoderConfig) -> list[str]:
    """The names of the fields in which two configurations differ."""
    return [f.name for f in fields(one) if f.compare and getattr(one, f.name) != getattr(other, f.name)]


@dataclass(frozen=True)
class WeightNames:
    """Where the weights of a family are called what. From `norm1` on names are relative to a block.

    `base` is the prefix that a checkpoint may lack; maps named in `transposed` lie as [in, out] on disk.
    """

    base_prefix: str
    token_embedding: str
    position_embedding: str | None
    layers: str
    final_norm: str
    norm1: str
    norm2: str
    q: str | None
    k: str | None
    v: str | None
    o: str
    gate: str | None
    up: str
    down: str
    q_norm: str | None = None
    k_norm: str | None = None
    qkv: str | None = None
    transposed: tuple[str, ...] = ()
    head: str = "lm_head"


LLAMA_NAMES = WeightNames(
    base_prefix="model",
    token_embedding="model.embed_tokens",
    position_embedding=None,
    layers="model.layers",
    final_norm="model.norm",
    norm1="input_layernorm",
    norm2="post_attention_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)
WEIGHT_NAMES: dict[str, WeightNames] = {
    "llama": LLAMA_NAMES,
    "mistral": LLAMA_NAMES,
    "qwen2": LLAMA_NAMES,
    "qwen3": replace(LLAMA_NAMES, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    "gpt2": WeightNames(
        base_prefix="transformer",
        token_embedding="transformer.wte",
        position_embedding="transformer.wpe",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        norm1="ln_1",
        norm2="ln_2",
        q=None,
        k=None,
        v=None,
        qkv="attn.c_attn",
        o="attn.c_proj",
        gate=None,
        up="mlp.c_fc",
        down="mlp.c_proj",
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ),
    "opt": WeightNames(
        base_prefix="model.decoder",
        token_embedding="model.decoder.embed_tokens",
        position_embedding="model.decoder.embed_positions",
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        norm1="self_attn_layer_norm",
        norm2="final_layer_norm",
        q="self_attn.q_proj",
        k="self_attn.k_proj",
        v="self_attn.v_proj",
        o="self_attn.out_proj",
        gate=None,
        up="fc1",
        down="fc2",
    ),
}
