"""The runs of a demo read back from their folders: what the table and the page show."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from laconic.batches import ReasoningBatch
from laconic.cli.trial import EXTRA_ITERATIONS
from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.data.reasoning.answer_matching import DIGIT
from laconic.evaluation.inspection.inspected_run import load_inspected_run
from laconic.evaluation.inspection.question import QuestionInspection, inspect_question
from laconic.evaluation.reasoning import run as reasoning_run
from laconic.evaluation.reasoning.latency import measure_latencies
from laconic.evaluation.reasoning.question_sets import load_question_set
from laconic.evaluation.report.runs_table import ComparisonReport, MethodResult
from laconic.experiment.build_data import load_held_out
from laconic.experiment.load_run import LoadedRun, load_run
from laconic.storage.run_dir import RunDirectory

if TYPE_CHECKING:
    from laconic.cli.demo import DemoEntry

NUM_TIMED_QUESTIONS = 50  # questions asked alone
CPU = torch.device("cpu")


def build_demo_report(
    entries: Sequence["DemoEntry"],
    out: Path,
    seeds: Sequence[int],
    seconds: float,
    command: str,
    notes: Sequence[str] = (),
) -> ComparisonReport:
    """The report of runs in `out`; their speed is measured here, one run after the other."""
    torch.set_num_threads(1)
    folders = {entry.name: [out / entry.name / f"seed-{seed}" for seed in seeds] for entry in entries}
    lines = [build_line(entry, folders[entry.name]) for entry in entries]
    timed = [answer_function(load_run(each[0], CPU)) for each in folders.values()]
    took = measure_latencies(timed, NUM_TIMED_QUESTIONS, len(timed[0][1]))
    focus = next((entry for entry in entries if entry.name == "kava"), entries[0])
    run = load_run(out / focus.name / f"seed-{seeds[0]}", CPU)
    first = reasoning_run.load_result(run.folder, "test")
    assert first is not None  # it was evaluated
    return ComparisonReport(
        title="Thinking in vectors: what can stand in for a written chain",
        lead=describe_task(run),
        results=[replace(line, latency=each) for line, each in zip(lines, took, strict=True)],
        focus=focus.name,
        cot_baseline="chain",
        majority_baseline=first.majority_baseline,
        protocol=DIGIT.name,
        seeds=seeds,
        caveats=[*notes, *describe_limits(run, out / "chain" / f"seed-{seeds[0]}")],
        recipe_differences=[
            (key, str(get_recipe_value(run.recipe, key)), why) for key, why in run.recipe.deviations.items()
        ],
        facts=run_facts(run, seconds),
        runs=[describe_run(entry.name, seed, out / entry.name / f"seed-{seed}") for entry in entries for seed in seeds],
        command=command,
        inspection=inspect_first_question(run),
        inspection_title="The first of the unseen problems, whatever came of it",
    )


def build_line(entry: "DemoEntry", folders: Sequence[Path]) -> MethodResult:
    """One row of the table."""
    run = load_run(folders[0], CPU)
    results = [result for folder in folders if (result := reasoning_run.load_result(folder, "test"))]
    thinking = run.recipe.latents
    M, T = (thinking.num_latents, thinking.jacobi_iterations) if thinking else (0, 0)
    return MethodResult(
        name=entry.name,
        title=entry.title,
        description=entry.description.format(M=M, T=T),
        correct=np.stack([found.correct for found in results]),
        passes=mean_over_seeds([found.mean_passes for found in results]),
        cache_positions=mean_over_seeds([found.mean_cache_positions for found in results]),
        is_control=entry.is_control,
        color_index=entry.color_index,
        bytes_per_position=reasoning_run.bytes_per_position(run),
        learning_curves=[validation_curve(folder) for folder in folders],
        iteration_sweep=iteration_sweep(folders, T + EXTRA_ITERATIONS) if T else {},
        trained_iterations=T or None,
        cot_accuracy=[
            float(result.correct.mean())
            for folder in folders
            if (result := reasoning_run.load_result(folder, "test", with_cot=True))
        ],
        training_seconds=[sum(line.get("seconds", 0.0) for line in load_metrics(folder)) for folder in folders],
    )


def answer_function(run: LoadedRun) -> tuple[Any, Any]:
    """How a run answers, and the questions."""
    rows = load_question_set(run, "test", DIGIT)
    return reasoning_run.answer_function(run, reasoning_run.decoding_for(run, rows)), rows.source


def iteration_sweep(folders: Sequence[Path], max_iterations: int) -> dict[int, list[float]]:
    """Return the accuracy of each seed by the number of Jacobi iterations, where all seeds were evaluated."""
    sweep: dict[int, list[float]] = {}
    for iterations in range(max_iterations + 1):
        results = [reasoning_run.load_result(folder, "test", iterations=iterations) for folder in folders]
        shares = [float(result.correct.mean()) for result in results if result]
        if len(shares) == len(folders):
            sweep[iterations] = shares
    return sweep


def mean_over_seeds(each: Sequence[tuple[float, ...]]) -> Any:
    """The mean over seeds of a tuple of figures."""
    return tuple(np.mean(np.array(each), axis=0).tolist())


def load_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def validation_curve(folder: Path) -> list[tuple[int, float]]:
    """Share right on validation problems over steps."""
    return [(line["step"], line["validation"]["accuracy"]) for line in load_metrics(folder) if "validation" in line]


def inspect_first_question(run: LoadedRun) -> QuestionInspection | None:
    """The first test problem, whatever came of it."""
    if run.parts.latents is None:
        return None
    asked = load_question_set(run, "test", DIGIT, limit=1)
    batch = cast(ReasoningBatch, asked.source.batch([0], 0, 0))
    return inspect_question(
        load_inspected_run(run, run.folder.name, CPU, reasoning_run.decoding_for(run, asked)), batch, ()
    )


def describe_task(run: LoadedRun) -> str:
    """What was done, in three sentences."""
    config, task = run.parts.decoder.config, run.recipe.data.digits
    size = sum(p.numel() for p in run.parts.decoder.parameters())
    example = load_held_out(run.recipe, run.parts.tokenizer, config.max_position_embeddings, "test", 1).examples[0]
    return (
        f"A Llama of {config.num_hidden_layers} layers and {size:,} parameters learns {task.num_operations} operations on "
        f"digits from left to right, of every result the last digit: {example.question} {example.answer}, by the chain "
        f"{' '.join(example.steps)}. Each row is one way to get from the question to the answer."
    )


def describe_limits(run: LoadedRun, chain: Path) -> list[str]:
    """What this task and these recipes leave open; `chain` is the run that they start from."""
    found = ["What holds for a model of this size on digits need not hold for a language model on words."]
    batch: Any = load_held_out(run.recipe, run.parts.tokenizer, 10**6, "test", 1).source.batch([0], 0, 0)
    M, N = run.recipe.latents.num_latents if run.recipe.latents else 0, int(batch.chain_live.sum())
    if M >= N:
        found.append(f"Selection: {M} thoughts stand for {N} chain tokens, so R-KV has nothing to choose here.")
    digits = run.recipe.data.digits
    if digits.chain_style == "bracket_tokens":
        found.append(
            "The chain is made for this: four of the five tokens of a step are marks, so that much of it is redundant."
        )
    if run.recipe.kv_selection and not run.recipe.kv_selection.importance_weight:
        found.append("R-KV goes by redundancy alone (λ = 0, where the paper has 0.1).")
    if run.recipe.kv_distillation and run.recipe.kv_distillation.layers is not None:
        layers, L = len(run.recipe.kv_distillation.layers), run.parts.decoder.config.num_hidden_layers
        found.append(f"Keys and values are matched in {layers} of {L} layers; the paper matches all.")
    if load_recipe(chain / "recipe.toml")[0].data.digits.results_only_fraction:
        found.append(
            "The chain's model has learned the results alone as well, when asked for them: it brings along what the "
            "thoughts are to do."
        )
    if run.recipe.data.chain_steps == "all":
        found.append(
            "The last step of the chain, which holds the answer, is kept; the papers leave it out, which is harder."
        )
    return found


def run_facts(run: LoadedRun, seconds: float) -> list[tuple[str, str]]:
    """Data, device, versions, time."""
    environment = json.loads((run.folder / "env.json").read_text(encoding="utf-8"))
    manifest = RunDirectory(run.folder).get_step(run.step).manifest
    minutes, rest = divmod(round(seconds), 60)
    return [
        ("wall time", f"{minutes} min {rest} s, two processes side by side"),
        (
            "training data",
            f"{run.recipe.data.digits.train_rows:,} problems, SHA-256 {manifest.fingerprints['data'][:16]}…",
        ),
        ("device", f"{environment['device']}, float32, one thread a process; {environment['platform']}"),
        (
            "versions",
            ", ".join(f"{k} {v}" for k, v in environment["versions"].items()) + f", Python {environment['python']}",
        ),
    ]


def describe_run(name: str, seed: int, folder: Path) -> tuple[str, str]:
    """What a run came to, and by what its weights are known."""
    committed = RunDirectory(folder).latest_valid_step()
    assert committed is not None  # it was evaluated
    weights = committed.manifest.files["model.safetensors"].sha256
    lines = [line for line in load_metrics(folder) if "seconds" in line]
    skipped = sum("nonfinite" in line for line in lines)
    spent = sum(line["seconds"] for line in lines)
    text = f"{committed.step} steps in {spent:.0f} s, {skipped} left out"
    return (
        f"{name}, seed {seed}",
        f"{text}; recipe {committed.manifest.fingerprints['recipe'][:12]}…, weights {weights[:12]}…",
    )


def get_recipe_value(recipe: Recipe, key: str) -> Any:
    """A recipe's value by its dotted key."""
    found: Any = recipe
    for part in key.split("."):
        found = getattr(found, part, None)
    return found
