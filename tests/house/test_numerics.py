"""docs/numerics.md: every key it names is one of a recipe, and every choice the papers leave open can be switched."""

import re
from typing import Any

import pytest

from laconic.core.errors import UsageError
from laconic.recipe.read import load_recipe
from laconic.recipe.schema import Recipe, find_field, flatten
from tests.conftest import REPO

PAGE = (REPO / "docs" / "numerics.md").read_text()
# What the papers leave open: the recipe that stands for it, its key, our choice, the others.
OPEN: tuple[tuple[str, str, Any, tuple[str, ...]], ...] = (
    ("kava-llama1b-aug", "distilling.codi_loss", "smooth_l1", ("l1", "mse")),
    ("kava-llama1b-aug", "distilling.codi_layers", "blocks", ("all", "last")),
    ("kava-llama1b-aug", "distilling.codi_norm", "layer", ("none", "global")),
    ("kava-llama1b-aug", "matching.kv_norm", "layer", ("none", "global", "own")),
    ("kava-llama1b-aug", "matching.kv_reduction", "mean", ("row_mean", "paper_sum")),
    ("kava-llama1b-aug", "matching.kv_loss", "smooth_l1", ("l1", "mse")),
    ("kava-llama1b-aug", "distilling.ce_reduction", "token", ("row",)),
    ("kava-llama1b-aug", "keeping.importance_norm", "chain", ("renormalised", "full")),
    ("kava-llama1b-aug", "keeping.answer_rows", "answer", ("number", "predict")),
    ("kava-llama1b-aug", "keeping.group_pool", "max", ("mean",)),
    ("kava-llama1b-aug", "keeping.redundancy_divisor", "count", ("others",)),
    ("kava-llama1b-aug", "keeping.kept_order", "time", ("score",)),
    ("kava-llama1b-aug", "matching.key_space", "post_rope", ("pre_rope",)),
    ("kava-llama1b-aug", "matching.short_chain", "mask", ("zero", "repeat")),
    ("kava-llama1b-aug", "data.format", "pccot", ("codi",)),
    ("kava-llama1b-aug", "lora.modules", "all", ("attention",)),
    ("pccot-gpt2-aug", "train.warmup", 0.03, ("0.05",)),
    ("pccot-gpt2-aug", "train.clip", 1.0, ("2.0",)),
    ("kava-llama1b-aug", "thinking.project", "pccot", ("codi", "none")),
    ("cot-llama1b-aug", "data.chain", "all", ("drop_last",)),
    ("kava-llama1b-aug", "distilling.share_question", True, ("false",)),
    ("kava-llama1b-aug", "distilling.codi_target", "same_pass", ("second_pass",)),
    ("kava-llama1b-aug", "thinking.control", "vectors", ("rows",)),
    ("codi-llama1b-aug", "data.separator", "none", ("eos",)),
    ("kava-llama1b-aug", "data.drop_negative", False, ("true",)),
    ("kava-llama1b-aug", "data.max_tokens", None, ("200",)),
    ("codi-gpt2-aug-nl", "data.split", "sentences", ("lines",)),
    ("coconut-gpt2-aug", "staging.pad_latent_to_max", True, ("false",)),
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
        load_recipe("kava-llama1b-aug", ["thinking.mode=sequential"])
