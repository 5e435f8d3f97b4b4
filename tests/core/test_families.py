"""config.json in and out: field by field against transformers, every refusal by its message, what is written."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from laconic.errors import InputError
from laconic.models import block, fields, hf_config
from laconic.models.config import WEIGHT_NAMES, DecoderConfig, DropoutRates
from laconic.models.rope import ROPE_SCALINGS, RopeConfig
from tests.conftest import needs

FAMILIES = list(WEIGHT_NAMES)
ROTARY = ["llama", "mistral", "qwen2", "qwen3"]
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 97,
    "intermediate_size": 64,
}


def file(family: str = "llama", **more: Any) -> dict[str, Any]:
    """A config.json of the least fields, and more."""
    sizes = SIZES
    if family == "gpt2":
        sizes = {"n_embd": 48, "n_layer": 3, "n_head": 8, "vocab_size": 97}
    if family == "opt":
        sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "intermediate_size")}
        sizes |= {"ffn_dim": 64}
    return {"model_type": family, **sizes, **more}


def transformers() -> Any:
    needs("transformers")
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


# ---- against transformers -------------------------------------------------------------------------------------------


def reference_model(source: dict[str, Any]) -> Any:
    """transformers' model of a config.json, without memory."""
    library = transformers()
    source = copy.deepcopy(source)
    with torch.device("meta"):
        return library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(**source))


def biases(module: nn.Module) -> bool:
    return module.bias is not None


def agree(ours: DecoderConfig, model: Any) -> None:
    """Every field against what transformers' modules and configuration hold."""
    held, base, names = model.config, model.base_model, WEIGHT_NAMES[ours.family]
    layers = model.get_submodule(names.layers)
    assert ours.num_hidden_layers == len(layers)
    assert (ours.vocab_size, ours.hidden_size) == model.get_submodule(names.token_embedding).weight.shape
    assert ours.tie_word_embeddings == held.tie_word_embeddings
    assert ours.max_position_embeddings == held.max_position_embeddings
    assert ours.dtype == (held.dtype or torch.float32)
    assert ours.bos_token_id == held.bos_token_id
    assert ours.eos_token_ids == tuple(config_ids(held.eos_token_id))
    assert ours.pad_token_id == held.pad_token_id
    for l, layer in enumerate(layers):
        agree_layer(ours, names, layer, l)
    if names.position_embedding:
        assert (
            model.get_submodule(names.position_embedding).weight.shape[0]
            == ours.max_position_embeddings + ours.position_offset
        )
    final = model.get_submodule(names.final_norm)
    assert ours.norm_type == ("layer" if isinstance(final, nn.LayerNorm) else "rms")
    assert ours.norm_eps == (final.eps if ours.norm_type == "layer" else final.variance_epsilon)
    assert ours.sliding_windows == reference_windows(held)
    spread = held.init_std if ours.family == "opt" else held.initializer_range
    assert ours.initializer_range == spread
    embedding = base.drop.p if ours.family == "gpt2" else 0.0
    residual = {"gpt2": lambda: layers[0].mlp.dropout.p, "opt": lambda: layers[0].dropout}
    attention = held.attn_pdrop if ours.family == "gpt2" else held.attention_dropout
    assert ours.dropout == DropoutRates(embedding, attention, residual.get(ours.family, lambda: 0.0)())
    assert (ours.rope is not None) == hasattr(base, "rotary_emb")


def agree_layer(ours: DecoderConfig, names: Any, layer: Any, l: int) -> None:
    H, G, E, D = ours.num_attention_heads, ours.num_key_value_heads, ours.head_dim, ours.hidden_size
    attention = layer.get_submodule((names.q or names.qkv).split(".")[0])
    assert attention.scaling == ours.attention_scales[l]
    assert attention.head_dim == E
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
    assert torch.allclose(act(x), block.ACTIVATIONS[ours.activation](x), atol=3e-7)


def config_ids(eos: Any) -> list[int]:
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def reference_windows(held: Any) -> tuple[int | None, ...]:
    """The window of each layer as transformers' attention modules and masks take it."""
    L, W = held.num_hidden_layers, getattr(held, "sliding_window", None)
    if held.model_type == "mistral":
        return (W,) * L
    if held.model_type in ("qwen2", "qwen3"):
        return tuple(W if kind == "sliding_attention" else None for kind in held.layer_types)
    return (None,) * L


def agree_rope(ours: DecoderConfig, model: Any, source: dict[str, Any]) -> None:
    """Frequencies and factor, short and long, as a model of transformers makes them from the same file."""
    library = transformers()
    held = library.AutoConfig.for_model(**copy.deepcopy(source))
    rotary = type(model.base_model.rotary_emb)(held)
    assert ours.rope is not None
    positions = [40, ours.rope.pretrained_positions + 5, ours.max_position_embeddings + 70]
    for longest in positions:
        rotary(torch.zeros(1), torch.tensor([[longest - 1]]))
        omega, a = ROPE_SCALINGS[ours.rope.kind](ours.rope, ours.head_dim, torch.tensor([longest]))
        assert torch.allclose(omega.reshape(-1), rotary.inv_freq, rtol=1e-6, atol=0), longest
        assert a == pytest.approx(rotary.attention_scaling, rel=1e-9)


PLAIN = [file(family) for family in FAMILIES]
ODD = [
    file("llama", num_key_value_heads=None, head_dim=10, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    file("llama", rms_norm_eps=1e-5, hidden_act="gelu", attention_dropout=0.1, bos_token_id=None, eos_token_id=[2, 3]),
    file("llama", sliding_window=16, initializer_range=0.5, torch_dtype="bfloat16", pad_token_id=0, pretraining_tp=2),
    file("mistral", sliding_window=None, head_dim=20, dtype="float16", torch_dtype="float32"),
    file("mistral", sliding_window=7, num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True),
    file("qwen2", sliding_window=9, use_sliding_window=False, attention_bias=False, tie_word_embeddings=True),
    file("qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=1, hidden_act="gelu_pytorch_tanh"),
    file("qwen2", use_sliding_window=True, max_window_layers=0, eos_token_id=5, head_dim=14),
    file("qwen2", sliding_window=None, use_sliding_window=True, max_window_layers=0),
    file("qwen2", num_hidden_layers=30, use_sliding_window=True),
    file("qwen3", head_dim=12, attention_bias=True, attention_dropout=0.25),
    file(
        "qwen3",
        sliding_window=5,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    file("gpt2", n_inner=100, n_positions=77, layer_norm_epsilon=1e-3, activation_function="relu"),
    file("gpt2", n_inner=None, embd_pdrop=0.2, attn_pdrop=0.3, resid_pdrop=0.4, tie_word_embeddings=False),
    file("gpt2", scale_attn_weights=False, activation_function="gelu_pytorch_tanh", n_ctx=1024),
    file("gpt2", scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True, activation_function="swish"),
    file("opt", enable_bias=False, dropout=0.0, attention_dropout=0.3, activation_function="gelu", init_std=0.1),
    file("opt", word_embed_proj_dim=48, tie_word_embeddings=False, max_position_embeddings=50, pad_token_id=None),
]


@pytest.mark.parametrize("source", PLAIN + ODD, ids=lambda source: source["model_type"])
def test_every_field_is_what_transformers_holds(source: dict[str, Any]) -> None:
    agree(DecoderConfig.from_dict(source), reference_model(source))


@pytest.mark.parametrize("source", PLAIN + ODD, ids=lambda source: source["model_type"])
def test_a_file_saved_by_transformers_reads_the_same(source: dict[str, Any], tmp_path: Path) -> None:
    held = transformers().AutoConfig.for_model(**copy.deepcopy(source))
    held.save_pretrained(tmp_path)
    assert DecoderConfig.from_folder(tmp_path) == DecoderConfig.from_dict(source)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_defaults_of_transformers(family: str, tmp_path: Path) -> None:
    held = transformers().AutoConfig.for_model(family, num_hidden_layers=2)
    held.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers().AutoModelForCausalLM.from_config(held)
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


@pytest.mark.parametrize("given", ROPES, ids=lambda given: given["rope_type"])
def test_rope_old_and_new_spelling_are_one_and_transformers(given: dict[str, Any]) -> None:
    with_theta = {"rope_theta": 1234.5, **given}
    theta = with_theta["rope_theta"]
    sizes = {"head_dim": 12, "max_position_embeddings": 256}
    typed = {"type" if key == "rope_type" else key: value for key, value in given.items() if key != "rope_theta"}
    bare = {key: value for key, value in typed.items() if key != "type"}
    spellings = [
        file(**sizes, rope_parameters=with_theta),
        file(**sizes, rope_scaling=typed, rope_theta=theta),
        file(**sizes, rope_scaling={**bare, "rope_type": given["rope_type"]}, rope_theta=theta),
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
def test_rope_of_every_family(family: str, more: dict[str, Any]) -> None:
    source = file(family, head_dim=12, max_position_embeddings=256, **more)
    ours = DecoderConfig.from_dict(source)
    assert ours.rope == RopeConfig(theta=777.0 if more else 10000.0, max_position_embeddings=256)
    agree_rope(ours, reference_model(source), source)


@pytest.mark.parametrize("kind", [YARN, {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 64}])
def test_a_pretraining_length_beside_the_dict_wins(kind: dict[str, Any]) -> None:
    """As in transformers' models, whose Phi-3 writes it there."""
    source = file(head_dim=12, max_position_embeddings=256, rope_scaling=kind, original_max_position_embeddings=128)
    ours = DecoderConfig.from_dict(source)
    assert ours.rope is not None
    assert ours.rope.original_max_position_embeddings == 128
    agree_rope(ours, reference_model(source), source)


@pytest.mark.parametrize("family", ROTARY)
def test_a_model_of_rope_null_is_default(family: str) -> None:
    empty = DecoderConfig.from_dict(file(family, rope_scaling=None, rope_parameters=None))
    assert empty == DecoderConfig.from_dict(file(family, rope_scaling={}, rope_parameters={}))
    assert empty.rope == RopeConfig(max_position_embeddings=empty.max_position_embeddings)


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
        "hidden_act": st.sampled_from(fields.ACTIVATIONS),
    }
)


@given(st.sampled_from(ROTARY), sizes_strategy, st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.data())
def test_drawn_files_read_as_transformers_does(
    family: str, drawn: dict[str, Any], G: int, R: int, half: int, data: Any
) -> None:
    source = file(family, **drawn, num_attention_heads=G * R, num_key_value_heads=G, hidden_size=G * R * 2)
    source |= {"head_dim": 2 * half}
    kept = data.draw(st.sets(st.sampled_from(sorted(drawn.keys() - SIZES.keys()))))
    source = {key: value for key, value in source.items() if key in kept or key not in drawn or key in SIZES}
    ours = DecoderConfig.from_dict(source)
    agree(ours, reference_model(source))
    assert DecoderConfig.from_dict(dataclasses.replace(ours, source="").to_config_json()) == ours


# ---- what is written ------------------------------------------------------------------------------------------------

CHANGES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    *(
        (family, {"tie_word_embeddings": True, "dtype": torch.bfloat16, "eos": (1, 2), "bos": None})
        for family in FAMILIES
    ),
    *((family, {"tie_word_embeddings": False, "pad": 0, "eos": ()}) for family in FAMILIES),
    *((family, {"num_hidden_layers": 3, "vocab_size": 50, "intermediate_size": 7}) for family in FAMILIES),
    *((family, {"head_dim": 12, "num_key_value_heads": 1, "eps": 1e-3}) for family in ROTARY),
    *((family, {"rope": RopeConfig("linear", 500.0, factor=2.0)}) for family in ROTARY),
    ("llama", {"rope": RopeConfig("llama3", 5e5, 8.0, original_max_position_embeddings=32)}),
    (
        "llama",
        {"rope": RopeConfig("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False, mscale=0.5)},
    ),
    ("llama", {"rope": RopeConfig("longrope", short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, attention_factor=1.1)}),
    ("llama", {"rope": RopeConfig("dynamic", factor=2.0), "qkv_bias": True, "o_bias": True, "mlp_bias": True}),
    ("mistral", {"windows": (None, None)}),
    ("qwen2", {"windows": (None, 8)}),
    ("qwen3", {"windows": (8, None), "act": "gelu"}),
    ("gpt2", {"score_scale": (12**-0.5, 12**-0.5 / 2), "dropout": DropoutRates(0.1, 0.2, 0.3)}),
    ("gpt2", {"score_scale": (1.0, 1.0), "max_position_embeddings": 60, "hidden_size": 48}),
    ("opt", {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "dropout": DropoutRates(0.0, 0.2, 0.3)}),
]


@pytest.mark.parametrize(("family", "changes"), CHANGES)
def test_a_configuration_made_here_is_what_transformers_loads(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    ours = DecoderConfig.tiny(family, **changes)
    for name, value in changes.items():
        held = getattr(ours, name)
        assert held == (dataclasses.replace(value, max_position_embeddings=128) if name == "rope" else value)
    (tmp_path / "config.json").write_text(json.dumps(ours.to_config_json()))
    assert DecoderConfig.from_folder(tmp_path) == ours
    held = transformers().AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers().AutoModelForCausalLM.from_config(held)
    agree(ours, model)
    assert [type(model).__name__] == ours.to_config_json()["architectures"]
    if ours.rope is not None:
        agree_rope(ours, model, ours.to_config_json())


@pytest.mark.parametrize("family", FAMILIES)
def test_small_is_the_fixture(family: str) -> None:
    ours = DecoderConfig.tiny(family)
    plain = family in ("gpt2", "opt")
    assert (ours.num_hidden_layers, ours.hidden_size, ours.intermediate_size, ours.vocab_size) == (2, 48, 64, 97)
    assert (ours.num_attention_heads, ours.num_key_value_heads, ours.head_dim) == ((4, 4, 12) if plain else (4, 2, 16))
    assert ours.max_position_embeddings == 128
    assert ours.sliding_windows == ((8, 8) if family == "mistral" else (None, None))
    assert ours.dropout == DropoutRates()
    assert ours.source == ""


@pytest.mark.parametrize("source", PLAIN + ODD, ids=lambda source: source["model_type"])
def test_a_file_unchanged_is_written_as_it_was(source: dict[str, Any]) -> None:
    source = {**source, "_name_or_path": "über/model", "auto_map": {"AutoModel": "x.Y"}, "use_cache": True}
    written = DecoderConfig.from_dict(source, {"eos_token_id": [7, 8], "bos_token_id": 9}).to_config_json()
    assert written == source
    assert list(written) == list(source)


@pytest.mark.parametrize(
    ("was", "asked", "now"),
    [
        ({}, {"vocab_size": 99}, {"vocab_size": 99}),
        ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ({}, {"dtype": torch.float16}, {"dtype": "float16"}),
        ({"torch_dtype": "bfloat16"}, {"dtype": torch.float32}, {"torch_dtype": "float32"}),
        ({"dtype": "bfloat16"}, {"dtype": torch.float32}, {"dtype": "float32"}),
        (
            {"dtype": "bfloat16", "torch_dtype": "float16"},
            {"dtype": torch.float32},
            {"dtype": "float32", "torch_dtype": "float32"},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5e3}, {"vocab_size": 9}, {"vocab_size": 9}),
        ({}, {"eps": 1e-4, "eos": (5,)}, {"rms_norm_eps": 1e-4}),
    ],
)
def test_only_the_changed_keys_change(was: dict[str, Any], asked: dict[str, Any], now: dict[str, Any]) -> None:
    source = file(**was)
    changed = dataclasses.replace(DecoderConfig.from_dict(source), **asked)
    assert changed.to_config_json() == {**source, **now}


def test_a_changed_rope_leaves_no_old_spelling() -> None:
    source = file(rope_scaling={"type": "linear", "factor": 2}, rope_theta=5e3, original_max_position_embeddings=9)
    ours = DecoderConfig.from_dict(source)
    changed = dataclasses.replace(ours, rope=RopeConfig("yarn", 7e3, 4.0, max_position_embeddings=2048))
    written = changed.to_config_json()
    assert not written.keys() & {"rope_scaling", "rope_theta", "original_max_position_embeddings"}
    assert DecoderConfig.from_dict(written) == changed


@pytest.mark.parametrize(
    ("family", "changes", "names"),
    [
        ("llama", {"windows": (4, None)}, "windows"),
        ("mistral", {"windows": (4, None)}, "windows"),
        ("qwen2", {"windows": (4, 5), "o_bias": True}, "o_bias, windows"),
        ("opt", {"eps": 1e-3}, "eps"),
        ("gpt2", {"score_scale": (0.1, 0.3)}, "score_scale"),
        ("qwen3", {"rope": None}, "rope"),
    ],
)
def test_what_the_file_cannot_say_is_refused(family: str, changes: dict[str, Any], names: str) -> None:
    made = DecoderConfig.tiny(family, **changes)
    read = dataclasses.replace(DecoderConfig.from_dict(DecoderConfig.tiny(family).to_config_json()), **changes)
    for one in (made, read):
        with pytest.raises(InputError) as error:
            one.to_config_json()
        message = f"a config.json of {family} cannot say this {names}; change it back"
        assert set(str(error.value)) == set(message)
        assert len(str(error.value)) == len(message)


def test_a_configuration_is_a_value() -> None:
    one, two = DecoderConfig.from_dict(file()), DecoderConfig.from_dict(file(use_cache=True))
    assert one == two
    assert hash(one) == hash(two)
    assert copy.deepcopy(one) == one
    assert one.source != two.source
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.vocab_size = 3  # type: ignore[misc]


def test_the_tables_name_what_there_is() -> None:
    assert tuple(block.ACTIVATIONS) == fields.ACTIVATIONS
    assert list(fields.ROPE_FIELDS) == list(ROPE_SCALINGS)
    assert list(fields.FAMILY_FIELDS) == FAMILIES == list(fields.ARCHITECTURES)
    assert {f.name for f in dataclasses.fields(RopeConfig)} == {"kind", "theta", "max_position_embeddings"}.union(
        *fields.ROPE_FIELDS.values()
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
    ],
)
def test_generation_config_wins_where_it_has_ids(
    config_ids: dict[str, Any], generation: dict[str, Any] | None, bos: Any, eos: Any, pad: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(file(**config_ids)))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    ours = DecoderConfig.from_folder(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_ids, ours.pad_token_id) == (bos, eos, pad)


# ---- refusals -------------------------------------------------------------------------------------------------------

KNOWN_ROPE = "known: default, linear, dynamic, llama3, yarn, longrope"
KNOWN_ACT = "known: silu, swish, gelu, gelu_new, gelu_pytorch_tanh, relu"
FAMILY = "is not one of llama, mistral, qwen2, qwen3, gpt2, opt; convert it or use transformers"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "phi3"}, f'config.json: model_type "phi3" {FAMILY}'),
    ({}, f"config.json: model_type null {FAMILY}"),
    ({"model_type": ["llama"]}, f'config.json: model_type ["llama"] {FAMILY}'),
    (
        file(rope_parameters={"rope_type": "proportional"}),
        f'config.json: rope_parameters.rope_type "proportional"; {KNOWN_ROPE}',
    ),
    (file(rope_scaling={"type": "su", "factor": 2}), f'config.json: rope_scaling.type "su"; {KNOWN_ROPE}'),
    (file(num_key_value_heads=3), "num_key_value_heads 3 does not divide num_attention_heads 8"),
    (file(hidden_size=50), "num_attention_heads 8 does not divide hidden_size 50"),
    (file("gpt2", n_embd=50), "n_head 8 does not divide n_embd 50"),
    (file(head_dim=7), "head_dim 7 is odd; RoPE turns pairs of numbers"),
    (file(hidden_act="gelu_fast"), f'config.json: hidden_act "gelu_fast"; {KNOWN_ACT}'),
    (file("gpt2", activation_function="tanh"), f'config.json: activation_function "tanh"; {KNOWN_ACT}'),
    (file(partial_rotary_factor=0.5), "config.json: partial_rotary_factor 0.5; known: 1"),
    (
        file(rope_parameters={"partial_rotary_factor": 0.5}),
        "config.json: rope_parameters.partial_rotary_factor 0.5; known: 1",
    ),
    (
        file("qwen3", rope_parameters={"full_attention": {"rope_theta": 1e4}, "sliding_attention": {}}),
        'config.json: rope_parameters.full_attention {"rope_theta": 10000.0}; known: one setting for all layers',
    ),
    (
        file(rope_parameters={"rope_theta": 1e4}, rope_scaling={"type": "linear", "factor": 2}),
        "config.json: rope_parameters and rope_scaling are both there and differ; keep the one meant",
    ),
    (file(rope_parameters={"rope_type": "linear"}), "config.json: rope_parameters.factor is missing"),
    (file(rope_scaling={"type": "dynamic", "factor": None}), "config.json: rope_scaling.factor is missing"),
    (
        file(rope_parameters={"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}),
        "config.json: rope_parameters.low_freq_factor is missing",
    ),
    (
        file(rope_scaling={"type": "longrope", "short_factor": [1.0]}),
        "config.json: rope_scaling.long_factor is missing",
    ),
    (
        file(rope_scaling={"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}),
        "long_factor has 4 numbers, head_dim 6 needs 3",
    ),
    (
        file(rope_scaling={"type": "longrope", "short_factor": [1.0, 0.0, 1], "long_factor": [1.0] * 3}),
        "config.json: rope_scaling.short_factor [1.0, 0.0, 1]: must be a list of numbers > 0",
    ),
    (file(rope_parameters=[1]), "config.json: rope_parameters [1]: must be an object"),
    (file(rope_theta=0), "config.json: rope_theta 0: must be a number > 0"),
    (
        file(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        'config.json: quantization_config {"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb…; known: none',
    ),
    (file(num_experts=8), "config.json: num_experts 8; known: 0"),
    (file(per_layer_config={"0": {}}), 'config.json: per_layer_config {"0": {}}; known: none'),
    (file("gpt2", add_cross_attention=True), "config.json: add_cross_attention true; known: false"),
    (file("opt", do_layer_norm_before=False), "config.json: do_layer_norm_before false; known: true"),
    (file("opt", layer_norm_elementwise_affine=False), "config.json: layer_norm_elementwise_affine false; known: true"),
    (file("opt", _remove_final_layer_norm=True), "config.json: _remove_final_layer_norm true; known: false"),
    (file("opt", layerdrop=0.1), "config.json: layerdrop 0.1; known: 0"),
    (file("opt", word_embed_proj_dim=24), "config.json: word_embed_proj_dim 24; known: 48, the hidden_size"),
    (
        file("qwen3", layer_types=["full_attention", "linear_attention", "full_attention"]),
        'config.json: layer_types ["full_attention", "linear_attention", "full_attention"]: '
        "must be a list of full_attention, sliding_attention",
    ),
    (file("qwen3", layer_types=["full_attention"]), "config.json: layer_types has 1 entries for 3 layers"),
    (
        file("qwen2", layer_types=["full_attention", "sliding_attention", "full_attention"]),
        'config.json: layer_types[1] "sliding_attention", but the other fields give layer 1 no window',
    ),
    (
        file("mistral", layer_types=["full_attention"] * 3),
        'config.json: layer_types[0] "full_attention", but the other fields give layer 0 a window of 4096',
    ),
    (file("mistral", sliding_window=0), "config.json: sliding_window 0: must be a whole number ≥ 1"),
    (
        file("qwen2", use_sliding_window=True, max_window_layers=-1),
        "config.json: max_window_layers -1: must be a whole number ≥ 0",
    ),
    (
        file(architectures=["LlamaForSequenceClassification"]),
        'config.json: architectures ["LlamaForSequenceClassification"]; known: …ForCausalLM, …LMHeadModel, …Model',
    ),
    (file(architectures="LlamaModel"), 'config.json: architectures "LlamaModel": must be a list of names'),
    (file(hidden_size="48"), 'config.json: hidden_size "48": must be a whole number ≥ 1'),
    (file(hidden_size=True), "config.json: hidden_size true: must be a whole number ≥ 1"),
    (file(num_hidden_layers=0), "config.json: num_hidden_layers 0: must be a whole number ≥ 1"),
    (file(vocab_size=9.0), "config.json: vocab_size 9.0: must be a whole number ≥ 1"),
    (file(rms_norm_eps="1e-5"), 'config.json: rms_norm_eps "1e-5": must be a number ≥ 0'),
    (file(attention_dropout=1), "config.json: attention_dropout 1: must be a number in [0, 1)"),
    (file(tie_word_embeddings=1), "config.json: tie_word_embeddings 1: must be true or false"),
    (file(bos_token_id=[1]), "config.json: bos_token_id [1]: must be a token id"),
    (file(eos_token_id=[1, "2"]), 'config.json: eos_token_id [1, "2"]: must be a token id or a list of them'),
    (
        file(torch_dtype="float8_e4m3fn"),
        'config.json: torch_dtype "float8_e4m3fn"; known: float64, float32, bfloat16, float16',
    ),
]


@pytest.mark.parametrize(("source", "message"), REFUSED, ids=[message[:70] for _, message in REFUSED])
def test_refused_by_name(source: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        DecoderConfig.from_dict(source)
    assert str(error.value) == message
    assert error.value.exit_code == 66


REQUIRED = [
    (family, row[0])
    for family in FAMILIES
    for row in fields.FAMILY_FIELDS[family].values()
    if row[2] == fields.REQUIRED
]


@pytest.mark.parametrize(("family", "key"), REQUIRED)
@pytest.mark.parametrize("null", [True, False])
def test_a_missing_size_is_an_error(family: str, key: str, null: bool) -> None:
    source = {**file(family), key: None}
    if not null:
        del source[key]
    with pytest.raises(InputError, match=f"config.json: {key} is missing"):
        DecoderConfig.from_dict(source)


def test_generation_config_is_named_in_its_errors() -> None:
    with pytest.raises(InputError) as error:
        DecoderConfig.from_dict(file(), {"eos_token_id": "x"})
    assert str(error.value) == 'generation_config.json: eos_token_id "x": must be a token id or a list of them'


def test_no_config_or_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        DecoderConfig.from_folder(tmp_path)
    assert str(error.value) == f"no config.json in {tmp_path}"
    (tmp_path / "config.json").write_text('{\n "model_type": "llama",\n "vocab')
    with pytest.raises(InputError, match=r"config.json:3:2: not JSON: "):
        DecoderConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(file()))
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"generation_config.json:1:1: a JSON object is asked for"):
        DecoderConfig.from_folder(tmp_path)


def test_small_knows_six_families() -> None:
    with pytest.raises(InputError) as error:
        DecoderConfig.tiny("bert")
    assert str(error.value) == 'no small "bert"; known: llama, mistral, qwen2, qwen3, gpt2, opt'


@pytest.mark.parametrize("name", ["windows", "score_scale"])
def test_one_entry_a_layer(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} has 3 entries for 2 layers"):
        DecoderConfig.tiny("llama", **{name: (1, 1, 1) if name == "windows" else (1.0, 1.0, 1.0)})


def test_a_whole_file_of_each_kind_of_value_refuses_nonsense() -> None:
    """Whatever stands in a known field, the answer is a configuration or one line."""
    nonsense: list[Any] = [None, True, -1, 0, 2.5, "x", [], [None], {}, {"rope_type": 3}, {"factor": "x"}]
    for family in FAMILIES:
        keys = {row[0] for row in fields.FAMILY_FIELDS[family].values()} | fields.FIXED_FIELDS.keys()
        keys |= {"rope_parameters", "rope_scaling", "sliding_window", "layer_types", "architectures", "dtype"}
        keys |= {"eos_token_id", "bos_token_id", "use_sliding_window", "scale_attn_weights", "word_embed_proj_dim"}
        for key in sorted(keys):
            for value in nonsense:
                source = {**file(family), key: value}
                try:
                    made = DecoderConfig.from_dict(source)
                except InputError as error:
                    said = str(error)
                else:
                    said = key
                    assert DecoderConfig.from_dict(hf_config.to_hf_config(vars(made)) | {"model_type": family}) == made
                assert key in said or "num_attention_heads" in said, (source, said)
