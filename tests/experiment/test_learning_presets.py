"""Recipes of papers on learning while reading: their settings, copied here once more from the spec by another hand."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.config.load import SHIPPED_RECIPES, load_recipe
from laconic.config.nested import SelfModifyingOptions
from laconic.config.recipe import flatten
from laconic.experiment.dry_run import plan_run
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
WORDS = 32000


def test_every_one_is_here() -> None:
    assert set(RUNS) == LEARNING


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_is_its_run(name: str) -> None:
    recipe, notes = load_recipe(name)
    found = flatten(recipe.model_dump(mode="json", exclude_none=True))
    assert {key: found.get(key) for key in RUNS[name]} == RUNS[name]
    assert (notes, recipe.unused_tables) == ([], [])
    assert (recipe.train.best_metric, recipe.train.best_mode) == ("nats", "min")
    text = (SHIPPED_RECIPES / f"{name}.toml").read_text()
    assert "[P]" in text
    assert "[?]" in text
    assert recipe.data.text.row_tokens * recipe.train.batch_size * (recipe.train.steps or 0) == pytest.approx(
        TOKENS[name], rel=1e-3
    )


def test_the_printed_forms_are_no_defaults() -> None:
    usual = SelfModifyingOptions()
    assert (usual.objective, usual.decay_target, usual.read_at, usual.momentum) == ("dot", "start", "token", False)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_preset_is_planned_without_weights_and_documents(name: str, tmp_path: Path) -> None:
    given = load_recipe(name)[0].model
    own = [f"model.name={folder_of(tmp_path, given.name)}"] if given.name else []
    own = own or [f"model.tokenizer={shared_dir()}/data/tokenizers/gpt2"]
    recipe = load_recipe(name, own)[0]
    found = plan_run(recipe, torch.device("cpu"))
    assert found["assumed"]
    assert found["steps"] == recipe.train.steps
    assert found["lengths"]["document"]["max"] == recipe.data.text.row_tokens
    assert found["trainable"] == found["parameters"]
    assert found["memory"]["by"] == "by formula"
    assert found["memory"]["bytes"] > 4 * found["bytes"]
    assert found["state"] > 1e7
    if given.name:  # a step of the inner loop for each layer
        assert found["parameters"] == PARAMETERS[given.name] + 32
    else:
        tables = 1 if given.tie_word_embeddings else 2
        there = found["parameters"] - tables * (50257 - WORDS) * given.hidden_size
        assert there == pytest.approx(SIZES[name], rel=0.02)
