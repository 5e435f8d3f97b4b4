"""Train and evaluate one run of the demo, in a subprocess of `laconic demo`."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.cli.commands.train import TrainCommand
from laconic.console import log_message, progress
from laconic.errors import LaconicError

if TYPE_CHECKING:
    from laconic.config.recipe import Recipe
    from laconic.evaluation.reasoning.run import EvalCondition

CHAIN_ENTRY, TEACHER_ENTRY = "chain", "teacher"  # the whole chain, and the chain that is distilled
FOCUS_ENTRY = "kava"  # entry that the others are compared with
EVALUATION_BATCH_SIZE = 250
SWEEP_QUESTIONS = 1000  # questions for each number of Jacobi iterations
EXTRA_ITERATIONS = 2  # how far the sweep goes beyond the number of iterations in training


def main(args: Sequence[str]) -> int:
    """Train and evaluate the run given by the arguments RECIPE OUT KEY=VALUE…; return the exit code."""
    recipe, out, *overrides = args
    sys.argv[1:] = ["train", recipe, "--out", out, *overrides]  # the command that env.json records
    try:
        train = TrainCommand(recipe, tuple(overrides), out=Path(out), device="cpu")
        return train.run() or evaluate_conditions(Path(out))
    except LaconicError as error:
        log_message(f"laconic: {error}")
        return error.exit_code


def evaluate_conditions(folder: Path) -> int:
    """Evaluate a run as trained and for several iterations; stored results are reused."""
    import torch

    from laconic.data.reasoning.answer_matching import DIGIT
    from laconic.evaluation.reasoning.question_sets import load_question_set
    from laconic.evaluation.reasoning.run import build_question_job
    from laconic.evaluation.suite import evaluate_job
    from laconic.experiment.load_run import load_run

    run = load_run(folder, torch.device("cpu"))
    with progress("evaluating") as show:
        for condition in planned_conditions(run.recipe):
            limit = None if condition.iterations is None else SWEEP_QUESTIONS
            questions = load_question_set(run, "test", DIGIT, limit=limit)
            job = build_question_job(run, questions, condition, limit=limit, batch_size=EVALUATION_BATCH_SIZE)
            name = condition.name or "test"
            evaluate_job(run, job, progress=lambda _, done, total, name=name: show(name, done, total))
    return 0


def planned_conditions(recipe: "Recipe") -> "Iterator[EvalCondition]":
    from laconic.evaluation.reasoning.run import EvalCondition

    yield EvalCondition()
    if recipe.latents and recipe.latents.jacobi_iterations:
        for iterations in range(recipe.latents.jacobi_iterations + EXTRA_ITERATIONS + 1):
            yield EvalCondition(iterations=iterations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
