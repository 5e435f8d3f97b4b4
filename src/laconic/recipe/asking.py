"""A run asked: a set of questions as it reads them, how its answers are written, and the folder that keeps them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch

from laconic.core import manifest
from laconic.core.answering import Writing
from laconic.core.artifact import read_json
from laconic.core.contract import Answers, Example, Source
from laconic.core.errors import BadInput, Preempted, Usage
from laconic.core.runs import RunFolder
from laconic.data.examples import read_examples
from laconic.data.maths import load
from laconic.data.reasoning import Questions
from laconic.data.sets import known, parted
from laconic.data.settings import Data, is_file
from laconic.evaluation import protocols
from laconic.evaluation.evaluate import Answer, Result, Show, evaluate
from laconic.evaluation.protocols import Protocol
from laconic.recipe.methods import answer, writing
from laconic.recipe.opened import RECIPE, Opened, is_run, newest
from laconic.recipe.rows import held_out, in_words
from laconic.recipe.schema import TABLES, WHOLE, Recipe
from laconic.training import checkpoint
from laconic.training.ranks import Alone, Ranks
from laconic.training.signals import Interrupted, Stop

OWN = ("test", "valid")  # the sets that a recipe itself names
FOLDER = "evaluations"


@dataclass(frozen=True)
class Asked:
    """Questions as a run reads them; `examples` hold their gold answers, `order` is that of asking, the longest first.

    `longest` is the positions of the longest question, `words` whether answers are no numbers.
    """

    name: str
    source: Source
    examples: Sequence[Example]
    protocol: Protocol
    order: Sequence[int]
    longest: int
    words: bool
    notes: tuple[str, ...] = ()


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


def chosen(recipe: Recipe, name: str | None, tol: Any = protocols.TOL) -> Protocol:
    """The protocol asked for, or the one that belongs to a recipe's format."""
    data = recipe.data
    found = protocols.own(data.format, words=in_words(data)) if name is None else protocols.PROTOCOLS[name]
    if found.name == "pccot":
        return protocols.pccot(data.prompt)
    return protocols.decimal(tol) if found.name == "decimal" else found


def asked(run: Opened, name: str, protocol: Protocol, *, root: str | None = None, rows: int | None = None) -> Asked:
    """The questions of a set: a name, a file, or the run's own test or valid; the first `rows` of them.

    Raises `Usage` (2) for a protocol that cannot read the run's answers, `BadInput` (66) for one that cannot judge
    against the set's, and for questions that do not fit.
    """
    data, config, tokenizer = run.recipe.data, run.parts.decoder.config, run.parts.tokenizer
    protocols.check_format(protocol, data.format, str(run.folder))
    if data.kind == "digits":
        return generated(run, name, protocol, rows)
    path, how = getattr(data, name) if name in OWN else name, only_questions(data, root)
    if path is None:
        raise BadInput(f"{name}: {run.folder} names no data.{name}; name a set or a file")
    file = name in OWN and data.kind == "jsonl"
    read = read_examples(path, how, rows) if file else load(path, "valid" if name == "valid" else "test", how, rows)
    protocols.check_gold(protocol, read.examples, path)
    put = [replace(each, question=protocol.question(each.question), steps=()) for each in read.examples]
    M = run.recipe.thinking.count if run.recipe.thinking else 0
    made = Questions(  # what stands for the answer is not asked
        [replace(each, answer="0") for each in put], tokenizer, how,
        context=config.max_position_embeddings, thoughts=M,
    )  # fmt: skip
    kept = {each.id for each in made.examples}
    examples = [each for each in put if each.id in kept]
    lengths = [len(made.row(i).question) for i in range(len(made))]
    order = sorted(range(len(examples)), key=lambda i: -lengths[i])
    words = protocols.whole_decimal(examples[0].answer) is None
    notes = [f"{title(path)}: {line}" for line in made.counts.lines() if "left out" in line or "cut" in line]
    return Asked(title(path), made, examples, protocol, order, max(lengths), words, tuple(notes))


def generated(run: Opened, name: str, protocol: Protocol, rows: int | None) -> Asked:
    """The questions of the digits task."""
    if name not in OWN:
        raise Usage(f"--on {name}: {run.folder} was trained on generated digits, and has words for no other; ask test")
    tokenizer, context = run.parts.tokenizer, run.parts.decoder.config.max_position_embeddings
    found = held_out(run.recipe, tokenizer, context, "valid" if name == "valid" else "test", rows)
    protocols.check_gold(protocol, found.examples, name)
    longest = cast(Any, found.source.batch([0], 0, 0)).question.shape[1]
    return Asked(name, found.source, found.examples, protocol, range(len(found.examples)), longest, False)


def only_questions(data: Data, root: str | None) -> Data:
    """How the rows of an evaluation are read: all of them, without their chains."""
    asks = {"field": None, "closed": False, "rows": None, "drop_negative": False, "max_tokens": None}
    return data.model_copy(update={**asks, "root": data.root if root is None else root})


def title(asked: str) -> str:
    """What a set is called: our name for it, or that of its file."""
    if is_file(asked):
        return Path(asked).stem
    name, split = parted(asked)
    found = known(asked)
    return (found.name if found else name) + (f":{split}" if split not in (None, "test") else "")


def told(run: Opened, asked: Asked, *, teacher: bool = False) -> Writing:
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


def budget(run: Opened, asked: Asked, teacher: bool) -> int:
    """Tokens an answer may have by its protocol."""
    return protocols.budget(
        asked.protocol, run.recipe.data.format, chain=chains(run, teacher), words=asked.words
    )  # fmt: skip


def chains(run: Opened, teacher: bool) -> bool:
    """Whether a chain is written before the answer, or what is left of one."""
    return teacher or run.recipe.method in WHOLE


def cut_short(run: Opened, asked: Asked, *, teacher: bool = False) -> list[str]:
    """A line where the model's context ends before the protocol's budget does."""
    whole, tokens = budget(run, asked, teacher), told(run, asked, teacher=teacher).max_tokens
    if tokens == whole:
        return []
    by = ", by chain" if teacher else ""
    return [f"{asked.name}{by}: answers of {run.folder} have {tokens} tokens at most, not {whole}: its context ends"]


def answering(run: Opened, told: Writing, *, teacher: bool = False, stop: Stop | None = None) -> Answer:
    """How a run answers a batch; a signal ends it at once, since answers change nothing."""
    device = run.parts.decoder.words.weight.device

    def answers(batch: Any) -> Answers:
        return answer(run.method, batch.to(device), told, teacher=teacher)

    def left(batch: Any) -> Answers:
        with cast(Stop, stop).leaving():
            return answers(batch)

    return answers if stop is None else left


def answered(
    run: Opened,
    asked: Asked,
    told: Writing,
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
                answering(run, told, teacher=teacher, stop=stop if alone else None),
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


def gold(asked: Asked) -> str:
    """SHA-256 of questions and gold answers."""
    return manifest.fingerprint([[each.id, each.question, each.answer] for each in asked.examples])


def folder_name(asked: Asked, step: int, *, rows: int | None, teacher: bool, rounds: int | None) -> str:
    """Where in evaluations/ the answers lie."""
    parts = [asked.name, asked.protocol.name, f"step-{step}"]
    parts += [f"first-{rows}"] if rows is not None else []
    parts += ["teacher"] if teacher else []
    parts += [f"rounds-{rounds}"] if rounds is not None else []
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts))


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
