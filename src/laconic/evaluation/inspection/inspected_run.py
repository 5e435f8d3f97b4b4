"""A run under inspection: its latents, its answers after them, and what its teacher's cache holds of a chain.

Shapes: B rows, M latents, Nc chain columns, G KV heads, E head size; tuples have one entry per layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from laconic.batches import AnswerBatch, ReasoningBatch
from laconic.config.methods import KVDistillationConfig, KVSelectionConfig
from laconic.config.recipe import COT_TEACHER_METHODS, Recipe
from laconic.errors import UsageError
from laconic.evaluation.reasoning.run import with_iterations
from laconic.evaluation.runs import flush_denormals
from laconic.experiment.document_reasoning import LatentDocumentReasoning
from laconic.experiment.load_run import LoadedRun
from laconic.experiment.methods import require
from laconic.latent import rkv
from laconic.latent.answering import AnswerDecoding, decode_answers, prompt_after_latents
from laconic.latent.coconut import Coconut
from laconic.latent.codi import Codi, encode_chain, encode_question
from laconic.latent.kava import find_distilled_layers
from laconic.latent.rkv import LayerSelection, SelectedColumns
from laconic.latent.rollout import Intervention, LatentRollout
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.modes import eval_no_grad

INSPECTED_POLICIES = ("rkv", "cosine", "attention", "crop", "uniform", "random")
DecodeToken = Callable[[int], str]
LayerTensors = tuple[Tensor, ...]


class SelectorChoice(NamedTuple):
    """What one policy selects of a chain in every layer, and the scores [B, G, Nc] it ranks by."""

    tokens: tuple[SelectedColumns, ...]
    S: LayerTensors


class TeacherChain(NamedTuple):
    """The teacher's cache at chains, and what each policy selects of it.

    Keys are as the cache holds them, and before rotation; importance I and redundancy R are [B, G, Nc]. `policy` is the
    run's own; matched layers are distilled; `is_distilled` says whether the run was trained to match the selection.
    """

    keys: LayerTensors
    keys_before_rope: LayerTensors
    values: LayerTensors
    I: LayerTensors
    R: LayerTensors
    choices: Mapping[str, SelectorChoice]
    policy: str
    matched_layers: tuple[int, ...]
    is_distilled: bool


class LatentKeysValues(NamedTuple):
    """Keys as the cache holds them, keys before rotation, and values at the latents, [B, G, M, E]."""

    keys: LayerTensors
    keys_before_rope: LayerTensors
    values: LayerTensors


@dataclass(frozen=True)
class InspectedRun:
    """A run as inspection uses it.

    `teacher_chain` returns what the teacher's cache holds of chains; it is None for a method without a teacher.
    `num_iterations` is that of training, None for sequential latents. `read_questions` returns the cache of questions
    for `think`; it is None for a method that reads them itself.
    """

    name: str
    method: str
    decoder: Decoder
    decode_token: DecodeToken
    think: Callable[..., LatentRollout]  # with the arguments of `latent_function`'s result
    answer: Callable[[ReasoningBatch, LatentRollout], AnswerBatch]
    teacher_chain: Callable[[ReasoningBatch], TeacherChain] | None
    num_iterations: int | None
    device: torch.device
    read_questions: Callable[[ReasoningBatch], KVCache] | None = None

    def with_questions(self, questions: ReasoningBatch) -> "InspectedRun":
        """Return a run that has read these questions, so that `think` about them reads them no more."""
        if self.read_questions is None:
            return self
        return replace(self, think=partial(self.think, question_cache=self.read_questions(questions)))


def load_inspected_run(
    run: LoadedRun, name: str, device: torch.device, decoding: AnswerDecoding, selection_recipe: Recipe | None = None
) -> InspectedRun:
    """Prepare a run for inspection.

    The tables [kv_selection] and [kv_distillation] of `selection_recipe`, by default the run's own, apply to the
    chains.

    Raises:
        UsageError: The run's method has no latents.
    """
    latents, recipe = run.parts.latents, run.recipe
    if latents is None:
        raise UsageError(f"{name}: method {recipe.method} has no latents; give a run of codi, pccot, kava or coconut")
    tokenizer = run.parts.tokenizer.backend
    has_teacher = recipe.method in COT_TEACHER_METHODS
    return InspectedRun(
        name=name,
        method=recipe.method,
        decoder=run.parts.decoder,
        decode_token=lambda i: tokenizer.decode([i], skip_special_tokens=False) or tokenizer.id_to_token(i) or str(i),
        think=latent_function(run),
        answer=answer_function(run, decoding),
        teacher_chain=teacher_chain_function(run, selection_recipe or recipe) if has_teacher else None,
        num_iterations=latents.num_iterations,
        device=device,
        read_questions=partial(read_questions, run) if can_cache_questions(run.method) else None,
    )


def can_cache_questions(method: nn.Module) -> bool:
    """Return whether `think` accepts the KV cache of the questions."""
    return isinstance(method, Codi | LatentDocumentReasoning)


def read_questions(run: LoadedRun, questions: ReasoningBatch) -> KVCache:
    """Return the KV cache of questions, after their documents if the run reads these."""
    method, decoder = run.method, run.parts.decoder
    with eval_no_grad(decoder), flush_denormals(questions.question_ids.device):
        state = method.find_state(questions, None) if isinstance(method, LatentDocumentReasoning) else None
        return encode_question(decoder, questions, state).cache


def latent_function(run: LoadedRun) -> Callable[..., LatentRollout]:
    """Return the function that computes a run's latents.

    `iterations` replaces the number of Jacobi iterations of training, and `question_cache` saves reading the questions.
    """
    method = cast(Any, run.method)

    def think(
        questions: ReasoningBatch,
        intervention: Intervention | None = None,
        record_passes: bool = False,
        iterations: int | None = None,
        question_cache: KVCache | None = None,
    ) -> LatentRollout:
        cached = {} if question_cache is None else {"question_cache": question_cache}
        with with_iterations(run, iterations), flush_denormals(questions.question_ids.device):
            rollout = method.think(questions, intervention=intervention, record_passes=record_passes, **cached)
        if not rollout.latents.shape[1]:
            raise UsageError(f"{run.folder}: step {run.step} is in a stage without latents; choose a later step")
        return rollout

    return think


def answer_function(run: LoadedRun, decoding: AnswerDecoding) -> Callable[[ReasoningBatch, LatentRollout], AnswerBatch]:
    """Return the function that answers after the latents."""
    method, decoder, end = run.method, run.parts.decoder, require(run.parts.latents).end

    def answer(batch: ReasoningBatch, latents: LatentRollout) -> AnswerBatch:
        if isinstance(method, Coconut):
            prompt = method.prompt_after_latents(latents, decoding)
        else:
            prompt = prompt_after_latents(decoder, latents, end, decoding.answer_prompt)
        return decode_answers(decoder, batch, prompt, decoding)

    return answer


def teacher_chain_function(run: LoadedRun, recipe: Recipe) -> Callable[[ReasoningBatch], TeacherChain]:
    """Return the function that computes what the run's teacher leaves of chains, with a recipe's selection.

    CODI and PCCoT distill no keys and values; for them KaVa's defaults apply.
    """
    selection_config = recipe.kv_selection or KVSelectionConfig.model_validate({})
    kv_config = recipe.kv_distillation or KVDistillationConfig.model_validate({})
    decoder, M, seed = run.parts.decoder, require(run.parts.latents).num_latents, run.recipe.seed
    L = decoder.config.num_hidden_layers
    distilled_layers = find_distilled_layers(kv_config, L)

    def teacher_chain(batch: ReasoningBatch) -> TeacherChain:
        with eval_no_grad(decoder):
            teacher = encode_chain(decoder, batch, read_questions(run, batch), ("q_rot", "k"))
            unrotated, rotated = (
                [
                    rkv.select_tokens(decoder, batch, teacher, l, selection_config, M, seed, space, True)
                    for l in range(L)
                ]
                for space in ("pre_rope", "post_rope")
            )
            targets = unrotated if kv_config.key_space == "pre_rope" else rotated
            policies = dict.fromkeys((selection_config.policy, *INSPECTED_POLICIES))
            choices = {policy: select_with_policy(run, batch, targets, selection_config, policy) for policy in policies}
        run_kv_config = run.recipe.kv_distillation
        return TeacherChain(
            tuple(layer.k_t for layer in rotated),
            tuple(layer.k_t for layer in unrotated),
            tuple(layer.v_t for layer in rotated),
            tuple(layer.I for layer in targets),
            tuple(layer.R for layer in targets),
            choices,
            selection_config.policy,
            distilled_layers,
            run_kv_config is not None and run_kv_config.weight > 0,
        )

    return teacher_chain


def select_with_policy(
    run: LoadedRun,
    batch: ReasoningBatch,
    targets: list[LayerSelection],
    selection_config: KVSelectionConfig,
    policy: str,
) -> SelectorChoice:
    """Return what one policy selects, by the scores of the teacher's pass."""
    mask, M = batch.chain_mask, require(run.parts.latents).num_latents
    tokens: list[SelectedColumns] = []
    scores: list[Tensor] = []
    for layer in targets:
        random = rkv.draw_random_scores(batch, run.recipe.seed, layer.I.shape[1]).to(layer.I.dtype)
        S = rkv.SELECTORS[policy](layer.I, layer.R, mask, selection_config.importance_weight, M, random)
        tokens.append(rkv.select_top_m(S, mask, M))
        scores.append(S)
    return SelectorChoice(tuple(tokens), tuple(scores))


def latent_keys_values(decoder: Decoder, rollout: LatentRollout) -> LatentKeysValues:
    """Return keys and values at the latents; these are read once more for their keys before rotation."""
    M, cache = rollout.latents.shape[1], rollout.cache
    with torch.no_grad():
        output = decoder(rollout.latents, cache.crop(cache.S - M), capture=("k",))
    unrotated = tuple(output.activations[f"k.{l}"] for l in range(len(cache.keys)))
    return LatentKeysValues(
        tuple(k[:, :, -M:] for k in cache.keys), unrotated, tuple(v[:, :, -M:] for v in cache.values)
    )
