"""A task with a few lines of code runs through the runner and the results store that all tasks share."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.cli.commands.train import TrainCommand
from laconic.config.recipe import Recipe
from laconic.errors import InputError
from laconic.evaluation.results_store import EvalItem, EvalJob, EvalKind
from laconic.evaluation.suite import (
    EvalReport,
    EvalRequest,
    EvalSuite,
    Results,
    describe_evaluation,
    evaluate_runs,
    load_results,
)
from laconic.evaluation.tables import Column, build_table
from laconic.experiment.load_run import LoadedRun
from laconic.training.signals import StopSignal

COLUMNS = (
    Column("run", lambda result: result.run, is_text=True),
    Column("items", lambda result: str(len(result.items_by_seed[0]))),
)


class NormSuite:
    """Evaluates the norm of each weight."""

    kinds: Sequence[EvalKind] = ("streams",)
    users = "all runs"
    options: Collection[str] = ()

    def accepts(self, recipes: object, tasks: object) -> bool:
        return True

    def check(self, request: EvalRequest, recipes: Mapping[Path, Recipe]) -> None:
        assert all(recipe.method == "kava" for recipe in recipes.values())

    def describe(self, recipe: Recipe) -> dict[str, Any]:
        return {"method": recipe.method}

    def build_jobs(self, request: EvalRequest, run: LoadedRun, task: str) -> Iterator[EvalJob]:
        weights = [(name, p.detach()) for name, p in run.parts.decoder.named_parameters()][: request.limit]
        metadata = describe_evaluation(run, "streams", task, limit=request.limit, variant={"norm": "2"})

        def evaluate(indices: Sequence[int]) -> list[list[EvalItem]]:
            some = [weights[i] for i in indices]
            return [[EvalItem(name, {"trained": {"norm": float(p.norm())}, "zero": {"norm": 0.0}})] for name, p in some]

        yield EvalJob(metadata, len(weights), evaluate, 2, summarize=lambda items: {"n": len(items)}, notes=("a note",))

    def report(self, request: EvalRequest, results: Results) -> EvalReport:
        return EvalReport([build_table(COLUMNS, results["streams"])], {"runs": len(results["streams"])})

    def build_sections(self, results: Results, paths: Sequence[str]) -> list[Any]:
        return []


@pytest.mark.medium
def test_evaluate_runs_and_load_results(tmp_path: Path, tiny_recipe: Path) -> None:
    assert (
        TrainCommand(str(tiny_recipe), ("train.steps=1",), out=tmp_path / "kava", num_seeds=2, device="cpu").run() == 0
    )
    suite: EvalSuite = NormSuite()
    request = EvalRequest([str(tmp_path / "kava")], ["norms"], torch.device("cpu"), StopSignal(), limit=5)
    results = evaluate_runs(suite, request)
    (result,) = results["streams"]
    assert (result.run, result.task, result.seeds, result.steps) == ("kava", "norms", (0, 1), (1, 1))
    assert (result.conditions, len(result.pooled_items), result.figures) == (["trained", "zero"], 10, [{"n": 5}] * 2)
    assert (result.info, result.variant, result.notes) == ({"method": "kava"}, {"norm": "2"}, ("a note",))
    folder = tmp_path / "kava/seed-0/evaluations/streams-norms-2-step-1-limit-5"
    assert {path.name for path in folder.iterdir()} >= {"records.jsonl", "result.json", "recipe.toml"}
    (stored,) = load_results(suite, request.runs)["streams"]
    assert stored.notes == result.notes
    assert stored.items_by_seed == result.items_by_seed == evaluate_runs(suite, request)["streams"][0].items_by_seed
    report = suite.report(request, results)
    assert report.blocks[0].rows == [["kava", "5"]]  # pyright: ignore
    evaluate_runs(suite, EvalRequest([str(tmp_path / "kava/seed-1")], ["norms"], request.device, request.stop, limit=6))
    with pytest.raises(InputError, match="kava: seeds have results on different items of norms"):
        load_results(suite, request.runs)
