"""The table of contents: each method by its name, made of a recipe's settings; and how its answers are written."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from laconic.core.answering import Writing
from laconic.core.errors import Usage
from laconic.data.pieces import ending
from laconic.data.reasoning import prompt_ids
from laconic.methods.coconut import Coconut
from laconic.methods.codi import Codi
from laconic.methods.cot import Cot, NoCot
from laconic.methods.icot import Icot
from laconic.methods.kava import Kava
from laconic.methods.pccot import Pccot
from laconic.recipe.models import Parts
from laconic.recipe.schema import Recipe

Make = Callable[[Parts, Recipe, int], nn.Module]

# What a table holds is there: the recipe was validated.
METHODS: Mapping[str, Make] = {
    "cot": lambda parts, recipe, steps: Cot(parts.decoder),
    "nocot": lambda parts, recipe, steps: NoCot(parts.decoder),
    "icot": lambda parts, recipe, steps: Icot(
        parts.decoder, asked(recipe.removing), steps_per_epoch=steps, seed=recipe.seed
    ),
    "coconut": lambda parts, recipe, steps: Coconut(
        parts.decoder, asked(parts.thoughts), asked(recipe.staging), steps_per_epoch=steps, seed=recipe.seed
    ),
    "codi": lambda parts, recipe, steps: Codi(parts.decoder, asked(parts.thoughts), asked(recipe.distilling)),
    "pccot": lambda parts, recipe, steps: Pccot(parts.decoder, asked(parts.thoughts), asked(recipe.distilling)),
    "kava": lambda parts, recipe, steps: Kava(
        parts.decoder,
        asked(parts.thoughts),
        asked(recipe.distilling),
        asked(recipe.keeping),
        asked(recipe.matching),
        recipe.seed,
    ),
}


def asked(there: Any) -> Any:
    """What a recipe's validation has put there."""
    assert there is not None
    return there


def method_of(parts: Parts, recipe: Recipe, steps_per_epoch: int) -> nn.Module:
    """The method of a recipe. Raises `Usage` (2) where something that it needs would stay as it starts."""
    method = METHODS[recipe.method](parts, recipe, steps_per_epoch)
    learned = {id(p) for p in method.parameters() if p.requires_grad}
    named = parts.thoughts.named_parameters() if parts.thoughts is not None else ()
    frozen = next((name for name, p in named if id(p) not in learned), None)
    if frozen:
        raise Usage(
            f"method {recipe.method} would leave {frozen} of the thoughts as it starts; train it or leave it out"
        )
    return method


def writing(parts: Parts, recipe: Recipe, max_tokens: int) -> Writing:
    """How answers of a recipe's format are written and ended."""
    tokenizer = parts.tokenizer
    eos, prompt = ending(tokenizer, recipe.data), prompt_ids(tokenizer, recipe.data)
    return Writing(max_tokens, (eos,), tokenizer.decode, tuple(prompt))
