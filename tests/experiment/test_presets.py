"""Recipes of the papers' runs: their values against a second, independent copy of the papers' tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.config.load import SHIPPED_RECIPES, load_recipe
from laconic.config.recipe_keys import flatten
from laconic.experiment.from_recipe.dry_run import plan_run
from tests.conftest import shared_dir
from tools.ledger import OWN_TABLE

LLAMA = {
    "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 128256, "rope_theta": 500000.0,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "intermediate_size": 8192,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
OPT = {
    "model_type": "opt", "activation_function": "relu", "do_layer_norm_before": True, "vocab_size": 50272,
    "max_position_embeddings": 2048, "num_attention_heads": 32, "pad_token_id": 1,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA | {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "meta-llama/Llama-3.2-3B-Instruct": LLAMA | {
        "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Qwen/Qwen2.5-0.5B-Instruct": {
        "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 151936,
        "rope_theta": 1000000.0, "max_position_embeddings": 32768, "tie_word_embeddings": True, "hidden_size": 896,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
    },
    "openai-community/gpt2": {
        "model_type": "gpt2", "activation_function": "gelu_new", "n_embd": 768, "n_layer": 12, "n_head": 12,
        "n_positions": 1024, "vocab_size": 50257, "layer_norm_epsilon": 1e-5,
    },
    "mistralai/Mistral-7B-v0.1": {
        "model_type": "mistral", "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 32000,
        "rope_theta": 10000.0, "max_position_embeddings": 32768, "tie_word_embeddings": False, "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "sliding_window": 4096,
    },
    "facebook/opt-1.3b": OPT | {
        "hidden_size": 2048, "word_embed_proj_dim": 2048, "num_hidden_layers": 24, "ffn_dim": 8192,
    },
    "facebook/opt-2.7b": OPT | {
        "hidden_size": 2560, "word_embed_proj_dim": 2560, "num_hidden_layers": 32, "ffn_dim": 10240,
    },
    "meta-llama/Llama-2-7b-hf": {
        "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 32000, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008,
    },
    "meta-llama/Meta-Llama-3-8B": {
        "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 128256,
        "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False, "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    },
}  # fmt: skip
PARAMETERS = {  # as published with the checkpoints
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "openai-community/gpt2": 124_439_808,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-2.7b": 2_651_596_800,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
}
KAVA = ("llama1b", "llama3b", "qwen05b")
PRESETS = {
    *(
        f"{method}-{model}-{rows}"
        for method in ("kava", "cot", "nocot")
        for model in KAVA
        for rows in ("aug", "aug-nl")
    ),
    *(f"codi-{model}-{rows}" for model in ("gpt2", "llama1b") for rows in ("aug", "aug-nl")),
    *(f"{method}-gpt2-{rows}" for method in ("cot", "nocot") for rows in ("aug", "aug-nl")),
    *(f"{method}-{model}-aug" for method in ("pccot", "coconut", "cot-coconut") for model in ("gpt2", "llama1b")),
    *(f"{method}-mistral7b-aug" for method in ("icot", "cot", "nocot")),
    *(f"icot-gpt2-mult{n}" for n in (4, 5, 7, 9)),
    "coconut-gpt2-prosqa",
}
READING = {  # tested in test_document_presets.py
    *(f"ac-{model}" for model in ("opt-2.7b-6k", "opt-2.7b-30k", "opt-1.3b-30k", "llama-2-7b-6k")),
    *("rmt-opt-2.7b-8k", "rmt-opt-1.3b-30k", "read-compat"),
}
LEARNING = {"hope-760m", "hope-1.3b", "hope-attention-llama3", "titans-340m"}  # as well

# Table 6 of KaVa, one column per line: weights of both terms, distance, layer-wise std, lambda, projection, learning
# rate, weight decay, epochs.
TABLE_6 = {
    "llama1b-aug": (10, 1, "smooth_l1", True, 0.1, True, 8e-4, 0.1, 10),
    "llama1b-aug-nl": (10, 1, "mse", True, 0.1, True, 8e-4, 0.1, 10),
    "qwen05b-aug": (10, 1, "mse", False, 0.1, True, 5e-4, 0.01, 10),
    "qwen05b-aug-nl": (10, 1, "mse", True, 0.1, True, 8e-4, 0.1, 10),
    "llama3b-aug": (20, 2, "smooth_l1", False, 0.1, True, 2e-4, 0.1, 5),
    "llama3b-aug-nl": (20, 2, "smooth_l1", False, 0.0, False, 2e-4, 0.1, 5),
}
# Recipe values of the other public runs.
CODI = {
    "latents.num_latents": 6,
    "latents.schedule": "sequential",
    "latents.projection": "codi",
    "distillation.hidden_scale": "layer",
    "distillation.hidden_layers": "all",
    "train.weight_decay": 0.1,
    "train.batch_size": 128,
    "train.max_grad_norm": 2.0,
    "seed": 11,
    "train.warmup_ratio": 0.03,
    "train.lr_schedule": "cosine",
    "train.precision": "bfloat16",
    "lora.rank": 128,
}
GPT2 = {"distillation.hidden_weight": 1.0, "train.learning_rate": 3e-3, "train.epochs": 40.0}
LLAMA1B = {"distillation.hidden_weight": 20.0, "train.learning_rate": 8e-4, "train.epochs": 10.0}
PCCOT = {
    "latents.num_latents": 24,
    "latents.jacobi_iterations": 3,
    "latents.projection": "none",
    "distillation.hidden_layers": "blocks",
    "train.batch_size": 128,
    "train.warmup_ratio": 0.03,
    "train.max_grad_norm": 1.0,
}
COCONUT = {
    "train.trainable": "full",
    "train.learning_rate": 1e-4,
    "train.weight_decay": 0.01,
    "train.batch_size": 128,
    "train.micro_batch_size": 32,
}
ICOT = {
    "train.trainable": "full",
    "icot.tokens_removed_per_epoch": 8.0,
    "train.batch_size": 32,
    "train.max_grad_norm": 1.0,
}
RUNS: dict[str, dict[str, Any]] = {
    "codi-gpt2-aug": CODI | GPT2 | {"latents.projection_width": 768, "train.micro_batch_size": 64},
    "codi-gpt2-aug-nl": CODI | GPT2 | {"latents.projection_width": 768, "train.micro_batch_size": 64},
    "codi-llama1b-aug": CODI | LLAMA1B | {
        "latents.projection_width": 2048, "train.micro_batch_size": 32, "data.max_tokens": 200,
        "data.require_leading_digit": True,
    },
    "codi-llama1b-aug-nl": CODI | LLAMA1B | {
        "latents.projection_width": 2048, "train.epochs": 3.0, "data.max_tokens": 256,
        "data.require_leading_digit": True,
    },
    "pccot-gpt2-aug": PCCOT | GPT2 | {
        "distillation.hidden_scale": "layer", "train.weight_decay": 0.01, "train.validate_every": 200,
    },
    "pccot-llama1b-aug": PCCOT | LLAMA1B | {
        "distillation.hidden_scale": "global", "train.weight_decay": 0.1, "lora.target_modules": "all",
    },
    "coconut-gpt2-aug": COCONUT | {
        "coconut.latents_per_step": 2, "coconut.epochs_per_stage": 3, "coconut.max_stage": 3, "coconut.first_stage": 1,
        "train.epochs": 22.0, "train.precision": "float32", "model.dtype": "float32",
    },
    "cot-coconut-gpt2-aug": COCONUT | {"train.epochs": 25.0, "method": "cot"},
    "coconut-llama1b-aug": {"train.trainable": "full", "train.learning_rate": 1e-5, "train.epochs": 5.0},
    "cot-coconut-llama1b-aug": {"train.trainable": "full", "train.learning_rate": 1e-5, "train.epochs": 5.0},
    "coconut-gpt2-prosqa": COCONUT | {
        "coconut.latents_per_step": 1, "coconut.epochs_per_stage": 5, "coconut.max_stage": 6, "coconut.first_stage": 0,
        "train.epochs": 50.0,
    },
    "icot-mistral7b-aug": ICOT | {
        "train.learning_rate": 1e-5, "train.epochs": 80.0, "train.micro_batch_size": 16, "icot.remove_all_after": 39,
        "data.max_tokens": 150, "train.precision": "bfloat16",
    },
    "cot-gpt2-aug": {"train.learning_rate": 3e-3, "train.weight_decay": 0.01, "train.epochs": 40.0},
    **{f"icot-gpt2-mult{n}": ICOT | {"train.learning_rate": 5e-5, "train.epochs": 200.0} for n in (4, 5, 7, 9)},
}  # fmt: skip


def recipe_values(name: str) -> dict[str, Any]:
    """Return the value of every key of a recipe, with defaults."""
    return flatten(load_recipe(name)[0].model_dump(mode="json", exclude_none=True))


def base_model(name: str) -> str:
    """Return the pretrained checkpoint of a recipe, or of the run it starts from."""
    model = load_recipe(name)[0].model
    return model.name or base_model(Path(str(model.init_from_run)).name)


def folder_of(root: Path, model: str) -> Path:
    """Create a folder with a configuration and a tokenizer, without weights."""
    folder = root / model.replace("/", "-")
    if not folder.is_dir():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SIZES[model]))
        tokenizer = "gsm-bpe-4096" if SIZES[model]["vocab_size"] == 32000 else "gpt2"
        for file in (shared_dir() / "data" / "tokenizers" / tokenizer).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


def test_every_paper_run_has_a_recipe() -> None:
    papers = {
        path.stem for path in SHIPPED_RECIPES.glob("*.toml") if load_recipe(path.stem)[0].paper_table != OWN_TABLE
    }
    assert papers == PRESETS | READING | LEARNING


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_recipe_is_complete_and_cites_its_sources(name: str) -> None:
    recipe, notes = load_recipe(name)
    assert (notes, recipe.unused_tables) == ([], [])
    assert recipe.validation is not None
    assert recipe.train.best_metric == "accuracy"
    text = (SHIPPED_RECIPES / f"{name}.toml").read_text()
    assert any(mark in text for mark in ("[C]", "[T]", "[?]"))
    assert text.startswith("# ")


@pytest.mark.parametrize("name", TABLE_6)
def test_kava_recipe_values(name: str) -> None:
    alpha1, alpha2, loss, std, lam, project, lr, decay, epochs = TABLE_6[name]
    values = recipe_values(f"kava-{name}")
    norms = ("layer", "layer") if std else ("none", "global")
    assert (values["kv_distillation.scale"], values["distillation.hidden_scale"]) == norms
    assert values["latents.projection"] == ("pccot" if project else "none")
    keys = (
        "distillation.hidden_weight",
        "kv_distillation.weight",
        "kv_distillation.distance",
        "kv_selection.importance_weight",
        "train.learning_rate",
        "train.weight_decay",
    )
    assert tuple(values[key] for key in keys) == (alpha1, alpha2, loss, lam, lr, decay)
    common = {
        "train.epochs": epochs,
        "latents.num_latents": 24,
        "latents.jacobi_iterations": 3,
        "train.batch_size": 128,
        "train.max_grad_norm": 2.0,
        "train.lr_schedule": "cosine",
        "train.betas": [0.9, 0.999],
        "train.precision": "bfloat16",
        "train.warmup_ratio": 0.03,
        "lora.rank": 128,
        "lora.alpha": 32,
        "lora.dropout": 0.1,
        "data.chain_steps": "drop_last",
        "train.trainable": "lora",
    }
    assert {key: values[key] for key in common} == common
    assert values["data.name"] == [f"whynlp/gsm8k-{name.partition('-')[2]}"]
    for method in ("cot", "nocot"):  # where the papers print nothing, the same model's values
        base = recipe_values(f"{method}-{name}")
        assert {key: base[key] for key in base if key.startswith(("train.", "lora.", "model."))} == {
            key: values[key] for key in values if key.startswith(("train.", "lora.", "model."))
        }
        assert base["data.chain_steps"] == "all"


@pytest.mark.parametrize("name", RUNS)
def test_public_run_recipe_values(name: str) -> None:
    values = recipe_values(name)
    assert {key: values.get(key) for key in RUNS[name]} == RUNS[name]


def test_updates_per_epoch() -> None:
    for name in ("kava-llama1b-aug", "codi-gpt2-aug", "pccot-llama1b-aug"):
        assert load_recipe(name)[0].train.updates_per_epoch(385_620) == 3013
    assert load_recipe("icot-mistral7b-aug")[0].train.updates_per_epoch(385_620) == 12_051


def check_plan(name: str, root: Path, *keys: str) -> dict[str, Any]:
    """Return the plan of a recipe, made from a configuration without weights."""
    model = base_model(name)
    plan = plan_run(load_recipe(name, [f"model.name={folder_of(root, model)}", *keys])[0], torch.device("cpu"))
    recipe = load_recipe(name)[0]
    assert plan["assumed"]
    assert plan["steps"] == recipe.train.total_updates(plan["rows"])
    more = plan["parameters"] - PARAMETERS[model]
    assert more >= 0
    assert plan["trainable"] == (plan["parameters"] if recipe.train.trainable == "full" else more)
    assert plan["memory"]["bytes"] > plan["bytes"]
    fits = plan["largest_micro_batch"]
    assert 0 <= fits["24 GiB"] <= fits["80 GiB"] <= recipe.train.batch_size
    return plan


@pytest.mark.medium
def test_plan_without_weights(tmp_path: Path) -> None:
    plan = check_plan("nocot-gpt2-aug", tmp_path, "train.precision=float32")  # bfloat16 is slow on CPUs
    assert plan["rows"] == 385_620
    assert plan["steps"] == 40 * 3013
    assert plan["trainable"] == 12 * 128 * (768 + 2304 + 768 + 768 + 768 + 3072 + 3072 + 768)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_plan_every_recipe_without_weights(name: str, tmp_path: Path) -> None:
    check_plan(name, tmp_path)


TINY = sorted(path.stem for path in SHIPPED_RECIPES.glob("*-tiny*.toml"))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        (
            "ctnl-tiny",
            ["cms.chunk_sizes=[64]", "data.continual_translation.num_languages=2"],
        ),  # few chunks: each is a training step of its own
        *(pytest.param(name, [], marks=pytest.mark.slow) for name in TINY),
    ],
)
def test_plan_tiny_recipe(name: str, keys: list[str]) -> None:
    """Their models are here, and methods that learn while they read are measured on meta tensors too."""
    plan = plan_run(load_recipe(name, keys)[0], torch.device("cpu"))
    assert plan["memory"]["bytes"] > plan["bytes"] > 0
