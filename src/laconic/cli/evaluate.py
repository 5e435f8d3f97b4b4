"""`laconic evaluate`: runs asked the questions of data sets, judged by one protocol, beside what papers report."""

import json
import os
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from laconic.cli.arguments import parse_ints, split_commas, to_utf8
from laconic.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class EvaluateCommand:
    """Asks runs the questions of data sets and prints accuracy, its interval, passes and cache beside the floor.

    Answers are kept in RUN/evaluations; the same command goes on where it was stopped, and asks nothing twice.

    Example: laconic evaluate runs/kava --tasks gsm8k,gsm-hard,svamp,multiarith --protocol codi --data-dir ../shared/data
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN")]
    """what laconic train wrote: a run, or a folder of runs seed-0, seed-1, …, which give a mean with its spread"""
    tasks: str = "test"
    """sets, with commas between: names of laconic data list, names on the hub, files; NAME:SPLIT takes another split;
    test and valid are the recipe's own. Of runs that read documents: test, valid, and excerpt, whose tails are copied
    from what stands before them; files of context, question, answer, or of text, label. Of runs that learn while they
    read, and plain ones beside them: test, mqar, copying, languages, needle, ppl, books, levels (without each part in
    turn), clinc150, banking77 (these two are long: give --limit and --shots)"""
    protocol: Literal["codi", "codi-sampled", "pccot", "coconut", "decimal", "text"] | None = None
    """how answers are asked for and judged; by default the one of the recipe's format"""
    tolerance: str | None = None
    """protocol decimal: how far from the gold number an answer may be; by default 0.001"""
    data_dir: str | None = None
    """folder of the sets' files, as ../shared/data; by default the recipe's data.data_dir, else the hub"""
    limit: int | None = None
    """ask the first so many questions of each set; of texts the first so many stretches, of a class so many examples"""
    shots: int | None = None
    """of clinc150 and banking77, whose classes are learned one after another: learn so many examples of each class"""
    with_cot: bool = False
    """ask by written chain too, with the same weights"""
    jacobi_iterations: str | None = None
    """ask with so many rounds of thoughts too; several with commas between"""
    baseline: str | None = None
    """a run that the others are compared with, question by question"""
    checkpoint: str = "latest"
    """latest, best (by the run's own validation), or its number"""
    batch_size: int = 64
    """questions asked at once, by each rank"""
    latency: int = 0
    """time so many questions asked alone and greedily, and batches of 64, after others of the set that do not count"""
    query_aware: bool = False
    """of runs that read documents, on files of questions: the question stands before its context when that is read"""
    device: str | None = None
    """cpu, cuda, cuda:1, …; by default the first GPU, else the CPU"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """0 when every question is answered and kept."""
        self.validate()
        from laconic.cli.train import resolve_device
        from laconic.evaluation import tables
        from laconic.evaluation.compression.cli_runs import reads_documents
        from laconic.evaluation.reasoning import table
        from laconic.evaluation.reasoning.cli_runs import ReasoningRequest, run_evaluations
        from laconic.training.distributed import init_ranks
        from laconic.training.signals import handle_signals

        device = resolve_device(self.device)
        if self.evaluate_streams(device):
            return 0
        if reads_documents(tuple(map(to_utf8, self.runs))):
            return self.evaluate_documents(device)
        if self.query_aware:
            raise UsageError("--query-aware: of runs that read documents; these answer questions, leave it out")
        with handle_signals() as stop, init_ranks(None, device) as ranks:
            found = run_evaluations(
                ReasoningRequest(
                    runs=tuple(map(to_utf8, self.runs)),
                    baseline=None if self.baseline is None else to_utf8(self.baseline),
                    datasets=split_commas(to_utf8(self.tasks)),
                    protocol=self.protocol,
                    tolerance=parse_tolerance(self.tolerance, self.protocol),
                    root=self.data_dir,
                    limit=self.limit,
                    with_cot=self.with_cot,
                    iterations=parse_ints("--jacobi-iterations", self.jacobi_iterations),
                    checkpoint=self.checkpoint,
                    batch_size=self.batch_size,
                    num_timed=self.latency,
                    device=device,
                    ranks=ranks,
                    stop=stop,
                )
            )
            if ranks.rank == 0 and self.format == "json":
                print(json.dumps(table.table_to_json(found), ensure_ascii=False, allow_nan=False))
            elif ranks.rank == 0:
                tables.print_table(table.build_table(found))
                print(table.format_footnotes(found))
        return 0

    def evaluate_streams(self, device: "torch.device") -> bool:
        """The same of runs that learn while they read, if streams are asked for: `Usage` (2) for flags of questions."""
        from laconic.evaluation.runs import EvalRequest
        from laconic.evaluation.streams import cli_runs as streams_cli_runs
        from laconic.training.signals import handle_signals

        runs, sets = tuple(map(to_utf8, self.runs)), split_commas(to_utf8(self.tasks))
        if not streams_cli_runs.should_run_streams(runs, sets):
            return False
        self.refuse_question_flags("data_dir")
        with handle_signals() as stop:
            request = EvalRequest(runs, sets, self.limit, self.checkpoint, device, stop)
            streams_cli_runs.print_results(
                streams_cli_runs.run_evaluations(request, self.data_dir, self.shots), self.format == "json"
            )
        return True

    def refuse_question_flags(self, but: str | None = None) -> None:
        """Raises `Usage` (2) for flags that belong to questions."""
        flags = ("protocol", "tolerance", "data_dir", "with_cot", "jacobi_iterations", "baseline", "latency")
        if given := next((flag for flag in flags if flag != but and getattr(self, flag)), None):
            raise UsageError(
                f"--{given.replace('_', '-')}: of runs that answer questions; these read documents, leave it out"
            )

    def evaluate_documents(self, device: "torch.device") -> int:
        """The same of runs that read documents. Raises `Usage` (2) for flags that belong to questions."""
        from laconic.evaluation.compression import cli_runs as compression_cli_runs
        from laconic.evaluation.compression.cli_files import evaluate_files
        from laconic.evaluation.runs import EvalRequest
        from laconic.training.signals import handle_signals

        self.refuse_question_flags()
        with handle_signals() as stop:
            runs, sets = tuple(map(to_utf8, self.runs)), split_commas(to_utf8(self.tasks))
            request = EvalRequest(runs, sets, self.limit, self.checkpoint, device, stop)
            compression_cli_runs.print_results(
                compression_cli_runs.run_evaluations(request),
                evaluate_files(request, self.query_aware),
                self.format == "json",
            )
        return 0

    def validate(self) -> None:
        """Raises `Usage` (2) for flags that cannot be meant."""
        if not self.runs:
            raise UsageError("no run given; laconic evaluate RUN")
        least = {"limit": 1, "shots": 1, "batch_size": 1, "latency": 0}
        for name, value in ((name, getattr(self, name)) for name in least):
            if value is not None and value < least[name]:
                raise UsageError(f"--{name.replace('_', '-')} {value}: too few; give {least[name]} or more")
        if self.shots is not None and not set(split_commas(self.tasks)) & {"clinc150", "banking77"}:
            raise UsageError("--shots: of clinc150 and banking77, whose classes are learned in turn; leave it out")
        if self.latency and os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError("--latency: time is taken in one process; ask first with torchrun, then time without it")
        parse_ints("--jacobi-iterations", self.jacobi_iterations)
        parse_tolerance(self.tolerance, self.protocol)
        if not split_commas(self.tasks):
            raise UsageError("--tasks: no set given; name one, test say")


def parse_tolerance(text: str | None, protocol: str | None) -> Decimal | None:
    """A tolerance as it is written, with no rounding; of a protocol that has one."""
    if text is None:
        return None
    if protocol != "decimal":
        asked = f"protocol {protocol} has" if protocol else "the protocols of recipes have"
        raise UsageError(f"--tolerance {text}: {asked} no tolerance; give --protocol decimal, or leave it out")
    try:
        return Decimal(text)
    except InvalidOperation:
        raise UsageError(f"--tolerance {text}: write a number, as 0.001") from None
