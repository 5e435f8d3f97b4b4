"""Compare the runs of `laconic demo`, from their directories."""

from collections.abc import Sequence
from pathlib import Path

import torch

from laconic.cli.commands.demo import DemoEntry
from laconic.cli.demo_run import CHAIN_ENTRY, EXTRA_ITERATIONS, FOCUS_ENTRY
from laconic.data.reasoning.answer_matching import DIGIT
from laconic.evaluation.reasoning.evaluate import Latency, measure_latencies
from laconic.evaluation.reasoning.question_sets import load_question_set
from laconic.evaluation.reasoning.run import EvalCondition, answer_function, decoding_for
from laconic.evaluation.reasoning.suite import ReasoningSuite
from laconic.evaluation.reasoning.table import build_rows
from laconic.evaluation.report.runs_table import ComparisonReport, MethodResult
from laconic.evaluation.suite import load_seed_results
from laconic.experiment.load_run import LoadedRun, load_run

NUM_TIMED_QUESTIONS = 50
CPU = torch.device("cpu")


def build_demo_report(entries: Sequence[DemoEntry], out: Path, seeds: Sequence[int]) -> ComparisonReport:
    torch.set_num_threads(1)
    folders = {entry.name: [out / entry.name / f"seed-{seed}" for seed in seeds] for entry in entries}
    runs = {name: load_run(seed_folders[0], CPU) for name, seed_folders in folders.items()}
    sets = [(run, load_question_set(run, "test", DIGIT)) for run in runs.values()]
    timed = [(answer_function(run, decoding_for(run, questions)), questions.source) for run, questions in sets]
    latencies = measure_latencies(timed, NUM_TIMED_QUESTIONS, len(timed[0][1]))
    focus = FOCUS_ENTRY if FOCUS_ENTRY in runs else entries[0].name
    results = [
        build_result(entry, runs[entry.name], folders[entry.name], latency)
        for entry, latency in zip(entries, latencies, strict=True)
    ]
    return ComparisonReport(results, focus, CHAIN_ENTRY, describe_caveats(runs[focus]))


def build_result(entry: DemoEntry, run: LoadedRun, folders: Sequence[Path], latency: Latency) -> MethodResult:
    stored = load_seed_results(ReasoningSuite(), "reasoning", folders, entry.name)
    rows = {row.condition: row for result in stored if result.task == "test" for row in build_rows(result, latency)}
    latents = run.recipe.latents
    T = latents.jacobi_iterations if latents else None
    sweep = {n: rows.get(EvalCondition(iterations=n).name) for n in range(T + EXTRA_ITERATIONS + 1 if T else 0)}
    return MethodResult(
        rows[""],
        entry.title,
        is_control=entry.is_control,
        iteration_sweep={
            n: row.correct.mean(1).tolist() for n, row in sweep.items() if row and len(row.seeds) == len(folders)
        },
    )


def describe_caveats(run: LoadedRun) -> list[str]:
    """List what the results do not show, with the recipes demo-kava and demo-teacher."""
    return [
        "Results of a model of this size on digits need not hold for language models on text.",
        "KaVa is told which tokens of the chain are results. The paper selects tokens by R-KV, which does not find the "
        "results of these equations (row R-KV selection).",
        f"Keys and values are matched in 1 of {run.parts.decoder.config.num_hidden_layers} layers; the paper matches "
        "all.",
        "The model that latent methods start from was also trained on chains that contain only results, which is what "
        "the latents have to learn.",
    ]
