"""DecoderConfig: config.json files are read and written as transformers does; unsupported ones are refused."""

import copy
import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from laconic.errors import InputError, UsageError
from laconic.models.checkpoints import hf_fields
from laconic.models.checkpoints.hf_config import to_hf_config
from laconic.models.config import WEIGHT_NAMES, DecoderConfig, DropoutRates, RopeConfig
from laconic.models.decoder import Decoder
from laconic.models.ops.activation_functions import ACTIVATIONS
from laconic.models.ops.rope_scaling import ROPE_SCALINGS
from tests.conftest import needs

FAMILIES = list(WEIGHT_NAMES)
ROTARY = ["llama", "mistral", "qwen2", "qwen3", "smollm3"]
THETAS = {"smollm3": 2e6}
FULL, SLIDING = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4}
SIZES |= {"vocab_size": 97, "intermediate_size": 64}


def file(family: str = "llama", **more: Any) -> dict[str, Any]:
    """Return a config.json with the required keys, and more."""
    sizes = SIZES
    if family == "gpt2":
        sizes = {"n_embd": 48, "n_layer": 3, "n_head": 8, "vocab_size": 97}
    if family == "opt":
        sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "intermediate_size")}
        sizes |= {"ffn_dim": 64}
    if family == "smollm3":
        more = {"pad_token_id": None, **more}  # the default is beyond this vocabulary
    return {"model_type": family, **sizes, **more}


def transformers() -> Any:
    needs("transformers")
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


# ---- against transformers -------------------------------------------------------------------------------------------


def reference_model(source: dict[str, Any]) -> Any:
    """Return transformers' model for a config.json, on the meta device."""
    library = transformers()
    source = copy.deepcopy(source)
    with torch.device("meta"):
        return library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(**source))


def biases(module: nn.Module) -> bool:
    return module.bias is not None


def agree(ours: DecoderConfig, model: Any) -> None:
    """Assert that every field agrees with transformers' modules and configuration."""
    reference, base, names = model.config, model.base_model, WEIGHT_NAMES[ours.family]
    layers = model.get_submodule(names.layers)
    assert ours.num_hidden_layers == len(layers)
    assert (ours.vocab_size, ours.hidden_size) == model.get_submodule(names.token_embedding).weight.shape
    assert ours.tie_word_embeddings == reference.tie_word_embeddings
    assert ours.max_position_embeddings == reference.max_position_embeddings
    assert ours.dtype == (reference.dtype or torch.float32)
    assert ours.bos_token_id == reference.bos_token_id
    assert ours.eos_token_ids == tuple(config_ids(reference.eos_token_id))
    assert ours.pad_token_id == reference.pad_token_id
    for l, layer in enumerate(layers):
        agree_layer(ours, names, layer, l)
    if names.position_embedding:
        rows = model.get_submodule(names.position_embedding).weight.shape[0]
        assert rows == ours.max_position_embeddings + ours.position_offset
    final = model.get_submodule(names.final_norm)
    assert ours.norm_type == ("layer" if isinstance(final, nn.LayerNorm) else "rms")
    assert ours.norm_eps == (final.eps if ours.norm_type == "layer" else final.variance_epsilon)
    assert ours.sliding_windows == reference_windows(reference)
    std = reference.init_std if ours.family == "opt" else reference.initializer_range
    assert ours.initializer_range == std
    embedding = base.drop.p if ours.family == "gpt2" else 0.0
    residual = {"gpt2": lambda: layers[0].mlp.dropout.p, "opt": lambda: layers[0].dropout}
    attention = reference.attn_pdrop if ours.family == "gpt2" else reference.attention_dropout
    assert ours.dropout == DropoutRates(embedding, attention, residual.get(ours.family, lambda: 0.0)())
    assert (ours.rope is not None) == hasattr(base, "rotary_emb")


def agree_layer(ours: DecoderConfig, names: Any, layer: Any, l: int) -> None:
    H, G, E, D = ours.num_attention_heads, ours.num_key_value_heads, ours.head_dim, ours.hidden_size
    attention = layer.get_submodule((names.q or names.qkv).split(".")[0])
    assert attention.scaling == ours.attention_scales[l]
    assert attention.head_dim == E
    assert (l in ours.nope_layers) == (not getattr(attention, "use_rope", True))
    if names.qkv:
        assert layer.get_submodule(names.qkv).weight.shape == (D, (H + 2 * G) * E)
        assert biases(layer.get_submodule(names.qkv)) == ours.qkv_bias
    else:
        for role, heads in ((names.q, H), (names.k, G), (names.v, G)):
            assert layer.get_submodule(role).weight.shape == (heads * E, D)
            assert biases(layer.get_submodule(role)) == ours.qkv_bias
    assert biases(layer.get_submodule(names.o)) == ours.o_bias
    assert ours.qk_norm == hasattr(attention, "q_norm") == (names.q_norm is not None)
    assert ours.gated_mlp == (names.gate is not None)
    down = layer.get_submodule(names.down)
    for role in (names.gate, names.up, names.down):
        assert role is None or biases(layer.get_submodule(role)) == ours.mlp_bias
    shape = (ours.intermediate_size, D) if names.down in names.transposed else (D, ours.intermediate_size)
    assert down.weight.shape == shape
    act = layer.mlp.act if ours.family == "gpt2" else layer.activation_fn if ours.family == "opt" else layer.mlp.act_fn
    x = torch.linspace(-3, 3, 31)
    assert torch.allclose(act(x), ACTIVATIONS[ours.activation](x), atol=6e-7)


def config_ids(eos: Any) -> list[int]:
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def reference_windows(reference: Any) -> tuple[int | None, ...]:
    """Return the window of each layer as transformers applies it."""
    L, W = reference.num_hidden_layers, getattr(reference, "sliding_window", None)
    if reference.model_type == "mistral":
        return (W,) * L
    if reference.model_type in ("qwen2", "qwen3", "smollm3"):
        return tuple(W if kind == "sliding_attention" else None for kind in reference.layer_types)
    return (None,) * L


def agree_rope(ours: DecoderConfig, model: Any, source: dict[str, Any]) -> None:
    """Assert that RoPE frequencies agree with transformers' for the same file, at short and long lengths."""
    library = transformers()
    reference = library.AutoConfig.for_model(**copy.deepcopy(source))
    rotary = type(model.base_model.rotary_emb)(reference)
    assert ours.rope is not None
    positions = [40, ours.rope.pretrained_positions + 5, ours.max_position_embeddings + 70]
    for longest in positions:
        rotary(torch.zeros(1), torch.tensor([[longest - 1]]))
        omega, a = ROPE_SCALINGS[ours.rope.kind](ours.rope, ours.head_dim, torch.tensor([longest]))
        assert torch.allclose(omega.reshape(-1), rotary.inv_freq, rtol=1e-6, atol=0), longest
        assert a == pytest.approx(rotary.attention_scaling, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("torch.bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("half", torch.float16),
        ("auto", torch.float32),
        ("float8_e4m3fn", torch.float32),
        ({"": "bfloat16", "text_config": "float16"}, torch.bfloat16),
        ({"text_config": "float16"}, torch.float32),
    ],
)
def test_config_reads_every_spelling_of_a_dtype(name: Any, dtype: torch.dtype) -> None:
    assert DecoderConfig.from_dict(file(torch_dtype=name)).dtype == dtype
    assert DecoderConfig.from_dict(file(dtype=name)).dtype == dtype


MINIMAL = [file(family) for family in FAMILIES]
UNUSUAL = [
    file("llama", num_key_value_heads=None, head_dim=10, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    file("llama", rms_norm_eps=1e-5, hidden_act="gelu", attention_dropout=0.1, bos_token_id=None, eos_token_id=[2, 3]),
    file("llama", architectures="LlamaForCausalLM", partial_rotary_factor=1.0),
    file("llama", sliding_window=16, initializer_range=0.5, torch_dtype="bfloat16", pad_token_id=0, pretraining_tp=2),
    file("llama", rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32.0}),
    file("mistral", sliding_window=None, head_dim=20, dtype="float16", torch_dtype="float32"),
    file("mistral", sliding_window=7, num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True),
    file("qwen2", sliding_window=9, use_sliding_window=False, attention_bias=False, tie_word_embeddings=True),
    file("qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=1, hidden_act="gelu_pytorch_tanh"),
    file("qwen2", use_sliding_window=True, max_window_layers=0, eos_token_id=5, head_dim=14),
    file("qwen2", sliding_window=None, use_sliding_window=True, max_window_layers=0),
    file("qwen2", num_hidden_layers=30, use_sliding_window=True),
    file("qwen3", head_dim=12, attention_bias=True, attention_dropout=0.25),
    file("qwen3", sliding_window=5, use_sliding_window=True, layer_types=[SLIDING, FULL, SLIDING]),
    file("smollm3", no_rope_layers=[1, 0, 1, 1], attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    file("smollm3", no_rope_layer_interval=2, sliding_window=5, use_sliding_window=True),
    file("smollm3", sliding_window=5, use_sliding_window=True, layer_types=[FULL, FULL, SLIDING]),
    file("gpt2", n_inner=100, n_positions=77, layer_norm_epsilon=1e-3, activation_function="relu"),
    file("gpt2", n_inner=None, embd_pdrop=0.2, attn_pdrop=0.3, resid_pdrop=0.4, tie_word_embeddings=False),
    file("gpt2", scale_attn_weights=False, activation_function="gelu_pytorch_tanh", n_ctx=1024),
    file("gpt2", scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True, activation_function="swish"),
    *(file("llama", hidden_act=act) for act in get_args(hf_fields.ActivationName)),
    file("opt", enable_bias=False, dropout=0.0, attention_dropout=0.3, activation_function="gelu", init_std=0.1),
    file("opt", word_embed_proj_dim=48, tie_word_embeddings=False, max_position_embeddings=50, pad_token_id=None),
]


@pytest.mark.parametrize("source", MINIMAL + UNUSUAL, ids=lambda source: source["model_type"])
def test_config_from_dict_equals_transformers(source: dict[str, Any]) -> None:
    agree(DecoderConfig.from_dict(source), reference_model(source))


@pytest.mark.parametrize("source", MINIMAL + UNUSUAL, ids=lambda source: source["model_type"])
def test_config_from_folder_reads_files_saved_by_transformers(source: dict[str, Any], tmp_path: Path) -> None:
    reference = transformers().AutoConfig.for_model(**copy.deepcopy(source))
    reference.save_pretrained(tmp_path)
    assert DecoderConfig.from_folder(tmp_path) == DecoderConfig.from_dict(source)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_defaults_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = transformers().AutoConfig.for_model(family, num_hidden_layers=2)
    reference.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers().AutoModelForCausalLM.from_config(reference)
    agree(DecoderConfig.from_folder(tmp_path), model)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0 + i / 4 for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "factor": 4},
    {"rope_type": "dynamic", "factor": 2.5},
    {**LLAMA3, "original_max_position_embeddings": 64},
    LLAMA3,
    YARN,
    {**YARN, "factor": None},
    {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {**YARN, "attention_factor": 1.5},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    {**YARN, "mscale": 0.7},
    {"rope_type": "yarn", "factor": 3.0},
    {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 64},
    {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 64, "factor": 3.0},
    {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 64, "attention_factor": 1.25},
]


@pytest.mark.parametrize("table", ROPES, ids=lambda table: table["rope_type"])
def test_rope_spellings_agree_with_one_another_and_transformers(table: dict[str, Any]) -> None:
    with_theta = {"rope_theta": 1234.5, **table}
    theta = with_theta["rope_theta"]
    sizes: dict[str, Any] = {"head_dim": 12, "max_position_embeddings": 256}
    typed = {"type" if key == "rope_type" else key: value for key, value in table.items() if key != "rope_theta"}
    bare = {key: value for key, value in typed.items() if key != "type"}
    spellings = [
        file(**sizes, rope_parameters=with_theta),
        file(**sizes, rope_scaling=typed, rope_theta=theta),
        file(**sizes, rope_scaling={**bare, "rope_type": table["rope_type"]}, rope_theta=theta),
        file(**sizes, rope_scaling=with_theta, rope_theta=99.0),
        file(**sizes, rope_scaling={**with_theta, "type": "mrope"}),
        file(**sizes, rope_parameters=with_theta, rope_scaling=typed, rope_theta=theta),
        file(**sizes, rope_parameters=with_theta, rope_scaling=None),
    ]
    read = [DecoderConfig.from_dict(source) for source in spellings]
    assert all(one == read[0] for one in read)
    for ours, source in zip(read, spellings, strict=True):
        agree_rope(ours, reference_model(source), source)


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("more", [{}, {"rope_theta": 777}, {"rope_parameters": {"rope_theta": 777.0}}])
def test_rope_defaults_of_every_family(family: str, more: dict[str, Any]) -> None:
    source = file(family, head_dim=12, max_position_embeddings=256, **more)
    ours, theta = DecoderConfig.from_dict(source), 777.0 if more else THETAS.get(family, 1e4)
    assert ours.rope == RopeConfig(theta=theta, max_position_embeddings=256)
    agree_rope(ours, reference_model(source), source)


@pytest.mark.parametrize("kind", [YARN, {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 64}])
def test_rope_pretraining_length_beside_the_table_wins(kind: dict[str, Any]) -> None:
    """As in transformers; Phi-3 writes it there."""
    source = file(head_dim=12, max_position_embeddings=256, rope_scaling=kind, original_max_position_embeddings=128)
    ours = DecoderConfig.from_dict(source)
    assert ours.rope is not None
    assert ours.rope.original_max_position_embeddings == 128
    agree_rope(ours, reference_model(source), source)


@pytest.mark.parametrize("family", ROTARY)
def test_rope_null_means_default(family: str) -> None:
    empty = DecoderConfig.from_dict(file(family, rope_scaling=None, rope_parameters=None))
    assert empty == DecoderConfig.from_dict(file(family, rope_scaling={}, rope_parameters={}))
    theta, positions = THETAS.get(family, 1e4), empty.max_position_embeddings
    assert empty.rope == RopeConfig(theta=theta, max_position_embeddings=positions)


sizes_strategy = st.fixed_dictionaries(
    {
        "num_hidden_layers": st.integers(1, 4),
        "vocab_size": st.integers(5, 200),
        "intermediate_size": st.integers(1, 90),
        "max_position_embeddings": st.integers(1, 300),
        "rms_norm_eps": st.floats(1e-8, 1e-2),
        "rope_theta": st.floats(2.0, 1e7),
        "attention_dropout": st.sampled_from([0.0, 0.1]),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "use_sliding_window": st.booleans(),
        "sliding_window": st.none() | st.integers(1, 50),
        "max_window_layers": st.integers(0, 5),
        "eos_token_id": st.none() | st.integers(0, 4) | st.lists(st.integers(0, 4), min_size=1, max_size=3),
        "pad_token_id": st.none() | st.integers(0, 4),
        "hidden_act": st.sampled_from(get_args(hf_fields.ActivationName)),
    }
)


@pytest.mark.medium
@given(st.sampled_from(ROTARY), sizes_strategy, st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.data())
def test_config_of_random_files_equals_transformers(
    family: str, keys: dict[str, Any], G: int, R: int, half: int, data: Any
) -> None:
    source = file(family, **keys, num_attention_heads=G * R, num_key_value_heads=G, hidden_size=G * R * 2)
    source |= {"head_dim": 2 * half}
    present = data.draw(st.sets(st.sampled_from(sorted(keys.keys() - SIZES.keys()))))
    source = {key: value for key, value in source.items() if key in present or key not in keys or key in SIZES}
    source = {"pad_token_id": None, **source} if family == "smollm3" else source
    ours = DecoderConfig.from_dict(source)
    agree(ours, reference_model(source))
    assert DecoderConfig.from_dict(dataclasses.replace(ours, source="").to_config_json()) == ours


# ---- what is written ------------------------------------------------------------------------------------------------

CHANGES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    *(
        (family, {"tie_word_embeddings": True, "dtype": torch.bfloat16, "eos_token_ids": (1, 2), "bos_token_id": None})
        for family in FAMILIES
    ),
    *((family, {"tie_word_embeddings": False, "pad_token_id": 0, "eos_token_ids": ()}) for family in FAMILIES),
    *((family, {"num_hidden_layers": 3, "vocab_size": 50, "intermediate_size": 7}) for family in FAMILIES),
    *((family, {"head_dim": 12, "num_key_value_heads": 1, "norm_eps": 1e-3}) for family in ROTARY),
    *((family, {"rope": RopeConfig("linear", 500.0, factor=2.0)}) for family in ROTARY),
    ("llama", {"rope": RopeConfig("llama3", 5e5, 8.0, original_max_position_embeddings=32)}),
    ("llama", {"rope": RopeConfig("yarn", 1e4, 4.0, original_max_position_embeddings=32, truncate=False, mscale=0.5)}),
    ("llama", {"rope": RopeConfig("longrope", short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, attention_factor=1.1)}),
    ("llama", {"rope": RopeConfig("dynamic", factor=2.0), "qkv_bias": True, "o_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_windows": (None, None)}),
    ("qwen2", {"sliding_windows": (None, 8)}),
    ("qwen3", {"sliding_windows": (8, None), "activation": "gelu"}),
    ("gpt2", {"attention_scales": (12**-0.5, 12**-0.5 / 2), "dropout": DropoutRates(0.1, 0.2, 0.3)}),
    ("gpt2", {"attention_scales": (1.0, 1.0), "max_position_embeddings": 60, "hidden_size": 48}),
    ("opt", {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "dropout": DropoutRates(0.0, 0.2, 0.3)}),
]


@pytest.mark.parametrize(("family", "changes"), CHANGES)
def test_to_config_json_is_loaded_by_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    ours = DecoderConfig.tiny(family, **changes)
    for name, value in changes.items():
        reference = getattr(ours, name)
        assert reference == (dataclasses.replace(value, max_position_embeddings=128) if name == "rope" else value)
    (tmp_path / "config.json").write_text(json.dumps(ours.to_config_json()))
    assert DecoderConfig.from_folder(tmp_path) == ours
    reference = transformers().AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers().AutoModelForCausalLM.from_config(reference)
    agree(ours, model)
    assert [type(model).__name__] == ours.to_config_json()["architectures"]
    if ours.rope is not None:
        agree_rope(ours, model, ours.to_config_json())


@pytest.mark.parametrize("source", MINIMAL + UNUSUAL, ids=lambda source: source["model_type"])
def test_to_config_json_of_an_unchanged_file_is_identical(source: dict[str, Any]) -> None:
    source = {**source, "_name_or_path": "über/model", "auto_map": {"AutoModel": "x.Y"}, "use_cache": True}
    written = DecoderConfig.from_dict(source, {"eos_token_id": [7, 8], "bos_token_id": 9}).to_config_json()
    assert written == source
    assert list(written) == list(source)


@pytest.mark.parametrize(
    ("file_keys", "changes", "expected"),
    [
        ({}, {"vocab_size": 99}, {"vocab_size": 99}),
        ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ({}, {"dtype": torch.float16}, {"dtype": "float16"}),
        ({"torch_dtype": "bfloat16"}, {"dtype": torch.float32}, {"torch_dtype": "float32"}),
        ({"dtype": "bfloat16"}, {"dtype": torch.float32}, {"dtype": "float32"}),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5e3}, {"vocab_size": 9}, {"vocab_size": 9}),
        ({}, {"norm_eps": 1e-4, "eos_token_ids": (5,)}, {"rms_norm_eps": 1e-4}),
    ],
)
def test_to_config_json_updates_only_changed_keys(
    file_keys: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    source = file(**file_keys)
    changed = dataclasses.replace(DecoderConfig.from_dict(source), **changes)
    assert changed.to_config_json() == {**source, **expected}


def test_to_config_json_removes_the_old_rope_spelling() -> None:
    source = file(rope_scaling={"type": "linear", "factor": 2}, rope_theta=5e3, original_max_position_embeddings=9)
    ours = DecoderConfig.from_dict(source)
    changed = dataclasses.replace(ours, rope=RopeConfig("yarn", 7e3, 4.0, max_position_embeddings=2048))
    written = changed.to_config_json()
    assert not written.keys() & {"rope_scaling", "rope_theta", "original_max_position_embeddings"}
    assert DecoderConfig.from_dict(written) == changed


@pytest.mark.parametrize(
    ("family", "changes", "names"),
    [
        ("llama", {"sliding_windows": (4, None)}, "sliding_windows"),
        ("mistral", {"sliding_windows": (4, None)}, "sliding_windows"),
        ("qwen2", {"sliding_windows": (4, 5), "o_bias": True}, "o_bias, windows"),
        ("opt", {"norm_eps": 1e-3}, "norm_eps"),
        ("gpt2", {"attention_scales": (0.1, 0.3)}, "attention_scales"),
        ("qwen3", {"rope": None}, "rope"),
    ],
)
def test_to_config_json_refuses_what_the_family_cannot_express(
    family: str, changes: dict[str, Any], names: str
) -> None:
    new = DecoderConfig.tiny(family, **changes)
    from_file = dataclasses.replace(DecoderConfig.from_dict(DecoderConfig.tiny(family).to_config_json()), **changes)
    for config in (new, from_file):
        with pytest.raises(InputError, match="cannot express") as error:
            config.to_config_json()
        assert all(name in str(error.value) for name in names.split(", "))


def test_config_is_a_hashable_value() -> None:
    one, two = DecoderConfig.from_dict(file()), DecoderConfig.from_dict(file(use_cache=True))
    assert one == two
    assert hash(one) == hash(two)
    assert copy.deepcopy(one) == one
    assert one.source != two.source
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.vocab_size = 3  # type: ignore[misc]


def test_config_tables_cover_what_is_implemented() -> None:
    assert set(get_args(hf_fields.ActivationName)) == set(ACTIVATIONS)
    assert list(get_args(hf_fields.RopeKind)) == list(hf_fields.ROPE_FIELDS) == list(ROPE_SCALINGS)
    assert list(hf_fields.FAMILIES) == FAMILIES
    assert {f.name for f in dataclasses.fields(RopeConfig)} == {"kind", "theta", "max_position_embeddings"}.union(
        *hf_fields.ROPE_FIELDS.values()
    )


# ---- token ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config_ids", "generation", "bos", "eos", "pad"),
    [
        ({}, None, 1, (2,), None),
        ({"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7}, None, 5, (6,), 7),
        ({"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}, None, None, (), None),
        ({"eos_token_id": [6, 7]}, {"eos_token_id": [8, 9]}, 1, (8, 9), None),
        ({"eos_token_id": [6, 7]}, {"bos_token_id": 3, "pad_token_id": 4}, 3, (6, 7), 4),
        ({"pad_token_id": -1}, {"eos_token_id": 0, "temperature": 0.6}, 1, (0,), None),
        ({"bos_token_id": 5}, {"bos_token_id": None}, 5, (2,), None),
        ({}, {"eos_token_id": "6"}, 1, (6,), None),
        ({}, {"eos_token_id": [6.0, "7"], "pad_token_id": 8.0}, 1, (6, 7), 8),
    ],
)
def test_token_ids_prefer_generation_config(
    config_ids: dict[str, Any], generation: dict[str, Any] | None, bos: Any, eos: Any, pad: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(file(**config_ids)))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    ours = DecoderConfig.from_folder(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_ids, ours.pad_token_id) == (bos, eos, pad)


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "phi3"}, 'model_type="phi3" is not supported'),
    ({}, "model_type=null is not supported"),
    ({"model_type": ["llama"]}, "model_type"),
    (file(rope_parameters={"rope_type": "proportional"}), r"rope_parameters\.rope_type"),
    (file(rope_scaling={"type": "su", "factor": 2}), r"rope_scaling\.type"),
    (file(num_key_value_heads=3), "num_key_value_heads=3 does not divide"),
    (file(hidden_size=50), "does not divide hidden_size=50"),
    (file("gpt2", n_embd=50), "n_head=8 does not divide n_embd=50"),
    (file(head_dim=7), "head_dim=7 is odd"),
    (file(hidden_act="xielu"), "hidden_act"),
    (file("gpt2", activation_function="prelu"), "activation_function"),
    (file(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (file(rope_parameters={"partial_rotary_factor": 0.5}), r"rope_parameters\.partial_rotary_factor"),
    (file("qwen3", rope_parameters={"full_attention": {"rope_theta": 1e4}}), "one table for all layers"),
    (file(rope_parameters={"rope_type": "linear"}), r"rope_parameters\.factor is missing"),
    (file(rope_scaling={"type": "dynamic", "factor": None}), r"rope_scaling\.factor is missing"),
    (file(rope_scaling={"type": "longrope", "short_factor": [1.0]}), "long_factor is missing"),
    (
        file(rope_scaling={"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}),
        "long_factor has 4 entries",
    ),
    (file(rope_scaling={"type": "longrope", "short_factor": [0.0], "long_factor": [1.0]}), "short_factor"),
    (file(rope_parameters=[1]), "rope_parameters"),
    (file(rope_theta=0), "rope_theta=0"),
    (file(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), "quantization_config"),
    (file(num_experts=8), "num_experts=8"),
    (file(per_layer_config={"0": {}}), "per_layer_config"),
    (file("gpt2", add_cross_attention=True), "add_cross_attention"),
    (file("opt", do_layer_norm_before=False), "do_layer_norm_before"),
    (file("opt", layerdrop=0.1), "layerdrop"),
    (file("opt", word_embed_proj_dim=24), "word_embed_proj_dim=24"),
    (file("qwen3", layer_types=["full_attention", "linear_attention", "full_attention"]), "layer_types"),
    (file("qwen3", layer_types=["full_attention"]), "1 entries for 3 layers"),
    (file("qwen2", layer_types=["full_attention", "sliding_attention", "full_attention"]), "layer 1 no window"),
    (file("smollm3", no_rope_layers=[1, 0]), "no_rope_layers has 2 entries for 3 layers"),
    (file("smollm3", no_rope_layers=[1, 0, 2]), "no_rope_layers"),
    (file("mistral", layer_types=["full_attention"] * 3), "layer 0 a window of 4096"),
    (file("mistral", sliding_window=0), "sliding_window=0"),
    (file("qwen2", use_sliding_window=True, max_window_layers=-1), "max_window_layers=-1"),
    (file(architectures=7), "architectures"),
    (file(hidden_size="48"), "hidden_size"),
    (file(hidden_size=True), "hidden_size=true"),
    (file(num_hidden_layers=0), "num_hidden_layers=0"),
    (file(num_hidden_layers=300_000_000), "num_hidden_layers=300000000: .* less than or equal to 1000"),
    (file("gpt2", n_layer=20_000), "n_layer=20000"),
    (file(hidden_size=2_000_000_000), "hidden_size=2000000000"),
    (file(sliding_window=10**50, model_type="mistral"), "sliding_window=1"),
    (file(eos_token_id=[10**50]), "eos_token_id="),
    (file(vocab_size=9.0), r"vocab_size=9\.0"),
    (file(attention_dropout=1), "attention_dropout=1"),
    (file(tie_word_embeddings=1), "tie_word_embeddings=1"),
    (file(bos_token_id=[1]), "bos_token_id"),
    (file(eos_token_id=[1, "2"]), "eos_token_id"),
    (file(torch_dtype="int8"), "torch_dtype"),
    (file(dtype={"": "fp16"}), "dtype"),
]


@pytest.mark.parametrize(("source", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_config_refuses_unsupported_and_invalid_keys(source: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DecoderConfig.from_dict(source)


REQUIRED = [
    (family, field.alias or name)
    for family, keys in hf_fields.FAMILIES.items()
    for name, field in keys.model_fields.items()
    if field.is_required()
]


@pytest.mark.parametrize(("family", "key"), REQUIRED)
@pytest.mark.parametrize("is_null", [True, False])
def test_config_refuses_a_missing_size(family: str, key: str, is_null: bool) -> None:
    source = {**file(family), key: None}
    if not is_null:
        del source[key]
    with pytest.raises(InputError, match=f"{key} is missing"):
        DecoderConfig.from_dict(source)


@pytest.mark.parametrize("value", ["x", "", [2, "x"], 2.5, {"a": 1}])
def test_config_warns_of_generation_ids_that_are_none(value: Any) -> None:
    with pytest.warns(UserWarning, match=r"generation_config\.json: eos_token_id=.* that of config\.json is used"):
        config = DecoderConfig.from_dict(file(eos_token_id=7), {"eos_token_id": value, "bos_token_id": 3})
    assert (config.eos_token_ids, config.bos_token_id) == ((7,), 3)


def test_config_from_folder_refuses_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        DecoderConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{\n "model_type": "llama",\n "vocab')
    with pytest.raises(InputError, match=rf"^{tmp_path}/config\.json:3:2"):
        DecoderConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=rf"^{tmp_path}: config\.json: vocab_size is missing"):
        DecoderConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(file()))
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(InputError, match=rf"^{tmp_path}/generation_config\.json:1:1"):
        DecoderConfig.from_folder(tmp_path)


def test_config_from_folder_reads_numbers_and_keys_as_python_writes_them(tmp_path: Path) -> None:
    rest = json.dumps(file(limits=[0.0, float("inf")], share=float("nan"), length=10**30, vocab_size=5))[1:]
    (tmp_path / "config.json").write_text('{"vocab_size": 5, ' + rest.replace('"vocab_size": 5', '"vocab_size": 97'))
    (tmp_path / "generation_config.json").write_text('{"max_length": Infinity, "eos_token_id": [2, 7]}')
    config = DecoderConfig.from_folder(tmp_path)
    assert (config.vocab_size, config.eos_token_ids) == (97, (2, 7))
    assert json.loads(config.source)["limits"] == [0.0, float("inf")]
    assert transformers().AutoConfig.from_pretrained(tmp_path).vocab_size == 97


@pytest.mark.parametrize("field", ["family", "activation", "norm_type", "position_encoding", "rope.kind"])
def test_decoder_refuses_an_unknown_name_in_its_config(field: str) -> None:
    config = DecoderConfig.tiny("llama")
    assert config.rope
    name = field.rpartition(".")[2]
    changes = {"rope": replace(config.rope, kind="foo")} if name == "kind" else {name: "foo"}
    with pytest.raises(UsageError, match=f"{field} 'foo' is unknown; use one of '"):
        Decoder(replace(config, **changes), seed=0)


def test_config_tiny_refuses_an_unknown_family() -> None:
    with pytest.raises(InputError, match="bert"):
        DecoderConfig.tiny("bert")


@pytest.mark.parametrize("family", FAMILIES)
def test_config_limits_leave_every_weight_countable(family: str) -> None:
    """At the largest sizes that are accepted, no weight has more bytes than torch can count."""
    limits = {"num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16, "num_hidden_layers": 1}
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 2**24) | limits
    sizes["max_position_embeddings"] = 2**31
    keys = hf_fields.HF_KEYS[family]
    config = DecoderConfig.from_dict({"model_type": family, **{keys[k]: n for k, n in sizes.items() if k in keys}})
    with torch.device("meta"):
        assert all(p.nbytes > 0 for p in Decoder(config, seed=None).parameters())


@pytest.mark.parametrize("name", ["sliding_windows", "attention_scales"])
def test_config_needs_one_entry_per_layer(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} has 3 entries for 2 layers"):
        DecoderConfig.tiny("llama", **{name: (1, 1, 1) if name == "sliding_windows" else (1.0, 1.0, 1.0)})


def test_config_accepts_or_refuses_any_value() -> None:
    """Any JSON value of a known key gives a configuration that round-trips, or an error that names the key."""
    values: list[Any] = [None, True, -1, 0, 2.5, "x", [], [None], {}, {"rope_type": 3}, {"factor": "x"}]
    for family, model in hf_fields.FAMILIES.items():
        keys = {field.alias or name for name, field in model.model_fields.items()} | hf_fields.FIXED_KEYS.keys()
        for key in sorted(keys):
            for value in values:
                source = {**file(family), key: value}
                try:
                    config = DecoderConfig.from_dict(source)
                except InputError as error:
                    message = str(error)
                else:
                    message = key
                    assert DecoderConfig.from_dict(to_hf_config(vars(config)) | {"model_type": family}) == config
                assert key in message or "num_attention_heads" in message, (source, message)
