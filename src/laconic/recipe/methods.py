"""The table of contents: each method by its name, made of a recipe's settings; and how its answers are written."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from laconic.core.answering import Writing
from laconic.core.contract import Answers, Example, Reasoning
from laconic.core.errors import Usage
from laconic.core.sampling import Sampling
from laconic.data.pieces import Encoder, ending
from laconic.data.reasoning import collate, prompt_ids
from laconic.methods.autocompressor import AutoCompressor
from laconic.methods.coconut import Coconut
from laconic.methods.codi import Codi
from laconic.methods.cot import Cot, NoCot
from laconic.methods.hope_model import Hope
from laconic.methods.icot import Icot
from laconic.methods.kava import Kava
from laconic.methods.learner import Learner
from laconic.methods.pccot import Pccot
from laconic.methods.plain import Plain
from laconic.recipe.models import Parts
from laconic.recipe.schema import Recipe


class Sizes(NamedTuple):
    """What a schedule goes by: updates in an epoch and in all, tokens of the longest chain (None: not known)."""

    per_epoch: int
    steps: int
    longest: int | None


Make = Callable[[Parts, Recipe, Sizes], nn.Module]

# What a table holds is there: the recipe was validated.
METHODS: Mapping[str, Make] = {
    "cot": lambda parts, recipe, sizes: Cot(parts.decoder, ce_reduction=had(recipe.scoring).ce_reduction),
    "nocot": lambda parts, recipe, sizes: NoCot(parts.decoder, ce_reduction=had(recipe.scoring).ce_reduction),
    "icot": lambda parts, recipe, sizes: Icot(
        parts.decoder, had(recipe.removing), steps_per_epoch=sizes.per_epoch, longest=sizes.longest, seed=recipe.seed
    ),
    "coconut": lambda parts, recipe, sizes: Coconut(
        parts.decoder, had(parts.thoughts), had(recipe.staging), steps_per_epoch=sizes.per_epoch, seed=recipe.seed
    ),
    "codi": lambda parts, recipe, sizes: Codi(parts.decoder, had(parts.thoughts), had(recipe.distilling)),
    "pccot": lambda parts, recipe, sizes: Pccot(parts.decoder, had(parts.thoughts), had(recipe.distilling)),
    "kava": lambda parts, recipe, sizes: Kava(
        parts.decoder,
        had(parts.thoughts),
        had(recipe.distilling),
        had(recipe.keeping),
        had(recipe.matching),
        recipe.seed,
    ),
    "autocompressor": lambda parts, recipe, sizes: AutoCompressor(
        parts.decoder,
        had(parts.summaries),
        had(parts.summaries).reading,
        recipe.halting,
        steps=sizes.steps,
        seed=recipe.seed,
        bos=parts.tokenizer.id_of("bos_token"),
        base=parts.adapter.disable_adapter if parts.adapter is not None else None,
    ),
    "plain": lambda parts, recipe, sizes: Plain(parts.decoder),
    "hope": lambda parts, recipe, sizes: Learner(cast(Hope, parts.decoder), had(recipe.learning)),
}


def staged(method: nn.Module, epoch: int) -> None:
    """Coconut answers as in the stage of an epoch; the other methods know no stages."""
    if isinstance(method, Coconut):
        method.stage = method.scheduled(epoch)


def had(there: Any) -> Any:
    """What a recipe's validation has put there."""
    assert there is not None
    return there


def method_of(parts: Parts, recipe: Recipe, steps_per_epoch: int, longest: int | None = None) -> nn.Module:
    """The method of a recipe; `longest` is in tokens, of all chains it is trained on.

    Raises `Usage` (2) where something that it needs would stay as it starts.
    """
    steps = recipe.train.updates(steps_per_epoch)
    method = METHODS[recipe.method](parts, recipe, Sizes(steps_per_epoch, steps, longest))
    learned = {id(p) for p in method.parameters() if p.requires_grad}
    for module in parts.beside.values():
        frozen = next((name for name, p in module.named_parameters() if id(p) not in learned), None)
        if frozen:
            what = type(module).__name__.lower()
            raise Usage(f"method {recipe.method} would leave {frozen} of the {what} as it starts; leave it out")
    return method


def writing(parts: Parts, recipe: Recipe, max_tokens: int, how: Sampling | None = None, seed: int = 0) -> Writing:
    """How answers of a recipe's format are written and ended; greedily unless `how` says else."""
    tokenizer = parts.tokenizer
    eos, prompt = ending(tokenizer, recipe.data), prompt_ids(tokenizer, recipe.data)
    return Writing(max_tokens, (eos,), tokenizer.decode, tuple(prompt), how or Sampling(), seed)


def asked(parts: Parts, recipe: Recipe, questions: Sequence[str]) -> Reasoning:
    """Questions alone as a batch; what stands for their answers means nothing."""
    encoder = Encoder(parts.tokenizer, recipe.data)
    rows = [encoder.row(Example(f"question {i}", text, (), "0")) for i, text in enumerate(questions, 1)]
    return collate(rows, range(len(rows)))


def answer(method: nn.Module, questions: Reasoning, told: Writing, *, teacher: bool = False) -> Answers:
    """Answers as the method gives them, or by chain."""
    return cast(Any, method).answer(questions, told, teacher=teacher)
