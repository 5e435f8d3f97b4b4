"""A run as inspection takes it: what its teacher leaves of a chain under every selector, and questions to ask it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from laconic.core.answering import Writing, after, quiet
from laconic.core.cache import Cache
from laconic.core.contract import Answers, Reasoning
from laconic.core.errors import Usage
from laconic.core.generate import Passes
from laconic.core.rollout import Edit, Rollout
from laconic.data.pieces import Encoded, Encoder
from laconic.data.reasoning import Questions, collate
from laconic.evaluation.subject import Choice, Left, Subject
from laconic.methods import rkv
from laconic.methods.coconut import Coconut
from laconic.methods.cot import begun
from laconic.methods.kava import Kava, Taught
from laconic.methods.settings import Distilling, Keeping, Matching
from laconic.recipe.asking import flushed, in_rounds, writing_for
from laconic.recipe.methods import answer, had
from laconic.recipe.opened import Opened
from laconic.recipe.questions import QuestionSet
from laconic.recipe.schema import Recipe
from laconic.recipe.validation import TEACHERS

SELECTORS = ("rkv", "cosine", "attention", "crop", "uniform", "random")
ENDS = (">>", ";", "\n")  # in the last token of a step that a teacher writes


def subject(run: Opened, name: str, device: torch.device, writing: Writing, like: Recipe | None = None) -> Subject:
    """A run whose thoughts can be looked into; chains are kept and matched as a recipe `like` another says.

    Raises `Usage` (2) for a method that has no thoughts.
    """
    thoughts, recipe = run.parts.thoughts, run.recipe
    if thoughts is None:
        raise Usage(f"{name}: method {recipe.method} has no thoughts to look into; give a run of codi, pccot, kava")
    tokenizer = run.parts.tokenizer.inner
    return Subject(
        name=name,
        method=recipe.method,
        decoder=run.parts.decoder,
        logits=run.parts.decoder.logits,
        words=lambda i: tokenizer.decode([i], skip_special_tokens=False) or tokenizer.id_to_token(i) or str(i),
        think=thinking(run),
        follow=following(run, writing),
        left=teaching(run, like or recipe) if recipe.method in TEACHERS else None,
        rounds=thoughts.rounds,
        device=device,
    )


def thinking(run: Opened) -> Any:
    """The thoughts of a run, in another number of rounds where one is given."""
    method = cast(Any, run.method)

    def think(
        questions: Reasoning, edit: Edit | None = None, trace: bool = False, rounds: int | None = None
    ) -> Rollout:
        with in_rounds(run, rounds), flushed(questions.question.device):
            found = method.think(questions, edit=edit, trace=trace)
        if not found.thoughts.shape[1]:
            raise Usage(f"{run.folder}: at step {run.step} its stage has no latents yet; look into a later step")
        return found

    return think


def following(run: Opened, writing: Writing) -> Callable[[Reasoning, Cache, Passes], Answers]:
    """The answer to questions from the cache that their thoughts left."""
    method = run.method
    if isinstance(method, Coconut):
        return lambda questions, state, passes: method.follow(questions, state, passes, writing)
    eot = had(run.parts.thoughts).eot
    return lambda questions, state, passes: after(run.parts.decoder, questions, state, eot, passes, writing)


def teaching(run: Opened, recipe: Recipe) -> Callable[[Reasoning], Left]:
    """What the run's teacher leaves of chains, by the selector and the layers of a recipe.

    CODI and PCCoT match none of it, and are shown as KaVa with its defaults would be.
    """
    keeping, matching = recipe.keeping or Keeping.model_validate({}), recipe.matching or Matching.model_validate({})

    def teacher(space: str) -> Kava:
        how = matching.model_copy(update={"key_space": space})
        return Kava(
            run.parts.decoder, had(run.parts.thoughts), Distilling.model_validate({}), keeping, how, run.recipe.seed
        )

    before, after_ = teacher("pre_rope"), teacher("post_rope")
    scored = before if matching.key_space == "pre_rope" else after_

    def left(batch: Reasoning) -> Left:
        with quiet(run.parts.decoder):
            unturned, turned = before.teach(batch), after_.teach(batch)
            taught = unturned if scored is before else turned
            names = dict.fromkeys((keeping.select, *SELECTORS))
            chosen = {how: choice(run, batch, taught, keeping, how) for how in names}
        return Left(
            turned.k_t, unturned.k_t, turned.v_t, taught.I, taught.R, chosen, keeping.select, taught.matched,
            run.recipe.matching is not None and run.recipe.matching.alpha2 > 0,
        )  # fmt: skip

    return left


def choice(run: Opened, batch: Reasoning, taught: Taught, keeping: Keeping, how: str) -> Choice:
    """What one selector keeps, by the scores of the teacher's pass."""
    live, M, kept, scores = batch.chain_live, had(run.parts.thoughts).count, list[rkv.Kept](), list[Tensor]()
    for layer, (I, R) in enumerate(zip(taught.I, taught.R, strict=True)):
        drawn = rkv.draws(batch, run.recipe.seed, layer, I.shape[1], keeping.random_shared)
        S = rkv.select[how](I, R, live, keeping.lam, M, drawn.expand(I.shape).to(I.dtype))
        kept.append(rkv.keep(S, live, M, keeping.kept_order))
        scores.append(S)
    return Choice(tuple(kept), tuple(scores))


class Chained(NamedTuple):
    """One question with a chain beside it: the batch, whose the chain is, and the answer that the teacher wrote."""

    batch: Reasoning
    source: str
    teacher: str | None


def given(run: Opened, asked: QuestionSet) -> Chained:
    """A question with the user's own chain."""
    dropped = run.recipe.data.chain == "drop_last" and len(asked.examples[0].steps) > 0
    note = "as given, without its last step, which is left out in training" if dropped else "as given"
    return Chained(cast(Reasoning, asked.source.batch([0], 0, 0)), note, None)


def written(run: Opened, asked: QuestionSet, device: torch.device) -> Chained:
    """A question with the chain that the run's own teacher writes."""
    row = cast(Questions, asked.source).row(0)
    room = run.parts.decoder.config.max_position_embeddings - len(row.question) - len(row.answer)
    how = writing_for(run, asked, teacher=True)
    how = replace(how, max_tokens=min(how.max_tokens, room))
    said = answer(run.method, collate([row], [0]).to(device), how, teacher=True)
    made = behind(Encoder(run.parts.tokenizer, run.recipe.data), row, list(said.ids[0]), how.eos)
    return Chained(collate([made], [0]), "as the run's own teacher writes it", said.texts[0])


def behind(encoder: Encoder, row: Encoded, ids: list[int], eos: Sequence[int]) -> Encoded:
    """A row with what was written as its chain, up to the prompt, and with the answer that follows it, if one does."""
    prompt = len(encoder.given_ids)
    end = begun(encoder.given_ids, ids)
    answered = end < len(ids) - 1 and ids[-1] in eos
    chain = [i for i in (ids[: end - prompt] if answered else ids) if i not in eos]
    step, numbers = 0, list[int]()
    for word in (encoder.tokenizer.decode([i]) for i in chain):
        numbers.append(step)
        step += any(mark in word for mark in ENDS)
    made = replace(row, chain=tuple(chain), chain_step=tuple(numbers))
    if not answered:
        return made
    said = tuple(ids[end - prompt :])
    return replace(made, answer=said, number=(prompt, len(said) - 1), distil=prompt - 1)
