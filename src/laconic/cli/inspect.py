"""`laconic inspect`: what a run thinks, beside the chain it was taught by, and whether its answers depend on it."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from laconic.cli.arguments import parse_ints, split_commas, to_utf8
from laconic.console import progress, status, write_file
from laconic.errors import InputError, LaconicError, UsageError
from laconic.evaluation.run_names import short_run_names

if TYPE_CHECKING:
    from laconic.data.reasoning.answer_matching import AnswerProtocol
    from laconic.evaluation.inspection.interventions import InterventionSpec
    from laconic.evaluation.reasoning.question_sets import QuestionSet
    from laconic.experiment.load_run import LoadedRun


@dataclass(frozen=True)
class InspectCommand:
    """Looks into the thoughts of a run: of one question, or over a set of them (--task); or into a file of a memory.

    Example: laconic inspect runs/kava "3 + 4 * 2 - 1 + 9 =" --baseline runs/nodistil
    """

    model: Annotated[Positional[str], arg(metavar="RUN")]
    """a run of laconic train whose method thinks: codi, pccot, kava, coconut; or a file of laconic compress"""
    question: Annotated[Positional[str | None], arg(metavar="QUESTION")] = None
    """what to think about"""
    chain: tuple[str, ...] = ()
    """steps of the chain to stand beside the thoughts; by default the run's own teacher writes it"""
    answer: str | None = None
    """the right answer, if you know it"""
    task: str | None = None
    """a set in place of a question: a name of laconic data list, a file, or test or valid of the run's own recipe"""
    data_dir: str | None = None
    """folder of the data sets' files, of those too that edits take other questions from; by default the recipe's, else
    the hub"""
    limit: int = 256
    """questions of the set, from the first"""
    baseline: UseAppendAction[tuple[str, ...]] = ()
    """another run to compare with, one without distillation say; may be given several times"""
    interventions: str = "zero,mean,shuffle,swap,noise"
    """how thoughts are changed, by commas"""
    intervene_on: str = "vectors,cache"
    """what is changed: the vectors that are read, or keys and values in the cache when the thoughts are done"""
    latents: str | None = None
    """which thoughts are changed, from 1, by commas; by default all"""
    jacobi_iterations: str | None = None
    """test-time rounds to try over a set, by commas; by default 0 to two more than trained, and as many as thoughts"""
    seed: int = 0
    """of shuffles, swaps and noise"""
    batch_size: int = 64
    """questions at once"""
    protocol: Literal["codi", "pccot", "coconut", "decimal", "text"] | None = None
    """how answers are asked for and judged; by default the protocol of the recipe's format"""
    out: Path | None = None
    """the page; by default inspect.html, and none with --format json"""
    device: str = "cpu"
    """cpu, cuda, cuda:1, …"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """0 when everything asked for is found and written."""
        if Path(self.model).is_file():
            return self.inspect_file()
        if not Path(self.model).exists():
            raise InputError(f"no {self.model}; give the folder of a run and a question, or the file of a memory")
        from laconic.evaluation.inspection import page as inspection_page
        from laconic.evaluation.inspection import summary as inspection_summary
        from laconic.experiment.load_run import load_run
        from laconic.models.weights import resolve_device

        self.validate()
        interventions, device = (
            parse_interventions(self.interventions, self.intervene_on, self.latents),
            resolve_device(self.device),
        )
        with status(f"loading {self.model}"):
            runs = [load_run(path, device) for path in (self.model, *self.baseline)]
        check_comparable(runs)
        found = (
            self.inspect_dataset(runs, interventions, device)
            if self.task
            else self.inspect_question(runs, interventions, device)
        )
        if self.format == "json":
            print(
                json.dumps(inspection_summary.summary_to_json(found), ensure_ascii=False, allow_nan=False), flush=True
            )
        else:
            print(inspection_summary.format_summary(found), flush=True)
        if self.page_path is not None:
            write_file(self.page_path, inspection_page.render_inspection_page(found))
        return 0

    def inspect_file(self) -> int:
        """What the file of a memory or state says of itself. Raises `Usage` (2) for what asks a run, `Damaged` (76)."""
        from laconic.cli import inspect_file as cli_inspect_file
        from laconic.cli import nested as cli_nested
        from laconic.nested.state_file import ARTIFACT_KIND
        from laconic.storage.atomic import read_artifact_kind

        if self.question is not None or self.task is not None or self.baseline:
            raise UsageError(
                f"{self.model} is a file, which answers no question; give the folder of a run, or the file alone"
            )
        is_state = read_artifact_kind(Path(self.model)) == ARTIFACT_KIND
        describe = cli_nested.describe_state_file if is_state else cli_inspect_file.describe_memory_file
        return describe(Path(self.model), self.format)

    @property
    def page_path(self) -> Path | None:
        """Where the page goes."""
        return self.out or (Path("inspect.html") if self.format == "human" else None)

    def validate(self) -> None:
        """Raises `Usage` (2) for what cannot be meant."""
        if (self.question is None) == (self.task is None):
            raise UsageError("give either a question or --task SET; laconic inspect RUN QUESTION")
        if self.task is not None and (self.chain or self.answer is not None):
            raise UsageError("--chain and --answer belong to a question; a set brings its own, leave them out")
        if self.question is not None and self.jacobi_iterations is not None:
            raise UsageError(
                f"--jacobi-iterations {self.jacobi_iterations}: rounds are tried over a set; give --task SET in place of a question"
            )
        if self.page_path is not None and (self.page_path.is_dir() or not self.page_path.parent.is_dir()):
            raise UsageError(
                f"--out {self.page_path}: a file in a folder that is there is asked for; make {self.page_path.parent}"
            )
        if self.limit < 2 or self.batch_size < 1:
            raise UsageError(
                f"--limit {self.limit} --batch-size {self.batch_size}: give two questions or more, one at once or more"
            )

    def build_subjects(self, runs: "Sequence[LoadedRun]", sets: "Sequence[QuestionSet]", device: Any) -> list[Any]:
        """The runs as inspection takes them; chains are kept and matched as the first one was taught."""
        from laconic.evaluation.inspection.inspected_run import load_inspected_run
        from laconic.evaluation.reasoning.run import decoding_for

        return [
            load_inspected_run(run, name, device, decoding_for(run, asked), runs[0].recipe)
            for run, name, asked in zip(runs, short_run_names([run.folder for run in runs]), sets, strict=True)
        ]

    def inspect_question(
        self, runs: "Sequence[LoadedRun]", interventions: "Sequence[InterventionSpec]", device: Any
    ) -> Any:
        """One question."""
        from laconic.evaluation.inspection import run as inspection_run
        from laconic.evaluation.inspection.question import inspect_question
        from laconic.evaluation.inspection.summary import QuestionSummary
        from laconic.evaluation.reasoning.question_sets import single_question
        from laconic.evaluation.reasoning.run import choose_protocol

        text, gold = to_utf8(str(self.question)), None if self.answer is None else to_utf8(self.answer)
        first, steps = runs[0], [to_utf8(step) for step in self.chain]
        protocol = choose_protocol(first.recipe, self.protocol)
        sets = [single_question(run, text, steps, gold, protocol) for run in runs]
        subjects = self.build_subjects(runs, sets, device)
        teaches = subjects[0].teacher_chain is not None and not steps
        asked = (
            inspection_run.with_teacher_chain(first, sets[0], device)
            if teaches
            else inspection_run.with_given_chain(first, sets[0])
        )
        others, why = None, list[str]()
        if {each.kind for each in interventions} & {"mean", "swap"}:
            others, why = reference_questions(first, protocol, self.data_dir)
        sides = [inspect_question(subject, asked.batch, interventions, others, seed=self.seed) for subject in subjects]
        notes = [*why, *describe_limits(runs, len(sides[0].lens.chain))]
        if subjects[0].teacher_chain is None:
            notes.append(f"Method {first.recipe.method} has no teacher, so there are no maps and no selection.")
        return QuestionSummary(
            text, asked.chain_source, sides[0].lens.chain, gold, asked.teacher_output, sides, protocol, notes, run_facts(runs)
        )  # fmt: skip

    def inspect_dataset(
        self, runs: "Sequence[LoadedRun]", interventions: "Sequence[InterventionSpec]", device: Any
    ) -> Any:
        """A set."""
        from laconic.data.reasoning.read_examples import most_common_answer
        from laconic.evaluation.inspection.dataset import MIN_REFERENCE_QUESTIONS, inspect_dataset
        from laconic.evaluation.inspection.summary import DatasetSummary
        from laconic.evaluation.reasoning.question_sets import load_question_set
        from laconic.evaluation.reasoning.run import choose_protocol

        name, protocol, most = (
            to_utf8(str(self.task)),
            choose_protocol(runs[0].recipe, self.protocol),
            max(self.limit, MIN_REFERENCE_QUESTIONS),
        )
        sets = [
            load_question_set(run, name, protocol, root=self.data_dir, limit=most, with_chains=True) for run in runs
        ]
        asked = [[example.id for example in each.examples] for each in sets]
        if any(ids != asked[0] for ids in asked):
            raise UsageError(
                "--baseline: the runs leave out different rows of the set (data.on_too_long); compare others"
            )
        surveys: list[Any] = []
        with progress("inspecting") as show:
            for run, subject, each in zip(runs, self.build_subjects(runs, sets, device), sets, strict=True):
                made = inspect_dataset(
                    subject, each.source, each.examples[: self.limit], protocol, interventions,
                    iterations=iteration_counts(self.jacobi_iterations, run), seed=self.seed, batch_size=self.batch_size, progress=show,
                )  # fmt: skip
                surveys.append(made)
        floor = most_common_answer(sets[0].examples[: self.limit])
        return DatasetSummary(
            sets[0].name, protocol, floor, surveys, [*sets[0].notes, *describe_limits(runs, None)], run_facts(runs)
        )


def parse_interventions(kinds: str, wheres: str, slots: str | None) -> "list[InterventionSpec]":
    """The edits asked for. Raises `Usage` (2) for a name that is none, or a slot that is no number."""
    from laconic.evaluation.inspection.interventions import INTERVENTION_KINDS, INTERVENTION_TARGETS, InterventionSpec

    for flag, text, known in (
        ("--interventions", kinds, INTERVENTION_KINDS),
        ("--intervene-on", wheres, INTERVENTION_TARGETS),
    ):
        odd = next((name for name in split_commas(text) if name not in known), None)
        if odd is not None:
            raise UsageError(f"{flag} {odd}: no such kind; there are {', '.join(known)}")
    at = None if slots is None else tuple(n - 1 for n in parse_ints("--latents", slots))
    wanted: list[Any] = []
    for kind in split_commas(kinds):
        wanted += [InterventionSpec(kind, where, at) for where in split_commas(wheres)]  # pyright: ignore
    return wanted


def iteration_counts(asked: str | None, run: "LoadedRun") -> Sequence[int]:
    """The test-time rounds to try; none for thoughts made one after the other."""
    thoughts = run.parts.latents
    if thoughts is None or thoughts.num_iterations is None:
        return []
    if asked is not None:
        return parse_ints("--jacobi-iterations", asked)
    return sorted({*range(thoughts.num_iterations + 3), thoughts.num_latents})


def check_comparable(runs: "Sequence[LoadedRun]") -> None:
    """Raises `Usage` (2) for runs whose rows are made of other words or in another form: they cannot be compared."""
    first = runs[0]
    for run in runs[1:]:
        if run.parts.tokenizer.fingerprint != first.parts.tokenizer.fingerprint:
            raise UsageError(f"--baseline {run.folder}: its tokenizer is another one; compare runs of the same words")
        ours, theirs = first.recipe.data, run.recipe.data
        odd = next((key for key in ("kind", "format", "chain") if getattr(ours, key) != getattr(theirs, key)), None)
        if odd:
            raise UsageError(
                f"--baseline {run.folder}: data.{odd} is {getattr(theirs, odd)}, of {first.folder} {getattr(ours, odd)}; "
                "compare runs of the same rows"
            )


def reference_questions(run: "LoadedRun", protocol: "AnswerProtocol", root: str | None) -> tuple[Any, list[str]]:
    """Other questions of the run's own recipe, and what is left out where there are none."""
    from laconic.evaluation.inspection.dataset import MIN_REFERENCE_QUESTIONS
    from laconic.evaluation.reasoning.question_sets import load_question_set

    try:
        source = load_question_set(run, "valid", protocol, root=root, limit=MIN_REFERENCE_QUESTIONS).source
    except LaconicError as error:
        return None, [f"mean and swap are left out, they need other questions of the recipe: {error}"]
    if len(source) >= MIN_REFERENCE_QUESTIONS:
        return source, []
    return source, [
        f"mean is left out: the recipe has {len(source)} validation rows, it asks for {MIN_REFERENCE_QUESTIONS}."
    ]


def describe_limits(runs: "Sequence[LoadedRun]", chain: int | None) -> list[str]:
    """What the figures leave open."""
    found = [
        "That a word can be read in a thought, or that a map has a diagonal, does not show that the answer is made of "
        "it. The edits show whether the answer depends on the thoughts, not on what in them."
    ]
    if len(runs) == 1:
        found.append("No run without distillation stands beside it (--baseline): what is seen may be so without any.")
    M = runs[0].recipe.latents.num_latents if runs[0].recipe.latents else 0
    if chain is not None and 0 < chain <= M:
        found.append(f"{M} thoughts stand for {chain} chain tokens, so nothing is chosen.")
    return found


def run_facts(runs: "Sequence[LoadedRun]") -> list[tuple[str, str]]:
    """Which runs these are, and the command."""
    return [
        *((str(run.folder), f"method {run.recipe.method}, step {run.step}, seed {run.recipe.seed}") for run in runs),
        ("command", shlex.join(["laconic", *sys.argv[1:]])),
    ]
