"""Build the method of a recipe, and answer questions with it."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from laconic.batches import AnswerBatch, ReasoningBatch, ReasoningExample
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.lm_baseline import LanguageModelBaseline
from laconic.config.data import DataConfig
from laconic.config.recipe import Recipe
from laconic.data.messages import Message
from laconic.data.reasoning.dataset import answer_prefix_ids, collate
from laconic.data.reasoning.encode import EncodedExample, ReasoningEncoder, find_eos_token_id
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.experiment.from_recipe import build_model, build_nested
from laconic.experiment.from_recipe.build_model import ModelParts
from laconic.experiment.from_recipe.custom_method import MethodParameters, build_custom_method
from laconic.experiment.text_models.document_reasoning import add_documents
from laconic.generation.config import GenerationConfig
from laconic.interfaces import AnswersQuestions
from laconic.latent.answering import AnswerDecoding, PromptedAnswers
from laconic.latent.coconut import Coconut
from laconic.latent.codi import Codi
from laconic.latent.cot import Cot, NoCot
from laconic.latent.icot import Icot
from laconic.latent.kava import Kava
from laconic.latent.pccot import Pccot
from laconic.latent.stop_training import StopTraining
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.nested.hope.model import Hope
from laconic.nested.language_model import NestedLanguageModel

T = TypeVar("T")
Question = str | Sequence[Message]  # messages, the last by the user, need a recipe with data.format = "chat"


def require(value: T | None) -> T:
    """Return a value that the recipe's validation guarantees to be present."""
    assert value is not None
    return value


def build_autocompressor(parts: ModelParts, recipe: Recipe, total_steps: int) -> AutoCompressor:
    summaries = require(parts.summary_parameters)
    return AutoCompressor(
        parts.decoder,
        summaries,
        summaries.config,
        recipe.stop_head if recipe.method == "autocompressor" else None,
        total_steps=total_steps,
        seed=recipe.seed,
        bos_token_id=parts.tokenizer.special_token_id("bos_token"),
        base_model_context=parts.adapter.disable_adapter if parts.adapter is not None else None,
    )


def set_stage(method: nn.Module, epoch: int) -> None:
    """Let Coconut answer as in the stage of an epoch; other methods have no stages."""
    if isinstance(method, Coconut):
        method.eval_stage = method.get_stage(epoch)


def build_builtin_method(
    parts: ModelParts, recipe: Recipe, steps_per_epoch: int, max_chain_tokens: int | None
) -> nn.Module:
    """Build the method of a recipe without documents."""
    decoder, seed = parts.decoder, recipe.seed
    total_steps = recipe.train.num_updates(steps_per_epoch)
    stop_training = None
    if recipe.latents is not None and recipe.latents.length_policy == "stop_head":
        head_only_from = math.ceil(recipe.latents.head_only_after * total_steps)
        stop_training = StopTraining(head_only_from, recipe.latents.length_cost)
    match recipe.method:
        case "cot":
            return Cot(decoder)
        case "nocot":
            return NoCot(decoder)
        case "icot":
            return Icot(
                decoder,
                require(recipe.icot),
                steps_per_epoch=steps_per_epoch,
                max_chain_length=max_chain_tokens,
                seed=seed,
            )
        case "coconut":
            latents, config = require(parts.latents), require(recipe.coconut)
            return Coconut(decoder, latents, config, steps_per_epoch=steps_per_epoch, seed=seed)
        case "codi":
            return Codi(decoder, require(parts.latents), require(recipe.distillation))
        case "pccot":
            return Pccot(decoder, require(parts.latents), require(recipe.distillation), stop_training)
        case "kava":
            return Kava(
                decoder,
                latent_thoughts=require(parts.latents),
                config=require(recipe.distillation),
                selection_config=require(recipe.kv_selection),
                kv_config=require(recipe.kv_distillation),
                seed=seed,
                stop_training=stop_training,
            )
        case "autocompressor":
            return build_autocompressor(parts, recipe, total_steps)
        case "lm":
            return LanguageModelBaseline(decoder)
        case "hope":
            return NestedLanguageModel(cast(Hope, decoder), require(recipe.inner_loop))
        case method:
            raise UsageError(f"method {method} is unknown")


def build_method(
    parts: ModelParts, recipe: Recipe, steps_per_epoch: int, max_chain_tokens: int | None = None
) -> nn.Module:
    """Build the method of a recipe; `max_chain_tokens` is the longest chain of the training rows."""
    if recipe.is_custom_method:
        method = build_custom_method(recipe, parts.decoder, parts.tokenizer)
        parameters = MethodParameters(method, parts.decoder)
        parts.method_parameters = parameters if parameters.state_dict() else None
        return method
    steps = recipe.train.num_updates(steps_per_epoch)
    method = build_builtin_method(parts, recipe, steps_per_epoch, max_chain_tokens)
    if recipe.reads_documents:
        assert isinstance(method, Cot | NoCot | Codi)
        method = add_documents(method, build_autocompressor(parts, recipe, steps), recipe.data.segment_tokens)
    trained = {id(p) for p in method.parameters() if p.requires_grad}
    for module in filter(None, (parts.latents, parts.summary_parameters)):
        untrained = next((name for name, p in module.named_parameters() if id(p) not in trained), None)
        if untrained:
            raise UsageError(f"method {recipe.method} does not train {untrained} of {type(module).__name__}; remove it")
    return method


def build_meta_method(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer) -> nn.Module:
    """Build decoder, adapter and method on the meta device: their sizes, and an early check that they fit together.

    Initial values are not computed from the weights, and every segment becomes the largest number of vectors.
    """
    changes: dict[str, object] = {}
    if recipe.latents is not None:
        changes["latents"] = recipe.latents.model_copy(update={"projection_init_scale": "unit"})
    if recipe.compression is not None:
        fixed = {"length_policy": "fixed", "num_vectors": None}
        compression = build_model.resolve_summary_init(recipe.compression, recipe.model)
        if compression.summary_init == "eos":
            fixed["summary_init"] = "normal"
        changes["compression"] = compression.model_copy(update=fixed)
    recipe = recipe.model_copy(update=changes)
    with torch.device("meta"):
        decoder = build_nested.create_decoder(recipe, config, None).to(getattr(torch, recipe.model.dtype))
    decoder.activation_checkpointing = recipe.train.activation_checkpointing
    return build_method(build_model.build_parts(recipe, decoder, tokenizer, ""), recipe, 1).to("meta").train()


def answer_decoding(
    tokenizer: Tokenizer, data: DataConfig, max_tokens: int, sampling: GenerationConfig | None = None, seed: int = 0
) -> AnswerDecoding:
    """Return how answers in the format of some rows are decoded, greedily by default."""
    eos = find_eos_token_id(tokenizer, data)
    prefix = answer_prefix_ids(tokenizer, data)
    return AnswerDecoding(max_tokens, (eos,), tokenizer.decode, tuple(prefix), sampling or GenerationConfig(), seed)


def build_questions_batch(tokenizer: Tokenizer, data: DataConfig, questions: Sequence[Question]) -> ReasoningBatch:
    """Return a batch of questions; its chains and answers are placeholders."""
    return collate(encode_questions(tokenizer, data, questions), range(len(questions)))


def encode_questions(
    tokenizer: Tokenizer, data: DataConfig, questions: Sequence[Question], tools: Sequence[Sequence[Any]] = ()
) -> list[EncodedExample]:
    """Encode questions in the format of rows; `tools` are the JSON schemas of each conversation.

    Raises `InputError` for a question that has no tokens.
    """
    encoder = ReasoningEncoder(tokenizer, data)
    rows: list[EncodedExample] = []
    for number, question in enumerate(questions, 1):
        if isinstance(question, str):
            text, metadata = question, {}
        else:
            text = question[-1]["content"]
            metadata = {"messages": question, "tools": list(tools[number - 1]) if tools else []}
        placeholder = ReasoningExample(f"question {number}", text, steps=(), answer="0", metadata=metadata)
        rows.append(encoder.encode_example(placeholder))
    return rows


def answer_questions(
    method: nn.Module,
    questions: ReasoningBatch,
    decoding: AnswerDecoding,
    *,
    with_cot: bool = False,
    state: KVCache | None = None,
) -> AnswerBatch:
    """Answer questions, as the method does or with the chain written out, after what the KV cache `state` holds."""
    if not isinstance(method, AnswersQuestions):
        raise UsageError(f"{type(method).__name__} does not answer questions: it has no method `answer`")
    if state is None:
        return method.answer(questions, decoding, with_cot=with_cot)
    if not isinstance(method, PromptedAnswers):
        raise UsageError(f"{type(method).__name__}: a method outside laconic reads no memory; remove the memory")
    return method.answer(questions, decoding, with_cot=with_cot, state=state)
