"""Configuration of a decoder for the supported model families, and the names of their weights."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.errors import InputError, name_folder_in_errors
from laconic.models.checkpoints.hf_config import (
    DropoutRates,
    RopeConfig,
    describe_ignored_keys,
    parse_hf_config,
    to_hf_config,
)
from laconic.models.checkpoints.hf_fields import FAMILIES, HF_KEYS
from laconic.storage.strict_json import read_foreign_json

__all__ = ["WEIGHT_NAMES", "DecoderConfig", "DropoutRates", "RopeConfig", "WeightNames"]

TINY_SIZES = {  # sizes of `DecoderConfig.tiny`; GPT-2 and OPT have G = H and E = D / H
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}
TINY_KEYS = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "sliding_window": 8,
    "no_rope_layer_interval": 2,
}
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKEN_FIELDS = ("bos_token_id", "eos_token_ids", "pad_token_id")


@dataclass(frozen=True)
class DecoderConfig:
    """Architecture of a decoder, named as in Llama's config.json.

    Args:
        family: "llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt2" or "opt".
        hidden_size: D.
        num_hidden_layers: L.
        num_attention_heads: H.
        vocab_size: V.
        intermediate_size: F.
        num_key_value_heads: G.
        head_dim: E.
        max_position_embeddings: Positions of the model.
        norm_type: "rms" or "layer".
        norm_eps: Epsilon of the norms.
        position_encoding: "rope" or "table" (learned).
        position_offset: Row of the table for position 0.
        rope: RoPE settings; None with learned positions.
        nope_layers: Indices of the layers without RoPE; every fourth in SmolLM3.
        qkv_bias: Whether queries, keys and values have biases.
        o_bias: Whether the attention's output has a bias.
        mlp_bias: Whether the MLP has biases.
        qk_norm: Whether queries and keys are normalised (Qwen3).
        gated_mlp: Whether the MLP has a gate.
        activation: Name of the MLP's activation function.
        sliding_windows: Window of each layer; None for full attention.
        tie_word_embeddings: Whether the head shares the token embedding.
        attention_scales: Factor on the attention scores of each layer.
        dropout: Dropout rates in training.
        initializer_range: Standard deviation of initialised weights.
        bos_token_id: Token at the start of a text.
        eos_token_ids: Tokens that end a text.
        pad_token_id: Token of padding.
        dtype: Dtype of the checkpoint.
        source: Text of the config.json it was read from, empty otherwise; ignored by ==.

    Raises:
        InputError: The sizes do not fit one another.

    Examples:
        >>> import laconic
        >>> config = laconic.DecoderConfig.tiny("llama", vocab_size=500)
        >>> config.hidden_size, config.vocab_size
        (48, 500)
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
    nope_layers: tuple[int, ...]
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
            raise InputError(f"num_key_value_heads={G} does not divide num_attention_heads={H}")
        for name in ("sliding_windows", "attention_scales"):
            length = len(getattr(self, name))
            if length != L:
                raise InputError(f"{name} has {length} entries for {L} layers")
        if self.rope is None:
            return
        if E % 2:
            raise InputError(f"head_dim={E} is odd; RoPE rotates pairs of dimensions")
        for name, g in (("short_factor", self.rope.short_factor), ("long_factor", self.rope.long_factor)):
            if self.rope.kind == "longrope" and len(g) != E // 2:
                raise InputError(f"{name} has {len(g)} entries; head_dim={E} needs {E // 2}")

    @classmethod
    def from_folder(cls, folder: str | Path) -> "DecoderConfig":
        """Read config.json and, if there is one, generation_config.json of a folder. Warn of keys that are ignored."""
        folder = Path(folder)
        source = read_foreign_json(folder / "config.json")
        path = folder / "generation_config.json"
        with name_folder_in_errors(folder):
            config = cls.from_dict(source, read_foreign_json(path) if path.is_file() else {})
        for note in describe_ignored_keys(source):
            warnings.warn(f"{folder}/config.json: {note}", stacklevel=2)
        return config

    @classmethod
    def from_dict(cls, source: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "DecoderConfig":
        """Read `source`, the parsed config.json, and `generation`, the parsed generation_config.json if there is one.

        Raises:
            InputError: The family or a value is not supported, or a key is missing or invalid.
        """
        return cls(**parse_hf_config(source, generation or {}), source=json.dumps(dict(source), ensure_ascii=False))

    @classmethod
    def tiny(cls, family: str, **changes: Any) -> "DecoderConfig":
        """Return a configuration with a few thousand parameters and no dropout, for tests and examples.

        Args:
            family: Model family. Mistral gets a window of 8; every second layer of SmolLM3 has no RoPE.
            changes: Fields to replace, such as `vocab_size`. Pmax of `rope` follows `max_position_embeddings`.

        Raises:
            InputError: The family is not supported.
        """
        if family not in FAMILIES:
            raise InputError(f"no family {family!r}; supported: {', '.join(FAMILIES)}")
        keys = HF_KEYS[family]
        sizes = {keys[name]: changes.get(name, size) for name, size in TINY_SIZES.items() if name in keys}
        config = cls.from_dict({"model_type": family, **TINY_KEYS, **sizes})
        if changes.get("rope") is not None:
            changes["rope"] = replace(changes["rope"], max_position_embeddings=config.max_position_embeddings)
        return replace(config, **{"dropout": DropoutRates(), **changes, "source": ""})

    def check_positions(self, position_ids: Tensor) -> None:
        """Raise ValueError for a position outside a learned table, or a missing one (-1) with RoPE."""
        low, high = (int(end) for end in position_ids.aminmax())
        if low < -1:
            raise ValueError(f"position {low}: positions must be ≥ -1 (-1 = no position)")
        if low < 0 and self.position_encoding == "rope":
            raise ValueError(f"position -1 (none) needs learned positions; {self.family} uses RoPE")
        if self.position_encoding == "table" and high >= self.max_position_embeddings:
            raise ValueError(f"position {high} exceeds the {self.max_position_embeddings} positions of {self.family}")

    def to_config_json(self) -> dict[str, Any]:
        """Return a config.json: the file it was read from with the changed fields updated, or a new one.

        Token ids of a file stay as they are there.

        Raises:
            InputError: A config.json of the family has no key for a changed field.
        """
        new = {"architectures": [FAMILIES[self.family].architecture], "model_type": self.family}
        file = self.updated_source() if self.source else {**new, **to_hf_config(vars(self))}
        written = DecoderConfig.from_dict(file)
        names = {f.name for f in fields(self) if f.compare}.difference(TOKEN_FIELDS if self.source else ())
        lost = sorted(name for name in names if getattr(self, name) != getattr(written, name))
        if lost:
            raise InputError(f"a config.json of {self.family} cannot express this {', '.join(lost)}; change it back")
        return file

    def updated_source(self) -> dict[str, Any]:
        """Return the file as read, with the fields that were replaced since; keys keep their spelling."""
        file: dict[str, Any] = json.loads(self.source)
        old = to_hf_config(vars(DecoderConfig.from_dict(file)))
        new = to_hf_config(vars(self))
        changed = {key: value for key, value in new.items() if value != old[key] and key not in TOKEN_KEYS}
        if "rope_parameters" in changed:
            for key in ("rope_scaling", "rope_theta", "original_max_position_embeddings"):
                file.pop(key, None)
        if "dtype" in changed and "torch_dtype" in file:
            file["torch_dtype"] = changed["dtype"] if "dtype" in file else changed.pop("dtype")
        return {**file, **changed}


@dataclass(frozen=True)
class WeightNames:
    """Names of a family's modules in checkpoints. From `norm1` on they are relative to a layer.

    Checkpoints of base models may lack `base_prefix`. Weights of `transposed` are stored as [in, out].
    """

    base_prefix: str
    token_embedding: str
    layers: str
    final_norm: str
    norm1: str
    norm2: str
    o: str
    up: str
    down: str
    position_embedding: str | None = None
    q: str | None = None
    k: str | None = None
    v: str | None = None
    gate: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    qkv: str | None = None
    transposed: tuple[str, ...] = ()
    head: str = "lm_head"


LLAMA_NAMES = WeightNames(
    base_prefix="model",
    token_embedding="model.embed_tokens",
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
    "smollm3": LLAMA_NAMES,
    "gpt2": WeightNames(
        base_prefix="transformer",
        token_embedding="transformer.wte",
        position_embedding="transformer.wpe",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        norm1="ln_1",
        norm2="ln_2",
        qkv="attn.c_attn",
        o="attn.c_proj",
        up="mlp.c_fc",
        down="mlp.c_proj",
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ),
    "opt": replace(
        LLAMA_NAMES,
        base_prefix="model.decoder",
        token_embedding="model.decoder.embed_tokens",
        position_embedding="model.decoder.embed_positions",
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        norm1="self_attn_layer_norm",
        norm2="final_layer_norm",
        o="self_attn.out_proj",
        gate=None,
        up="fc1",
        down="fc2",
    ),
}
