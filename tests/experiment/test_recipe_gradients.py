"""Every trainable tensor of a shipped recipe gets a gradient."""

import json
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
import tomli_w
import torch

from laconic.config.load import SHIPPED_RECIPES, load_recipe
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import UsageError
from laconic.experiment.from_recipe.build import build_experiment
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.nested.hope.model import Hope

pytestmark = pytest.mark.usefixtures("unchecked")
CPU = torch.device("cpu")
CONTENTS = {path.stem: tomllib.loads(path.read_text()) for path in SHIPPED_RECIPES.glob("*.toml")}
NESTED = sorted(name for name, content in CONTENTS.items() if content["method"] == "hope")
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
CHUNK = 4  # of the fastest level


def shrink_recipe(name: str, folder: Path) -> list[str]:
    """Return overrides that keep a nested recipe's options and make its model and rows small."""
    recipe, keys = load_recipe(name)[0], ["train.batch_size=2"]
    assert recipe.cms is not None
    assert recipe.mixer is not None
    if recipe.model.name:
        config = DecoderConfig.tiny("llama", vocab_size=build_byte_tokenizer().vocab_size, num_hidden_layers=3)
        Decoder(config, seed=1).save_pretrained(folder / "donor")
        build_byte_tokenizer().save(folder / "donor")
        keys += [f"model.name={folder / 'donor'}"]
    else:
        keys += ["model.hidden_size=16", "model.num_hidden_layers=1", "model.intermediate_size=16"]
    ratios = [size // recipe.cms.chunk_sizes[0] for size in recipe.cms.chunk_sizes]
    if recipe.mixer.kind != "attention":
        keys += ["mixer.num_heads=2", f"mixer.chunk_size={CHUNK}"]
        keys += [f"mixer.self_modifying.{group}_chunk_size={CHUNK}" for group in ("memory", "projection")]
    keys += ["mixer.head_dim=8"] if recipe.mixer.kind == "self_modifying" else []
    keys += [f"cms.chunk_sizes={[CHUNK * ratio for ratio in ratios]}"]
    if recipe.data.source == "text":
        tokens = CHUNK * (ratios[-1] + 3)
        rows = [{"book": f"b{i}", "text": f"{i} " + "The quick brown fox jumps. " * 24} for i in range(6)]
        (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys += [f"data.path={folder / 'books.jsonl'}", f"data.text.row_tokens={tokens}"]
        keys += [f"data.text.segment_tokens={tokens}", "model.max_position_embeddings=128"]
        keys += [f"data.text.vocabulary_drift_every={tokens // 2}"] if recipe.data.text.vocabulary_drift_every else []
    if recipe.model.tokenizer and "/" in recipe.model.tokenizer:
        keys += ["model.tokenizer=bytes"]
    return keys


def first_model(name: str) -> dict[str, Any]:
    """Return the model table of the run that a recipe begins with, or its own."""
    model = CONTENTS[name]["model"]
    earlier = model.get("init_from_run")
    return model if earlier is None else first_model(Path(earlier).name)


def save_family_donor(name: str, folder: Path) -> str:
    """Save a tiny checkpoint of the family of a published one, and return its folder."""
    family = next((family for part, family in FAMILIES.items() if part in name), "llama")
    config = DecoderConfig.tiny(family, vocab_size=build_byte_tokenizer().vocab_size, max_position_embeddings=512)
    Decoder(config, seed=1).save_pretrained(folder)
    build_byte_tokenizer().save(folder)
    return str(folder)


def shrink_model(name: str, folder: Path) -> dict[str, Any]:
    model = dict(first_model(name))
    if "name" in model:
        return {"name": save_family_donor(model["name"], folder / "donor")}
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


def shrink_plain_recipe(name: str, folder: Path) -> Recipe:
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


def tensors_without_gradient(recipe: Recipe) -> list[str]:
    """Return the trainable tensors whose gradient is zero everywhere in the first three updates and the last.

    Behind a map that starts at zero, such as the last one of an added level, gradients begin with the second update,
    and behind two, such as LoRA's and that of summary vectors, with the third. A stop head may be trained last.
    """
    experiment = build_experiment(recipe, CPU)
    method = experiment.method.train()
    named = {name: p for name, p in method.named_parameters() if p.requires_grad}
    assert named
    is_nested = recipe.method == "hope"
    optimizer, zero = torch.optim.SGD(named.values(), lr=0.1 if is_nested else 0.01), list(named)
    for step in (0, 1, 2, recipe.train.total_updates(len(experiment.training_data)) - 1):
        optimizer.zero_grad()
        method(experiment.training_data.batch([0, 1], 0, 0 if is_nested else step)).loss.backward()
        optimizer.step()
        zero = [name for name in zero if (g := named[name].grad) is None or not g.any()]
        if not zero:
            break
    return zero


@pytest.mark.medium
@pytest.mark.parametrize("name", NESTED)
def test_nested_recipe_gives_every_trainable_tensor_a_gradient(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name, shrink_recipe(name, tmp_path))[0]
    assert recipe.cms is not None
    zero = tensors_without_gradient(recipe)
    if recipe.cms.initial_inner_lr == 0:  # a level that is fixed at learning rate 0
        zero = [name for name in zero if not name.endswith("step.bias")]
    assert zero == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in REPEATED else []) for name in OTHERS]
)
def test_recipe_gives_every_trainable_tensor_a_gradient(name: str, tmp_path: Path) -> None:
    assert tensors_without_gradient(shrink_plain_recipe(name, tmp_path)) == []


def test_stacked_llama_has_a_control_of_one_frequency(tmp_path: Path) -> None:
    """The one in the recipe's comment: as many parameters, every layer with the same chunk."""
    keys = [key for key in shrink_recipe("hope-attention-tiny", tmp_path) if not key.startswith("cms.chunk_sizes")]
    models = [
        build_experiment(load_recipe("hope-attention-tiny", [*keys, f"cms.chunk_sizes={sizes}"])[0], CPU).parts.decoder
        for sizes in ([4, 16, 64], [16])
    ]
    assert [cast(Hope, model).hope_config.chunk_sizes for model in models] == [((4,), (16,), (64,)), ((16,),) * 3]
    assert len({sum(p.numel() for p in model.parameters()) for model in models}) == 1


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("hope-tiny-books", ["inner_loop.outer_gradient=first_order"], "associative.*adaptive projections"),
        ("hope-tiny-recall", ["inner_loop.outer_gradient=first_order"], "adaptive projections"),
    ],
)
def test_recipe_refuses_gradients_that_train_nothing(name: str, keys: list[str], message: str, tmp_path: Path) -> None:
    small = [*shrink_recipe(name, tmp_path), *keys]
    with pytest.raises(UsageError, match=rf"inner_loop\.outer_gradient: .*{message}.*allow_untrained_level"):
        build_experiment(load_recipe(name, small)[0], CPU)
    build_experiment(load_recipe(name, [*small, "inner_loop.allow_untrained_level=true"])[0], CPU)
    build_experiment(load_recipe(name, [*small, "inner_loop.enabled=false"])[0], CPU)
