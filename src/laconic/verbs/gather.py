"""The runs of a demo read back from their folders: what the table and the page show."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from laconic.core.contract import Reasoning
from laconic.core.runs import RunFolder
from laconic.evaluation.evaluate import Result, read_rows
from laconic.evaluation.looked import Looked, look
from laconic.evaluation.protocols import DIGIT
from laconic.evaluation.report import Line, Report
from laconic.evaluation.timing import latencies
from laconic.recipe import asking, looking
from laconic.recipe.opened import Opened, opened
from laconic.recipe.questions import question_set
from laconic.recipe.read import read
from laconic.recipe.rows import held_out
from laconic.recipe.schema import Recipe
from laconic.verbs.trial import MORE

if TYPE_CHECKING:
    from laconic.verbs.demo import Entry

TIMED = 50  # questions asked alone
CPU = torch.device("cpu")


def gathered(
    roster: Sequence["Entry"], out: Path, seeds: Sequence[int], seconds: float, command: str, notes: Sequence[str] = ()
) -> Report:
    """The report of runs in `out`; their speed is measured here, one run after the other."""
    torch.set_num_threads(1)
    folders = {entry.name: [out / entry.name / f"seed-{seed}" for seed in seeds] for entry in roster}
    lines = [line_of(entry, folders[entry.name]) for entry in roster]
    timed = [asked(opened(each[0], CPU)) for each in folders.values()]
    took = latencies(timed, TIMED, len(timed[0][1]))
    focus = next((entry for entry in roster if entry.name == "kava"), roster[0])
    run = opened(out / focus.name / f"seed-{seeds[0]}", CPU)
    first = Result(tuple(read_rows(run.folder / "evaluations" / "test")), DIGIT.name)
    return Report(
        title="Thinking in vectors: what can stand in for a written chain",
        lead=lead(run),
        lines=[replace(line, latency=each) for line, each in zip(lines, took, strict=True)],
        focus=focus.name,
        chain="chain",
        floor=first.floor,
        protocol=DIGIT.name,
        seeds=seeds,
        limits=[*notes, *limits(run, out / "chain" / f"seed-{seeds[0]}")],
        differs=[(key, str(value_of(run.recipe, key)), why) for key, why in run.recipe.differs.items()],
        facts=facts(run, seconds),
        runs=[told(entry.name, seed, out / entry.name / f"seed-{seed}") for entry in roster for seed in seeds],
        command=command,
        inspection=looked_into(run),
        chosen="The first of the unseen problems, whatever came of it",
    )


def line_of(entry: "Entry", folders: Sequence[Path]) -> Line:
    """One row of the table."""
    run = opened(folders[0], CPU)
    results = [result(folder, "test") for folder in folders]
    thinking = run.recipe.thinking
    M, T = (thinking.count, thinking.rounds) if thinking else (0, 0)
    return Line(
        name=entry.name,
        title=entry.title,
        about=entry.about.format(M=M, T=T),
        right=np.stack([found.right for found in results]),
        passes=mean([found.passes for found in results]),
        held=mean([found.held for found in results]),
        control=entry.control,
        tint=entry.tint,
        bytes_each=asking.bytes_each(run),
        curves=[curve(folder) for folder in folders],
        sweep=swept(folders, T + MORE) if T else {},
        trained=T or None,
        teacher=[result(folder, "teacher").right.mean() for folder in folders if there(folder, "teacher")],
        seconds=[sum(line.get("seconds", 0.0) for line in metrics(folder)) for folder in folders],
    )


def asked(run: Opened) -> tuple[Any, Any]:
    """How a run answers, and the questions."""
    rows = question_set(run, "test", DIGIT)
    return asking.answering(run, asking.writing_for(run, rows)), rows.source


def there(folder: Path, name: str) -> bool:
    """Whether a run was asked so."""
    return (folder / "evaluations" / name).is_dir()


def result(folder: Path, name: str) -> Result:
    """An evaluation of a run."""
    return Result(read_rows(folder / "evaluations" / name), DIGIT.name)


def swept(folders: Sequence[Path], most: int) -> dict[int, list[float]]:
    """Shares right by test-time rounds, for each seed."""
    names = {rounds: f"rounds-{rounds}" for rounds in range(most + 1)}
    return {
        rounds: [float(result(folder, name).right.mean()) for folder in folders]
        for rounds, name in names.items()
        if all(there(folder, name) for folder in folders)
    }


def mean(each: Sequence[tuple[float, ...]]) -> Any:
    """The mean over seeds of a tuple of figures."""
    return tuple(np.mean(np.array(each), axis=0).tolist())


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def curve(folder: Path) -> list[tuple[int, float]]:
    """Share right on validation problems over steps."""
    return [(line["step"], line["validation"]["accuracy"]) for line in metrics(folder) if "validation" in line]


def looked_into(run: Opened) -> Looked | None:
    """The first test problem, whatever came of it."""
    if run.parts.thoughts is None:
        return None
    asked = question_set(run, "test", DIGIT, rows=1)
    batch = cast(Reasoning, asked.source.batch([0], 0, 0))
    return look(looking.subject(run, run.folder.name, CPU, asking.writing_for(run, asked)), batch, ())


def lead(run: Opened) -> str:
    """What was done, in three sentences."""
    config, task = run.parts.decoder.config, run.recipe.data.digits
    size = sum(p.numel() for p in run.parts.decoder.parameters())
    example = held_out(run.recipe, run.parts.tokenizer, config.max_position_embeddings, "test", 1).examples[0]
    return (
        f"A Llama of {config.num_hidden_layers} layers and {size:,} parameters learns {task.operations} operations on "
        f"digits from left to right, of every result the last digit: {example.question} {example.answer}, by the chain "
        f"{' '.join(example.steps)}. Each row is one way to get from the question to the answer."
    )


def limits(run: Opened, chain: Path) -> list[str]:
    """What this task and these recipes leave open; `chain` is the run that they start from."""
    found = ["What holds for a model of this size on digits need not hold for a language model on words."]
    batch: Any = held_out(run.recipe, run.parts.tokenizer, 10**6, "test", 1).source.batch([0], 0, 0)
    M, N = run.recipe.thinking.count if run.recipe.thinking else 0, int(batch.chain_live.sum())
    if M >= N:
        found.append(f"Selection: {M} thoughts stand for {N} chain tokens, so R-KV has nothing to choose here.")
    digits = run.recipe.data.digits
    if digits.style == "marks":
        found.append(
            "The chain is made for this: four of the five tokens of a step are marks, so that much of it is redundant."
        )
    if run.recipe.keeping and not run.recipe.keeping.lam:
        found.append("R-KV goes by redundancy alone (λ = 0, where the paper has 0.1).")
    if run.recipe.matching and run.recipe.matching.kv_layers is not None:
        layers, L = len(run.recipe.matching.kv_layers), run.parts.decoder.config.num_hidden_layers
        found.append(f"Keys and values are matched in {layers} of {L} layers; the paper matches all.")
    if read(chain / "recipe.toml")[0].data.digits.terse:
        found.append(
            "The chain's model has learned the results alone as well, when asked for them: it brings along what the "
            "thoughts are to do."
        )
    if run.recipe.data.chain == "all":
        found.append(
            "The last step of the chain, which holds the answer, is kept; the papers leave it out, which is harder."
        )
    return found


def facts(run: Opened, seconds: float) -> list[tuple[str, str]]:
    """Data, device, versions, time."""
    environment = json.loads((run.folder / "env.json").read_text(encoding="utf-8"))
    manifest = RunFolder(run.folder).asked(run.step).manifest
    minutes, rest = divmod(round(seconds), 60)
    return [
        ("wall time", f"{minutes} min {rest} s, two processes side by side"),
        ("training data", f"{run.recipe.data.digits.rows:,} problems, SHA-256 {manifest.bound['data'][:16]}…"),
        ("device", f"{environment['device']}, float32, one thread a process; {environment['platform']}"),
        (
            "versions",
            ", ".join(f"{k} {v}" for k, v in environment["versions"].items()) + f", Python {environment['python']}",
        ),
    ]


def told(name: str, seed: int, folder: Path) -> tuple[str, str]:
    """What a run came to, and by what its weights are known."""
    committed = RunFolder(folder).newest()
    assert committed is not None  # it was evaluated
    weights = committed.manifest.files["model.safetensors"].sha256
    lines = [line for line in metrics(folder) if "seconds" in line]
    skipped = sum("nonfinite" in line for line in lines)
    spent = sum(line["seconds"] for line in lines)
    text = f"{committed.number} steps in {spent:.0f} s, {skipped} left out"
    return f"{name}, seed {seed}", f"{text}; recipe {committed.manifest.bound['recipe'][:12]}…, weights {weights[:12]}…"


def value_of(recipe: Recipe, key: str) -> Any:
    """A recipe's value by its dotted key."""
    found: Any = recipe
    for part in key.split("."):
        found = getattr(found, part, None)
    return found
