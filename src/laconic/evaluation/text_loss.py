"""The task `loss`: nats per token of a checkpoint on windows of text, compared with another checkpoint."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX
from laconic.config.data import TextConfig
from laconic.config.recipe import Recipe
from laconic.data.documents.load import read_documents
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError, UsageError
from laconic.evaluation.checkpoints import read_prompt
from laconic.evaluation.report.page import PageSection
from laconic.evaluation.results_store import EvalItem, EvalJob, EvalKind
from laconic.evaluation.statistics import Difference, Estimate, estimate_mean, paired_difference
from laconic.evaluation.suite import (
    CHARACTERS_PER_TOKEN,
    EvalReport,
    EvalRequest,
    Results,
    RunResult,
    describe_evaluation,
)
from laconic.evaluation.tables import Column, build_table, figures_to_json, format_percent
from laconic.experiment.load_run import LoadedRun
from laconic.losses import LogitsFn, score_rows_in_chunks
from laconic.storage.manifest import hash_json

TASK = "loss"
CONDITION = "text"


def score_grid(
    logits: LogitsFn, hidden_states: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return -log p(target) in nats, and whether it is the most likely id; 0 and False for `IGNORE_INDEX`."""
    scored = targets != IGNORE_INDEX
    nats, is_correct = score_rows_in_chunks(logits, hidden_states[scored], targets[scored])
    grid = nats.new_zeros(targets.shape).masked_scatter(scored, nats)
    return grid, torch.zeros_like(scored).masked_scatter(scored, is_correct)


class LossRow(NamedTuple):
    """The loss of a model on the windows of a file, and its difference from the baseline's."""

    run: str
    data: str
    nats: Estimate
    accuracy: float
    difference: Difference | None


COLUMNS = (
    Column("model", lambda row: row.run, is_text=True),
    Column("text", lambda row: row.data, is_text=True),
    Column("windows", lambda row: str(row.nats.num_items)),
    Column("nats per token", lambda row: f"{row.nats.mean:.4f}"),
    Column("correct %", lambda row: format_percent(row.accuracy)),
    Column("difference", lambda row: "" if row.difference is None else f"{row.difference.mean:+z.4f}"),
    Column("95 % interval", lambda row: "" if row.difference is None else format_loss_interval(row.difference)),
)


class TextLossSuite:
    """Loss of checkpoints on windows of text."""

    kinds: Sequence[EvalKind] = ("loss",)
    users = "the task loss"
    options: Collection[str] = ("documents", "tokens", "baseline")

    def accepts(self, recipes: Collection[Recipe], tasks: Collection[str]) -> bool:
        return TASK in tasks

    def check(self, request: EvalRequest, recipes: Mapping[Path, Recipe]) -> None:
        if len(request.tasks) > 1:
            raise UsageError(f"--tasks {','.join(request.tasks)}: evaluate {TASK} by itself")
        if request.documents is None:
            raise UsageError(f"--tasks {TASK}: pass --documents FILE")
        run = next((folder for folder in recipes if read_prompt(folder) is None), None)
        if run is not None:
            raise UsageError(f"{run} is a run; --tasks {TASK} is for models, such as what laconic export writes")

    def describe(self, recipe: Recipe) -> dict[str, Any]:
        return {}  # a checkpoint has no settings of training

    def build_jobs(self, request: EvalRequest, run: LoadedRun, task: str) -> Iterator[EvalJob]:
        decoder, file = run.parts.decoder, request.documents
        assert file is not None
        context = decoder.config.max_position_embeddings
        num_tokens = request.document_tokens(context)
        if num_tokens > context:
            raise UsageError(f"--tokens {num_tokens}: the model has {context:,} positions; lower it")
        excerpts = load_excerpts(run.parts.tokenizer, file, num_tokens, request.limit)
        variant = {"data": Path(file).stem, "tokens": f"{num_tokens}"}
        key = {"data": hash_json(excerpts)}
        metadata = describe_evaluation(run, "loss", TASK, limit=request.limit, variant=variant, key=key)
        names = list(excerpts)

        @torch.no_grad()
        def evaluate(indices: Sequence[int]) -> list[list[EvalItem]]:
            items: list[list[EvalItem]] = []
            for name in (names[i] for i in indices):
                ids = torch.tensor([excerpts[name]], device=decoder.device)
                hidden_states = decoder(decoder.embed(ids)).hidden_states[0, :-1]
                nll, is_correct = score_rows_in_chunks(decoder.logits, hidden_states, ids[0, 1:])
                metrics = {"nats": float(nll.mean()), "correct": float(is_correct.float().mean())}
                items.append([EvalItem(name, {CONDITION: metrics})])
            return items

        yield EvalJob(metadata, len(excerpts), evaluate, source=excerpts)

    def report(self, request: EvalRequest, results: Results) -> EvalReport:
        place = None if request.baseline is None else request.paths.index(request.baseline)
        baseline = None if place is None else results["loss"][place]
        rows = compare_losses(results["loss"], baseline)
        notes = [
            f"{result.run} is not compared with {baseline.run}: they have other windows, by tokenizer or context"
            for result in results["loss"]
            if baseline is not None and result.source != baseline.source
        ]
        data = {"schema": 1, "results": figures_to_json(rows), "notes": notes}
        return EvalReport([build_table(COLUMNS, rows), *notes], data)

    def build_sections(self, results: Results, paths: Sequence[str]) -> list[PageSection]:
        rows = compare_losses(results["loss"], None)
        return [PageSection("Loss", [build_table(COLUMNS[:5], rows)])] if rows else []


def load_excerpts(tokenizer: Tokenizer, file: str, num_tokens: int, limit: int | None) -> dict[str, list[int]]:
    """Return ids from the middle of sections by name; the first section of each text comes first, then the second."""
    documents = read_documents(file, TextConfig())[0]
    sections = [(i, j) for i, document in enumerate(documents) for j in range(len(document.sections))]
    excerpts: dict[str, list[int]] = {}
    for i, j in sorted(sections, key=lambda section: section[::-1]):
        text = documents[i].sections[j]
        ids = tokenizer.encode(text[len(text) // 2 :][: CHARACTERS_PER_TOKEN * num_tokens])[:num_tokens]
        if len(ids) == num_tokens:
            excerpts[f"{documents[i].name} {j + 1}"] = ids
        if len(excerpts) == limit:
            break
    if not excerpts:
        raise InputError(f"{file}: no text has {num_tokens} tokens after its middle; lower --tokens")
    return excerpts


def compare_losses(results: Sequence[RunResult], baseline: RunResult | None) -> list[LossRow]:
    rows: list[LossRow] = []
    for result in results:
        nats = result.scores(CONDITION, itemgetter("nats"))
        difference = None
        if baseline is not None and baseline is not result and baseline.source == result.source:
            difference = paired_difference(nats, baseline.scores(CONDITION, itemgetter("nats")))
        accuracy = float(result.scores(CONDITION, itemgetter("correct")).mean())
        rows.append(LossRow(result.run, result.variant["data"], estimate_mean(nats), accuracy, difference))
    return rows


def format_loss_interval(difference: Difference) -> str:
    return f"{difference.low:+z.4f} to {difference.high:+z.4f}"
