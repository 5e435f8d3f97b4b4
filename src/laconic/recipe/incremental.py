"""Class-incremental learning of a model on a set by name: streams, ways to learn them, and their figures."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from laconic.core.artifact import canonical
from laconic.core.contract import Learner
from laconic.core.decoder import Decoder
from laconic.core.errors import BadInput, Usage
from laconic.core.nearest import closest
from laconic.core.tasks import Tasks
from laconic.data.intents import read_intents, tasks_of
from laconic.data.tokens import Tokenizer
from laconic.evaluation import kept
from laconic.evaluation.approaches import Carried, Frozen, InContext, NearestMean
from laconic.evaluation.classes import Approach, Course, at_end, course
from laconic.evaluation.forgetting import estimates, plain
from laconic.evaluation.labels import blind
from laconic.evaluation.listening import Cached
from laconic.evaluation.tuned import Anchor, Reservoir, Tuned, Tuning
from laconic.methods.hope_model import Hope

METHODS = ("learner", "frozen", "icl", "ncm", "ncm-shared", "finetune", "ewc", "replay", "joint")
ORDERS = 5


@dataclass(frozen=True)
class Plan:
    """Methods of a model on class orders: a course each, order after order. `about` is what JSON holds beside them."""

    learner: Learner
    methods: Sequence[str]
    streams: Sequence[Tasks]
    how: Tuning
    about: Mapping[str, Any]

    def __len__(self) -> int:
        """Courses."""
        return len(self.methods) * len(self.streams)

    def lines(self, places: Iterable[int], note: Callable[[str], None] | None = None) -> list[str]:
        """Some of the courses, each a line of JSON."""
        return [self.line(*divmod(i, len(self.methods)), note) for i in places]

    def line(self, order: int, n: int, note: Callable[[str], None] | None) -> str:
        """The course of a method on an order."""
        made = run(self.methods[n], self.learner, self.streams[order], self.how, note)
        return canonical({"method": self.methods[n], **made._asdict()}) + "\n"

    def found(self, lines: Sequence[str]) -> dict[str, Any]:
        """Figures and whole matrices of all courses by method, as JSON holds them."""
        made: dict[str, list[Course]] = {method: [] for method in self.methods}
        for line in lines:
            course = json.loads(line)
            made[course.pop("method")].append(Course(**course))
        return {**self.about, "methods": {method: reported(courses) for method, courses in made.items()}}


def planned(
    model: Decoder,
    tokenizer: Tokenizer,
    name: str,
    where: str | Path | None,
    *,
    orders: Sequence[int] = range(ORDERS),
    rows: int | None = None,
    examples: int | None = None,
    methods: Sequence[str] | None = None,
    how: Tuning | None = None,
    part: Literal["test", "valid"] = "test",
    task: int | None = None,
) -> Plan:
    """A model on the set of a name.

    `where` is the folder of the sets or a file of rows; None, the hub. `rows` limits the test examples of a class,
    `examples` those that are learned, None leaves all; `task` is how many classes a task has, where not the set's own.
    `part` "valid" is for choosing options, and never looks at test. A model that does not learn while it reads has no
    "learner", one without attention no "icl". Raises `Usage` (2) for an unknown method, `BadInput` (66) for the set.
    """
    learner: Learner = model if isinstance(model, Hope) else Cached(model)
    asked, tuning = chosen(learner, methods), how or Tuning()
    found = read_intents(name, where)
    streams = [
        tasks_of(found, tokenizer, seed, name=name, task=task, rows=rows, examples=examples, part=part)
        for seed in orders
    ]
    about = {
        "set": name,
        "part": part,
        "orders": list(orders),
        "tasks": [len(each) for each in streams[0].tasks],
        "test_examples": sum(map(len, streams[0].test)),
        "train_examples": sum(map(len, streams[0].train)),
        "left_out": found.left_out,
        "tuning": asdict(tuning),
    }
    return Plan(learner, asked, streams, tuning, about)


def chosen(model: Learner, methods: Sequence[str] | None) -> list[str]:
    """The methods asked for, or all that a model has. Raises `Usage` (2) for another."""
    lacking = {"learner"} if isinstance(model, Cached) else {"icl"} if blind(model.start(1)) else set[str]()
    have = [method for method in METHODS if method not in lacking]
    for method in methods or ():
        if method not in METHODS:
            near = closest(method, METHODS)
            meant = f"did you mean {near}?" if near else f"there are {', '.join(METHODS)}"
            raise Usage(f"classes: no method {method}; {meant}")
        if method in lacking:
            why = "does not learn while it reads" if method == "learner" else "has no attention to a context"
            raise Usage(f"classes: method {method} was asked for, the model {why}; leave it out")
    return list(methods or have)


def run(method: str, model: Learner, tasks: Tasks, how: Tuning, note: Callable[[str], None] | None) -> Course:
    """One method on one order."""
    told = None if note is None else lambda text: note(f"{tasks.name}, {method}, {text}")
    if method == "joint":
        mixed = Tuned(model, tasks, how)
        return at_end(mixed, tasks, told)
    return course(approach(method, model, tasks, how), tasks, told)


def approach(method: str, model: Learner, tasks: Tasks, how: Tuning) -> Approach:
    """A way to learn, with nothing learned yet."""
    match method:
        case "learner":
            return Carried(model, tasks, how.predicted)
        case "icl":
            return InContext(model, tasks, model.config.max_position_embeddings)
        case "ncm" | "ncm-shared":
            return NearestMean(model, tasks, shared=method == "ncm-shared")
        case "finetune":
            return Tuned(model, tasks, how)
        case "ewc":
            return Tuned(model, tasks, how, anchor=Anchor())
        case "replay":
            return Tuned(model, tasks, how, reservoir=Reservoir(how.kept, tasks.seed))
        case _:
            return Frozen(model, tasks)


def reported(courses: Sequence[Course]) -> dict[str, Any]:
    """Figures by way, whole matrices of every order, and what the method says of itself."""
    ways = {
        way: {
            "figures": plain(estimates([one.matrices[way] for one in courses])),
            "matrices": [one.matrices[way] for one in courses],
        }
        for way in courses[0].matrices
    }
    return {"ways": ways, "notes": [one.notes for one in courses]}


def figures(folder: Path) -> dict[str, Any]:
    """The figures of classes that are kept, method by method in our order. Raises `BadInput` (66) for another form."""
    found = json.loads(kept.result_of(folder))
    if "methods" not in found:
        raise BadInput(f"{folder}: classes kept in a form of before, without figures; remove it and evaluate again")
    return found | {"methods": {name: found["methods"][name] for name in METHODS if name in found["methods"]}}
