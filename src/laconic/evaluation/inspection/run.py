"""A run as inspection takes it: what its teacher leaves of a chain under every selector, and questions to ask it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from laconic.batches import AnswerBatch, PassCounts, ReasoningBatch
from laconic.config.methods import DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.config.recipe import Recipe
from laconic.data.reasoning.dataset import ReasoningDataset, collate
from laconic.data.reasoning.encode import EncodedExample, ReasoningEncoder
from laconic.errors import UsageError
from laconic.evaluation.inspection.subject import InspectedRun, SelectorChoice, TeacherChain
from laconic.evaluation.reasoning.question_sets import QuestionSet
from laconic.evaluation.reasoning.run import decoding_for, flush_denormals, with_iterations
from laconic.evaluation.validation import COT_TEACHER_METHODS
from laconic.experiment.load_run import LoadedRun
from laconic.experiment.methods import answer_questions, require
from laconic.latent import rkv
from laconic.latent.answering import AnswerDecoding, answer_from_cache, find_answer_offset
from laconic.latent.coconut import Coconut
from laconic.latent.kava import Kava, TeacherTargets
from laconic.latent.rollout import Intervention, LatentRollout
from laconic.models.cache import KVCache
from laconic.models.modes import eval_no_grad

INSPECTED_POLICIES = ("rkv", "cosine", "attention", "crop", "uniform", "random")
STEP_ENDINGS = (">>", ";", "\n")  # in the last token of a step that a teacher writes


def load_inspected_run(
    run: LoadedRun, name: str, device: torch.device, decoding: AnswerDecoding, selection_recipe: Recipe | None = None
) -> InspectedRun:
    """A run whose thoughts can be looked into; chains are kept and matched as a recipe `like` another says.

    Raises `Usage` (2) for a method that has no thoughts.
    """
    thoughts, recipe = run.parts.latents, run.recipe
    if thoughts is None:
        raise UsageError(
            f"{name}: method {recipe.method} has no thoughts to look into; give a run of codi, pccot, kava"
        )
    tokenizer = run.parts.tokenizer.backend
    return InspectedRun(
        name=name,
        method=recipe.method,
        decoder=run.parts.decoder,
        logits=run.parts.decoder.logits,
        decode_token=lambda i: tokenizer.decode([i], skip_special_tokens=False) or tokenizer.id_to_token(i) or str(i),
        think=latent_function(run),
        answer_from_cache=answer_from_cache_function(run, decoding),
        teacher_chain=teacher_chain_function(run, selection_recipe or recipe)
        if recipe.method in COT_TEACHER_METHODS
        else None,
        num_iterations=thoughts.num_iterations,
        device=device,
    )


def latent_function(run: LoadedRun) -> Any:
    """The thoughts of a run, in another number of rounds where one is given."""
    method = cast(Any, run.method)

    def think(
        questions: ReasoningBatch, edit: Intervention | None = None, trace: bool = False, rounds: int | None = None
    ) -> LatentRollout:
        with with_iterations(run, rounds), flush_denormals(questions.question_ids.device):
            found = method.think(questions, edit=edit, trace=trace)
        if not found.thoughts.shape[1]:
            raise UsageError(f"{run.folder}: at step {run.step} its stage has no latents yet; look into a later step")
        return found

    return think


def answer_from_cache_function(
    run: LoadedRun, decoding: AnswerDecoding
) -> Callable[[ReasoningBatch, KVCache, PassCounts], AnswerBatch]:
    """The answer to questions from the cache that their thoughts left."""
    method = run.method
    if isinstance(method, Coconut):
        return lambda questions, state, passes: method.answer_after_latents(questions, state, passes, decoding)
    eot = require(run.parts.latents).eot
    return lambda questions, state, passes: answer_from_cache(
        run.parts.decoder, questions, state, eot, passes, decoding
    )


def teacher_chain_function(run: LoadedRun, recipe: Recipe) -> Callable[[ReasoningBatch], TeacherChain]:
    """What the run's teacher leaves of chains, by the selector and the layers of a recipe.

    CODI and PCCoT match none of it, and are shown as KaVa with its defaults would be.
    """
    keeping, matching = (
        recipe.kv_selection or KVSelectionConfig.model_validate({}),
        recipe.kv_distillation or KVDistillationConfig.model_validate({}),
    )

    def teacher(space: str) -> Kava:
        how = matching.model_copy(update={"key_space": space})
        return Kava(
            run.parts.decoder,
            require(run.parts.latents),
            DistillationConfig.model_validate({}),
            keeping,
            how,
            run.recipe.seed,
        )

    before, after_ = teacher("pre_rope"), teacher("post_rope")
    scored = before if matching.key_space == "pre_rope" else after_

    def left(batch: ReasoningBatch) -> TeacherChain:
        with eval_no_grad(run.parts.decoder):
            unturned, turned = before.compute_teacher_targets(batch), after_.compute_teacher_targets(batch)
            taught = unturned if scored is before else turned
            names = dict.fromkeys((keeping.policy, *INSPECTED_POLICIES))
            chosen = {how: select_with_policy(run, batch, taught, keeping, how) for how in names}
        return TeacherChain(
            turned.k_t, unturned.k_t, turned.v_t, taught.I, taught.R, chosen, keeping.policy, taught.distilled_layers,
            run.recipe.kv_distillation is not None and run.recipe.kv_distillation.weight > 0,
        )  # fmt: skip

    return left


def select_with_policy(
    run: LoadedRun, batch: ReasoningBatch, teacher: TeacherTargets, selection_config: KVSelectionConfig, policy: str
) -> SelectorChoice:
    """What one selector keeps, by the scores of the teacher's pass."""
    live, M, kept, scores = (
        batch.chain_mask,
        require(run.parts.latents).count,
        list[rkv.SelectedColumns](),
        list[Tensor](),
    )
    for layer, (I, R) in enumerate(zip(teacher.I, teacher.R, strict=True)):
        drawn = rkv.draw_random_scores(batch, run.recipe.seed, layer, I.shape[1], selection_config.share_random_draw)
        S = rkv.SELECTORS[policy](I, R, live, selection_config.importance_weight, M, drawn.expand(I.shape).to(I.dtype))
        kept.append(rkv.select_top_m(S, live, M, selection_config.slot_order))
        scores.append(S)
    return SelectorChoice(tuple(kept), tuple(scores))


class QuestionWithChain(NamedTuple):
    """One question with a chain beside it: the batch, whose the chain is, and the answer that the teacher wrote."""

    batch: ReasoningBatch
    chain_source: str
    teacher_output: str | None


def with_given_chain(run: LoadedRun, questions: QuestionSet) -> QuestionWithChain:
    """A question with the user's own chain."""
    dropped = run.recipe.data.chain_steps == "drop_last" and len(questions.examples[0].steps) > 0
    note = "as given, without its last step, which is left out in training" if dropped else "as given"
    return QuestionWithChain(cast(ReasoningBatch, questions.source.batch([0], 0, 0)), note, None)


def with_teacher_chain(run: LoadedRun, questions: QuestionSet, device: torch.device) -> QuestionWithChain:
    """A question with the chain that the run's own teacher writes."""
    row = cast(ReasoningDataset, questions.source).get_row(0)
    room = run.parts.decoder.config.max_position_embeddings - len(row.question_ids) - len(row.answer_ids)
    how = decoding_for(run, questions, with_cot=True)
    how = replace(how, max_tokens=min(how.max_tokens, room))
    said = answer_questions(run.method, collate([row], [0]).to(device), how, teacher=True)
    made = append_generated_chain(
        ReasoningEncoder(run.parts.tokenizer, run.recipe.data), row, list(said.token_ids[0]), how.eos_token_ids
    )
    return QuestionWithChain(collate([made], [0]), "as the run's own teacher writes it", said.texts[0])


def append_generated_chain(
    encoder: ReasoningEncoder, row: EncodedExample, ids: list[int], eos: Sequence[int]
) -> EncodedExample:
    """A row with what was written as its chain, up to the prompt, and with the answer that follows it, if one does."""
    prompt = len(encoder.answer_prompt_ids)
    end = find_answer_offset(encoder.answer_prompt_ids, ids)
    answered = end < len(ids) - 1 and ids[-1] in eos
    chain = [i for i in (ids[: end - prompt] if answered else ids) if i not in eos]
    step, numbers = 0, list[int]()
    for word in (encoder.tokenizer.decode([i]) for i in chain):
        numbers.append(step)
        step += any(mark in word for mark in STEP_ENDINGS)
    made = replace(row, chain_ids=tuple(chain), chain_step_index=tuple(numbers))
    if not answered:
        return made
    said = tuple(ids[end - prompt :])
    return replace(made, answer_ids=said, number_span=(prompt, len(said) - 1), distill_column=prompt - 1)
