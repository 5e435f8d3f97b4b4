"""docs/numerics.md: every key it names is one of a recipe, and every choice the papers leave open can be switched."""

import re
from typing import Any

import pytest

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe, find_field, flatten
from laconic.errors import UsageError
from tests.conftest import REPO

PAGE = (REPO / "docs" / "numerics.md").read_text()
# What the papers leave open: the recipe that stands for it, its key, our choice, the others.
OPEN: tuple[tuple[str, str, Any, tuple[str, ...]], ...] = (
    ("kava-llama1b-aug", "distillation.hidden_loss", "smooth_l1", ("l1", "mse")),
    ("kava-llama1b-aug", "distillation.hidden_layers", "blocks", ("all", "last")),
    ("kava-llama1b-aug", "distillation.hidden_scale", "layer", ("none", "global")),
    ("kava-llama1b-aug", "kv_distillation.scale", "layer", ("none", "global", "each_side")),
    ("kava-llama1b-aug", "kv_distillation.reduction", "mean", ("row_mean", "paper_sum")),
    ("kava-llama1b-aug", "kv_distillation.distance", "smooth_l1", ("l1", "mse")),
    ("kava-llama1b-aug", "distillation.ce_reduction", "token", ("row",)),
    ("kava-llama1b-aug", "kv_selection.importance_norm", "chain", ("renormalised", "full")),
    ("kava-llama1b-aug", "kv_selection.importance_queries", "answer", ("number", "predict")),
    ("kava-llama1b-aug", "kv_selection.head_pooling", "max", ("mean",)),
    ("kava-llama1b-aug", "kv_selection.redundancy_divisor", "count", ("others",)),
    ("kava-llama1b-aug", "kv_selection.slot_order", "position", ("score",)),
    ("kava-llama1b-aug", "kv_distillation.key_space", "post_rope", ("pre_rope",)),
    ("kava-llama1b-aug", "kv_distillation.short_chain_targets", "mask", ("zero", "repeat")),
    ("kava-llama1b-aug", "data.format", "pccot", ("codi",)),
    ("kava-llama1b-aug", "lora.target_modules", "all", ("attention",)),
    ("pccot-gpt2-aug", "train.warmup_ratio", 0.03, ("0.05",)),
    ("pccot-gpt2-aug", "train.max_grad_norm", 1.0, ("2.0",)),
    ("kava-llama1b-aug", "latents.projection", "pccot", ("codi", "none")),
    ("cot-llama1b-aug", "data.chain_steps", "all", ("drop_last",)),
    ("kava-llama1b-aug", "distillation.share_question_cache", True, ("false",)),
    ("kava-llama1b-aug", "distillation.teacher_pass", "same_pass", ("second_pass",)),
    ("kava-llama1b-aug", "latents.control_tokens", "vectors", ("vocabulary",)),
    ("codi-llama1b-aug", "data.separator", "none", ("eos",)),
    ("kava-llama1b-aug", "data.require_leading_digit", False, ("true",)),
    ("kava-llama1b-aug", "data.max_tokens", None, ("200",)),
    ("codi-gpt2-aug-nl", "data.chain_split", "sentences", ("lines",)),
    ("coconut-gpt2-aug", "coconut.pad_latent_to_max", True, ("false",)),
    ("kava-llama1b-aug", "seed", 0, ("1", "2")),
)


def value(recipe: Recipe, key: str) -> Any:
    return flatten(recipe.model_dump(mode="json")).get(key)


def test_every_key_on_the_page_is_a_recipe_s() -> None:
    tables = "data|distilling|keeping|lora|matching|model|removing|scoring|staging|thinking|train|validation"
    named = set(re.findall(rf"`((?:{tables})\.[a-z_0-9]+)\b(?!\()", PAGE))
    assert len(named) > 20
    assert sorted(key for key in named if find_field(key) is None) == []


@pytest.mark.parametrize(("name", "key", "ours", "others"), OPEN, ids=[key for _, key, _, _ in OPEN])
def test_what_the_papers_leave_open_is_switched_by_its_key(
    name: str, key: str, ours: Any, others: tuple[str, ...]
) -> None:
    before = value(load_recipe(name)[0], key)
    assert before == ours
    for other in others:
        after = value(load_recipe(name, [f"{key}={other}"])[0], key)
        assert str(after).lower() == other
        assert after != before
    last = key.rpartition(".")[2]
    assert f"`{key}`" in PAGE or f"`{last}`" in PAGE or f"`{last} " in PAGE or f"`{key} " in PAGE, f"{key} is not told"


def test_thoughts_made_one_by_one_have_no_rounds() -> None:
    with pytest.raises(UsageError, match=r"thinking\.rounds: 3: sequential thoughts have no rounds"):
        load_recipe("kava-llama1b-aug", ["latents.schedule=sequential"])
