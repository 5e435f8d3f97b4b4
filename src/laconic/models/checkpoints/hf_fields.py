"""Keys of Hugging Face config.json files: one pydantic model per family, with transformers' defaults.

Fields are named as in DecoderConfig; the alias is the key in the file where that differs. Unknown keys are ignored,
except for the few that change the mathematics (FIXED_KEYS).
"""

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}  # torch's short names


def parse_dtype_name(value: Any) -> Any:
    """Return the name of a dtype without "torch."; if each part has its own, the whole model's, as transformers does.

    "auto" and float8, which weights are stored but not computed in, become None, which leaves the choice to the reader.
    """
    if isinstance(value, dict):
        value = cast(dict[str, Any], value).get("")
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    return None if name == "auto" or name.startswith("float8_") else DTYPE_ALIASES.get(name, name)


MAX_LAYERS = 1000  # this and the following limits are far above real models, and checked before anything is built
NumLayers = Annotated[int, Field(gt=0, le=MAX_LAYERS)]
Size = Annotated[int, Field(gt=0, le=2**24)]  # the bytes of any weight fit in 63 bits
HeadSize = Annotated[int, Field(gt=0, le=2**16)]  # of heads, also their number
NumPositions = Annotated[int, Field(gt=0, le=2**31)]
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # some files write "none" as a negative number
Probability = Annotated[float, Field(ge=0, lt=1)]
ActivationName = Literal[
    "silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast",
    "gelu_accurate", "gelu_10", "quick_gelu", "relu", "relu2", "relu6", "leaky_relu", "hardswish", "mish", "sigmoid",
    "tanh", "linear",
]  # fmt: skip
DtypeName = Annotated[Literal["float64", "float32", "bfloat16", "float16"] | None, BeforeValidator(parse_dtype_name)]
LayerType = Literal["full_attention", "sliding_attention"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
NULLABLE = ("bos_token_id", "eos_token_id", "pad_token_id", "sliding_window")  # null differs from absent

RMS_NORM_AND_ROPE = {
    "norm_type": "rms",
    "position_encoding": "rope",
    "position_offset": 0,
    "qk_norm": False,
    "gated_mlp": True,
    "qkv_bias": False,
    "o_bias": False,
    "mlp_bias": False,
}
LAYER_NORM_AND_TABLE = {
    "norm_type": "layer",
    "position_encoding": "table",
    "position_offset": 0,
    "qk_norm": False,
    "gated_mlp": False,
    "rope": None,
}


class JsonModel(BaseModel):
    """Base: unknown keys are ignored, types are not coerced."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class TokenIds(JsonModel):
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | None = None


class GenerationTokenIds(TokenIds):
    """Special token ids in generation_config.json, where transformers does not check types: "2" and 2.0 are 2."""

    model_config = ConfigDict(strict=False)


class RopeTable(JsonModel):
    """`rope_parameters` (new spelling) or `rope_scaling` (old spelling)."""

    rope_type: RopeKind | None = None
    type: RopeKind | None = None
    rope_theta: PositiveFloat | None = None
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: NumPositions | None = Field(None, strict=False)  # some files have 32768.0
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    truncate: bool | None = None
    mscale: NonNegativeFloat | None = None
    mscale_all_dim: NonNegativeFloat | None = None
    attention_factor: NonNegativeFloat | None = None
    short_factor: tuple[PositiveFloat, ...] | None = Field(None, strict=False)
    long_factor: tuple[PositiveFloat, ...] | None = Field(None, strict=False)


class FamilyKeys(TokenIds):
    """Keys of every family. `constants` are fields of DecoderConfig that no file of the family sets."""

    architecture: ClassVar[str]
    constants: ClassVar[dict[str, Any]]

    architectures: Annotated[list[str], BeforeValidator(lambda x: [x] if isinstance(x, str) else x)] = []
    vocab_size: Size
    num_hidden_layers: NumLayers
    tie_word_embeddings: bool = False
    initializer_range: NonNegativeFloat = 0.02
    dtype: DtypeName = None
    torch_dtype: DtypeName = None


class RopeFamilyKeys(FamilyKeys):
    """Keys of the families with RoPE, RMSNorm and a gated MLP."""

    constants: ClassVar[dict[str, Any]] = RMS_NORM_AND_ROPE

    hidden_size: Size
    num_attention_heads: HeadSize
    num_key_value_heads: HeadSize | None
    head_dim: HeadSize | None = None
    intermediate_size: Size
    max_position_embeddings: NumPositions = 32768
    norm_eps: NonNegativeFloat = Field(1e-6, alias="rms_norm_eps")
    activation: ActivationName = Field("silu", alias="hidden_act")
    dropout_attention: Probability = Field(0.0, alias="attention_dropout")
    rope_theta: PositiveFloat = 10000.0
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: NumPositions | None = None
    layer_types: list[LayerType] | None = None


class LlamaKeys(RopeFamilyKeys):
    architecture = "LlamaForCausalLM"

    num_key_value_heads: HeadSize | None = None
    max_position_embeddings: NumPositions = 2048
    qkv_bias: bool = Field(False, alias="attention_bias")
    o_bias: bool = Field(False, alias="attention_bias")
    mlp_bias: bool = False
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2


class MistralKeys(RopeFamilyKeys):
    architecture = "MistralForCausalLM"

    max_position_embeddings: NumPositions = 131072
    sliding_window: NumPositions | None = 4096
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2


class Qwen2Keys(RopeFamilyKeys):
    architecture = "Qwen2ForCausalLM"
    constants = RMS_NORM_AND_ROPE | {"qkv_bias": True}

    sliding_window: NumPositions | None = 4096
    use_sliding_window: bool = False
    max_window_layers: NonNegativeInt = 28


class Qwen3Keys(Qwen2Keys):
    architecture = "Qwen3ForCausalLM"
    constants = RMS_NORM_AND_ROPE | {"qk_norm": True}

    head_dim: HeadSize | None = 128
    qkv_bias: bool = Field(False, alias="attention_bias")
    o_bias: bool = Field(False, alias="attention_bias")


class SmolLM3Keys(RopeFamilyKeys):
    architecture = "SmolLM3ForCausalLM"

    num_key_value_heads: HeadSize | None = 4
    rope_theta: PositiveFloat = 2000000.0
    no_rope_layers: list[Literal[0, 1]] | None = None  # 1: the layer has RoPE
    no_rope_layer_interval: NumLayers = 4
    sliding_window: NumPositions | None = None
    use_sliding_window: bool = False
    qkv_bias: bool = Field(False, alias="attention_bias")
    o_bias: bool = Field(False, alias="attention_bias")
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: TokenId | None = 128000
    eos_token_id: TokenId | list[TokenId] | None = 128001
    pad_token_id: TokenId | None = 128004


class GPT2Keys(FamilyKeys):
    architecture = "GPT2LMHeadModel"
    constants = LAYER_NORM_AND_TABLE | {"qkv_bias": True, "o_bias": True, "mlp_bias": True}

    hidden_size: Size = Field(alias="n_embd")
    num_hidden_layers: NumLayers = Field(alias="n_layer")
    num_attention_heads: HeadSize = Field(alias="n_head")
    intermediate_size: Size | None = Field(None, alias="n_inner")
    max_position_embeddings: NumPositions = Field(1024, alias="n_positions")
    norm_eps: NonNegativeFloat = Field(1e-5, alias="layer_norm_epsilon")
    activation: ActivationName = Field("gelu_new", alias="activation_function")
    tie_word_embeddings: bool = True
    dropout_embedding: Probability = Field(0.1, alias="embd_pdrop")
    dropout_attention: Probability = Field(0.1, alias="attn_pdrop")
    dropout_residual: Probability = Field(0.1, alias="resid_pdrop")
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    bos_token_id: TokenId | None = 50256
    eos_token_id: TokenId | list[TokenId] | None = 50256


class OPTKeys(FamilyKeys):
    architecture = "OPTForCausalLM"
    constants = LAYER_NORM_AND_TABLE | {"position_offset": 2, "norm_eps": 1e-5}

    hidden_size: Size
    num_attention_heads: HeadSize
    intermediate_size: Size = Field(alias="ffn_dim")
    max_position_embeddings: NumPositions = 2048
    qkv_bias: bool = Field(True, alias="enable_bias")
    o_bias: bool = Field(True, alias="enable_bias")
    mlp_bias: bool = Field(True, alias="enable_bias")
    activation: ActivationName = Field("relu", alias="activation_function")
    tie_word_embeddings: bool = True
    initializer_range: NonNegativeFloat = Field(0.02, alias="init_std")
    dropout_attention: Probability = Field(0.0, alias="attention_dropout")
    dropout_residual: Probability = Field(0.1, alias="dropout")
    word_embed_proj_dim: Size | None = None
    bos_token_id: TokenId | None = 2
    eos_token_id: TokenId | list[TokenId] | None = 2
    pad_token_id: TokenId | None = 1


FAMILIES: dict[str, type[FamilyKeys]] = {
    "llama": LlamaKeys,
    "mistral": MistralKeys,
    "qwen2": Qwen2Keys,
    "qwen3": Qwen3Keys,
    "smollm3": SmolLM3Keys,
    "gpt2": GPT2Keys,
    "opt": OPTKeys,
}
FIXED_KEYS: dict[str, tuple[Any, ...]] = {  # keys that change the mathematics, with their supported values
    "quantization_config": (),
    "num_experts": (0,),
    "per_layer_config": (),
    "add_cross_attention": (False,),
    "do_layer_norm_before": (True,),
    "layer_norm_elementwise_affine": (True,),
    "_remove_final_layer_norm": (False,),
    "layerdrop": (0,),
    "partial_rotary_factor": (1,),  # transformers rotates whole heads of these families all the same, vLLM a part
}
DERIVED_KEYS = frozenset(  # keys that are not fields of DecoderConfig, but enter into some
    {"architectures", "dtype", "torch_dtype", *NULLABLE, *vars(RopeTable)["__annotations__"], "rope_parameters"}
    | {"rope_scaling", "layer_types", "use_sliding_window", "max_window_layers", "word_embed_proj_dim"}
    | {"scale_attn_weights", "scale_attn_by_inverse_layer_idx", "no_rope_layers", "no_rope_layer_interval"}
)
HF_KEYS: dict[str, dict[str, str]] = {  # family -> field of DecoderConfig (dropout_* for its parts) -> key in the file
    family: {name: field.alias or name for name, field in keys.model_fields.items() if name not in DERIVED_KEYS}
    for family, keys in FAMILIES.items()
}
ROPE_FIELDS: dict[str, tuple[str, ...]] = {  # fields of RopeConfig that a kind of scaling reads
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim",
        "attention_factor",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
}  # fmt: skip
REQUIRED_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
MISSING_FEATURES: dict[str, tuple[str, ...]] = {  # what the models of other types need and the decoder does not have
    "ALiBi position biases": ("bloom", "mpt"),
    "parallel attention and MLP": ("cohere", "falcon", "RefinedWeb"),
    "parallel attention and MLP, and RoPE on a part of each head": ("gpt_neox", "gptj", "phi"),
    "state-space layers": ("falcon_mamba", "mamba", "mamba2"),
    "linear attention": ("qwen3_5", "qwen3_next"),
    "scaled embeddings and norms of 1 + weight": ("gemma", "gemma3", "gemma3_text"),
    "scaled embeddings, norms of 1 + weight and capped logits": ("gemma2",),
    "multipliers of embeddings, residuals and logits": ("granite",),
    "norms without weights": ("olmo",),
    "norms after attention and MLP": ("olmo2", "olmo3"),
    "one projection for q, k and v, and one for gate and up": ("phi3",),
    "LayerNorm with RoPE on a part of each head": ("stablelm",),
    "LayerNorm with RoPE": ("starcoder2",),
}
