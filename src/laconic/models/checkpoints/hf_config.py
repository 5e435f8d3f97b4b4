"""Read Hugging Face config.json files into the fields of DecoderConfig, and write those fields back."""

import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

import torch
from pydantic import ValidationError

from laconic.errors import InputError
from laconic.models.checkpoints.hf_fields import (
    EXPERT_KEYS,
    FAMILIES,
    FIXED_KEYS,
    HF_KEYS,
    MISSING_FEATURES,
    NULLABLE,
    REQUIRED_ROPE_FIELDS,
    ROPE_FIELDS,
    FamilyKeys,
    GenerationTokenIds,
    GPT2Keys,
    JsonModel,
    MistralKeys,
    OPTKeys,
    Qwen2Keys,
    RopeFamilyKeys,
    RopeTable,
    SmolLM3Keys,
    TokenIds,
)
from laconic.storage.strict_json import abbreviate

LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "Model")  # ends of the names of architectures
JsonObject = Mapping[str, Any]
Model = TypeVar("Model", bound=JsonModel)


@dataclass(frozen=True)
class RopeConfig:
    """RoPE settings, named as in Hugging Face's `rope_parameters`."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    max_position_embeddings: int = 2048
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def pretrained_positions(self) -> int:
        """Positions of the pretraining, P0; those of the model, Pmax, by default."""
        return self.original_max_position_embeddings or self.max_position_embeddings

    @property
    def scaling_factor(self) -> float:
        """Scaling factor f; Pmax / P0 by default."""
        return self.factor or self.max_position_embeddings / self.pretrained_positions


@dataclass(frozen=True)
class DropoutRates:
    """Dropout in training: after position embeddings, of attention probabilities, after attention and MLP."""

    embedding: float = 0.0
    attention: float = 0.0
    residual: float = 0.0


def unsupported_value(key: str, value: Any, supported: str) -> InputError:
    return InputError(f"{key}={abbreviate(value)} is not supported; supported: {supported}")


def validate_object(model: type[Model], source: JsonObject, location: str) -> Model:
    """Validate an object of a file; null counts as absent. Raise InputError naming the first invalid key."""
    try:
        return model.model_validate({k: value for k, value in source.items() if value is not None or k in NULLABLE})
    except ValidationError as error:
        first = error.errors()[0]
        key = location + str(first["loc"][0])
        if first["type"] == "missing":
            raise InputError(f"{key} is missing") from error
        reason = first["msg"][:1].lower() + first["msg"][1:]
        raise InputError(f"{key}={abbreviate(first['input'])}: {reason}") from error


def validate_hf_config(source: JsonObject) -> FamilyKeys:
    """Return the validated keys of config.json; InputError if a value changes the mathematics in an unknown way."""
    family = source.get("model_type")
    if family not in tuple(FAMILIES):
        raise unsupported_family(source)
    check_fixed_keys(source, "config.json: ")
    return validate_object(FAMILIES[family], source, "config.json: ")


def parse_hf_config(source: JsonObject, generation: JsonObject) -> dict[str, Any]:
    """Return the fields of DecoderConfig (except `source`) from config.json and generation_config.json."""
    file = validate_hf_config(source)
    family = source["model_type"]
    values = {name: getattr(file, name) for name in HF_KEYS[family]}
    values |= derived_sizes(file, values)
    dropout = {part: values.pop(f"dropout_{part}", 0.0) for part in ("embedding", "attention", "residual")}
    values |= {
        "dropout": DropoutRates(**dropout),
        "attention_scales": attention_scales(values["head_dim"], file),
        "nope_layers": nope_layers(file),
        "sliding_windows": sliding_windows(file),
        "dtype": getattr(torch, file.dtype or file.torch_dtype or "float32"),
    }
    if isinstance(file, RopeFamilyKeys):
        values["rope"] = parse_rope(file)
    return {"family": family, **file.constants, **values, **special_token_ids(file, generation)}


def unsupported_family(source: JsonObject) -> InputError:
    family = source.get("model_type")
    inner = source.get("text_config")
    lacks = next((feature for feature, families in MISSING_FEATURES.items() if family in families), None)
    if any(source.get(key) for key in EXPERT_KEYS):
        lacks = "mixture-of-experts layers"
    reason = f"it has {lacks}; " if lacks else ""
    if isinstance(inner, dict):
        inner_type = abbreviate(cast(JsonObject, inner).get("model_type"))
        reason = f"it wraps a text model ({inner_type}); save that alone with transformers; "
    if source.get("auto_map"):
        reason += "its own code (auto_map) is not run; "
    return InputError(
        f"config.json: model_type={abbreviate(family)} is not supported; {reason}supported: {', '.join(FAMILIES)}"
    )


def describe_ignored_keys(source: JsonObject) -> list[str]:
    """Return a note on each key of a valid config.json that is ignored and could matter."""
    notes = list[str]()
    file = validate_hf_config(source)
    if source.get("auto_map"):
        notes.append("auto_map names Python code of the checkpoint, which is not run")
    if file.architectures and not any(name.endswith(LANGUAGE_MODELS) for name in file.architectures):
        notes.append(f"architectures={abbreviate(file.architectures)}: read as a language model, without another head")
    if isinstance(file, RopeFamilyKeys) and file.rope_scaling and file.rope_parameters:
        with suppress(InputError):  # an invalid table differs
            if parse_rope(file) == parse_rope(file.model_copy(update={"rope_scaling": None})):
                return notes
        notes.append("rope_parameters is ignored: rope_scaling beside it differs, and wins as in transformers")
    return notes


def check_fixed_keys(source: JsonObject, location: str) -> None:
    """Refuse, by name, what changes the mathematics and is not implemented."""
    quantization = source.get("quantization_config")
    if isinstance(quantization, dict) and quantization:
        method = cast(JsonObject, quantization).get("quant_method") or "quantized"
        raise InputError(
            f"{location}quantization_config: {method} weights are not supported; load the unquantized checkpoint"
        )
    for key, values in FIXED_KEYS.items():
        if source.get(key) not in (None, *values):
            raise unsupported_value(location + key, source[key], ", ".join(map(abbreviate, values)) or "none")


def derived_sizes(file: FamilyKeys, values: JsonObject) -> dict[str, int]:
    """Return F, G and E where the file leaves them to the other sizes."""
    D, H = values["hidden_size"], values["num_attention_heads"]
    if values.get("head_dim") is None and D % H:
        keys = {name: field.alias or name for name, field in type(file).model_fields.items()}
        raise InputError(f"config.json: {keys['num_attention_heads']}={H} does not divide {keys['hidden_size']}={D}")
    if isinstance(file, OPTKeys) and file.word_embed_proj_dim not in (None, D):
        raise unsupported_value("config.json: word_embed_proj_dim", file.word_embed_proj_dim, f"hidden_size={D}")
    return {
        "intermediate_size": values["intermediate_size"] or 4 * D,
        "num_key_value_heads": values.get("num_key_value_heads") or H,
        "head_dim": values.get("head_dim") or D // H,
    }


def special_token_ids(file: TokenIds, generation: JsonObject) -> dict[str, Any]:
    """Return bos, eos and pad ids, from generation_config.json where it has valid ones; a negative id means none."""
    ids: dict[str, tuple[int, ...]] = {}
    for key in GenerationTokenIds.model_fields:
        value: int | list[int] | None = getattr(file, key)
        try:
            preferred = validate_object(GenerationTokenIds, {key: generation.get(key)}, "generation_config.json: ")
        except InputError as error:
            warnings.warn(f"{error}; that of config.json is used", stacklevel=2)
        else:
            value = value if getattr(preferred, key) is None else getattr(preferred, key)
        listed = value if isinstance(value, list) else [value]
        ids[key] = tuple(i for i in listed if i is not None and i >= 0)
    bos, pad = (next(iter(ids[key]), None) for key in ("bos_token_id", "pad_token_id"))
    return {"bos_token_id": bos, "eos_token_ids": ids["eos_token_id"], "pad_token_id": pad}


def attention_scales(E: int, file: FamilyKeys) -> tuple[float, ...]:
    """Return the factor on the attention scores of each layer; only GPT-2 has options for it."""
    if not isinstance(file, GPT2Keys):
        return (E**-0.5,) * file.num_hidden_layers
    scale = E**-0.5 if file.scale_attn_weights else 1.0
    by_layer = file.scale_attn_by_inverse_layer_idx
    return tuple(scale / (l + 1) if by_layer else scale for l in range(file.num_hidden_layers))


def nope_layers(file: FamilyKeys) -> tuple[int, ...]:
    """Return the indices of the layers without RoPE, which only SmolLM3 has."""
    L = file.num_hidden_layers
    if not isinstance(file, SmolLM3Keys):
        return ()
    has_rope = file.no_rope_layers or [int((l + 1) % file.no_rope_layer_interval != 0) for l in range(L)]
    if len(has_rope) < L:
        raise InputError(f"config.json: no_rope_layers has {len(has_rope)} entries for {L} layers")
    return tuple(l for l in range(L) if not has_rope[l])


def sliding_windows(file: FamilyKeys) -> tuple[int | None, ...]:
    """Return the window of each layer. Mistral: one for all; Qwen, SmolLM3: from their switches; others: none."""
    L = file.num_hidden_layers
    windows = (None,) * L
    if not isinstance(file, RopeFamilyKeys):
        return windows
    types = file.layer_types
    if types is not None and len(types) != L:
        raise InputError(f"config.json: layer_types has {len(types)} entries for {L} layers")
    if isinstance(file, MistralKeys):
        windows = (file.sliding_window,) * L
    elif isinstance(file, Qwen2Keys | SmolLM3Keys) and file.use_sliding_window:
        if types is not None:
            has_window = [kind == "sliding_attention" for kind in types]
        elif isinstance(file, SmolLM3Keys):
            has_window = [l in nope_layers(file) for l in range(L)]
        else:
            has_window = [l >= file.max_window_layers for l in range(L)]
        windows = tuple(file.sliding_window if windowed else None for windowed in has_window)
    for l, kind in enumerate(types or ()):
        if (kind == "sliding_attention") != (windows[l] is not None):
            window = "no window" if windows[l] is None else f"a window of {windows[l]}"
            raise InputError(
                f'config.json: layer_types[{l}]="{kind}", but the other keys give layer {l} {window}; correct one'
            )
    return windows


def parse_rope(file: RopeFamilyKeys) -> RopeConfig:
    """Read `rope_scaling` of older files or, without it, `rope_parameters`; `rope_theta` may stand beside it."""
    if file.rope_scaling:
        return parse_rope_table(file, file.rope_scaling, "config.json: rope_scaling.")
    return parse_rope_table(file, file.rope_parameters or {}, "config.json: rope_parameters.")


def parse_rope_table(file: RopeFamilyKeys, table: JsonObject, location: str) -> RopeConfig:
    """Read one table. Its rope_theta wins over the one beside it; P0 beside it wins over its own."""
    nested = next((key for key, value in table.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise unsupported_value(location + nested, table[nested], "one table for all layers")
    check_fixed_keys(table, location)
    if table.get("rope_type") is not None:  # then transformers does not read the older `type`
        table = {key: value for key, value in table.items() if key != "type"}
    rope = validate_object(RopeTable, table, location)
    kind = rope.rope_type or rope.type or "default"
    values = {name: getattr(rope, name) for name in ROPE_FIELDS[kind]}
    missing = next((name for name in REQUIRED_ROPE_FIELDS.get(kind, ()) if values[name] is None), None)
    if missing:
        raise InputError(f"{location}{missing} is missing")
    if "original_max_position_embeddings" in values and file.original_max_position_embeddings:
        values["original_max_position_embeddings"] = file.original_max_position_embeddings
    return RopeConfig(
        kind,
        rope.rope_theta or file.rope_theta,
        max_position_embeddings=file.max_position_embeddings,
        **{name: value for name, value in values.items() if value is not None},
    )


def to_hf_config(config: JsonObject) -> dict[str, Any]:
    """Return the keys of a config.json that transformers reads as these fields of DecoderConfig."""
    family = config["family"]
    flat = {**config, **{f"dropout_{part}": rate for part, rate in asdict(config["dropout"]).items()}}
    file = {key: flat[name] for name, key in HF_KEYS[family].items()}
    if config["rope"] is not None:
        file["rope_parameters"] = rope_to_hf(config["rope"])
    eos = config["eos_token_ids"]
    windows: tuple[int | None, ...] = config["sliding_windows"]
    window = next((W for W in windows if W is not None), None)
    if family == "mistral":
        file["sliding_window"] = window
    elif family in ("qwen2", "qwen3", "smollm3"):
        types = ["full_attention" if W is None else "sliding_attention" for W in windows]
        file |= {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": types}
    elif family == "gpt2":
        scales = config["attention_scales"]
        by_layer = not math.isclose(scales[0], scales[-1])
        file |= {"scale_attn_weights": scales[0] != 1.0, "scale_attn_by_inverse_layer_idx": by_layer}
    if family == "smollm3":
        layers = range(config["num_hidden_layers"])
        file["no_rope_layers"] = [int(l not in config["nope_layers"]) for l in layers]
    file |= {"bos_token_id": config["bos_token_id"], "pad_token_id": config["pad_token_id"]}
    file |= {"eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None}
    return file | {"dtype": str(config["dtype"]).removeprefix("torch.")}


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    values = {name: getattr(rope, name) for name in ROPE_FIELDS[rope.kind]}
    values |= {name: list(values[name]) for name in ("short_factor", "long_factor") if name in values}
    return {"rope_type": rope.kind, "rope_theta": rope.theta} | {k: v for k, v in values.items() if v is not None}
