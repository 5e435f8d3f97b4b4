"""One run of the demo, in a process of its own: trained, then asked the problems it has not seen."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from laconic.console import progress, say
from laconic.core.errors import LaconicError
from laconic.verbs.train import Train

BATCH = 250
SWEPT = 1000  # problems for each number of test-time rounds
MORE = 2  # rounds beyond those trained with


def main(args: Sequence[str]) -> int:
    """RECIPE OUT KEY=VALUE…: the exit code of training, or of the evaluation behind it."""
    recipe, out, *overrides = args
    try:
        return Train(recipe, tuple(overrides), out=Path(out), device="cpu").run() or asked(Path(out))
    except LaconicError as error:
        say(f"laconic: {error}")
        return error.code


def asked(folder: Path) -> int:
    """Every evaluation of a run, each committed; what is there is not asked again."""
    import torch

    from laconic.evaluation.protocols import DIGIT
    from laconic.recipe import asking
    from laconic.recipe.opened import opened
    from laconic.recipe.questions import question_set

    run = opened(folder, torch.device("cpu"))
    with progress("asking") as show:
        for name, rounds, teacher in evaluations(run.recipe):
            rows = question_set(run, "test", DIGIT, rows=None if rounds is None else SWEPT)
            how = asking.writing_for(run, rows, teacher=teacher)
            asking.answered(
                run, rows, how, name, teacher=teacher, rounds=rounds, batch=BATCH,
                show=lambda _, done, total, name=name: show(name, done, total),
            )  # fmt: skip
    return 0


def evaluations(recipe: Any) -> Iterator[tuple[str, int | None, bool]]:
    """Name, test-time rounds where they are not those of training, and whether the chain is written instead."""
    yield "test", None, False
    if recipe.method in ("codi", "pccot", "kava"):
        yield "teacher", None, True
    if recipe.thinking and recipe.thinking.rounds:
        for rounds in range(recipe.thinking.rounds + MORE + 1):
            yield f"rounds-{rounds}", rounds, False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
