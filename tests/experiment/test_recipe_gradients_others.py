"""Every trainable tensor of the shipped recipes without fast weights gets a gradient."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from laconic.config.load import SHIPPED_RECIPES, load_recipe
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.experiment.from_recipe.build import build_experiment
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder

pytestmark = pytest.mark.usefixtures("unchecked")
CPU = torch.device("cpu")
CONTENTS = {path.stem: tomllib.loads(path.read_text()) for path in SHIPPED_RECIPES.glob("*.toml")}
OTHERS = sorted(name for name, content in CONTENTS.items() if content["method"] != "hope")
FAMILIES = {"gpt2": "gpt2", "opt": "opt", "Qwen": "qwen2", "Mistral": "mistral"}  # the others are Llamas
# They differ from others in sizes, rates and rows, which this test replaces, or combine options that others have.
REPEATED = tuple(
    name
    for name in OTHERS
    if name.endswith("-aug-nl")
    or (name.startswith(("cot-", "nocot-")) and name.endswith("-aug") and "gpt2" not in name)
)
SEGMENT = 16


def first_model(name: str) -> dict[str, Any]:
    """Return the model table of the run that a recipe begins with, or its own."""
    model = CONTENTS[name]["model"]
    earlier = model.get("init_from_run")
    return model if earlier is None else first_model(Path(earlier).name)


def save_donor(name: str, folder: Path) -> str:
    """Save a tiny checkpoint of the family of a published one, and return its folder."""
    family = next((family for part, family in FAMILIES.items() if part in name), "llama")
    config = DecoderConfig.tiny(family, vocab_size=build_byte_tokenizer().vocab_size, max_position_embeddings=512)
    Decoder(config, seed=1).save_pretrained(folder)
    build_byte_tokenizer().save(folder)
    return str(folder)


def shrink_model(name: str, folder: Path) -> dict[str, Any]:
    model = dict(first_model(name))
    if "name" in model:
        return {"name": save_donor(model["name"], folder / "donor")}
    model |= {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    if "/" in model["tokenizer"]:
        model["tokenizer"] = "bytes"
    model.pop("num_key_value_heads", None)
    return model


def shrink_texts(content: dict[str, Any], folder: Path) -> None:
    """Give a recipe short segments of a text of a few words, and few summary vectors."""
    rows = [{"book": f"b{i}", "text": f"{i} " + "The quick brown fox jumps. " * 24} for i in range(6)]
    (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, segments = content["data"]["text"], content["data"]["text"].get("segments_per_window", 1)
    content["data"]["path"] = str(folder / "books.jsonl")
    if text.get("segment_lengths") == "random":
        text |= {"min_segment_tokens": SEGMENT // 2, "max_segment_tokens": SEGMENT + SEGMENT // 2}
    is_uneven = isinstance(text.get("segment_tokens"), list)
    text |= {"segment_tokens": [SEGMENT] * segments if is_uneven else SEGMENT, "row_tokens": SEGMENT * segments}
    if "compression" in content:
        smaller = {"num_vectors": 2, "max_vectors": 2, "allowed_lengths": [1, 2]}
        content["compression"] |= {key: value for key, value in smaller.items() if key in content["compression"]}


def shrink_questions(content: dict[str, Any], folder: Path) -> None:
    """Give a recipe two questions with chains of three steps."""
    row = {"question": "3 + 4 - 2 + 5 =", "steps": ["<<3+4=7>>", "<<7-2=5>>", "<<5+5=10>>"], "answer": "10"}
    (folder / "rows.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    (folder / "valid.jsonl").write_text(json.dumps(row | {"question": "1 + 9 ="}) + "\n")
    data = content["data"]
    data |= {"name": str(folder / "rows.jsonl"), "valid": str(folder / "valid.jsonl"), "max_tokens": 400}
    data.pop("eos_token", None)


def shrink_recipe(name: str, folder: Path) -> Recipe:
    """Return a recipe with its own method, options and losses, but a small model and few rows."""
    content: dict[str, Any] = json.loads(json.dumps(CONTENTS[name]))
    content["model"] = shrink_model(name, folder)
    for key in ("paper_table", "table_row", "deviations"):
        content.pop(key, None)
    source = content["data"]["source"]
    if source == "text":
        shrink_texts(content, folder)
    elif source == "catalog":
        shrink_questions(content, folder)
    if "lora" in content:
        content["lora"] |= {"rank": 2, "dropout": 0.0}
    content["train"] |= {"batch_size": 2, "last_batch": "drop", "precision": "float32"}
    content["train"].pop("micro_batch_size", None)
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(content))
    return load_recipe(path)[0]


def choose_updates(num_updates: int) -> list[int]:
    """Return the first three updates and the last.

    Behind two maps that start at zero, such as LoRA's and that of summary vectors, gradients begin with the third. A
    stop head may be trained last.
    """
    return [0, 1, 2, num_updates - 1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in REPEATED else []) for name in OTHERS]
)
def test_recipe_gives_every_trainable_tensor_a_gradient(name: str, tmp_path: Path) -> None:
    recipe = shrink_recipe(name, tmp_path)
    experiment = build_experiment(recipe, CPU)
    method = experiment.method.train()
    named = {name: p for name, p in method.named_parameters() if p.requires_grad}
    assert named
    optimizer, zero = torch.optim.SGD(named.values(), lr=0.01), list(named)
    for step in choose_updates(recipe.train.total_updates(len(experiment.training_data))):
        batch = experiment.training_data.batch([0, 1], 0, step)
        optimizer.zero_grad()
        method(batch).loss.backward()
        optimizer.step()
        zero = [name for name in zero if (g := named[name].grad) is None or not g.any()]
        if not zero:
            break
    assert zero == []
