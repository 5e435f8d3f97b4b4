"""A run asked: which of its steps, how its answers to a set are written, and the folder that keeps them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch

from laconic.core import manifest
from laconic.core.answering import Writing
from laconic.core.artifact import read_json
from laconic.core.contract import Answers
from laconic.core.errors import BadInput, Preempted, Usage
from laconic.core.runs import RunFolder
from laconic.evaluation import protocols
from laconic.evaluation.evaluate import Answer, Result, Show, evaluate
from laconic.evaluation.protocols import Protocol
from laconic.recipe.methods import answer, writing
from laconic.recipe.opened import RECIPE, Opened, is_run, newest
from laconic.recipe.questions import QuestionSet, kept_as
from laconic.recipe.rows import in_words
from laconic.recipe.schema import TABLES, WHOLE, Recipe
from laconic.training import checkpoint
from laconic.training.ranks import Alone, Ranks
from laconic.training.signals import Interrupted, Stop

FOLDER = "evaluations"


def seeds(path: str | Path) -> list[Path]:
    """The runs of a path: itself, or its seed-0, seed-1, … in order. Raises `BadInput` (66) where there is none."""
    folder = Path(path)
    if is_run(folder):
        return [folder]
    found = [each for each in folder.glob("seed-*") if each.name[5:].isdecimal() and is_run(each)]
    if not found:
        raise BadInput(f"{folder} is no run, and holds no seed-N that is one; give what laconic train wrote")
    return sorted(found, key=lambda each: int(each.name[5:]))


def step_of(folder: Path, asked: str) -> int:
    """The number of a step by what a user calls it: newest, best (by the run's validation), or the number itself."""
    if asked.isdecimal():
        return int(asked)
    found = newest(folder)
    if asked == "newest":
        return found.number
    best = read_json(found.folder / checkpoint.PROGRESS)["best"] if asked == "best" else None
    if not best:
        why = "its recipe has no train.best" if asked == "best" else "write newest, best, or a number"
        raise Usage(f"--step {asked}: no such step of {folder}; {why}")
    return int(best[0][1])


def chosen(recipe: Recipe, name: str | None, tol: Decimal | None = None) -> Protocol:
    """The protocol asked for, or the one that belongs to a recipe's format."""
    data = recipe.data
    found = protocols.own(data.format, words=in_words(data)) if name is None else protocols.PROTOCOLS[name]
    if found.name == "pccot":
        return protocols.pccot(data.prompt)
    return protocols.decimal(tol) if found.name == "decimal" and tol is not None else found


def writing_for(run: Opened, asked: QuestionSet, *, teacher: bool = False) -> Writing:
    """How answers to these questions are written: the protocol's prompt and budget, as far as the model's context goes.

    CODI's gives eot alone, so that a prompt is generated too.
    """
    recipe, protocol, tokens = run.recipe, asked.protocol, budget(run, asked, teacher)
    made = writing(run.parts, recipe, tokens, protocol.sampling, recipe.seed)
    if protocol.name.startswith("codi") and recipe.data.format == "pccot" and not chains(run, teacher):
        made = replace(made, prompt=())
    thoughts = recipe.thinking.count + 2 if recipe.thinking and not teacher else 0
    room = run.parts.decoder.config.max_position_embeddings - asked.longest - thoughts - len(made.prompt)
    return replace(made, max_tokens=min(tokens, room))


def budget(run: Opened, asked: QuestionSet, teacher: bool) -> int:
    """Tokens an answer may have by its protocol."""
    return protocols.budget(asked.protocol, run.recipe.data.format, chain=chains(run, teacher), words=asked.words)


def chains(run: Opened, teacher: bool) -> bool:
    """Whether a chain is written before the answer, or what is left of one."""
    return teacher or run.recipe.method in WHOLE


def cut_short(run: Opened, asked: QuestionSet, name: str, *, teacher: bool = False) -> list[str]:
    """A line where the model's context ends before the protocol's budget does."""
    whole, tokens = budget(run, asked, teacher), writing_for(run, asked, teacher=teacher).max_tokens
    if tokens == whole:
        return []
    by = ", by chain" if teacher else ""
    return [f"{asked.name}{by}: answers of {name} have {tokens} tokens at most, not {whole}: its context ends"]


def answering(run: Opened, how: Writing, *, teacher: bool = False, stop: Stop | None = None) -> Answer:
    """How a run answers a batch; a signal ends it at once, since answers change nothing."""
    device = run.parts.decoder.words.weight.device

    def answered(batch: Any) -> Answers:
        return answer(run.method, batch.to(device), how, teacher=teacher)

    def left(batch: Any) -> Answers:
        with cast(Stop, stop).leaving():
            return answered(batch)

    return answered if stop is None else left


def answered(
    run: Opened,
    asked: QuestionSet,
    how: Writing,
    name: str,
    *,
    teacher: bool = False,
    rounds: int | None = None,
    batch: int = 64,
    key: Mapping[str, str] | None = None,
    ranks: Ranks | None = None,
    stop: Stop | None = None,
    show: Show | None = None,
) -> Result:
    """The evaluation `name` of a run: what is there is read, what is begun goes on, and is committed at its end.

    `rounds` are those of the thoughts, where they are not those of training. Raises `Preempted` (75) after a signal:
    what is answered is kept.
    """
    ranks = ranks or Alone()
    alone, bound = ranks.world == 1, {"step": step_hash(run.folder, run.step), "rounds": str(rounds)}

    def between() -> None:
        if stop and not alone and ranks.any(bool(stop.signal)):
            raise Interrupted

    try:
        with in_rounds(run, rounds), flushed(run.parts.decoder.words.weight.device):
            return evaluate(
                answering(run, how, teacher=teacher, stop=stop if alone else None),
                asked.source,
                asked.examples,
                asked.protocol,
                batch=batch,
                bytes_each=bytes_each(run),
                folder=run.folder / FOLDER / name,
                key={**bound, "teacher": str(teacher), **(key or {})},
                texts={RECIPE: (run.folder / RECIPE).read_text(encoding="utf-8")},
                show=show,
                order=asked.order,
                ranks=ranks,
                between=between,
            )
    except Interrupted:
        why = stop.name if stop and stop.signal else "a signal to another rank"
        kept = "what is answered is kept; run the same command again to go on"
        raise Preempted(f"{why}: {run.folder}, {asked.name}: {kept}") from None


def gold(asked: QuestionSet) -> str:
    """SHA-256 of questions and gold answers."""
    return manifest.fingerprint([[each.id, each.question, each.answer] for each in asked.examples])


def folder_name(asked: QuestionSet, step: int, *, rows: int | None, teacher: bool, rounds: int | None) -> str:
    """Where in evaluations/ the answers lie."""
    parts = [asked.name, asked.protocol.name, f"step-{step}"]
    parts += [f"first-{rows}"] if rows is not None else []
    parts += ["teacher"] if teacher else []
    parts += [f"rounds-{rounds}"] if rounds is not None else []
    return kept_as("-".join(parts))


def check_rounds(recipe: Recipe, rounds: int, run: str) -> None:
    """Raises `Usage` (2) for a run that makes no thoughts in rounds."""
    thinking = recipe.thinking if "thinking" in TABLES[recipe.method] else None
    if thinking is None or thinking.rounds is None:
        raise Usage(f"--rounds {rounds}: {run} makes no thoughts in rounds; ask a run of pccot or kava")


@contextmanager
def in_rounds(run: Opened, rounds: int | None) -> Iterator[None]:
    """Inside, thoughts are made in another number of rounds than they were trained with."""
    thoughts = run.parts.thoughts
    if rounds is None or thoughts is None:
        yield
        return
    trained = thoughts.rounds
    thoughts.rounds = rounds
    try:
        yield
    finally:
        thoughts.rounds = trained


@contextmanager
def flushed(device: torch.device) -> Iterator[None]:
    """Inside, numbers below the normal range count as 0 on a CPU, as in training: each costs a hundred others."""
    torch.set_flush_denormal(device.type == "cpu")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def bytes_each(run: Opened) -> int:
    """Bytes of one cache position: keys and values of every layer and head."""
    config, dtype = run.parts.decoder.config, run.parts.decoder.words.weight.dtype
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def step_hash(folder: Path, step: int) -> str:
    """SHA-256 of the manifest of a step."""
    return sha256(RunFolder(folder).asked(step).manifest.text.encode()).hexdigest()
