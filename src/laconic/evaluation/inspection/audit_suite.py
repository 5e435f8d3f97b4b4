"""Audits as a suite: evaluate a run and its controls, and print, store and report the results."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from laconic.config.recipe import DOCUMENT_METHODS, Recipe
from laconic.errors import UsageError
from laconic.evaluation.inspection.conditions import build_audit_job
from laconic.evaluation.inspection.verdict import ThoughtAudit, audit_to_json, build_audit_table, explain_columns
from laconic.evaluation.reasoning import table as reasoning_table
from laconic.evaluation.reasoning.question_sets import load_question_set
from laconic.evaluation.reasoning.run import build_question_job, choose_protocol
from laconic.evaluation.reasoning.suite import ReasoningSuite
from laconic.evaluation.report.page import PageSection
from laconic.evaluation.results_store import EvalJob, EvalKind
from laconic.evaluation.runs import describe_folder, seed_runs
from laconic.evaluation.suite import EvalReport, EvalRequest, Results
from laconic.evaluation.tables import format_percent
from laconic.experiment.load_run import LoadedRun

MAX_DETECTABLE_LOSS = 0.1  # a larger one gets a warning
STORED_CAVEAT = (  # of a stored audit, which has no controls
    "without the controls of laconic audit, with which the correction is over more tests and the verdict may differ"
)


class AuditSuite(ReasoningSuite):
    """The audit of the first run, with the others as controls; `laconic audit` uses it, no task of evaluate does."""

    kinds: Sequence[EvalKind] = ("audit", "reasoning")

    def accepts(self, recipes: Collection[Recipe], tasks: Collection[str]) -> bool:
        return False

    def check(self, request: EvalRequest, recipes: Mapping[Path, Recipe]) -> None:
        for folder, recipe in recipes.items():
            if recipe.method in DOCUMENT_METHODS:
                name = describe_folder(folder)
                raise UsageError(f"{name}: method {recipe.method} reads documents; give a run that answers questions")
        super().check(request, recipes)

    def build_jobs(self, request: EvalRequest, run: LoadedRun, task: str) -> Iterator[EvalJob]:
        """Yield the audit of a seed of the first run, or the answers of a control as `laconic evaluate` stores them."""
        protocol = choose_protocol(run.recipe, request.protocol, request.tolerance)
        questions = load_question_set(run, task, protocol, root=request.data_dir, limit=request.limit)
        build_job = build_audit_job if run.folder in seed_runs(request.runs[0]) else build_question_job
        yield build_job(run, questions, limit=request.limit, batch_size=request.batch_size)

    def report(self, request: EvalRequest, results: Results) -> EvalReport:
        result = results["audit"][0]
        controls = [reasoning_table.build_rows(control)[0] for control in results["reasoning"]]
        audit = ThoughtAudit(reasoning_table.build_rows(result)[0], controls)
        notes = [
            *dict.fromkeys(note for r in (result, *results["reasoning"]) for note in r.notes),
            *list_caveats(audit),
        ]
        data = {"schema": 1, "run": result.run, "task": result.task, **audit_to_json(audit), "notes": notes}
        blocks = [build_audit_table(audit), *explain_columns(audit), "", *notes, "", f"Verdict: {audit.verdict.text}"]
        return EvalReport(blocks, data)

    def build_sections(self, results: Results, paths: Sequence[str]) -> list[PageSection]:
        sections: list[PageSection] = []
        for result in results["audit"]:
            audit = ThoughtAudit(reasoning_table.build_rows(result)[0])
            notes = [*explain_columns(audit), *result.notes, *list_caveats(audit), STORED_CAVEAT]
            blocks = [f"Verdict: {audit.verdict.text}", build_audit_table(audit), notes]
            sections.append(PageSection(f"Audit of {result.run} on {result.task}", blocks))
        return sections


def list_caveats(audit: ThoughtAudit) -> list[str]:
    answer, share = audit.row.majority_baseline
    loss = format_percent(audit.detectable_loss)
    caveats = [
        f'always giving the most frequent answer, "{answer}", is correct in {format_percent(share)} %',
        f"if another question's thoughts cost {loss} points of accuracy or more, at least four of five audits of this "
        "size would show it",
    ]
    if audit.detectable_loss > MAX_DETECTABLE_LOSS:
        caveats.append(f"only losses above {loss} points are likely to show: raise --limit, or use a larger --task")
    if audit.row.accuracy.num_seeds == 1:
        caveats.append("one seed: the tests are about this run, not about other runs of its recipe")
    return caveats
