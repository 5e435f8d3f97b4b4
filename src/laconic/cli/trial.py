"""One run of the demo, in a process of its own: trained, then asked the problems it has not seen."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from laconic.cli.train import TrainCommand
from laconic.console import log_message, progress
from laconic.errors import LaconicError

EVALUATION_BATCH_SIZE = 250
SWEEP_QUESTIONS = 1000  # problems for each number of test-time rounds
EXTRA_ITERATIONS = 2  # rounds beyond those trained with


def main(args: Sequence[str]) -> int:
    """RECIPE OUT KEY=VALUE…: the exit code of training, or of the evaluation behind it."""
    recipe, out, *overrides = args
    try:
        return TrainCommand(recipe, tuple(overrides), out=Path(out), device="cpu").run() or evaluate_run(Path(out))
    except LaconicError as error:
        log_message(f"laconic: {error}")
        return error.exit_code


def evaluate_run(folder: Path) -> int:
    """Every evaluation of a run, each committed; what is there is not asked again."""
    import torch

    from laconic.data.reasoning.answer_matching import DIGIT
    from laconic.evaluation.reasoning import run as reasoning_run
    from laconic.evaluation.reasoning.question_sets import load_question_set
    from laconic.experiment.load_run import load_run

    run = load_run(folder, torch.device("cpu"))
    with progress("asking") as show:
        for name, rounds, teacher in planned_evaluations(run.recipe):
            rows = load_question_set(run, "test", DIGIT, limit=None if rounds is None else SWEEP_QUESTIONS)
            how = reasoning_run.decoding_for(run, rows, with_cot=teacher)
            reasoning_run.evaluate_run(
                run, rows, how, with_cot=teacher, iterations=rounds, batch_size=EVALUATION_BATCH_SIZE,
                limit=None if rounds is None else SWEEP_QUESTIONS,
                progress=lambda _, done, total, name=name: show(name, done, total),
            )  # fmt: skip
    return 0


def planned_evaluations(recipe: Any) -> Iterator[tuple[str, int | None, bool]]:
    """Name, test-time rounds where they are not those of training, and whether the chain is written instead."""
    yield "test", None, False
    if recipe.method in ("codi", "pccot", "kava"):
        yield "teacher", None, True
    if recipe.latents and recipe.latents.jacobi_iterations:
        for rounds in range(recipe.latents.jacobi_iterations + EXTRA_ITERATIONS + 1):
            yield f"rounds-{rounds}", rounds, False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
