"""Recipes of nested learning papers: their values against a second, independent copy."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.config.load import SHIPPED_RECIPES, load_recipe
from laconic.config.nested import SelfModifyingOptions
from laconic.config.recipe_keys import flatten
from laconic.experiment.from_recipe.dry_run import plan_run
from tests.conftest import shared_dir
from tests.experiment.test_presets import LEARNING, PARAMETERS, folder_of

PRINTED = {
    "mixer.self_modifying.objective": "l2",
    "mixer.self_modifying.decay_target": "zero",
    "mixer.self_modifying.read_at": "boundary",
    "mixer.self_modifying.momentum": True,
    "mixer.self_modifying.memory_kind": "affine",
    "mixer.self_modifying.memory_chunk_size": 64,
    "cms.chunk_sizes": [128, 512, 2048],
    "cms.gated_mlp": False,
    "mixer.num_heads": 16,
}
TITANS_CONFIGURATION = {
    "train.learning_rate": 4e-4,
    "train.lr_schedule": "cosine",
    "train.weight_decay": 0.1,
    "data.text.row_tokens": 4096,
    "train.betas": [0.9, 0.95],
    "train.warmup_ratio": 0.01,
    "train.max_grad_norm": 1.0,
}
RUNS: dict[str, dict[str, Any]] = {
    "hope-760m": PRINTED
    | TITANS_CONFIGURATION
    | {
        "model.num_hidden_layers": 19,
        "model.hidden_size": 1536,
        "mixer.head_dim": 96,
        "model.intermediate_size": 3072,
    },
    "hope-1.3b": PRINTED
    | TITANS_CONFIGURATION
    | {
        "model.num_hidden_layers": 18,
        "model.hidden_size": 2048,
        "mixer.head_dim": 128,
        "model.intermediate_size": 4096,
    },
    "titans-340m": TITANS_CONFIGURATION
    | {
        "model.num_hidden_layers": 24,
        "model.hidden_size": 1024,
        "mixer.num_heads": 16,
        "model.intermediate_size": 4096,
        "mixer.chunk_size": 64,
        "mixer.titans.memory_depth": 2,
        "mixer.titans.momentum": True,
        "cms.inner_lr": 0.0,
    },
    "hope-attention-llama3": {
        "mixer.kind": "attention",
        "cms.donor_layout": "depth",
        "cms.chunk_sizes": [128, 512, 2048],
        "cms.inner_objective": "task",
        "inner_loop.outer_gradient": "first_order",
    },
}
TOKENS = {"hope-760m": 30e9, "hope-1.3b": 100e9, "titans-340m": 15e9, "hope-attention-llama3": 15e9}
SIZES = {"hope-760m": 0.77e9, "hope-1.3b": 1.3e9, "titans-340m": 0.36e9}
VOCAB_SIZE = 32000


def test_all_nested_recipes_are_listed() -> None:
    assert set(RUNS) == LEARNING


@pytest.mark.parametrize("name", RUNS)
def test_recipe_values(name: str) -> None:
    recipe, notes = load_recipe(name)
    values = flatten(recipe.model_dump(mode="json", exclude_none=True))
    assert {key: values.get(key) for key in RUNS[name]} == RUNS[name]
    assert (notes, recipe.unused_tables) == ([], [])
    assert (recipe.train.best_metric, recipe.train.best_mode) == ("nats", "min")
    text = (SHIPPED_RECIPES / f"{name}.toml").read_text()
    assert "[P]" in text
    assert "[?]" in text
    assert recipe.data.text.row_tokens * recipe.train.batch_size * (recipe.train.steps or 0) == pytest.approx(
        TOKENS[name], rel=1e-3
    )


def test_printed_forms_are_not_the_defaults() -> None:
    defaults = SelfModifyingOptions()
    assert (defaults.objective, defaults.decay_target, defaults.read_at, defaults.momentum) == (
        "dot",
        "start",
        "token",
        False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_plan_without_weights_and_documents(name: str, tmp_path: Path) -> None:
    model = load_recipe(name)[0].model
    overrides = [f"model.name={folder_of(tmp_path, model.name)}"] if model.name else []
    overrides = overrides or [f"model.tokenizer={shared_dir()}/data/tokenizers/gpt2"]
    recipe = load_recipe(name, overrides)[0]
    plan = plan_run(recipe, torch.device("cpu"))
    assert plan["assumed"]
    assert plan["steps"] == recipe.train.steps
    assert plan["tokens"]["document"]["max"] == recipe.data.text.row_tokens
    assert plan["trainable"] == plan["parameters"]
    assert plan["memory"]["bytes"] > 4 * plan["bytes"]
    if model.name:  # an inner learning rate for each layer
        assert plan["parameters"] == PARAMETERS[model.name] + 32
    else:
        num_embeddings = 1 if model.tie_word_embeddings else 2
        num_parameters = plan["parameters"] - num_embeddings * (50257 - VOCAB_SIZE) * model.hidden_size
        assert num_parameters == pytest.approx(SIZES[name], rel=0.02)
