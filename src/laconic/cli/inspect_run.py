"""Inspect runs for `laconic inspect`, print the summary and write the page."""

from collections.abc import Sequence

from laconic.cli.arguments import command_line, parse_ints
from laconic.cli.commands.evaluate import print_report
from laconic.cli.commands.inspect import InspectCommand
from laconic.cli.files import write_file
from laconic.config.recipe import DOCUMENT_METHODS
from laconic.console import progress, status
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.errors import LaconicError, UsageError
from laconic.evaluation.inspection.conditions import NUM_REFERENCE_QUESTIONS
from laconic.evaluation.inspection.dataset import DatasetInspection, inspect_dataset
from laconic.evaluation.inspection.dataset_summary import (
    DatasetSummary,
    dataset_tables,
    dataset_to_json,
    describe_set,
    list_caveats,
)
from laconic.evaluation.inspection.inspected_run import InspectedRun
from laconic.evaluation.inspection.page import render_inspection_page
from laconic.evaluation.inspection.question import (
    NUM_MEAN_QUESTIONS,
    QuestionInspection,
    inspect_question,
    with_dataset_chain,
    with_teacher_chain,
)
from laconic.evaluation.inspection.question_summary import QuestionSummary, format_inspection, question_to_json
from laconic.evaluation.reasoning.question_sets import QuestionSet, load_question_set, single_question
from laconic.evaluation.reasoning.run import choose_protocol, decoding_for, find_latents
from laconic.evaluation.runs import short_run_names
from laconic.evaluation.suite import EvalReport
from laconic.experiment.load_run import LoadedRun, load_run, read_run_method
from laconic.interfaces import TrainingData
from laconic.models.checkpoints.weights import resolve_device

DEFAULT_QUESTIONS, DEFAULT_BATCH_SIZE = 256, 64


def inspect_runs(command: InspectCommand) -> int:
    device = resolve_device(command.device)
    for path in (command.model, *command.baseline):
        if (method := read_run_method(path)) in DOCUMENT_METHODS:
            raise UsageError(f"{path}: method {method} has no latent thoughts; give a run that answers questions")
    with status(f"loading {command.model}"):
        runs = [load_run(path, device) for path in (command.model, *command.baseline)]
    check_comparable(runs)
    summary = (inspect_task if command.task else inspect_one_question)(command, runs)
    if isinstance(summary, QuestionSummary):
        report = EvalReport([format_inspection(summary)], question_to_json(summary))
    else:
        tables = [block for _, table, note in dataset_tables(summary) for block in ("", table, note)]
        report = EvalReport([describe_set(summary), *tables, "", *list_caveats(summary)], dataset_to_json(summary))
    print_report(report, command.format)
    if command.page_path is not None:
        with status("drawing the page"):
            page = render_inspection_page(summary)
        write_file(command.page_path, page)
    return 0


def build_inspected_runs(runs: Sequence[LoadedRun], question_sets: Sequence[QuestionSet]) -> list[InspectedRun]:
    """Return the runs for inspection; chains are selected and matched as the first run was trained."""
    names = short_run_names([run.folder for run in runs])
    return [
        InspectedRun(run, name, decoding_for(run, questions), runs[0].recipe)
        for run, name, questions in zip(runs, names, question_sets, strict=True)
    ]


def inspect_one_question(command: InspectCommand, runs: Sequence[LoadedRun]) -> QuestionSummary:
    text, gold = str(command.question), command.answer
    first, steps = runs[0], list(command.chain)
    protocol = choose_protocol(first.recipe, command.protocol)
    question_sets = [single_question(run, text, steps, gold, protocol) for run in runs]
    inspected = build_inspected_runs(runs, question_sets)
    has_teacher = inspected[0].has_teacher
    with status("reading other questions of the recipe, and writing the teacher's chain"):
        others, note = reference_questions(first, protocol, command.data_dir)
        if has_teacher and not steps:
            question = with_teacher_chain(first, question_sets[0])
        else:
            question = with_dataset_chain(first, question_sets[0])
    inspections: list[QuestionInspection] = []
    for run in inspected:
        with progress(run.name) as show:
            inspections.append(inspect_question(run, question.batch, others, seed=command.seed, progress=show))
    notes = [note, *list_notes(runs, len(inspections[0].lens.chain))]
    if not has_teacher:
        notes.append(f"Method {first.recipe.method} has no teacher, so there are no maps and no selection.")
    source, output = question.chain_source, question.teacher_output
    return QuestionSummary(text, source, gold, output, inspections, protocol, notes, describe_runs(runs))


def inspect_task(command: InspectCommand, runs: Sequence[LoadedRun]) -> DatasetSummary:
    name, num_questions = str(command.task), command.limit or DEFAULT_QUESTIONS
    limit = max(num_questions, NUM_REFERENCE_QUESTIONS)
    protocol = choose_protocol(runs[0].recipe, command.protocol)
    question_sets = [
        load_question_set(run, name, protocol, root=command.data_dir, limit=limit, with_chains=True) for run in runs
    ]
    ids = [[example.id for example in questions.examples] for questions in question_sets]
    if any(other != ids[0] for other in ids):
        raise UsageError("--baseline: the runs drop different rows of the task (data.on_too_long)")
    inspections: list[DatasetInspection] = []
    inspected = build_inspected_runs(runs, question_sets)
    with progress("inspecting") as show:
        for run, inspected_run, questions in zip(runs, inspected, question_sets, strict=True):
            inspections.append(
                inspect_dataset(
                    inspected_run,
                    questions,
                    limit=num_questions,
                    iterations=iteration_counts(command.jacobi_iterations, run),
                    seed=command.seed,
                    batch_size=command.batch_size or DEFAULT_BATCH_SIZE,
                    progress=show,
                )
            )
    return DatasetSummary(inspections, [*question_sets[0].notes, *list_notes(runs, None)], describe_runs(runs))


def iteration_counts(text: str | None, run: LoadedRun) -> Sequence[int]:
    """Return the numbers of Jacobi iterations to try; none for sequential latents."""
    latents = find_latents(run)
    if latents is None or latents.num_iterations is None:
        return []
    if text is not None:
        return parse_ints("--jacobi-iterations", text)
    return sorted({*range(latents.num_iterations + 3), latents.num_latents})


def check_comparable(runs: Sequence[LoadedRun]) -> None:
    """Raise `UsageError` (2) for runs with different tokenizers or row formats."""
    first = runs[0]
    for run in runs[1:]:
        if run.parts.tokenizer.fingerprint != first.parts.tokenizer.fingerprint:
            raise UsageError(f"--baseline {run.folder}: has a different tokenizer than {first.folder}")
        ours, theirs = first.recipe.data, run.recipe.data
        for key in ("source", "format", "chain_steps"):
            if getattr(ours, key) != getattr(theirs, key):
                raise UsageError(f"--baseline {run.folder}: has another data.{key} than {first.folder}")


def reference_questions(run: LoadedRun, protocol: AnswerProtocol, root: str | None) -> tuple[TrainingData | None, str]:
    """Return other questions of the run's recipe for mean and swap, or None, and a note on what these rest on."""
    try:
        source = load_question_set(run, "valid", protocol, root=root, limit=NUM_MEAN_QUESTIONS).source
    except LaconicError as error:
        return None, f"mean and swap are left out, because they need other questions of the recipe: {error}"
    return source, f"mean is that of the first {len(source)} validation questions; --task takes more."


def list_notes(runs: Sequence[LoadedRun], num_chain_tokens: int | None) -> list[str]:
    caveats = [
        "A word that can be decoded from a latent, or a diagonal map, does not show that the answer uses it. The "
        "interventions show whether the answer depends on the latents, not on what is in them."
    ]
    if len(runs) == 1:
        caveats.append("There is no run without distillation to compare with (--baseline).")
    M = runs[0].recipe.num_latents
    if num_chain_tokens is not None and 0 < num_chain_tokens <= M:
        caveats.append(f"{M} latents cover {num_chain_tokens} chain tokens, so nothing is selected.")
    return caveats


def describe_runs(runs: Sequence[LoadedRun]) -> list[tuple[str, str]]:
    return [
        *((str(run.folder), f"method {run.recipe.method}, step {run.step}, seed {run.recipe.seed}") for run in runs),
        ("command", command_line()),
    ]
