"""Build the report of `laconic demo` from its run directories."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from laconic.cli.commands.demo import DemoEntry
from laconic.cli.demo_run import CHAIN_ENTRY, EXTRA_ITERATIONS, FOCUS_ENTRY
from laconic.config.recipe_keys import flatten
from laconic.data.reasoning.answer_matching import DIGIT
from laconic.evaluation.reasoning.evaluate import Latency, measure_latencies
from laconic.evaluation.reasoning.question_sets import load_question_set
from laconic.evaluation.reasoning.run import EvalCondition, answer_function, decoding_for
from laconic.evaluation.reasoning.suite import ReasoningSuite
from laconic.evaluation.reasoning.table import build_rows
from laconic.evaluation.report.runs_table import ComparisonReport, MethodResult
from laconic.evaluation.suite import load_seed_results
from laconic.experiment.from_recipe.build_data import load_held_out_rows
from laconic.experiment.load_run import LoadedRun, load_run

NUM_TIMED_QUESTIONS = 50
CPU = torch.device("cpu")


def build_demo_report(
    entries: Sequence[DemoEntry], out: Path, seeds: Sequence[int], seconds: float, command: str
) -> ComparisonReport:
    torch.set_num_threads(1)
    folders = {entry.name: [out / entry.name / f"seed-{seed}" for seed in seeds] for entry in entries}
    runs = {name: load_run(seed_folders[0], CPU) for name, seed_folders in folders.items()}
    sets = [(run, load_question_set(run, "test", DIGIT)) for run in runs.values()]
    timed = [(answer_function(run, decoding_for(run, questions)), questions.source) for run, questions in sets]
    latencies = measure_latencies(timed, NUM_TIMED_QUESTIONS, len(timed[0][1]))
    focus = FOCUS_ENTRY if FOCUS_ENTRY in runs else entries[0].name
    run = runs[focus]
    values = flatten(run.recipe.model_dump())
    return ComparisonReport(
        title="Latent thoughts: what can replace a chain of thought",
        lead=describe_task(run),
        results=[
            build_result(entry, runs[entry.name], folders[entry.name], latency)
            for entry, latency in zip(entries, latencies, strict=True)
        ],
        focus=focus,
        cot_baseline=CHAIN_ENTRY,
        caveats=describe_caveats(run, [entry.title for entry in entries]),
        recipe_differences=[(key, str(values.get(key)), why) for key, why in run.recipe.deviations.items()],
        facts=[("command", command), ("seeds", ", ".join(map(str, seeds))), *collect_run_facts(run, seconds)],
    )


def build_result(entry: DemoEntry, run: LoadedRun, folders: Sequence[Path], latency: Latency) -> MethodResult:
    stored = load_seed_results(ReasoningSuite(), "reasoning", folders, entry.name)
    rows = {row.condition: row for result in stored if result.task == "test" for row in build_rows(result, latency)}
    latents = run.recipe.latents
    M, T = (latents.num_latents, latents.jacobi_iterations) if latents else (0, 0)
    sweep = {n: rows.get(EvalCondition(iterations=n).name) for n in range(T + EXTRA_ITERATIONS + 1 if T else 0)}
    return MethodResult(
        rows[""],
        entry.title,
        entry.description.format(M=M, T=T),
        is_control=entry.is_control,
        learning_curves=[
            [(line["step"], line["validation"]["accuracy"]) for line in load_metrics(folder) if "validation" in line]
            for folder in folders
        ],
        iteration_sweep={
            n: row.correct.mean(1).tolist() for n, row in sweep.items() if row and len(row.seeds) == len(folders)
        },
    )


def load_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def describe_task(run: LoadedRun) -> str:
    config, task = run.parts.decoder.config, run.recipe.data.digits
    size = sum(p.numel() for p in run.parts.decoder.parameters())
    example = load_held_out_rows(run.recipe, run.parts.tokenizer, config.max_position_embeddings, "test", 1).examples[0]
    return (
        f"A Llama with {config.num_hidden_layers} layers and {size:,} parameters learns to apply {task.num_operations} "
        f"operations to digits from left to right, keeping the last digit of every result: {example.question} "
        f"{example.answer}, with the chain {' '.join(example.steps)}. Each row of the table is one method."
    )


def describe_caveats(run: LoadedRun, titles: Sequence[str]) -> list[str]:
    """List what results with these rows do not show, with the recipes demo-kava and demo-teacher."""
    row = " (row R-KV selection)" if "R-KV selection" in titles else ""
    return [
        "Results of a model of this size on digits need not hold for language models on text.",
        "KaVa is told which tokens of the chain are results. The paper selects tokens by R-KV, which does not find the "
        f"results of these equations{row}.",
        f"Keys and values are matched in 1 of {run.parts.decoder.config.num_hidden_layers} layers; the paper matches "
        "all.",
        "The model that latent methods start from was also trained on chains that contain only results, which is what "
        "the latents have to learn.",
    ]


def collect_run_facts(run: LoadedRun, seconds: float) -> list[tuple[str, str]]:
    environment = json.loads((run.folder / "env.json").read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    minutes, rest = divmod(round(seconds), 60)
    return [
        ("time of the last command", f"{minutes} min {rest} s, two processes at a time"),
        ("training data", f"{run.recipe.data.digits.train_rows:,} problems"),
        ("device", f"{environment['device']}, float32, one thread per process; {environment['platform']}"),
        ("versions", f"{versions}, Python {environment['python']}"),
    ]
