"""A Hugging Face config.json read into the fields of DecoderConfig, and those fields written as one."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from laconic.errors import InputError
from laconic.models.fields import (
    COUNT,
    DEFAULT_TOKEN_IDS,
    DTYPE,
    FAMILY_CONSTANTS,
    FAMILY_FIELDS,
    FIXED_FIELDS,
    FLAG,
    ID,
    IDS,
    LAYER_TYPES,
    LAYERS,
    NAMED,
    OBJECT,
    ORIGINAL_POSITIONS,
    POSITIVE,
    REQUIRED,
    REQUIRED_ROPE_FIELDS,
    ROPE_FIELD_SPECS,
    ROPE_FIELDS,
    SIZE,
    FieldSpec,
    choice_field,
)
from laconic.models.rope import RopeConfig

JsonObject = Mapping[str, Any]


@dataclass(frozen=True)
class DropoutRates:
    """Shares dropped in training: after the places, of the probabilities, after attention and MLP."""

    embedding: float = 0.0
    attention: float = 0.0
    residual: float = 0.0


def abbreviate(value: Any) -> str:
    """A value as the file has it, at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def unsupported_value(place: str, value: Any, supported: str) -> InputError:
    """The field, what it is, what it could be."""
    return InputError(f"{place} {abbreviate(value)}; known: {supported}")


def get_typed(
    source: JsonObject, key: str, spec: FieldSpec, default: Any = None, location: str = "config.json: "
) -> Any:
    """The value at `key`, checked; `absent` where there is none or null, an error where that is REQUIRED."""
    value = source.get(key)
    if value is None:
        if default is REQUIRED:
            raise InputError(f"{location}{key} is missing")
        return default
    if not spec.is_valid(value) and spec.choices:
        raise unsupported_value(location + key, value, spec.choices)
    if not spec.is_valid(value):
        raise InputError(f"{location}{key} {abbreviate(value)}: must be {spec.rule}")
    return spec.convert(value)


def parse_hf_config(source: JsonObject, generation: JsonObject) -> dict[str, Any]:
    """The fields of DecoderConfig, but `source`; raises `BadInput` for whatever is not known here."""
    family = source.get("model_type")
    if family not in tuple(FAMILY_FIELDS):
        known = ", ".join(FAMILY_FIELDS)
        raise InputError(
            f"config.json: model_type {abbreviate(family)} is not one of {known}; convert it or use transformers"
        )
    check_architecture(source)
    check_fixed_fields(source, "config.json: ")
    found = {ours: get_typed(source, *row) for ours, row in FAMILY_FIELDS[family].items()}
    found |= derived_sizes(family, found, source)
    dropout = DropoutRates(*(found.pop(f"dropout.{part}", 0.0) for part in ("embedding", "attention", "residual")))
    more: dict[str, Any] = {
        "dropout": dropout,
        "sliding_windows": sliding_windows(family, source, found["num_hidden_layers"]),
    }
    more |= {
        "attention_scales": attention_scales(
            found["head_dim"], found["num_hidden_layers"], **score_scale_flags(family, source)
        )
    }
    if FAMILY_CONSTANTS[family]["position_encoding"] == "rope":
        more["rope"] = parse_rope(source, found["max_position_embeddings"])
    more["dtype"] = get_typed(source, "dtype", DTYPE) or get_typed(
        source, "torch_dtype", DTYPE, DTYPE.convert("float32")
    )
    return {
        "family": family,
        **FAMILY_CONSTANTS[family],
        **found,
        **more,
        **special_token_ids(family, source, generation),
    }


def check_architecture(file: JsonObject) -> None:
    """Any model of the family that ends in the usual head, or in none."""
    names = get_typed(file, "architectures", NAMED, [])
    if names and not any(name.endswith(("ForCausalLM", "LMHeadModel", "Model")) for name in names):
        raise unsupported_value("config.json: architectures", names, "…ForCausalLM, …LMHeadModel, …Model")


def check_fixed_fields(file: JsonObject, location: str) -> None:
    """Refuses, by name, what changes the model and is not known here."""
    for key, values in FIXED_FIELDS.items():
        if file.get(key) not in (None, *values):
            raise unsupported_value(location + key, file[key], ", ".join(map(abbreviate, values)) or "none")


def derived_sizes(family: str, found: JsonObject, file: JsonObject) -> dict[str, int]:
    """F, G and E where the file leaves them to the other sizes."""
    D, H = found["hidden_size"], found["num_attention_heads"]
    if found.get("head_dim") is None and D % H:
        wide, heads = FAMILY_FIELDS[family]["hidden_size"][0], FAMILY_FIELDS[family]["num_attention_heads"][0]
        raise InputError(f"{heads} {H} does not divide {wide} {D}")
    if family == "opt" and file.get("word_embed_proj_dim") not in (None, D):
        raise unsupported_value(
            "config.json: word_embed_proj_dim", file["word_embed_proj_dim"], f"{D}, the hidden_size"
        )
    return {
        "intermediate_size": found["intermediate_size"] or 4 * D,
        "num_key_value_heads": found.get("num_key_value_heads") or H,
        "head_dim": found.get("head_dim") or D // H,
    }


def special_token_ids(family: str, file: JsonObject, generation: JsonObject) -> dict[str, Any]:
    """bos, eos, pad: from generation_config.json where it has them; a negative id is none."""
    bos, eos, pad = DEFAULT_TOKEN_IDS[family]
    return {
        "bos_token_id": next(iter(token_ids(file, generation, "bos_token_id", ID, bos)), None),
        "eos_token_ids": token_ids(file, generation, "eos_token_id", IDS, eos),
        "pad_token_id": next(iter(token_ids(file, generation, "pad_token_id", ID, pad)), None),
    }


def token_ids(
    file: JsonObject, generation: JsonObject, key: str, kind: FieldSpec, absent: int | None
) -> tuple[int, ...]:
    """The ids under one key; `absent` is the family's own where neither file has it."""
    value = get_typed(generation, key, kind, location="generation_config.json: ")
    if value is None:
        value = get_typed(file, key, kind) if key in file or absent is None else [absent]
    return tuple(i for i in value or () if i >= 0)


def score_scale_flags(family: str, file: JsonObject) -> dict[str, bool]:
    """Whether scores are scaled, and by the layer too; only GPT-2 has a choice."""
    if family != "gpt2":
        return {"scaled": True, "by_layer": False}
    return {
        "scaled": get_typed(file, "scale_attn_weights", FLAG, True),
        "by_layer": get_typed(file, "scale_attn_by_inverse_layer_idx", FLAG, False),
    }


def attention_scales(E: int, L: int, scaled: bool, by_layer: bool) -> tuple[float, ...]:
    """What the scores of each layer are multiplied by."""
    scale = E**-0.5 if scaled else 1.0
    return tuple(scale / (l + 1) if by_layer else scale for l in range(L))


def sliding_windows(family: str, file: JsonObject, L: int) -> tuple[int | None, ...]:
    """Mistral: one on all layers, 4096 if the file does not say, none if null. Qwen: where its switches say."""
    types = get_typed(file, "layer_types", LAYERS)
    if types is not None and len(types) != L:
        raise InputError(f"config.json: layer_types has {len(types)} entries for {L} layers")
    found: tuple[int | None, ...] = (None,) * L
    if family == "mistral":
        found = (get_typed(file, "sliding_window", SIZE) if "sliding_window" in file else 4096,) * L
    elif family in ("qwen2", "qwen3") and get_typed(file, "use_sliding_window", FLAG, False):
        W = get_typed(file, "sliding_window", SIZE) if "sliding_window" in file else 4096
        first = get_typed(file, "max_window_layers", COUNT, 28)
        found = tuple(W if (types[l] == LAYER_TYPES[1] if types else l >= first) else None for l in range(L))
    for l, kind in enumerate(types or ()):
        if (kind == LAYER_TYPES[1]) != (found[l] is not None):
            there = "no window" if found[l] is None else f"a window of {found[l]}"
            raise InputError(f'config.json: layer_types[{l}] "{kind}", but the other fields give layer {l} {there}')
    return found


def parse_rope(file: JsonObject, Pmax: int) -> RopeConfig:
    """The new spelling (`rope_parameters`) and the old one (`rope_scaling`, `rope_theta` beside it) give the same."""
    spelled = [place for place in ("rope_parameters", "rope_scaling") if get_typed(file, place, OBJECT)]
    found = [parse_rope_table(file, file[place], f"config.json: {place}.", Pmax) for place in spelled]
    if len(found) == 2 and found[0] != found[1]:
        raise InputError("config.json: rope_parameters and rope_scaling are both there and differ; keep the one meant")
    return found[0] if found else parse_rope_table(file, {}, "config.json: rope_parameters.", Pmax)


def parse_rope_table(file: JsonObject, table: JsonObject, location: str, Pmax: int) -> RopeConfig:
    """One dict of RoPE; its own theta wins over the one beside it, the P0 beside it wins over its own."""
    nested = next((key for key, value in table.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise unsupported_value(location + nested, table[nested], "one setting for all layers")
    check_fixed_fields(table, location)
    key = "type" if table.get("rope_type") is None else "rope_type"
    kind = get_typed(table, key, choice_field(ROPE_FIELDS), "default", location)
    theta = get_typed(table, "rope_theta", POSITIVE, None, location) or get_typed(file, "rope_theta", POSITIVE, 10000.0)
    values = {
        name: get_typed(
            table,
            name,
            ROPE_FIELD_SPECS.get(name, POSITIVE),
            REQUIRED if name in REQUIRED_ROPE_FIELDS.get(kind, ()) else None,
            location,
        )
        for name in ROPE_FIELDS[kind]
    }
    if ORIGINAL_POSITIONS in values:
        values[ORIGINAL_POSITIONS] = get_typed(file, ORIGINAL_POSITIONS, SIZE, values[ORIGINAL_POSITIONS])
    return RopeConfig(kind, theta, max_position_embeddings=Pmax, **{k: v for k, v in values.items() if v is not None})


def to_hf_config(config: JsonObject) -> dict[str, Any]:
    """The fields of a config.json, new spelling, that transformers reads as these fields of DecoderConfig."""
    family = config["family"]
    flat = {**config, **{f"dropout.{part}": share for part, share in asdict(config["dropout"]).items()}}
    file = {key: flat[ours] for ours, (key, _, _) in FAMILY_FIELDS[family].items()}
    if config["rope"] is not None:
        file["rope_parameters"] = rope_to_hf(config["rope"])
    eos = config["eos_token_ids"]
    file |= windows_to_hf(family, config["sliding_windows"]) | scale_to_hf(config)
    file |= {"bos_token_id": config["bos_token_id"], "pad_token_id": config["pad_token_id"]}
    file |= {"eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None}
    return file | {"dtype": str(config["dtype"]).removeprefix("torch.")}


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """A `rope_parameters` of the fields that its kind reads."""
    values = {name: getattr(rope, name) for name in ROPE_FIELDS[rope.kind]}
    values |= {name: list(values[name]) for name in ("short_factor", "long_factor") if name in values}
    return {"rope_type": rope.kind, "rope_theta": rope.theta} | {k: v for k, v in values.items() if v is not None}


def windows_to_hf(family: str, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """The fields of a family from which its reader makes these windows, if it can."""
    W = next((W for W in windows if W is not None), None)
    if family == "mistral":
        return {"sliding_window": W}
    if family not in ("qwen2", "qwen3"):
        return {}
    types = [LAYER_TYPES[window is not None] for window in windows]
    return {"use_sliding_window": W is not None, "sliding_window": W, "layer_types": types}


def scale_to_hf(config: JsonObject) -> dict[str, Any]:
    """GPT-2's two switches of the scale of scores."""
    if config["family"] != "gpt2":
        return {}
    by_layer = not math.isclose(config["attention_scales"][0], config["attention_scales"][-1])
    return {"scale_attn_weights": config["attention_scales"][0] != 1.0, "scale_attn_by_inverse_layer_idx": by_layer}
