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
MAX_TOKENS = 96  # of a chain and its answer


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

    from laconic.evaluation.evaluate import evaluate
    from laconic.recipe.methods import writing
    from laconic.recipe.opened import opened
    from laconic.recipe.rows import held_out

    torch.set_flush_denormal(True)  # as in training
    run = opened(folder, torch.device("cpu"))
    rows = held_out(run.recipe, run.parts.tokenizer, run.parts.decoder.config.max_position_embeddings, "test")
    how = writing(run.parts, run.recipe, MAX_TOKENS)
    key = {"step": step_hash(folder, run.step)}
    with progress("asking") as show:
        for name, rounds, teacher in evaluations(run.recipe):
            if rounds is not None:
                asked_with(run, rounds)
            evaluate(
                lambda batch, teacher=teacher: run.method.answer(batch, how, teacher=teacher),  # pyright: ignore
                rows.source,
                rows.examples[: SWEPT if rounds is not None else None],
                rows.protocol,
                batch=BATCH,
                bytes_each=bytes_each(run.parts.decoder.config),
                folder=folder / "evaluations" / name,
                key={**key, "rounds": str(rounds), "teacher": str(teacher)},
                show=lambda _, done, total, name=name: show(name, done, total),
            )
    return 0


def evaluations(recipe: Any) -> Iterator[tuple[str, int | None, bool]]:
    """Name, test-time rounds where they are not those of training, and whether the chain is written instead."""
    yield "test", None, False
    if recipe.method in ("codi", "pccot", "kava"):
        yield "teacher", None, True
    if recipe.thinking and recipe.thinking.rounds:
        for rounds in range(recipe.thinking.rounds + MORE + 1):
            yield f"rounds-{rounds}", rounds, False


def asked_with(run: Any, rounds: int) -> None:
    """Thoughts made in another number of rounds than they were trained with."""
    run.parts.thoughts.rounds = rounds


def bytes_each(config: Any) -> int:
    """Bytes of one cache position in float32: keys and values of every layer and head."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def step_hash(folder: Path, step: int) -> str:
    """SHA-256 of the manifest of a step."""
    import hashlib

    from laconic.core.runs import RunFolder

    return hashlib.sha256(RunFolder(folder).asked(step).manifest.text.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
