"""The recipes of papers on reading: their settings, copied here once more from the tables by another hand."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.recipe.plan import plan
from laconic.recipe.read import SHIPPED_RECIPES, load_recipe
from laconic.recipe.schema import flatten
from tests.recipe.test_presets import PARAMETERS, READING, folder_of

OPT = {
    "reading.generator": "parallel", "reading.length": "fixed", "reading.kappa": 50, "reading.positions": "zero",
    "data.text.overlap": 0, "train.what": "full", "train.lr": 2e-5, "train.warmup_steps": 1000, "train.clip": 1.0,
    "train.schedule": "linear", "train.weight_decay": 0.0, "train.betas": [0.9, 0.999], "train.precision": "bfloat16",
}  # fmt: skip
RANDOM = {"data.text.segments": "random", "data.text.low": 1024, "data.text.high": 2048, "data.text.window": 2}
FIXED = {"data.text.segments": "fixed", "data.text.segment": 2048, "reading.memory": "replace"}
LONG = {"data.text.tokens": 30_720, "train.batch": 4}
RUNS: dict[str, dict[str, Any]] = {
    "ac-opt-2.7b-6k": OPT | RANDOM | {
        "model.name": "facebook/opt-2.7b", "reading.memory": "accumulate", "data.text.tokens": 6144, "train.batch": 16,
    },
    "ac-opt-2.7b-30k": OPT | RANDOM | LONG | {"model.name": "facebook/opt-2.7b", "reading.memory": "accumulate"},
    "ac-opt-1.3b-30k": OPT | RANDOM | LONG | {"model.name": "facebook/opt-1.3b", "reading.memory": "accumulate"},
    "rmt-opt-2.7b-8k": OPT | FIXED | {
        "model.name": "facebook/opt-2.7b", "data.text.tokens": 8192, "data.text.window": 4, "train.batch": 16,
    },
    "rmt-opt-1.3b-30k": OPT | FIXED | LONG | {"model.name": "facebook/opt-1.3b", "data.text.window": 15},
    "ac-llama-2-7b-6k": OPT | {
        "model.name": "meta-llama/Llama-2-7b-hf", "reading.positions": "contiguous", "reading.memory": "accumulate",
        "data.text.tokens": 6144, "data.text.segments": "random", "data.text.low": 2, "train.what": "lora",
        "train.lr": 8e-4, "train.warmup_steps": 5000, "train.batch": 32, "lora.r": 16, "lora.alpha": 16,
        "lora.dropout": 0.05, "lora.modules": "attention",
    },
    "read-compat": {
        "reading.trigger": "replace", "reading.adapter": "none", "reading.steps": False, "reading.memory": "replace",
        "reading.generator": "self", "reading.length": "stop", "reading.cap": 50, "halting.stop_head": "vocabulary",
        "halting.control": "rows", "halting.control_in_softmax": True, "halting.index": "split",
        "halting.gate": "scale", "halting.penalty": "ratio", "halting.alpha": 1.0, "halting.penalise": "all",
        "halting.price": 0.0, "halting.estimator": "soft", "halting.stop": "sample", "data.text.segments": "fixed",
        "train.lr": 2e-5,
    },
}  # fmt: skip
GB = {"ac-opt-2.7b-30k": 75, "ac-opt-1.3b-30k": 38}  # of a GPU, reported for training on rows of 30,720 tokens


def test_every_one_is_here() -> None:
    assert set(RUNS) == READING


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_is_its_run(name: str) -> None:
    recipe, notes = load_recipe(name)
    found = flatten(recipe.model_dump(mode="json", exclude_none=True))
    assert {key: found.get(key) for key in RUNS[name]} == RUNS[name]
    assert (notes, recipe.unused_tables) == ([], [])
    assert (recipe.train.best_metric, recipe.train.best_mode) == ("nats", "smallest")
    text = (SHIPPED_RECIPES / f"{name}.toml").read_text()
    assert "[C]" in text
    assert "[?]" in text
    assert recipe.data.text.row_tokens * recipe.train.batch_size * (recipe.train.steps or 0) == pytest.approx(
        15e9 if "llama" in name else 2e9, rel=1e-3
    )


def test_the_small_one_has_the_formulas_of_the_large() -> None:
    small, large = (flatten(load_recipe(name)[0].model_dump(mode="json")) for name in ("read-recall-compat", "read-compat"))
    formulas = {key for key in small if key.startswith(("reading.", "halting."))}
    differ = {key for key in formulas if small[key] != large[key]}
    assert differ == {"reading.cap", "reading.positions"}  # Llama has no table of positions
    task = flatten(load_recipe("read-recall")[0].model_dump(mode="json"))
    others = {key for key in small if not key.startswith(("reading.", "halting."))}
    assert {key for key in others if small[key] != task[key]} == set()


def test_documents_are_those_that_are_given(tmp_path: Path) -> None:
    found, notes = load_recipe("ac-opt-2.7b-6k", ["data.name=someone/texts"])
    assert (found.data.path, found.data.name) == (None, ("someone/texts",))
    assert notes == ["data.name takes the place of data.path"]
    assert load_recipe("ac-opt-2.7b-6k", [f"data.path={tmp_path}/b.txt"])[0].data.path == f"{tmp_path}/b.txt"


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_preset_is_planned_without_weights_and_documents(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)[0]
    model = str(recipe.model.name)
    found = plan(load_recipe(name, [f"model.name={folder_of(tmp_path, model)}"])[0], torch.device("cpu"))
    assert found["assumed"]
    assert found["steps"] == recipe.train.steps
    assert found["lengths"]["document"]["max"] == recipe.data.text.row_tokens
    more, width = found["parameters"] - PARAMETERS[model], 4096 if "lora" in recipe.train.trainable else 0
    summaries = 2 * 2560 if name == "read-compat" else 50 * (width or (2560 if "2.7b" in model else 2048))
    assert more == summaries + (32 * 4 * 2 * 16 * 4096 if width else 0)
    assert found["memory"]["by"] == "followed through fake tensors"
    if name in GB:
        assert found["memory"]["bytes"] == pytest.approx(GB[name] * 1e9, rel=0.1)
