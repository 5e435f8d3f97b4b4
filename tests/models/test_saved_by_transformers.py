"""Folders and adapters as transformers and peft write them, and as people edit them: logits are theirs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.experiment.lora import lora
from laconic.models.decoder import Decoder
from tests.conftest import needs
from tests.models.fixtures import read_logits, transformers_logits
from tests.tolerances import FLOAT32, error

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = SIZES | {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "smollm3"), LLAMA),
    "qwen3": LLAMA | {"head_dim": 16},
    "gpt2": {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "opt": SIZES | {"ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 48},
}
OPTIONS: dict[str, dict[str, Any]] = {  # of save_pretrained, and "dtype" of the weights
    "plain": {},
    "sharded": {"max_shard_size": "20KB"},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
}
EDITS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # families, and new values of config.json; ... removes
    "architectures is a text": (("llama", "gpt2"), {"architectures": "LlamaForCausalLM"}),
    "no architectures": (("mistral", "opt"), {"architectures": ...}),
    "torch_dtype": (("llama", "gpt2"), {"torch_dtype": "float32", "dtype": ...}),
    "no dtype": (("qwen2", "opt"), {"dtype": ...}),
    "several eos ids": (("llama", "qwen3"), {"eos_token_id": [2, 5]}),
    "negative pad id": (("llama", "opt"), {"pad_token_id": -1}),
    "untied": (("smollm3",), {"tie_word_embeddings": False}),
    "head_dim is null": (("llama", "mistral"), {"head_dim": None}),
    "keys that change nothing": (
        ("llama", "gpt2"),
        {"use_cache": False, "pretraining_tp": 2, "model_max_length": 1e30, "id2label": {"0": "a"}},
    ),
    "theta beside": (("llama", "smollm3"), {"rope_theta": 777.0, "rope_scaling": None, "rope_parameters": ...}),
    "no table of RoPE": (("mistral", "qwen3"), {"rope_parameters": ...}),
    "linear": (("llama", "qwen2"), {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": ...}),
    "dynamic": (("llama",), {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": ...}),
    "llama3": (
        ("llama", "smollm3"),
        {
            "rope_parameters": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32, "rope_theta": 500.0,
            }
        },
    ),
    "yarn with unknown keys": (
        ("llama", "qwen3"),
        {
            "rope_scaling": {
                "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "finetuned": True,
                "extrapolation_factor": 1.0,
            },
            "rope_parameters": ...,
        },
    ),
    "yarn with a factor on attention": (
        ("mistral",),
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3}, "rope_parameters": ...},
    ),
    "longrope": (
        ("llama", "qwen2"),
        {
            "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.5] * 6},
            "original_max_position_embeddings": 16,
            "rope_parameters": ...,
        },
    ),
    "window that is not used": (("llama", "qwen2", "qwen3"), {"sliding_window": 8, "use_sliding_window": False}),
    "window": (("mistral",), {"sliding_window": 8}),
    "no window": (("mistral", "qwen2"), {"sliding_window": None}),
    "windows from a layer on": (
        ("qwen2", "qwen3"),
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "layer_types": ...},
    ),
    "windows by layer": (
        ("qwen3", "smollm3"),
        {
            "sliding_window": 8, "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "too many no_rope_layers": (("smollm3",), {"no_rope_layers": [1, 0, 1, 0, 1]}),
    **{  # each other name is in test_config.py
        f"{act} is the activation": (("llama", "gpt2"), {"hidden_act": act, "activation_function": act})
        for act in ("gelu_10", "relu6", "leaky_relu", "hardswish", "mish", "sigmoid", "linear")
    },
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "pattern": {"target_modules": r".*layers\.[01]\.self_attn\.(q|k)_proj"},
    "exclusion": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "rank and alpha": {
        "target_modules": "all-linear",
        "rank_pattern": {r".*\.layers\.[02]\..*": 2},
        "alpha_pattern": {r".*down_proj": 32, r"^model.layers.0.self_attn.q_proj": 3.5},
    },
    "biases": {"bias": "all"},
    "layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "rsLoRA and DoRA": {"target_modules": "all-linear", "use_rslora": True, "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "embedding and head": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "norms": {"modules_to_save": ["input_layernorm"]},
    "rows of embedding and head": {"trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [3, 5]}},
}

pytestmark = [
    pytest.mark.medium,
    pytest.mark.filterwarnings("ignore:.*read as a language model:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def save_model(family: str, folder: Path, changes: dict[str, Any], dtype: Any = None, **options: Any) -> Any:
    """Write a random model, all of whose weights matter, as transformers does; edit config.json; return the model."""
    needs("transformers")
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family] | {"bos_token_id": 1, "eos_token_id": 2})
    config.tie_word_embeddings = changes.get("tie_word_embeddings", config.tie_word_embeddings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    model.save_pretrained(folder, **options)
    file = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in file.items() if value is not ...}))
    return model


def check_logits(folder: Path, tmp_path: Path) -> None:
    """Compare logits with transformers', of the folder and of what the decoder saves, beyond the original context."""
    decoder = Decoder.from_pretrained(folder, dtype="float32")
    T = 64 if decoder.config.rope is None else 90
    ids = torch.randint(0, 97, (2, T))
    logits = read_logits(decoder, ids)
    assert error(logits, transformers_logits(folder, ids)) < FLOAT32
    decoder.save_pretrained(tmp_path / "again")
    assert error(logits, transformers_logits(tmp_path / "again", ids)) < FLOAT32


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_model_equals_transformers(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    save_model(family, tmp_path / "model", {}, **options)
    check_logits(tmp_path / "model", tmp_path)


@pytest.mark.parametrize(
    ("family", "changes"),
    [pytest.param(f, changes, id=f"{f}: {name}") for name, (families, changes) in EDITS.items() for f in families],
)
def test_edited_config_equals_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    save_model(family, tmp_path / "model", changes)
    check_logits(tmp_path / "model", tmp_path)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_saved_adapter_equals_peft(options: dict[str, Any], is_tied: bool, tmp_path: Path) -> None:
    needs("peft")
    import peft

    model = save_model("qwen2", tmp_path / "model", {"tie_word_embeddings": is_tied})
    settings = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": ["q_proj", "v_proj"]} | options)
    adapted = peft.get_peft_model(model, settings).eval()
    with torch.no_grad():
        for p in adapted.parameters():
            p.add_(torch.randn_like(p) * 0.1 * p.requires_grad)
        adapted.save_pretrained(tmp_path / "adapter")
        ids = torch.randint(0, 97, (2, 30))
        base = type(model).from_pretrained(tmp_path / "model")
        expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(ids).logits
    loaded = lora.load_adapter(Decoder.from_pretrained(tmp_path / "model"), tmp_path / "adapter")
    assert error(read_logits(loaded.get_base_model(), ids), expected) < FLOAT32
    assert error(read_logits(lora.merge_adapter(loaded), ids), expected) < FLOAT32
