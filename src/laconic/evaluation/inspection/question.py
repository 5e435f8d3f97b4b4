"""Inspect one question: logit lens, similarity to a chain, what is selected of it, answers under interventions.

The results of several runs become text for a terminal and JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from laconic.batches import ReasoningBatch
from laconic.console import ProgressFn
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.data.reasoning.dataset import ReasoningDataset, collate
from laconic.data.reasoning.encode import EncodedExample, ReasoningEncoder, mark_results
from laconic.evaluation.inspection import interventions
from laconic.evaluation.inspection.chain_comparison import CHAIN, SELECTED, ChainComparison, compare_with_chain
from laconic.evaluation.inspection.conditions import load_batch
from laconic.evaluation.inspection.inspected_run import InspectedRun
from laconic.evaluation.inspection.interventions import InterventionInputs, InterventionKind, InterventionTarget
from laconic.evaluation.inspection.logit_lens import LogitLens, apply_logit_lens
from laconic.evaluation.reasoning.question_sets import QuestionSet
from laconic.evaluation.reasoning.run import decoding_for
from laconic.evaluation.tables import figures_to_json, format_percent
from laconic.experiment.from_recipe.methods import answer_questions
from laconic.experiment.load_run import LoadedRun
from laconic.interfaces import TrainingData
from laconic.latent.answering import find_answer_offset
from laconic.latent.rollout import LatentRollout

STEP_ENDINGS = (">>", ";", "\n")  # a token with one of these ends a step of a generated chain
MAX_DONOR_TRIES = 8
NUM_MEAN_QUESTIONS = 16  # for "mean"; a page on one question must not read hundreds of others


def describe_given_chain(run: LoadedRun, steps: Sequence[str]) -> str:
    if steps and run.recipe.data.chain_steps == "drop_last":
        return "as given, without its last step, which training leaves out"
    return "as given" if steps else "none was given"


def generate_chain(run: LoadedRun, questions: QuestionSet) -> tuple[ReasoningBatch, str]:
    """Return a question with the chain that the run's own teacher generates, and all that it generated."""
    row = cast(ReasoningDataset, questions.source).get_row(0)
    room = run.parts.decoder.config.max_position_embeddings - len(row.question_ids) - len(row.answer_ids)
    decoding = decoding_for(run, questions, with_cot=True)
    decoding = replace(decoding, max_tokens=min(decoding.max_tokens, room))
    answers = answer_questions(run.method, collate([row], [0]).to(run.parts.decoder.device), decoding, with_cot=True)
    encoder = ReasoningEncoder(run.parts.tokenizer, run.recipe.data)
    row = append_generated_chain(encoder, row, list(answers.token_ids[0]), decoding.eos_token_ids)
    return collate([row], [0]), answers.texts[0]


def append_generated_chain(
    encoder: ReasoningEncoder, row: EncodedExample, ids: list[int], eos_token_ids: Sequence[int]
) -> EncodedExample:
    """Return a row whose chain is the generated text up to the answer prompt, with the answer if it was finished."""
    prompt = len(encoder.answer_prompt_ids)
    start = find_answer_offset(encoder.answer_prompt_ids, ids)
    has_answer = start < len(ids) - 1 and ids[-1] in eos_token_ids
    chain = [i for i in (ids[: start - prompt] if has_answer else ids) if i not in eos_token_ids]
    tokens = [encoder.tokenizer.decode([i]) for i in chain]
    step_index: list[int] = []
    steps = [""]
    for token in tokens:
        step_index.append(len(steps) - 1)
        steps[-1] += token
        if any(ending in token for ending in STEP_ENDINGS):
            steps.append("")
    offsets = list(pairwise(accumulate(map(len, tokens), initial=0)))
    is_result = mark_results(offsets, steps, 0, 0)
    row = replace(row, chain_ids=tuple(chain), chain_step_index=tuple(step_index), chain_result_mask=is_result)
    if not has_answer:
        return row
    answer = tuple(ids[start - prompt :])
    return replace(row, answer_ids=answer, number_span=(prompt, len(answer) - 1), distill_column=prompt - 1)


class ChangedAnswer(NamedTuple):
    """The answer under an intervention; for "swap" also the answer to the donor's question."""

    intervention: InterventionKind
    target: InterventionTarget
    answer: str
    donor_answer: str | None = None


@dataclass(frozen=True)
class QuestionInspection:
    """A run on one question; `num_iterations` is that of training, None for sequential latents."""

    name: str
    method: str
    num_iterations: int | None
    answer: str
    lens: LogitLens
    chain: ChainComparison = field(default_factory=ChainComparison)
    effects: tuple[ChangedAnswer, ...] = ()


@torch.no_grad()
def inspect_question(
    run: InspectedRun,
    batch: ReasoningBatch,
    others: TrainingData | None = None,
    *,
    seed: int = 0,
    progress: ProgressFn | None = None,
) -> QuestionInspection:
    """Inspect a run on one question with its chain; without other questions, "mean" and "swap" are left out.

    `progress` is called as each part begins, with its name, the number of finished parts, and their total, 0 at first.
    """
    batch = batch.to(run.decoder.device)
    num_begun = count()
    total = 0

    def begin(name: str) -> None:
        if progress is not None:
            progress(name, next(num_begun), total)

    begin("thinking and answering")
    rollout = run.think(batch, record_passes=True)
    specs = interventions.list_interventions(rollout.latents.shape[1])
    total = 4 + len(specs)
    answer = run.answer(batch, rollout).texts[0]
    lens = apply_logit_lens(rollout, batch, run.decoder.logits, run.decode_token)
    chain = ChainComparison()
    if run.has_teacher and bool(batch.chain_mask.any()):
        begin("comparing the latents with the chain")
        chain = compare_with_chain(run, batch, rollout, lens.chain)
    means, donor_rollout, donor_answer = None, None, None
    if others is not None:
        num_questions = min(NUM_MEAN_QUESTIONS, len(others))
        begin(f"thinking about {num_questions} other questions for mean")
        means = interventions.compute_reference_means(run, [load_batch(run, others, np.arange(num_questions))])
        begin("finding a question to swap with")
        donor_rollout, donor_answer = find_donor(run, answer, others)
    inputs = InterventionInputs(rollout, np.zeros(1, dtype=np.int64), seed, donor_rollout, means)
    has_inputs = {"mean": means is not None, "swap": donor_rollout is not None}
    effects: list[ChangedAnswer] = []
    for spec in specs:
        if has_inputs.get(spec.kind, True):
            begin(f"{spec.kind} in {spec.target}")
            changed = run.answer(batch, interventions.run_intervention(run, batch, inputs, spec)).texts[0]
            effects.append(ChangedAnswer(*spec, changed, donor_answer if spec.kind == "swap" else None))
    return QuestionInspection(run.name, run.method, run.num_iterations, answer, lens, chain, tuple(effects))


def find_donor(run: InspectedRun, answer: str, others: TrainingData) -> tuple[LatentRollout | None, str | None]:
    """Return the latents of another question and their answer: of the first few, one with a different answer."""
    for row in range(min(MAX_DONOR_TRIES, len(others))):
        batch = load_batch(run, others, np.array([row]))
        rollout = run.think(batch, record_passes=True)
        donor_answer = run.answer(batch, rollout).texts[0]
        if donor_answer != answer:
            return rollout, donor_answer
    return None, None


BASELINE_LABELS = {CHAIN: "with the chain", SELECTED: "with the selected tokens"}
SIMILARITY_TERMS = (
    "diagonal contrast: mean similarity of latent m and token m, minus that of all other pairs; look-ahead: share of "
    "latents that are most similar to a token after the one with their own index"
)


@dataclass(frozen=True)
class QuestionSummary:
    """One question as each run answers it; the first run is the inspected one, the others are baselines.

    `gold` is the gold answer, if known; `teacher_output` is what the run's teacher generated, if the chain is its own.
    """

    text: str
    chain_source: str
    gold: str | None
    teacher_output: str | None
    runs: Sequence[QuestionInspection]
    protocol: AnswerProtocol
    notes: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()

    @property
    def chain(self) -> tuple[str, ...]:
        return self.runs[0].lens.chain


def question_to_json(summary: QuestionSummary) -> dict[str, Any]:
    data = {
        "schema": 3,
        "question": summary.text,
        "chain": summary.chain,
        "chain_source": summary.chain_source,
        "gold": summary.gold,
        "teacher_output": summary.teacher_output,
        "runs": [
            {
                "run": run.name,
                "method": run.method,
                "answer": run.answer,
                "passes": run.lens.passes,
                "share_in_chain": run.lens.share_in_chain,
                "lcs_ratio": run.lens.lcs_ratio,
                "matched_layers": run.chain.matched_layers,
                "maps": run.chain.maps,
                "token_classes": run.chain.token_classes,
                "policy": run.chain.policy,
                "scores": dict(zip("IRS", run.chain.scores, strict=False)) or None,
                "selections": {policy: mask.astype(int).tolist() for policy, mask in run.chain.selections.items()},
                "effects": run.effects,
            }
            for run in summary.runs
        ],
        "notes": summary.notes,
    }
    return figures_to_json(data)


def format_inspection(summary: QuestionSummary) -> str:
    lines = [summary.text, f"chain, {summary.chain_source}: {join_words(''.join(summary.chain)) or 'none'}"]
    if summary.teacher_output is not None:
        lines.append(f"the teacher writes: {join_words(summary.teacher_output)}")
    for run in summary.runs:
        correctness = correctness_suffix(run.answer, summary)
        lines += ["", f"{run.name} ({run.method}) answers {join_words(run.answer)}{correctness}"]
        for name, row in zip(name_passes(run), run.lens.passes, strict=True):
            lines.append(f"  {name:<13}" + " ".join(slot[0].token.strip() or "␣" for slot in row))
        if summary.chain:
            lines.append(
                f"  {format_percent(run.lens.share_in_chain)} % of the latents name a token of the chain; in order, "
                f"{format_percent(run.lens.lcs_ratio)} % of it"
            )
        lines += [
            f"  {map.space} {BASELINE_LABELS[map.baseline]}: diagonal contrast {map.diagonal_contrast:+.3f}, "
            f"look-ahead {format_percent(map.look_ahead)} %"
            for map in run.chain.maps
        ]
        if run.chain.maps:
            lines.append(f"  {SIMILARITY_TERMS}")
        lines += [
            f"  {effect.intervention} in {effect.target}: {join_words(effect.answer)}"
            + (f" (the donor's answer is {join_words(effect.donor_answer)})" if effect.donor_answer else "")
            for effect in run.effects
        ]
    return "\n".join([*lines, "", *summary.notes])


def join_words(text: str) -> str:
    return " ".join(text.split())


def correctness_suffix(answer: str, summary: QuestionSummary) -> str:
    if summary.gold is None:
        return ""
    prediction = summary.protocol.extract(answer)
    is_correct = prediction is not None and summary.protocol.is_correct(prediction, summary.gold)
    return ", correct" if is_correct else f", expected {summary.gold.strip()}"


def name_passes(run: QuestionInspection) -> list[str]:
    """Return a name for each pass over the latents; sequential latents have one."""
    iterations = [f"iteration {t}" for t in range(1, len(run.lens.passes))]
    return ["sequential"] if run.num_iterations is None else ["placeholders", *iterations]
