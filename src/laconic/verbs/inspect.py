"""`laconic inspect`: what a run thinks, beside the chain it was taught by, and whether its answers depend on it."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from laconic.console import note, progress, write
from laconic.core.errors import BadInput, LaconicError, Usage
from laconic.verbs.arguments import names, numbers, utf8, words

if TYPE_CHECKING:
    from laconic.evaluation.edits import Intervention
    from laconic.evaluation.protocols import Protocol
    from laconic.recipe.opened import Opened
    from laconic.recipe.questions import QuestionSet


@dataclass(frozen=True)
class Inspect:
    """Looks into the thoughts of a run: of one question, or over a set of them (--on); or into a file of a memory.

    Example: laconic inspect runs/kava "3 + 4 * 2 - 1 + 9 =" --beside runs/nodistil
    """

    model: Annotated[Positional[str], arg(metavar="RUN")]
    """a run of laconic train whose method thinks: codi, pccot, kava, coconut; or a file of laconic compress"""
    question: Annotated[Positional[str | None], arg(metavar="QUESTION")] = None
    """what to think about"""
    chain: tuple[str, ...] = ()
    """steps of the chain to stand beside the thoughts; by default the run's own teacher writes it"""
    answer: str | None = None
    """the right answer, if you know it"""
    on: str | None = None
    """a set in place of a question: a name of laconic data list, a file, or test or valid of the run's own recipe"""
    root: str | None = None
    """folder of the data sets' files, of those too that edits take other questions from; by default the recipe's, else
    the hub"""
    rows: int = 256
    """questions of the set, from the first"""
    beside: UseAppendAction[tuple[str, ...]] = ()
    """another run to compare with, one without distillation say; may be given several times"""
    edits: str = "zero,mean,shuffle,swap,noise"
    """how thoughts are changed, by commas"""
    where: str = "vectors,cache"
    """what is changed: the vectors that are read, or keys and values in the cache when the thoughts are done"""
    slots: str | None = None
    """which thoughts are changed, from 1, by commas; by default all"""
    rounds: str | None = None
    """test-time rounds to try over a set, by commas; by default 0 to two more than trained, and as many as thoughts"""
    seed: int = 0
    """of shuffles, swaps and noise"""
    batch: int = 64
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
            return self.memory()
        if not Path(self.model).exists():
            raise BadInput(f"no {self.model}; give the folder of a run and a question, or the file of a memory")
        from laconic.core.weights import place_of
        from laconic.evaluation import findings, inspected
        from laconic.recipe.opened import opened

        self.check()
        interventions, device = planned(self.edits, self.where, self.slots), place_of(self.device)
        with note(f"loading {self.model}"):
            runs = [opened(path, device) for path in (self.model, *self.beside)]
        same_rows(runs)
        found = self.over(runs, interventions, device) if self.on else self.looked(runs, interventions, device)
        if self.format == "json":
            print(json.dumps(findings.plain(found), ensure_ascii=False, allow_nan=False), flush=True)
        else:
            print(findings.said(found), flush=True)
        if self.page is not None:
            write(self.page, inspected.page(found))
        return 0

    def memory(self) -> int:
        """What the file of a memory or state says of itself. Raises `Usage` (2) for what asks a run, `Damaged` (76)."""
        from laconic.core.artifact import kind_of
        from laconic.core.state_file import KIND
        from laconic.verbs import memories, states

        if self.question is not None or self.on is not None or self.beside:
            raise Usage(
                f"{self.model} is a file, which answers no question; give the folder of a run, or the file alone"
            )
        shown = states if kind_of(Path(self.model)) == KIND else memories
        return shown.described(Path(self.model), self.format)

    @property
    def page(self) -> Path | None:
        """Where the page goes."""
        return self.out or (Path("inspect.html") if self.format == "human" else None)

    def check(self) -> None:
        """Raises `Usage` (2) for what cannot be meant."""
        if (self.question is None) == (self.on is None):
            raise Usage("give either a question or --on SET; laconic inspect RUN QUESTION")
        if self.on is not None and (self.chain or self.answer is not None):
            raise Usage("--chain and --answer belong to a question; a set brings its own, leave them out")
        if self.question is not None and self.rounds is not None:
            raise Usage(f"--rounds {self.rounds}: rounds are tried over a set; give --on SET in place of a question")
        if self.page is not None and (self.page.is_dir() or not self.page.parent.is_dir()):
            raise Usage(f"--out {self.page}: a file in a folder that is there is asked for; make {self.page.parent}")
        if self.rows < 2 or self.batch < 1:
            raise Usage(f"--rows {self.rows} --batch {self.batch}: give two questions or more, one at once or more")

    def subjects(self, runs: "Sequence[Opened]", sets: "Sequence[QuestionSet]", device: Any) -> list[Any]:
        """The runs as inspection takes them; chains are kept and matched as the first one was taught."""
        from laconic.recipe.asking import writing_for
        from laconic.recipe.looking import subject

        return [
            subject(run, name, device, writing_for(run, asked), runs[0].recipe)
            for run, name, asked in zip(runs, names([run.folder for run in runs]), sets, strict=True)
        ]

    def looked(self, runs: "Sequence[Opened]", interventions: "Sequence[Intervention]", device: Any) -> Any:
        """One question."""
        from laconic.evaluation.findings import Question
        from laconic.evaluation.looked import look
        from laconic.recipe import looking
        from laconic.recipe.asking import chosen
        from laconic.recipe.questions import single

        text, gold = utf8(str(self.question)), None if self.answer is None else utf8(self.answer)
        first, steps = runs[0], [utf8(step) for step in self.chain]
        protocol = chosen(first.recipe, self.protocol)
        sets = [single(run, text, steps, gold, protocol) for run in runs]
        subjects = self.subjects(runs, sets, device)
        teaches = subjects[0].left is not None and not steps
        asked = looking.written(first, sets[0], device) if teaches else looking.given(first, sets[0])
        others, why = None, list[str]()
        if {each.kind for each in interventions} & {"mean", "swap"}:
            others, why = reference(first, protocol, self.root)
        sides = [look(subject, asked.batch, interventions, others, seed=self.seed) for subject in subjects]
        notes = [*why, *limits(runs, len(sides[0].words.chain))]
        if subjects[0].left is None:
            notes.append(f"Method {first.recipe.method} has no teacher, so there are no maps and no selection.")
        return Question(
            text, asked.source, sides[0].words.chain, gold, asked.teacher, sides, protocol, notes, facts(runs)
        )  # fmt: skip

    def over(self, runs: "Sequence[Opened]", interventions: "Sequence[Intervention]", device: Any) -> Any:
        """A set."""
        from laconic.data.examples import majority
        from laconic.evaluation.findings import Questions
        from laconic.evaluation.survey import REFERENCE, survey
        from laconic.recipe.asking import chosen
        from laconic.recipe.questions import question_set

        name, protocol, most = utf8(str(self.on)), chosen(runs[0].recipe, self.protocol), max(self.rows, REFERENCE)
        sets = [question_set(run, name, protocol, root=self.root, rows=most, chains=True) for run in runs]
        asked = [[example.id for example in each.examples] for each in sets]
        if any(ids != asked[0] for ids in asked):
            raise Usage("--beside: the runs leave out different rows of the set (data.too_long); compare others")
        surveys: list[Any] = []
        with progress("inspecting") as show:
            for run, subject, each in zip(runs, self.subjects(runs, sets, device), sets, strict=True):
                made = survey(
                    subject, each.source, each.examples[: self.rows], protocol, interventions,
                    rounds=swept(self.rounds, run), seed=self.seed, batch=self.batch, show=show,
                )  # fmt: skip
                surveys.append(made)
        floor = majority(sets[0].examples[: self.rows])
        return Questions(sets[0].name, protocol, floor, surveys, [*sets[0].notes, *limits(runs, None)], facts(runs))


def planned(kinds: str, wheres: str, slots: str | None) -> "list[Intervention]":
    """The edits asked for. Raises `Usage` (2) for a name that is none, or a slot that is no number."""
    from laconic.evaluation.edits import KINDS, WHERES, Intervention

    for flag, text, known in (("--edits", kinds, KINDS), ("--where", wheres, WHERES)):
        odd = next((name for name in words(text) if name not in known), None)
        if odd is not None:
            raise Usage(f"{flag} {odd}: no such kind; there are {', '.join(known)}")
    at = None if slots is None else tuple(n - 1 for n in numbers("--slots", slots))
    wanted: list[Any] = [Intervention(kind, where, at) for kind in words(kinds) for where in words(wheres)]  # pyright: ignore
    return wanted


def swept(asked: str | None, run: "Opened") -> Sequence[int]:
    """The test-time rounds to try; none for thoughts made one after the other."""
    thoughts = run.parts.thoughts
    if thoughts is None or thoughts.rounds is None:
        return []
    if asked is not None:
        return numbers("--rounds", asked)
    return sorted({*range(thoughts.rounds + 3), thoughts.count})


def same_rows(runs: "Sequence[Opened]") -> None:
    """Raises `Usage` (2) for runs whose rows are made of other words or in another form: they cannot be compared."""
    first = runs[0]
    for run in runs[1:]:
        if run.parts.tokenizer.fingerprint != first.parts.tokenizer.fingerprint:
            raise Usage(f"--beside {run.folder}: its tokenizer is another one; compare runs of the same words")
        ours, theirs = first.recipe.data, run.recipe.data
        odd = next((key for key in ("kind", "format", "chain") if getattr(ours, key) != getattr(theirs, key)), None)
        if odd:
            raise Usage(
                f"--beside {run.folder}: data.{odd} is {getattr(theirs, odd)}, of {first.folder} {getattr(ours, odd)}; "
                "compare runs of the same rows"
            )


def reference(run: "Opened", protocol: "Protocol", root: str | None) -> tuple[Any, list[str]]:
    """Other questions of the run's own recipe, and what is left out where there are none."""
    from laconic.evaluation.survey import REFERENCE
    from laconic.recipe.questions import question_set

    try:
        source = question_set(run, "valid", protocol, root=root, rows=REFERENCE).source
    except LaconicError as error:
        return None, [f"mean and swap are left out, they need other questions of the recipe: {error}"]
    if len(source) >= REFERENCE:
        return source, []
    return source, [f"mean is left out: the recipe has {len(source)} validation rows, it asks for {REFERENCE}."]


def limits(runs: "Sequence[Opened]", chain: int | None) -> list[str]:
    """What the figures leave open."""
    found = [
        "That a word can be read in a thought, or that a map has a diagonal, does not show that the answer is made of "
        "it. The edits show whether the answer depends on the thoughts, not on what in them."
    ]
    if len(runs) == 1:
        found.append("No run without distillation stands beside it (--beside): what is seen may be so without any.")
    M = runs[0].recipe.thinking.count if runs[0].recipe.thinking else 0
    if chain is not None and 0 < chain <= M:
        found.append(f"{M} thoughts stand for {chain} chain tokens, so nothing is chosen.")
    return found


def facts(runs: "Sequence[Opened]") -> list[tuple[str, str]]:
    """Which runs these are, and the command."""
    return [
        *((str(run.folder), f"method {run.recipe.method}, step {run.step}, seed {run.recipe.seed}") for run in runs),
        ("command", shlex.join(["laconic", *sys.argv[1:]])),
    ]
