"""The table of contents: each method by its name, made of a recipe's settings; and how its answers are written."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from laconic.batches import AnswerBatch, ReasoningBatch, ReasoningExample
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.lm_baseline import LanguageModelBaseline
from laconic.config.recipe import Recipe
from laconic.data.reasoning.dataset import answer_prefix_ids, collate
from laconic.data.reasoning.encode import ReasoningEncoder, find_eos_token_id
from laconic.errors import UsageError
from laconic.experiment.build_model import ModelParts
from laconic.generation.config import GenerationConfig
from laconic.latent.answering import AnswerDecoding
from laconic.latent.coconut import Coconut
from laconic.latent.codi import Codi
from laconic.latent.cot import Cot, NoCot
from laconic.latent.icot import Icot
from laconic.latent.kava import Kava
from laconic.latent.pccot import Pccot
from laconic.nested.hope.model import Hope
from laconic.nested.language_model import NestedLanguageModel


class ScheduleSizes(NamedTuple):
    """What a schedule goes by: updates in an epoch and in all, tokens of the longest chain (None: not known)."""

    updates_per_epoch: int
    total_updates: int
    max_chain_tokens: int | None


MethodFactory = Callable[[ModelParts, Recipe, ScheduleSizes], nn.Module]

# What a table holds is there: the recipe was validated.
METHOD_FACTORIES: Mapping[str, MethodFactory] = {
    "cot": lambda parts, recipe, sizes: Cot(parts.decoder),
    "nocot": lambda parts, recipe, sizes: NoCot(parts.decoder),
    "icot": lambda parts, recipe, sizes: Icot(
        parts.decoder,
        require(recipe.icot),
        steps_per_epoch=sizes.updates_per_epoch,
        max_chain_length=sizes.max_chain_tokens,
        seed=recipe.seed,
    ),
    "coconut": lambda parts, recipe, sizes: Coconut(
        parts.decoder,
        require(parts.latents),
        require(recipe.coconut),
        steps_per_epoch=sizes.updates_per_epoch,
        seed=recipe.seed,
    ),
    "codi": lambda parts, recipe, sizes: Codi(parts.decoder, require(parts.latents), require(recipe.distillation)),
    "pccot": lambda parts, recipe, sizes: Pccot(parts.decoder, require(parts.latents), require(recipe.distillation)),
    "kava": lambda parts, recipe, sizes: Kava(
        parts.decoder,
        require(parts.latents),
        require(recipe.distillation),
        require(recipe.kv_selection),
        require(recipe.kv_distillation),
        recipe.seed,
    ),
    "autocompressor": lambda parts, recipe, sizes: AutoCompressor(
        parts.decoder,
        require(parts.summary_parameters),
        require(parts.summary_parameters).config,
        recipe.stop_head,
        total_steps=sizes.total_updates,
        seed=recipe.seed,
        bos_token_id=parts.tokenizer.special_token_id("bos_token"),
        base_model_context=parts.adapter.disable_adapter if parts.adapter is not None else None,
    ),
    "lm": lambda parts, recipe, sizes: LanguageModelBaseline(parts.decoder),
    "hope": lambda parts, recipe, sizes: NestedLanguageModel(cast(Hope, parts.decoder), require(recipe.inner_loop)),
}


def set_stage(method: nn.Module, epoch: int) -> None:
    """Coconut answers as in the stage of an epoch; the other methods know no stages."""
    if isinstance(method, Coconut):
        method.eval_stage = method.get_stage(epoch)


def require(there: Any) -> Any:
    """What a recipe's validation has put there."""
    assert there is not None
    return there


def build_method(
    parts: ModelParts, recipe: Recipe, steps_per_epoch: int, max_chain_tokens: int | None = None
) -> nn.Module:
    """The method of a recipe; `longest` is in tokens, of all chains it is trained on.

    Raises `Usage` (2) where something that it needs would stay as it starts.
    """
    steps = recipe.train.num_updates(steps_per_epoch)
    method = METHOD_FACTORIES[recipe.method](parts, recipe, ScheduleSizes(steps_per_epoch, steps, max_chain_tokens))
    learned = {id(p) for p in method.parameters() if p.requires_grad}
    for module in parts.extra_modules.values():
        frozen = next((name for name, p in module.named_parameters() if id(p) not in learned), None)
        if frozen:
            what = type(module).__name__.lower()
            raise UsageError(f"method {recipe.method} would leave {frozen} of the {what} as it starts; leave it out")
    return method


def answer_decoding(
    parts: ModelParts, recipe: Recipe, max_tokens: int, how: GenerationConfig | None = None, seed: int = 0
) -> AnswerDecoding:
    """How answers of a recipe's format are written and ended; greedily unless `how` says else."""
    tokenizer = parts.tokenizer
    eos, prompt = find_eos_token_id(tokenizer, recipe.data), answer_prefix_ids(tokenizer, recipe.data)
    return AnswerDecoding(max_tokens, (eos,), tokenizer.decode, tuple(prompt), how or GenerationConfig(), seed)


def build_questions_batch(parts: ModelParts, recipe: Recipe, questions: Sequence[str]) -> ReasoningBatch:
    """Questions alone as a batch; what stands for their answers means nothing."""
    encoder = ReasoningEncoder(parts.tokenizer, recipe.data)
    rows = [
        encoder.encode_example(ReasoningExample(f"question {i}", text, (), "0")) for i, text in enumerate(questions, 1)
    ]
    return collate(rows, range(len(rows)))


def answer_questions(
    method: nn.Module, questions: ReasoningBatch, decoding: AnswerDecoding, *, with_cot: bool = False
) -> AnswerBatch:
    """Return the answers of a method; with `with_cot` it writes out the chain first."""
    return cast(Any, method).answer(questions, decoding, with_cot=with_cot)
