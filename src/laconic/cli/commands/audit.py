"""`laconic audit`: whether the answers of a run use its latent thoughts, as one table and one sentence."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from laconic.cli.arguments import Device, OptionalProtocol, OptionalStr, OutputFormat, check_minimum
from laconic.cli.files import check_model
from laconic.cli.model_flags import import_with_status


@dataclass(frozen=True)
class AuditCommand:
    """Test whether the answers of a run use its latent thoughts: replace, remove or shorten them, question by question.

    The result is stored in RUN/evaluations, for an exported run in laconic's cache; re-run the same command to resume.

    Example: laconic audit runs/kava --control runs/pause --control runs/random
    """

    run_path: Annotated[Positional[str], arg(metavar="RUN", name="run")]
    """run of method codi, pccot, kava or coconut, directory of runs seed-0, seed-1, …, or exported run (folder or
    name on the hub)"""
    control: UseAppendAction[tuple[str, ...]] = ()
    """run to compare with on the same questions, for example one with pause tokens"""
    task: Annotated[str, arg(aliases=("--tasks",))] = "test"
    """questions: the recipe's test or valid, a data set of laconic data list, or a file"""
    limit: int = 200  # SmolLM2 with LoRA takes 2.5 s each on one core: 8 minutes
    """number of questions, from the first"""
    data_dir: OptionalStr = None
    """folder of the data sets' files (default: data.data_dir of the recipe, else the hub)"""
    protocol: OptionalProtocol = None
    """how answers are prompted and matched (default: the protocol of the recipe's data.format)"""
    checkpoint: str = "latest"
    """latest, best (by validation during training), or the step of a checkpoint"""
    batch_size: int = 64
    """questions per batch"""
    device: Device = "auto"
    format: OutputFormat = "human"

    def run(self) -> int:
        check_minimum(2, limit=self.limit)
        check_minimum(1, batch_size=self.batch_size)
        for run in (self.run_path, *self.control):
            check_model(run)
        import_with_status(f"loading {self.run_path}", "laconic.evaluation.inspection.audit_suite")
        from laconic.cli.commands.evaluate import print_report
        from laconic.cli.commands.train import select_device
        from laconic.evaluation.checkpoints import resolve_run
        from laconic.evaluation.inspection.audit_suite import AuditSuite
        from laconic.evaluation.suite import EvalRequest, evaluate_runs
        from laconic.training.signals import handle_signals

        suite = AuditSuite()
        runs = tuple(resolve_run(run) for run in (self.run_path, *self.control))
        with handle_signals() as stop:
            request = EvalRequest(
                runs,
                (self.task,),
                select_device(self.device),
                stop,
                limit=self.limit,
                checkpoint=self.checkpoint,
                batch_size=self.batch_size,
                data_dir=self.data_dir,
                protocol=self.protocol,
            )
            report = suite.report(request, evaluate_runs(suite, request))
        print_report(report, self.format)
        return 0
