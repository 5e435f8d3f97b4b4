"""A run under inspection: its latents, its answers after them, and what its teacher's cache holds of a chain.

Shapes: B rows, M latents, Nc chain columns, G KV heads, E head size; tuples have one entry per layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from laconic.batches import AnswerBatch, ReasoningBatch
from laconic.config.methods import KVDistillationConfig, KVSelectionConfig
from laconic.config.recipe import COT_TEACHER_METHODS, Recipe
from laconic.errors import UsageError
from laconic.evaluation.reasoning.run import find_latents, with_iterations
from laconic.evaluation.runs import flush_denormals
from laconic.experiment.from_recipe.methods import require
from laconic.experiment.load_run import LoadedRun
from laconic.experiment.text_models.document_reasoning import LatentDocumentReasoning
from laconic.latent import rkv
from laconic.latent.answering import AnswerDecoding, LatentReasoning, decode_answers
from laconic.latent.codi import Codi
from laconic.latent.rkv import LayerSelection, SelectedColumns
from laconic.latent.rollout import Intervention, LatentRollout, read_chain, read_question
from laconic.latent.stop_head import count_valid_latents
from laconic.latent.thoughts import LatentThoughts
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.modes import eval_no_grad

INSPECTED_POLICIES = ("rkv", "cosine", "attention", "crop", "uniform", "random")
LayerTensors = tuple[Tensor, ...]


class KeysValues(NamedTuple):
    """Keys as the cache holds them, keys before rotation, and values, at latents or a chain, [B, G, M or Nc, E]."""

    keys: LayerTensors
    keys_before_rope: LayerTensors
    values: LayerTensors


class TeacherChain(NamedTuple):
    """The teacher's cache at chains, and what each policy selects of it in every layer.

    Scores are importance I, redundancy R and the score S of the run's own `policy`, each [B, G, Nc] in every layer.
    Matched layers are distilled; `is_distilled` says whether the run was trained to match the selection.
    """

    keys_values: KeysValues
    choices: Mapping[str, tuple[SelectedColumns, ...]]
    scores: tuple[LayerTensors, LayerTensors, LayerTensors]
    policy: str
    matched_layers: tuple[int, ...]
    is_distilled: bool


@dataclass(frozen=True)
class InspectedRun:
    """A run as inspection uses it.

    The tables [kv_selection] and [kv_distillation] of `selection_recipe`, by default the run's own, apply to the
    chains. `question_cache` is the cache of questions that `think` is going to be about.
    """

    run: LoadedRun
    name: str
    decoding: AnswerDecoding
    selection_recipe: Recipe | None = None
    question_cache: KVCache | None = None

    def __post_init__(self) -> None:
        if find_latents(self.run) is None:
            raise UsageError(
                f"{self.name}: method {self.method} has no latents; give a run of codi, pccot, kava or coconut"
                + (", or of a class of yours that inherits from one of the first three" if ":" in self.method else "")
            )
        if ":" in self.method and getattr(type(self.run.method), "prompt_answers", None) is not Codi.prompt_answers:
            raise UsageError(
                f"{self.name}: {self.method} answers in a way of its own, with prompt_answers; audit and inspect "
                "answer after the latents as CODI does"
            )

    @property
    def method(self) -> str:
        return self.run.recipe.method

    @property
    def decoder(self) -> Decoder:
        return self.run.parts.decoder

    @property
    def latents(self) -> LatentThoughts:
        return require(find_latents(self.run))

    @property
    def num_iterations(self) -> int | None:
        """The number of Jacobi iterations of training; None for sequential latents."""
        return self.latents.num_iterations

    @property
    def has_teacher(self) -> bool:
        return self.method in COT_TEACHER_METHODS

    def decode_token(self, i: int) -> str:
        tokenizer = self.run.parts.tokenizer.backend
        alone, twice = (tokenizer.decode(ids, skip_special_tokens=False) for ids in ([i], [i, i]))
        return twice[len(alone) :] or tokenizer.id_to_token(i) or str(i)  # SentencePiece drops a text's first space

    def with_questions(self, questions: ReasoningBatch) -> "InspectedRun":
        """Return a run that has read these questions, so that `think` does not read them again."""
        if not isinstance(self.run.method, Codi | LatentDocumentReasoning):
            return self  # its `think` takes no cache
        return replace(self, question_cache=self.read_questions(questions))

    def read_questions(self, questions: ReasoningBatch) -> KVCache:
        """Return the KV cache of questions, after their documents if the run reads these."""
        method = self.run.method
        with eval_no_grad(self.decoder), flush_denormals(questions.question_ids.device):
            state = method.find_state(questions, None) if isinstance(method, LatentDocumentReasoning) else None
            return read_question(self.decoder, questions, state).cache

    def think(
        self,
        questions: ReasoningBatch,
        intervention: Intervention | None = None,
        record_passes: bool = False,
        iterations: int | None = None,
    ) -> LatentRollout:
        """Compute the latents of questions; `iterations` replaces the number of Jacobi iterations of training."""
        run = self.run
        method = cast(Any, run.method)
        cached = {} if self.question_cache is None else {"question_cache": self.question_cache}
        with with_iterations(run, iterations), flush_denormals(questions.question_ids.device):
            rollout = method.think(questions, intervention=intervention, record_passes=record_passes, **cached)
        if not rollout.latents.shape[1]:
            raise UsageError(f"{run.folder}: step {run.step} is in a stage without latents; choose a later checkpoint")
        return rollout

    def answer(self, batch: ReasoningBatch, rollout: LatentRollout) -> AnswerBatch:
        method = self.run.method
        method = cast(LatentReasoning, method.method if isinstance(method, LatentDocumentReasoning) else method)
        num_latents = count_valid_latents(rollout.cache, rollout.latents.shape[1])
        prompt = method.prompt_after_latents(rollout.cache, rollout.passes, num_latents, self.decoding)
        return decode_answers(self.decoder, batch, prompt, self.decoding)

    def teacher_chain(self, batch: ReasoningBatch) -> TeacherChain:
        """Return what the teacher's cache holds of chains, and what each policy selects of it.

        CODI and PCCoT distill no keys and values; for them KaVa's defaults apply.
        """
        run = self.run
        decoder = self.decoder
        recipe = self.selection_recipe or self.run.recipe
        selection_config = recipe.kv_selection or KVSelectionConfig.model_validate({})
        kv_config = recipe.kv_distillation or KVDistillationConfig.model_validate({})
        M = self.latents.num_latents
        L = decoder.config.num_hidden_layers
        seed = run.recipe.seed
        with eval_no_grad(decoder):
            teacher = read_chain(decoder, batch, self.read_questions(batch), ("q_rot", "k"))
            select = partial(
                rkv.select_tokens, decoder, batch, teacher, config=selection_config, M=M, seed=seed, all_scores=True
            )
            unrotated = [select(layer=l, key_space="pre_rope") for l in range(L)]
            rotated = [select(layer=l, key_space="post_rope") for l in range(L)]
            targets = unrotated if kv_config.key_space == "pre_rope" else rotated
            policies = dict.fromkeys((selection_config.policy, *INSPECTED_POLICIES))
            scores = {policy: self.score_tokens(policy, batch, targets, selection_config) for policy in policies}
            choices = {
                policy: tuple(rkv.select_top_m(S, rkv.find_selectable_columns(batch, policy), M) for S in layers)
                for policy, layers in scores.items()
            }
        run_kv_config = run.recipe.kv_distillation
        return TeacherChain(
            keys_values=KeysValues(
                keys=tuple(layer.k_t for layer in rotated),
                keys_before_rope=tuple(layer.k_t for layer in unrotated),
                values=tuple(layer.v_t for layer in rotated),
            ),
            choices=choices,
            scores=(tuple(x.I for x in targets), tuple(x.R for x in targets), scores[selection_config.policy]),
            policy=selection_config.policy,
            matched_layers=tuple(range(L)) if kv_config.layers is None else kv_config.layers,
            is_distilled=run_kv_config is not None and run_kv_config.weight > 0,
        )

    def score_tokens(
        self, policy: str, batch: ReasoningBatch, targets: list[LayerSelection], config: KVSelectionConfig
    ) -> LayerTensors:
        """Return the scores by which one policy selects in every layer, from those of the teacher's pass."""
        score = partial(
            rkv.score_columns,
            policy,
            lam=config.importance_weight,
            batch=batch,
            M=self.latents.num_latents,
            seed=self.run.recipe.seed,
        )
        return tuple(score(I=layer.I, R=layer.R).to(layer.I.dtype) for layer in targets)


def latent_keys_values(decoder: Decoder, rollout: LatentRollout) -> KeysValues:
    """Return keys and values at the latents; these are read once more for their keys before rotation."""
    M = rollout.latents.shape[1]
    cache = rollout.cache
    with torch.no_grad():
        output = decoder(rollout.latents, cache.crop(cache.S - M), capture=("k",))
    unrotated = tuple(output.activations[f"k.{l}"] for l in range(len(cache.keys)))
    return KeysValues(tuple(k[:, :, -M:] for k in cache.keys), unrotated, tuple(v[:, :, -M:] for v in cache.values))
