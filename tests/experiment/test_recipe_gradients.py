"""Every trainable tensor of a shipped nested recipe gets a gradient in its first updates."""

import json
from pathlib import Path
from typing import cast

import pytest
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
NESTED = sorted(path.stem for path in SHIPPED_RECIPES.glob("*.toml") if 'method = "hope"' in path.read_text())
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


def tensors_without_gradient(recipe: Recipe) -> list[str]:
    """Return the trainable tensors whose gradient is zero everywhere in the first two updates.

    Behind a map that starts at zero, such as the last one of an added level, gradients begin with the second update.
    """
    experiment = build_experiment(recipe, CPU)
    method = experiment.method.train()
    named = {name: p for name, p in method.named_parameters() if p.requires_grad}
    assert named
    optimizer, zero = torch.optim.SGD(named.values(), lr=0.1), list(named)
    for _ in range(2):
        optimizer.zero_grad()
        method(experiment.training_data.batch([0, 1], 0, 0)).loss.backward()
        optimizer.step()
        zero = [name for name in zero if (g := named[name].grad) is None or not g.any()]
        if not zero:
            break
    return zero


@pytest.mark.medium
@pytest.mark.parametrize("name", NESTED)
def test_recipe_gives_every_trainable_tensor_a_gradient(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name, shrink_recipe(name, tmp_path))[0]
    assert recipe.cms is not None
    zero = tensors_without_gradient(recipe)
    if recipe.cms.initial_inner_lr == 0:  # a level that is fixed at learning rate 0
        zero = [name for name in zero if not name.endswith("step.bias")]
    assert zero == []


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
        ("titans-tiny-recall", ["inner_loop.outer_gradient=none"], "gates of the memory"),
        ("cms-tiny-drift", ["inner_loop.outer_gradient=none"], "'task'"),
    ],
)
def test_recipe_refuses_gradients_that_train_nothing(name: str, keys: list[str], message: str, tmp_path: Path) -> None:
    small = [*shrink_recipe(name, tmp_path), *keys]
    with pytest.raises(UsageError, match=rf"inner_loop\.outer_gradient: .*{message}.*allow_untrained_level"):
        build_experiment(load_recipe(name, small)[0], CPU)
    build_experiment(load_recipe(name, [*small, "inner_loop.allow_untrained_level=true"])[0], CPU)
    build_experiment(load_recipe(name, [*small, "inner_loop.enabled=false"])[0], CPU)
