"""One question as each inspected run answers it, as JSON and as text for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.evaluation.inspection.chain_comparison import CHAIN, SELECTED
from laconic.evaluation.inspection.question import QuestionInspection
from laconic.evaluation.tables import figures_to_json, format_percent

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
    """Return whether an answer matches the gold one; empty if that is unknown."""
    if summary.gold is None:
        return ""
    prediction = summary.protocol.extract(answer)
    is_correct = prediction is not None and summary.protocol.is_correct(prediction, summary.gold)
    return ", correct" if is_correct else f", expected {summary.gold.strip()}"


def name_passes(run: QuestionInspection) -> list[str]:
    """Return a name for each pass over the latents; sequential latents have one."""
    iterations = [f"iteration {t}" for t in range(1, len(run.lens.passes))]
    return ["sequential"] if run.num_iterations is None else ["placeholders", *iterations]
