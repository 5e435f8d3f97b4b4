"""Recipes of compression and nested learning papers: their values against a second, independent copy of the tables."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.config.load import SHIPPED_RECIPES, load_recipe
from laconic.config.nested import SelfModifyingOptions
from laconic.config.recipe_keys import flatten
from laconic.experiment.from_recipe.dry_run import ALLOCATOR_OVERHEAD, plan_run
from tests.conftest import shared_dir
from tests.experiment.test_presets import LEARNING, PARAMETERS, READING, folder_of

OPT = {
    "compression.summary": "parallel", "compression.length_policy": "fixed", "compression.num_vectors": 50,
    "compression.summary_positions": "zero", "data.text.segment_overlap": 0, "train.trainable": "full",
    "train.learning_rate": 2e-5, "train.warmup_steps": 1000, "train.max_grad_norm": 1.0, "train.lr_schedule": "linear",
    "train.weight_decay": 0.0, "train.betas": [0.9, 0.999], "train.precision": "bfloat16",
}  # fmt: skip
RANDOM = OPT | {
    "data.text.segment_lengths": "random", "data.text.min_segment_tokens": 1024,
    "data.text.max_segment_tokens": 2048, "data.text.segments_per_window": 2,
    "compression.memory_policy": "accumulate",
}  # fmt: skip
FIXED = OPT | {
    "data.text.segment_lengths": "fixed", "data.text.segment_tokens": 2048, "compression.memory_policy": "replace"
}  # fmt: skip
LONG = {"data.text.row_tokens": 30_720, "train.batch_size": 4}
OPT_2_7B, OPT_1_3B = {"model.name": "facebook/opt-2.7b"}, {"model.name": "facebook/opt-1.3b"}
PRINTED = {
    "mixer.self_modifying.objective": "l2", "mixer.self_modifying.decay_target": "zero",
    "mixer.self_modifying.read_at": "boundary", "mixer.self_modifying.momentum": True,
    "mixer.self_modifying.memory_kind": "affine", "mixer.self_modifying.memory_chunk_size": 64,
    "cms.chunk_sizes": [128, 512, 2048], "cms.gated_mlp": False, "mixer.num_heads": 16,
}  # fmt: skip
TITANS_CONFIGURATION = {
    "train.learning_rate": 4e-4, "train.lr_schedule": "cosine", "train.weight_decay": 0.1,
    "data.text.row_tokens": 4096, "train.betas": [0.9, 0.95], "train.warmup_ratio": 0.01, "train.max_grad_norm": 1.0,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "ac-opt-2.7b-6k": RANDOM | OPT_2_7B | {"data.text.row_tokens": 6144, "train.batch_size": 16},
    "ac-opt-2.7b-30k": RANDOM | OPT_2_7B | LONG,
    "ac-opt-1.3b-30k": RANDOM | OPT_1_3B | LONG,
    "rmt-opt-2.7b-8k": FIXED | OPT_2_7B | {
        "data.text.row_tokens": 8192, "data.text.segments_per_window": 4, "train.batch_size": 16,
    },
    "rmt-opt-1.3b-30k": FIXED | OPT_1_3B | LONG | {"data.text.segments_per_window": 15},
    "ac-llama-2-7b-6k": OPT | {
        "model.name": "meta-llama/Llama-2-7b-hf", "compression.summary_positions": "contiguous",
        "compression.memory_policy": "accumulate", "data.text.row_tokens": 6144,
        "data.text.segment_lengths": "random", "data.text.min_segment_tokens": 2, "train.trainable": "lora",
        "train.learning_rate": 8e-4, "train.warmup_steps": 5000, "train.batch_size": 32, "lora.rank": 16,
        "lora.alpha": 16, "lora.dropout": 0.05, "lora.target_modules": "attention",
    },
    "read-compat": {
        "compression.trigger_placement": "replace", "compression.summary_map": "none",
        "compression.step_embedding": False, "compression.memory_policy": "replace",
        "compression.summary": "autoregressive", "compression.length_policy": "stop_head",
        "compression.max_vectors": 50, "stop_head.head": "vocabulary", "stop_head.control_tokens": "vocabulary",
        "stop_head.control_tokens_in_softmax": True, "stop_head.stop_position": "mixture",
        "stop_head.soft_gate": "scale_vectors", "stop_head.cost_kind": "ratio", "stop_head.ratio_memory_weight": 1.0,
        "stop_head.cost_on": "all", "stop_head.length_cost": 0.0, "stop_head.estimator": "soft",
        "stop_head.stop_rule": "sample", "data.text.segment_lengths": "fixed", "train.learning_rate": 2e-5,
    },
    "hope-760m": PRINTED | TITANS_CONFIGURATION | {
        "model.num_hidden_layers": 19, "model.hidden_size": 1536, "mixer.head_dim": 96,
        "model.intermediate_size": 3072,
    },
    "hope-1.3b": PRINTED | TITANS_CONFIGURATION | {
        "model.num_hidden_layers": 18, "model.hidden_size": 2048, "mixer.head_dim": 128,
        "model.intermediate_size": 4096,
    },
    "titans-340m": TITANS_CONFIGURATION | {
        "model.num_hidden_layers": 24, "model.hidden_size": 1024, "mixer.num_heads": 16,
        "model.intermediate_size": 4096, "mixer.chunk_size": 64, "mixer.titans.memory_depth": 2,
        "mixer.titans.momentum": True, "cms.inner_lr": 0.0,
    },
    "hope-attention-llama3": {
        "mixer.kind": "attention", "cms.donor_layout": "depth", "cms.chunk_sizes": [128, 512, 2048],
        "cms.inner_objective": "task", "inner_loop.outer_gradient": "first_order",
    },
}  # fmt: skip
TOKENS = dict.fromkeys(RUNS, 2e9) | {
    "ac-llama-2-7b-6k": 15e9, "hope-760m": 30e9, "hope-1.3b": 100e9, "titans-340m": 15e9, "hope-attention-llama3": 15e9
}  # fmt: skip
SIZES = {"hope-760m": 0.77e9, "hope-1.3b": 1.3e9, "titans-340m": 0.36e9}  # of the nested models, with 32,000 tokens
GB = {"ac-opt-2.7b-30k": 75, "ac-opt-1.3b-30k": 38}  # of a GPU, reported for training on rows of 30,720 tokens


def test_all_recipes_of_documents_are_listed() -> None:
    assert set(RUNS) == READING | LEARNING


@pytest.mark.parametrize("name", RUNS)
def test_recipe_values(name: str) -> None:
    recipe, notes = load_recipe(name)
    values = flatten(recipe.model_dump(mode="json", exclude_none=True))
    assert {key: values.get(key) for key in RUNS[name]} == RUNS[name]
    assert (notes, recipe.unused_tables) == ([], [])
    assert (recipe.train.best_metric, recipe.train.best_mode) == ("nats", "min")
    text = (SHIPPED_RECIPES / f"{name}.toml").read_text()
    assert ("[P]" if name in LEARNING else "[C]") in text
    assert "[?]" in text
    tokens = recipe.data.text.row_tokens * recipe.train.batch_size * (recipe.train.steps or 0)
    assert tokens == pytest.approx(TOKENS[name], rel=1e-3)


def test_read_recall_compat_has_the_formulas_of_read_compat() -> None:
    small, large = (
        flatten(load_recipe(name)[0].model_dump(mode="json")) for name in ("read-recall-compat", "read-compat")
    )
    formulas = {key for key in small if key.startswith(("compression.", "stop_head."))}
    differ = {key for key in formulas if small[key] != large[key]}
    assert differ == {"compression.max_vectors", "compression.summary_positions"}  # Llama has no position table
    task = flatten(load_recipe("read-recall")[0].model_dump(mode="json"))
    others = {key for key in small if not key.startswith(("compression.", "stop_head."))}
    assert {key for key in others if small[key] != task[key]} == set()


def test_data_name_replaces_data_path(tmp_path: Path) -> None:
    recipe, notes = load_recipe("ac-opt-2.7b-6k", ["data.name=someone/texts"])
    assert (recipe.data.path, recipe.data.name) == (None, ("someone/texts",))
    assert notes == ["data.name replaces data.path"]
    assert load_recipe("ac-opt-2.7b-6k", [f"data.path={tmp_path}/b.txt"])[0].data.path == f"{tmp_path}/b.txt"


def test_printed_forms_are_not_the_defaults() -> None:
    defaults = SelfModifyingOptions()
    forms = (defaults.objective, defaults.decay_target, defaults.read_at, defaults.momentum)
    assert forms == ("dot", "start", "token", False)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_plan_without_weights_and_documents(name: str, tmp_path: Path) -> None:
    model = load_recipe(name)[0].model
    source = (
        f"name={folder_of(tmp_path, model.name)}" if model.name else f"tokenizer={shared_dir()}/data/tokenizers/gpt2"
    )
    recipe = load_recipe(name, [f"model.{source}"])[0]
    plan = plan_run(recipe, torch.device("cpu"))
    assert plan["assumed"]
    assert plan["steps"] == recipe.train.steps
    assert plan["tokens"]["document"]["max"] == recipe.data.text.row_tokens
    more = plan["parameters"] - PARAMETERS.get(str(model.name), 0)
    if name in SIZES:
        num_embeddings = 1 if model.tie_word_embeddings else 2
        more -= num_embeddings * (50257 - 32000) * model.hidden_size
        assert more == pytest.approx(SIZES[name], rel=0.02)
    elif name in LEARNING:
        assert more == 32  # an inner learning rate for each layer
    else:
        width = 4096 if "lora" in recipe.train.trainable else 0
        summaries = 2 * 2560 if name == "read-compat" else 50 * (width or (2560 if "2.7b" in str(model.name) else 2048))
        assert more == summaries + (32 * 4 * 2 * 16 * 4096 if width else 0)
    if name in LEARNING:
        assert plan["trainable"] == plan["parameters"]
        assert plan["memory"]["bytes"] > 4 * plan["bytes"]
    if name in GB:
        # Below the reported figure: our cross-entropy never holds the logits of a whole segment.
        on_gpu = plan["memory"]["bytes"] / ALLOCATOR_OVERHEAD["cpu"]
        assert on_gpu == pytest.approx(GB[name] * 1e9, rel=0.12)
