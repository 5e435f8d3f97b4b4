"""`laconic evaluate`: runs asked the questions of data sets, judged by one protocol, beside what papers report."""

import json
import os
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from laconic.core.errors import Usage
from laconic.verbs.arguments import numbers, utf8, words

if TYPE_CHECKING:
    import torch

    from laconic.evaluation.table import Table


@dataclass(frozen=True)
class Evaluate:
    """Asks runs the questions of data sets and prints accuracy, its interval, passes and cache beside the floor.

    Answers are kept in RUN/evaluations; the same command goes on where it was stopped, and asks nothing twice.

    Example: laconic evaluate runs/kava --on gsm8k,gsm-hard,svamp,multiarith --protocol codi --root ../shared/data
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN")]
    """what laconic train wrote: a run, or a folder of runs seed-0, seed-1, …, which give a mean with its spread"""
    on: str = "test"
    """sets, with commas between: names of laconic data list, names on the hub, files; NAME:SPLIT takes another split;
    test and valid are the recipe's own. Of runs that read documents: test, valid, and excerpt, whose tails are copied
    from what stands before them; files of context, question, answer, or of text, label. Of runs that learn while they
    read, and plain ones beside them: test, mqar, copying, languages, needle, ppl, books, levels (without each part in
    turn), clinc150, banking77 (these two are long: give --rows and --examples)"""
    protocol: Literal["codi", "codi-sampled", "pccot", "coconut", "decimal", "text"] | None = None
    """how answers are asked for and judged; by default the one of the recipe's format"""
    tol: str | None = None
    """protocol decimal: how far from the gold number an answer may be; by default 0.001"""
    root: str | None = None
    """folder of the sets' files, as ../shared/data; by default the recipe's data.root, else the hub"""
    rows: int | None = None
    """ask the first so many questions of each set; of texts the first so many stretches, of a class so many examples"""
    examples: int | None = None
    """of clinc150 and banking77, whose classes are learned one after another: learn so many examples of each class"""
    teacher: bool = False
    """ask by written chain too, with the same weights"""
    rounds: str | None = None
    """ask with so many rounds of thoughts too; several with commas between"""
    against: str | None = None
    """a run that the others are compared with, question by question"""
    step: str = "newest"
    """newest, best (by the run's own validation), or its number"""
    batch: int = 64
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
        self.check()
        from laconic.evaluation import table
        from laconic.training.distributed import joined
        from laconic.training.signals import heard
        from laconic.verbs.answers import Asking, gathered
        from laconic.verbs.reading import readers
        from laconic.verbs.train import placed

        device = placed(self.device)
        if self.streams(device):
            return 0
        if readers(tuple(map(utf8, self.runs))):
            return self.read(device)
        if self.query_aware:
            raise Usage("--query-aware: of runs that read documents; these answer questions, leave it out")
        with heard() as stop, joined(None, device) as ranks:
            found = gathered(
                Asking(
                    runs=tuple(map(utf8, self.runs)),
                    against=None if self.against is None else utf8(self.against),
                    sets=words(utf8(self.on)),
                    protocol=self.protocol,
                    tol=tolerance(self.tol, self.protocol),
                    root=self.root,
                    rows=self.rows,
                    teacher=self.teacher,
                    rounds=numbers("--rounds", self.rounds),
                    step=self.step,
                    batch=self.batch,
                    timed=self.latency,
                    device=device,
                    ranks=ranks,
                    stop=stop,
                )
            )
            if ranks.rank == 0 and self.format == "json":
                print(json.dumps(table.plain(found), ensure_ascii=False, allow_nan=False))
            elif ranks.rank == 0:
                printed(found)
        return 0

    def streams(self, device: "torch.device") -> bool:
        """The same of runs that learn while they read, if streams are asked for: `Usage` (2) for flags of questions."""
        from laconic.training.signals import heard
        from laconic.verbs import reading, streaming

        runs, sets = tuple(map(utf8, self.runs)), words(utf8(self.on))
        if not streaming.wanted(runs, sets):
            return False
        self.refuse("root")
        with heard() as stop:
            how = reading.Asking(runs, sets, self.rows, self.step, False, device, stop)
            streaming.told(streaming.gathered(how, self.root, self.examples), self.format == "json")
        return True

    def refuse(self, but: str | None = None) -> None:
        """Raises `Usage` (2) for flags that belong to questions."""
        flags = ("protocol", "tol", "root", "teacher", "rounds", "against", "latency")
        if given := next((flag for flag in flags if flag != but and getattr(self, flag)), None):
            raise Usage(f"--{given}: of runs that answer questions; these read documents, leave it out")

    def read(self, device: "torch.device") -> int:
        """The same of runs that read documents. Raises `Usage` (2) for flags that belong to questions."""
        from laconic.training.signals import heard
        from laconic.verbs import reading

        self.refuse()
        with heard() as stop:
            runs, sets = tuple(map(utf8, self.runs)), words(utf8(self.on))
            how = reading.Asking(runs, sets, self.rows, self.step, self.query_aware, device, stop)
            reading.told(reading.gathered(how), reading.told_of(how), self.format == "json")
        return 0

    def check(self) -> None:
        """Raises `Usage` (2) for flags that cannot be meant."""
        if not self.runs:
            raise Usage("no run given; laconic evaluate RUN")
        least = {"rows": 1, "examples": 1, "batch": 1, "latency": 0}
        for name, value in ((name, getattr(self, name)) for name in least):
            if value is not None and value < least[name]:
                raise Usage(f"--{name} {value}: too few; give {least[name]} or more")
        if self.examples is not None and not set(words(self.on)) & {"clinc150", "banking77"}:
            raise Usage("--examples: of clinc150 and banking77, whose classes are learned in turn; leave it out")
        if self.latency and os.environ.get("WORLD_SIZE", "1") != "1":
            raise Usage("--latency: time is taken in one process; ask first with torchrun, then time without it")
        numbers("--rounds", self.rounds)
        tolerance(self.tol, self.protocol)
        if not words(self.on):
            raise Usage("--on: no set given; name one, test say")


def tolerance(text: str | None, protocol: str | None) -> Decimal | None:
    """A tolerance as it is written, with no rounding; of a protocol that has one."""
    if text is None:
        return None
    if protocol != "decimal":
        asked = f"protocol {protocol} has" if protocol else "the protocols of recipes have"
        raise Usage(f"--tol {text}: {asked} no tolerance; give --protocol decimal, or leave it out")
    try:
        return Decimal(text)
    except InvalidOperation:
        raise Usage(f"--tol {text}: write a number, as 0.001") from None


def printed(found: "Table") -> None:
    """The table and what stands under it; no line is cut where nobody sees a terminal's width."""
    from rich.console import Console

    from laconic.evaluation import table

    wide = Console(highlight=False)
    (wide if wide.is_terminal else Console(highlight=False, width=240)).print(table.shown(found))
    print(table.footnotes(found))
