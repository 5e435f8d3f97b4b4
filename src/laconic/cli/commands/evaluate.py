"""`laconic evaluate`: evaluate runs on tasks, and compare them with baselines and the papers' results."""

import math
import os
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from laconic.cli.arguments import (
    Device,
    OptionalFloat,
    OptionalInt,
    OptionalQuantization,
    OptionalStr,
    OutputFormat,
    check_minimum,
    parse_ints,
    refuse_flags,
    split_commas,
)
from laconic.cli.files import check_file, check_model, print_json
from laconic.cli.model_flags import import_with_status
from laconic.errors import UsageError

if TYPE_CHECKING:
    from laconic.evaluation.suite import EvalReport


@dataclass(frozen=True)
class EvaluateCommand:
    """Evaluate runs and models on tasks: accuracy or loss with confidence intervals, cost, and comparisons.

    Results are stored in RUN/evaluations, for a model or exported run in laconic's cache; re-run the same command to
    resume. laconic tasks list shows the tasks.

    Example: laconic evaluate runs/kava --tasks gsm8k,svamp --protocol codi --data-dir ../shared/data
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN ...", help_behavior_hint="")]
    """run of laconic train, directory of runs seed-0, seed-1, …, which are averaged, exported run, or model (folder,
    .gguf, name)"""
    tasks: Annotated[str, arg(aliases=("--task",))] = "test"
    """comma-separated tasks; see laconic tasks list"""
    protocol: Annotated[
        Literal["codi", "codi-sampled", "pccot", "coconut", "icot", "decimal", "text"] | None,
        arg(metavar="{codi,codi-sampled,pccot,coconut,icot,decimal,text}", help_behavior_hint=""),
    ] = None
    """how answers are prompted and matched. codi, decimal: the last number; pccot: the whole answer; coconut, icot: the
    text after # or ####; text: the last line (default: the protocol of the recipe's data.format)"""
    tolerance: OptionalFloat = None
    """with --protocol decimal: largest difference from the correct number (default: 0.001)"""
    data_dir: OptionalStr = None
    """folder of the data sets' files (default: data.data_dir of the recipe, else the hub)"""
    limit: OptionalInt = None
    """evaluate only the first N questions or documents; for ppl, books and levels, the first N passages of each text,
    and for sets with classes, N examples of each class"""
    shots: OptionalInt = None
    """models: solved examples before each question; clinc150, banking77, dbpedia14, classes:FILE: training examples
    per class"""
    shots_from: OptionalStr = None
    """models: data set or file of the solved examples (default: the training split of the task)"""
    prompt: Annotated[Literal["chat", "plain"] | None, arg(metavar="{chat,plain}", help_behavior_hint="")] = None
    """models: ask with the chat template, or with plain text (default: chat if there is a template)"""
    with_cot: bool = False
    """also answer with a generated chain of thought, with the same weights"""
    jacobi_iterations: OptionalStr = None
    """also answer with these numbers of Jacobi iterations, comma-separated"""
    jacobi_tolerance: OptionalStr = None
    """also answer with as many iterations as a question needs: end them when the latents' relative change, the
    residual, is below these numbers, comma-separated"""
    baseline: OptionalStr = None
    """run to compare the others with, question by question"""
    checkpoint: str = "latest"
    """latest, best (by validation during training), or the step of a checkpoint"""
    batch_size: OptionalInt = None
    """runs that answer questions: questions per batch, in each process (default: 64)"""
    latency: OptionalInt = None
    """measure latency on this many questions, one at a time"""
    documents: OptionalStr = None
    """memories, loss: file of texts; rows with the same book form one text (default: the contexts of --questions)"""
    questions: OptionalStr = None
    """memories: JSONL with document (name of a book) or context (a text), question, answer, and optionally
    answer_prefix"""
    methods: OptionalStr = None
    """memories: scores that choose keys and values, comma-separated; kvzip-equal is kvzip with equal heads
    (default: all)"""
    keep: OptionalStr = None
    """memories: shares of the tokens to keep, comma-separated (default: 0.125)"""
    tokens: OptionalInt = None
    """memories, loss: length to which documents are cut (default: 1024, or as many as fit the model's context)"""
    fit: OptionalInt = None
    """memories: also train a cartridge, from the selection by kvzip, for this many steps; slow"""
    quantize: OptionalQuantization = None
    """models: int8 evaluates with weights rounded to 8 bits; --baseline MODEL compares with the unrounded ones"""
    device: Device = "auto"
    format: OutputFormat = "human"

    def run(self) -> int:
        self.validate()
        iterations = parse_ints("--jacobi-iterations", self.jacobi_iterations)
        residuals = parse_positive("--jacobi-tolerance", self.jacobi_tolerance)
        shares = parse_positive("--keep", self.keep, 1.0)
        import_with_status(f"loading {self.runs[0]}", "laconic.evaluation.suites")
        from laconic.cli.commands.train import select_device
        from laconic.evaluation.suite import EvalRequest, evaluate_runs
        from laconic.evaluation.suites import SUITES, choose_suite
        from laconic.training.distributed import init_ranks
        from laconic.training.signals import handle_signals

        device = select_device(self.device)
        tasks = split_commas(self.tasks)
        runs = tuple(self.resolve(run, self.quantize) for run in self.runs)
        suite = choose_suite(runs, tasks)
        for name in dict.fromkeys(name for other in SUITES for name in other.options if name not in suite.options):
            users = dict.fromkeys(other.users for other in SUITES if name in other.options)
            refuse_flags(self, (name,), f"only for {' and '.join(users)}")
        with handle_signals() as stop, init_ranks(None, device) as ranks:
            request = EvalRequest(
                runs,
                tasks,
                device,
                stop,
                ranks,
                limit=self.limit,
                checkpoint=self.checkpoint,
                batch_size=self.batch_size or 64,
                data_dir=self.data_dir,
                shots=self.shots,
                protocol=self.protocol,
                tolerance=None if self.tolerance is None else Decimal(str(self.tolerance)),
                with_cot=self.with_cot,
                jacobi_iterations=iterations,
                jacobi_tolerance=residuals,
                baseline=None if self.baseline is None else self.resolve(self.baseline),
                latency=self.latency or 0,
                documents=self.documents,
                questions=self.questions,
                methods=split_commas(self.methods or ""),
                keep=shares or (0.125,),
                tokens=self.tokens,
                fit=self.fit,
            )
            report = suite.report(request, evaluate_runs(suite, request))
            if ranks.rank == 0:
                print_report(report, self.format)
        return 0

    def validate(self) -> None:
        if not self.runs:
            raise UsageError("no run given; laconic evaluate RUN")
        counts = ("limit", "shots", "batch_size", "tokens", "fit")
        check_minimum(1, **{name: getattr(self, name) for name in counts})
        check_minimum(0, latency=self.latency)
        if not split_commas(self.tasks):
            raise UsageError("--tasks: empty; give at least one task")
        if self.latency and os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError("--latency: requires a single process; run it without torchrun")
        if self.protocol != "decimal":
            refuse_flags(self, ("tolerance",), "requires --protocol decimal")
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise UsageError(f"--tolerance {self.tolerance:g}: expected 0, or a number such as 0.001")
        from laconic.config.data import is_row_file

        for run in filter(None, (*self.runs, self.baseline)):
            check_model(run)
        for name in filter(None, (*split_commas(self.tasks), self.documents, self.questions)):
            if is_row_file(name) and ":" not in name:
                check_file(Path(name), "a file, or a task that laconic tasks list shows")

    def resolve(self, run: str, quantize: Literal["int8"] | None = None) -> str:
        """Return a run as it is given; for a model or an exported run on the hub, the folder of its results."""
        from laconic.evaluation.checkpoints import find_hub_model, prepare_checkpoint
        from laconic.evaluation.class_incremental.intent_data import INTENT_DATASETS, is_class_task

        model, export = find_hub_model(run)
        if model is not None:
            style = self.prompt or ("plain" if "memories" in split_commas(self.tasks) else None)
            return str(prepare_checkpoint(model, run, style, self.shots or 0, self.shots_from, quantize))
        names = ("prompt", "shots_from", *(["quantize"] if quantize else []))
        refuse_flags(self, names, f"only for models, and {run} is a run")
        if self.shots is not None and not any(map(is_class_task, split_commas(self.tasks))):
            raise UsageError(f"--shots: only for models, {', '.join(INTENT_DATASETS)} and classes:FILE; remove --shots")
        return run if export is None else str(export)


def print_report(report: "EvalReport", format: OutputFormat) -> None:
    from laconic.evaluation.tables import Table, print_table

    if format == "json":
        print_json(report.data)
        return
    for block in report.blocks:
        if isinstance(block, Table):
            print_table(block)
        else:
            print(block)


def parse_positive(flag: str, text: str | None, maximum: float = 1e38) -> tuple[float, ...]:
    """Parse comma-separated numbers above 0; none for no text. Raises `UsageError` (2) for others, or larger ones."""
    try:
        values = () if text is None else tuple(sorted(set(map(float, split_commas(text)))))
    except ValueError:
        values = (math.nan,)
    if text is not None and not (values and all(0 < value <= maximum for value in values)):
        limit = " and at most 1" if maximum == 1 else ""
        raise UsageError(f"{flag} {text}: expected numbers above 0{limit}, for example 0.125,0.25")
    return values
