"""Train and evaluate one run of the demo, in a subprocess of `laconic demo`."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from laconic.cli.train import TrainCommand
from laconic.console import log_message, progress
from laconic.errors import LaconicError

EVALUATION_BATCH_SIZE = 250
SWEEP_QUESTIONS = 1000  # questions for each number of Jacobi iterations
EXTRA_ITERATIONS = 2  # how far the sweep goes beyond the number of iterations in training


def main(args: Sequence[str]) -> int:
    """Train and evaluate the run given by the arguments RECIPE OUT KEY=VALUE…; return the exit code."""
    recipe, out, *overrides = args
    try:
        return TrainCommand(recipe, tuple(overrides), out=Path(out), device="cpu").run() or evaluate_conditions(
            Path(out)
        )
    except LaconicError as error:
        log_message(f"laconic: {error}")
        return error.exit_code


def evaluate_conditions(folder: Path) -> int:
    """Evaluate a run with and without chain of thought and for several iterations; stored results are reused."""
    import torch

    from laconic.data.reasoning.answer_matching import DIGIT
    from laconic.evaluation.reasoning import run as reasoning_run
    from laconic.evaluation.reasoning.question_sets import load_question_set
    from laconic.experiment.load_run import load_run

    run = load_run(folder, torch.device("cpu"))
    with progress("evaluating") as show:
        for with_cot, iterations in planned_evaluations(run.recipe):
            limit = None if iterations is None else SWEEP_QUESTIONS
            questions = load_question_set(run, "test", DIGIT, limit=limit)
            decoding = reasoning_run.decoding_for(run, questions, with_cot=with_cot)
            name = "chain of thought" if with_cot else "test" if iterations is None else f"{iterations} iterations"
            reasoning_run.evaluate_run(
                run,
                questions,
                decoding,
                with_cot=with_cot,
                iterations=iterations,
                batch_size=EVALUATION_BATCH_SIZE,
                limit=limit,
                progress=lambda _, done, total, name=name: show(name, done, total),
            )
    return 0


def planned_evaluations(recipe: Any) -> Iterator[tuple[bool, int | None]]:
    """Yield pairs (with_cot, number of Jacobi iterations); None means as many iterations as in training."""
    yield False, None
    if recipe.method in ("codi", "pccot", "kava"):
        yield True, None
    if recipe.latents and recipe.latents.jacobi_iterations:
        for iterations in range(recipe.latents.jacobi_iterations + EXTRA_ITERATIONS + 1):
            yield False, iterations


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
