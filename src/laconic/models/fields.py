"""What a Hugging Face config.json says, as tables: the fields of each family, their kinds and defaults."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch


class FieldSpec(NamedTuple):
    """What a value of a file must be: in words, as a check, and what it becomes; `known` lists a choice."""

    rule: str
    is_valid: Callable[[Any], bool]
    convert: Callable[[Any], Any]
    choices: str = ""


def identity(value: Any) -> Any:
    return value


def as_list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else [value]


def int_field(rule: str, least: int | None = None) -> FieldSpec:
    def holds(value: Any) -> bool:
        return type(value) is int and (least is None or value >= least)

    return FieldSpec(rule, holds, identity)


def number_field(rule: str, least: float, below: float = math.inf) -> FieldSpec:
    def holds(value: Any) -> bool:
        return type(value) in (int, float) and least <= value < below

    return FieldSpec(rule, holds, float)


def type_field(rule: str, type_: type) -> FieldSpec:
    def holds(value: Any) -> bool:
        return type(value) is type_

    return FieldSpec(rule, holds, identity)


def choice_field(names: Iterable[str], made: Callable[[Any], Any] = identity) -> FieldSpec:
    known = tuple(names)
    return FieldSpec("one of these", known.__contains__, made, ", ".join(known))


def list_field(rule: str, each: FieldSpec, made: Callable[[Any], Any], *, or_one: bool = False) -> FieldSpec:
    def holds(value: Any) -> bool:
        return (or_one or type(value) is list) and all(map(each.is_valid, as_list(value)))

    return FieldSpec(rule, holds, made)


def float_tuple(values: list[float]) -> tuple[float, ...]:
    return tuple(map(float, values))


ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DTYPE_NAMES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")
}
LAYER_TYPES = ("full_attention", "sliding_attention")
TINY = 5e-324  # the least number above 0

SIZE = int_field("a whole number ≥ 1", 1)
COUNT = int_field("a whole number ≥ 0", 0)
ID = int_field("a token id")._replace(convert=as_list)
IDS = list_field("a token id or a list of them", ID, as_list, or_one=True)
POSITIVE = number_field("a number > 0", TINY)
AMOUNT = number_field("a number ≥ 0", 0.0)
SHARE = number_field("a number in [0, 1)", 0.0, below=1.0)
NUMBERS = list_field("a list of numbers > 0", POSITIVE, float_tuple)
FLAG = type_field("true or false", bool)
OBJECT = type_field("an object", dict)
NAMED = list_field("a list of names", type_field("", str), identity)
ACT = choice_field(ACTIVATIONS)
DTYPE = choice_field(DTYPE_NAMES, DTYPE_NAMES.__getitem__)
LAYERS = list_field(f"a list of {', '.join(LAYER_TYPES)}", choice_field(LAYER_TYPES), identity)

REQUIRED = "required"
FieldRow = tuple[
    str, FieldSpec, Any
]  # key in the file, what it must be, its value if absent (None: made from other fields)

GATED_FIELDS: dict[str, FieldRow] = {
    "hidden_size": ("hidden_size", SIZE, REQUIRED),
    "num_hidden_layers": ("num_hidden_layers", SIZE, REQUIRED),
    "num_attention_heads": ("num_attention_heads", SIZE, REQUIRED),
    "vocab_size": ("vocab_size", SIZE, REQUIRED),
    "intermediate_size": ("intermediate_size", SIZE, REQUIRED),
    "num_key_value_heads": ("num_key_value_heads", SIZE, REQUIRED),
    "head_dim": ("head_dim", SIZE, None),
    "max_position_embeddings": ("max_position_embeddings", SIZE, 32768),
    "norm_eps": ("rms_norm_eps", AMOUNT, 1e-6),
    "activation": ("hidden_act", ACT, "silu"),
    "tie_word_embeddings": ("tie_word_embeddings", FLAG, False),
    "initializer_range": ("initializer_range", AMOUNT, 0.02),
    "dropout.attention": ("attention_dropout", SHARE, 0.0),
}
FAMILY_FIELDS: dict[str, dict[str, FieldRow]] = {
    "llama": GATED_FIELDS
    | {
        "num_key_value_heads": ("num_key_value_heads", SIZE, None),
        "max_position_embeddings": ("max_position_embeddings", SIZE, 2048),
        "qkv_bias": ("attention_bias", FLAG, False),
        "o_bias": ("attention_bias", FLAG, False),
        "mlp_bias": ("mlp_bias", FLAG, False),
    },
    "mistral": GATED_FIELDS | {"max_position_embeddings": ("max_position_embeddings", SIZE, 131072)},
    "qwen2": GATED_FIELDS,
    "qwen3": GATED_FIELDS
    | {
        "head_dim": ("head_dim", SIZE, 128),
        "qkv_bias": ("attention_bias", FLAG, False),
        "o_bias": ("attention_bias", FLAG, False),
    },
    "gpt2": {
        "hidden_size": ("n_embd", SIZE, REQUIRED),
        "num_hidden_layers": ("n_layer", SIZE, REQUIRED),
        "num_attention_heads": ("n_head", SIZE, REQUIRED),
        "vocab_size": ("vocab_size", SIZE, REQUIRED),
        "intermediate_size": ("n_inner", SIZE, None),
        "max_position_embeddings": ("n_positions", SIZE, 1024),
        "norm_eps": ("layer_norm_epsilon", AMOUNT, 1e-5),
        "activation": ("activation_function", ACT, "gelu_new"),
        "tie_word_embeddings": ("tie_word_embeddings", FLAG, True),
        "initializer_range": ("initializer_range", AMOUNT, 0.02),
        "dropout.embedding": ("embd_pdrop", SHARE, 0.1),
        "dropout.attention": ("attn_pdrop", SHARE, 0.1),
        "dropout.residual": ("resid_pdrop", SHARE, 0.1),
    },
    "opt": {
        "hidden_size": ("hidden_size", SIZE, REQUIRED),
        "num_hidden_layers": ("num_hidden_layers", SIZE, REQUIRED),
        "num_attention_heads": ("num_attention_heads", SIZE, REQUIRED),
        "vocab_size": ("vocab_size", SIZE, REQUIRED),
        "intermediate_size": ("ffn_dim", SIZE, REQUIRED),
        "max_position_embeddings": ("max_position_embeddings", SIZE, 2048),
        "qkv_bias": ("enable_bias", FLAG, True),
        "o_bias": ("enable_bias", FLAG, True),
        "mlp_bias": ("enable_bias", FLAG, True),
        "activation": ("activation_function", ACT, "relu"),
        "tie_word_embeddings": ("tie_word_embeddings", FLAG, True),
        "initializer_range": ("init_std", AMOUNT, 0.02),
        "dropout.attention": ("attention_dropout", SHARE, 0.0),
        "dropout.residual": ("dropout", SHARE, 0.1),
    },
}

RMS = {"norm_type": "rms", "position_encoding": "rope", "position_offset": 0, "qk_norm": False, "gated_mlp": True}
LAYER = {"norm_type": "layer", "position_encoding": "table", "qk_norm": False, "gated_mlp": False, "rope": None}
BARE = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
FAMILY_CONSTANTS: dict[str, dict[str, Any]] = {  # what no file of the family says
    "llama": RMS,
    "mistral": RMS | BARE,
    "qwen2": RMS | BARE | {"qkv_bias": True},
    "qwen3": RMS | {"qk_norm": True, "mlp_bias": False},
    "gpt2": LAYER | {"position_offset": 0, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "opt": LAYER | {"position_offset": 2, "norm_eps": 1e-5},
}
DEFAULT_TOKEN_IDS: dict[str, tuple[int | None, int | None, int | None]] = {  # bos, eos, pad if absent
    "llama": (1, 2, None),
    "mistral": (1, 2, None),
    "qwen2": (None, None, None),
    "qwen3": (None, None, None),
    "gpt2": (50256, 50256, None),
    "opt": (2, 2, 1),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
}

FIXED_FIELDS: dict[str, tuple[Any, ...]] = {  # fields of which one value is known; null is absent
    "quantization_config": (),
    "num_experts": (0,),
    "per_layer_config": (),
    "add_cross_attention": (False,),
    "do_layer_norm_before": (True,),
    "layer_norm_elementwise_affine": (True,),
    "_remove_final_layer_norm": (False,),
    "layerdrop": (0,),
    "partial_rotary_factor": (1,),
}

ORIGINAL_POSITIONS = "original_max_position_embeddings"
SCALED = ("factor", ORIGINAL_POSITIONS)
ROPE_FIELDS: dict[str, tuple[str, ...]] = {  # fields of Rope beside kind and theta, which a kind of scaling reads
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (*SCALED, "low_freq_factor", "high_freq_factor"),
    "yarn": (*SCALED, "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": (*SCALED, "short_factor", "long_factor", "attention_factor"),
}
REQUIRED_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
ROPE_FIELD_SPECS = {
    ORIGINAL_POSITIONS: SIZE,
    "truncate": FLAG,
    "mscale": AMOUNT,
    "mscale_all_dim": AMOUNT,
    "attention_factor": AMOUNT,
    "short_factor": NUMBERS,
    "long_factor": NUMBERS,
}
