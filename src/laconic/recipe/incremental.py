"""Class-incremental learning of a model on a set by name: streams, ways to learn them, and their figures."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from laconic.core.contract import Learner
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.nearest import closest
from laconic.core.tasks import Tasks
from laconic.data.intents import read_intents, tasks_of
from laconic.data.tokens import Tokenizer
from laconic.evaluation.approaches import Carried, Frozen, InContext, NearestMean
from laconic.evaluation.classes import Approach, Course, at_end, course
from laconic.evaluation.forgetting import estimates, plain
from laconic.evaluation.labels import blind
from laconic.evaluation.listening import Cached
from laconic.evaluation.tuned import Anchor, Reservoir, Tuned, Tuning
from laconic.methods.hope_model import Hope

METHODS = ("learner", "frozen", "icl", "ncm", "ncm-shared", "finetune", "ewc", "replay", "joint")
ORDERS = 5


def incremental(
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
    note: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Figures and matrices of every method over class orders, as JSON holds them.

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
    made: dict[str, Any] = {}
    for method in asked:
        courses = [run(method, learner, tasks, tuning, note) for tasks in streams]
        made[method] = reported(courses)
    return {
        "set": name,
        "part": part,
        "orders": list(orders),
        "tasks": [len(task) for task in streams[0].tasks],
        "test_examples": sum(map(len, streams[0].test)),
        "train_examples": sum(map(len, streams[0].train)),
        "left_out": found.left_out,
        "tuning": asdict(tuning),
        "methods": made,
    }


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
