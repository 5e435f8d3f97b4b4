"""A Hugging Face config.json read into the fields of DecoderConfig, and those fields written as one."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from laconic.core.artifact import BadInput
from laconic.core.fields import (
    COUNT,
    DTYPE,
    FIXED,
    FLAG,
    ID,
    IDS,
    LAYER_TYPES,
    LAYERS,
    NAMED,
    NEEDS,
    OBJECT,
    ONLY,
    P0,
    POSITIVE,
    REQUIRED,
    ROPE_KINDS,
    SIZE,
    TABLE,
    TOKENS,
    USES,
    Kind,
    one_of,
)
from laconic.core.rope import Rope

File = Mapping[str, Any]


@dataclass(frozen=True)
class Dropout:
    """Shares dropped in training: after the places, of the probabilities, after attention and MLP."""

    embedding: float = 0.0
    attention: float = 0.0
    residual: float = 0.0


def shown(value: Any) -> str:
    """A value as the file has it, at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def unsupported(place: str, value: Any, known: str) -> BadInput:
    """The field, what it is, what it could be."""
    return BadInput(f"{place} {shown(value)}; known: {known}")


def taken(file: File, key: str, kind: Kind, absent: Any = None, place: str = "config.json: ") -> Any:
    """The value at `key`, checked; `absent` where there is none or null, an error where that is REQUIRED."""
    value = file.get(key)
    if value is None:
        if absent is REQUIRED:
            raise BadInput(f"{place}{key} is missing")
        return absent
    if not kind.holds(value) and kind.known:
        raise unsupported(place + key, value, kind.known)
    if not kind.holds(value):
        raise BadInput(f"{place}{key} {shown(value)}: must be {kind.rule}")
    return kind.made(value)


def read(file: File, generation: File) -> dict[str, Any]:
    """The fields of DecoderConfig, but `source`; raises `BadInput` for whatever is not known here."""
    family = file.get("model_type")
    if family not in tuple(TABLE):
        known = ", ".join(TABLE)
        raise BadInput(f"config.json: model_type {shown(family)} is not one of {known}; convert it or use transformers")
    check_architecture(file)
    check_only(file, "config.json: ")
    found = {ours: taken(file, *row) for ours, row in TABLE[family].items()}
    found |= sizes(family, found, file)
    dropout = Dropout(*(found.pop(f"dropout.{part}", 0.0) for part in ("embedding", "attention", "residual")))
    more: dict[str, Any] = {"dropout": dropout, "windows": windows(family, file, found["num_hidden_layers"])}
    more |= {"score_scale": score_scale(found["head_dim"], found["num_hidden_layers"], **score_flags(family, file))}
    if FIXED[family]["place"] == "rope":
        more["rope"] = rope(file, found["max_position_embeddings"])
    more["dtype"] = taken(file, "dtype", DTYPE) or taken(file, "torch_dtype", DTYPE, DTYPE.made("float32"))
    return {"family": family, **FIXED[family], **found, **more, **tokens(family, file, generation)}


def check_architecture(file: File) -> None:
    """Any model of the family that ends in the usual head, or in none."""
    names = taken(file, "architectures", NAMED, [])
    if names and not any(name.endswith(("ForCausalLM", "LMHeadModel", "Model")) for name in names):
        raise unsupported("config.json: architectures", names, "…ForCausalLM, …LMHeadModel, …Model")


def check_only(file: File, place: str) -> None:
    """Refuses, by name, what changes the model and is not known here."""
    for key, values in ONLY.items():
        if file.get(key) not in (None, *values):
            raise unsupported(place + key, file[key], ", ".join(map(shown, values)) or "none")


def sizes(family: str, found: File, file: File) -> dict[str, int]:
    """F, G and E where the file leaves them to the other sizes."""
    D, H = found["hidden_size"], found["num_attention_heads"]
    if found.get("head_dim") is None and D % H:
        wide, heads = TABLE[family]["hidden_size"][0], TABLE[family]["num_attention_heads"][0]
        raise BadInput(f"{heads} {H} does not divide {wide} {D}")
    if family == "opt" and file.get("word_embed_proj_dim") not in (None, D):
        raise unsupported("config.json: word_embed_proj_dim", file["word_embed_proj_dim"], f"{D}, the hidden_size")
    return {
        "intermediate_size": found["intermediate_size"] or 4 * D,
        "num_key_value_heads": found.get("num_key_value_heads") or H,
        "head_dim": found.get("head_dim") or D // H,
    }


def tokens(family: str, file: File, generation: File) -> dict[str, Any]:
    """bos, eos, pad: from generation_config.json where it has them; a negative id is none."""
    bos, eos, pad = TOKENS[family]
    return {
        "bos": next(iter(ids(file, generation, "bos_token_id", ID, bos)), None),
        "eos": ids(file, generation, "eos_token_id", IDS, eos),
        "pad": next(iter(ids(file, generation, "pad_token_id", ID, pad)), None),
    }


def ids(file: File, generation: File, key: str, kind: Kind, absent: int | None) -> tuple[int, ...]:
    """The ids under one key; `absent` is the family's own where neither file has it."""
    value = taken(generation, key, kind, place="generation_config.json: ")
    if value is None:
        value = taken(file, key, kind) if key in file or absent is None else [absent]
    return tuple(i for i in value or () if i >= 0)


def score_flags(family: str, file: File) -> dict[str, bool]:
    """Whether scores are scaled, and by the layer too; only GPT-2 has a choice."""
    if family != "gpt2":
        return {"scaled": True, "by_layer": False}
    return {
        "scaled": taken(file, "scale_attn_weights", FLAG, True),
        "by_layer": taken(file, "scale_attn_by_inverse_layer_idx", FLAG, False),
    }


def score_scale(E: int, L: int, scaled: bool, by_layer: bool) -> tuple[float, ...]:
    """What the scores of each layer are multiplied by."""
    scale = E**-0.5 if scaled else 1.0
    return tuple(scale / (l + 1) if by_layer else scale for l in range(L))


def windows(family: str, file: File, L: int) -> tuple[int | None, ...]:
    """Mistral: one on all layers, 4096 if the file does not say, none if null. Qwen: where its switches say."""
    types = taken(file, "layer_types", LAYERS)
    if types is not None and len(types) != L:
        raise BadInput(f"config.json: layer_types has {len(types)} entries for {L} layers")
    found: tuple[int | None, ...] = (None,) * L
    if family == "mistral":
        found = (taken(file, "sliding_window", SIZE) if "sliding_window" in file else 4096,) * L
    elif family in ("qwen2", "qwen3") and taken(file, "use_sliding_window", FLAG, False):
        W = taken(file, "sliding_window", SIZE) if "sliding_window" in file else 4096
        first = taken(file, "max_window_layers", COUNT, 28)
        found = tuple(W if (types[l] == LAYER_TYPES[1] if types else l >= first) else None for l in range(L))
    for l, kind in enumerate(types or ()):
        if (kind == LAYER_TYPES[1]) != (found[l] is not None):
            there = "no window" if found[l] is None else f"a window of {found[l]}"
            raise BadInput(f'config.json: layer_types[{l}] "{kind}", but the other fields give layer {l} {there}')
    return found


def rope(file: File, Pmax: int) -> Rope:
    """The new spelling (`rope_parameters`) and the old one (`rope_scaling`, `rope_theta` beside it) give the same."""
    spelled = [place for place in ("rope_parameters", "rope_scaling") if taken(file, place, OBJECT)]
    found = [one_rope(file, file[place], f"config.json: {place}.", Pmax) for place in spelled]
    if len(found) == 2 and found[0] != found[1]:
        raise BadInput("config.json: rope_parameters and rope_scaling are both there and differ; keep the one meant")
    return found[0] if found else one_rope(file, {}, "config.json: rope_parameters.", Pmax)


def one_rope(file: File, given: File, place: str, Pmax: int) -> Rope:
    """One dict of RoPE; its own theta wins over the one beside it, the P0 beside it wins over its own."""
    nested = next((key for key, value in given.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise unsupported(place + nested, given[nested], "one setting for all layers")
    check_only(given, place)
    key = "type" if given.get("rope_type") is None else "rope_type"
    kind = taken(given, key, one_of(USES), "default", place)
    theta = taken(given, "rope_theta", POSITIVE, None, place) or taken(file, "rope_theta", POSITIVE, 10000.0)
    values = {
        name: taken(
            given, name, ROPE_KINDS.get(name, POSITIVE), REQUIRED if name in NEEDS.get(kind, ()) else None, place
        )
        for name in USES[kind]
    }
    if P0 in values:
        values[P0] = taken(file, P0, SIZE, values[P0])
    return Rope(kind, theta, max_position_embeddings=Pmax, **{k: v for k, v in values.items() if v is not None})


def written(config: File) -> dict[str, Any]:
    """The fields of a config.json, new spelling, that transformers reads as these fields of DecoderConfig."""
    family = config["family"]
    flat = {**config, **{f"dropout.{part}": share for part, share in asdict(config["dropout"]).items()}}
    file = {key: flat[ours] for ours, (key, _, _) in TABLE[family].items()}
    if config["rope"] is not None:
        file["rope_parameters"] = written_rope(config["rope"])
    eos = config["eos"]
    file |= written_windows(family, config["windows"]) | written_scale(config)
    file |= {"bos_token_id": config["bos"], "pad_token_id": config["pad"]}
    file |= {"eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None}
    return file | {"dtype": str(config["dtype"]).removeprefix("torch.")}


def written_rope(rope: Rope) -> dict[str, Any]:
    """A `rope_parameters` of the fields that its kind reads."""
    values = {name: getattr(rope, name) for name in USES[rope.kind]}
    values |= {name: list(values[name]) for name in ("short_factor", "long_factor") if name in values}
    return {"rope_type": rope.kind, "rope_theta": rope.theta} | {k: v for k, v in values.items() if v is not None}


def written_windows(family: str, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """The fields of a family from which its reader makes these windows, if it can."""
    W = next((W for W in windows if W is not None), None)
    if family == "mistral":
        return {"sliding_window": W}
    if family not in ("qwen2", "qwen3"):
        return {}
    types = [LAYER_TYPES[window is not None] for window in windows]
    return {"use_sliding_window": W is not None, "sliding_window": W, "layer_types": types}


def written_scale(config: File) -> dict[str, Any]:
    """GPT-2's two switches of the scale of scores."""
    if config["family"] != "gpt2":
        return {}
    by_layer = not math.isclose(config["score_scale"][0], config["score_scale"][-1])
    return {"scale_attn_weights": config["score_scale"][0] != 1.0, "scale_attn_by_inverse_layer_idx": by_layer}
