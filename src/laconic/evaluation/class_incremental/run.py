"""Class-incremental learning of a model on a set by name: streams, ways to learn them, and their figures."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError, UsageError
from laconic.evaluation import line_store as results_store
from laconic.evaluation.class_incremental.finetune_baselines import (
    EWCPenalty,
    FinetuneConfig,
    FinetunedLearner,
    ReplayReservoir,
)
from laconic.evaluation.class_incremental.intent_data import build_stream, load_intents
from laconic.evaluation.class_incremental.label_scoring import has_no_attention
from laconic.evaluation.class_incremental.learners import (
    FrozenModel,
    InContextLearner,
    NearestClassMean,
    StatefulLearner,
)
from laconic.evaluation.class_incremental.metrics import estimate_metrics, metrics_to_json
from laconic.evaluation.class_incremental.protocol import ClassIncrementalLearner, StreamResult, run_joint, run_stream
from laconic.evaluation.class_incremental.tasks import ClassIncrementalStream
from laconic.evaluation.streams.evaluate import CacheAsState
from laconic.interfaces import StatefulLM
from laconic.models.decoder import Decoder
from laconic.models.nearest import closest_word
from laconic.nested.hope.model import Hope
from laconic.storage.strict_json import to_canonical_json

METHODS = ("learner", "frozen", "icl", "ncm", "ncm-shared", "finetune", "ewc", "replay", "joint")
NUM_ORDERS = 5


@dataclass(frozen=True)
class ClassIncrementalPlan:
    """Methods of a model on class orders: a course each, order after order. `about` is what JSON holds beside them."""

    learner: StatefulLM
    methods: Sequence[str]
    streams: Sequence[ClassIncrementalStream]
    config: FinetuneConfig
    metadata: Mapping[str, Any]

    def __len__(self) -> int:
        """Courses."""
        return len(self.methods) * len(self.streams)

    def run_many(self, indices: Iterable[int], log: Callable[[str], None] | None = None) -> list[str]:
        """Some of the courses, each a line of JSON."""
        return [self.run_one(*divmod(i, len(self.methods)), log) for i in indices]

    def run_one(self, order: int, n: int, log: Callable[[str], None] | None) -> str:
        """The course of a method on an order."""
        made = run_method(self.methods[n], self.learner, self.streams[order], self.config, log)
        return to_canonical_json({"method": self.methods[n], **made._asdict()}) + "\n"

    def summarise(self, lines: Sequence[str]) -> dict[str, Any]:
        """Figures and whole matrices of all courses by method, as JSON holds them."""
        made: dict[str, list[StreamResult]] = {method: [] for method in self.methods}
        for line in lines:
            course = json.loads(line)
            made[course.pop("method")].append(StreamResult(**course))
        return {**self.metadata, "methods": {method: summarise_results(courses) for method, courses in made.items()}}


def plan_class_incremental(
    model: Decoder,
    tokenizer: Tokenizer,
    name: str,
    path: str | Path | None,
    *,
    orders: Sequence[int] = range(NUM_ORDERS),
    max_test_per_class: int | None = None,
    max_train_per_class: int | None = None,
    methods: Sequence[str] | None = None,
    config: FinetuneConfig | None = None,
    part: Literal["test", "valid"] = "test",
    classes_per_task: int | None = None,
) -> ClassIncrementalPlan:
    """A model on the set of a name.

    `where` is the folder of the sets or a file of rows; None, the hub. `rows` limits the test examples of a class,
    `examples` those that are learned, None leaves all; `task` is how many classes a task has, where not the set's own.
    `part` "valid" is for choosing options, and never looks at test. A model that does not learn while it reads has no
    "learner", one without attention no "icl". Raises `Usage` (2) for an unknown method, `BadInput` (66) for the set.
    """
    learner: StatefulLM = model if isinstance(model, Hope) else CacheAsState(model)
    asked, tuning = choose_methods(learner, methods), config or FinetuneConfig()
    found = load_intents(name, path)
    streams = [
        build_stream(
            found,
            tokenizer,
            seed,
            name=name,
            classes_per_task=classes_per_task,
            max_test_per_class=max_test_per_class,
            max_train_per_class=max_train_per_class,
            part=part,
        )
        for seed in orders
    ]
    about = {
        "set": name,
        "part": part,
        "orders": list(orders),
        "tasks": [len(each) for each in streams[0].task_classes],
        "test_examples": sum(map(len, streams[0].test)),
        "train_examples": sum(map(len, streams[0].train)),
        "left_out": found.num_dropped,
        "tuning": asdict(tuning),
    }
    return ClassIncrementalPlan(learner, asked, streams, tuning, about)


def choose_methods(model: StatefulLM, methods: Sequence[str] | None) -> list[str]:
    """The methods asked for, or all that a model has. Raises `Usage` (2) for another."""
    lacking = (
        {"learner"}
        if isinstance(model, CacheAsState)
        else {"icl"}
        if has_no_attention(model.initial_state(1))
        else set[str]()
    )
    have = [method for method in METHODS if method not in lacking]
    for method in methods or ():
        if method not in METHODS:
            near = closest_word(method, METHODS)
            meant = f"did you mean {near}?" if near else f"there are {', '.join(METHODS)}"
            raise UsageError(f"classes: no method {method}; {meant}")
        if method in lacking:
            why = "does not learn while it reads" if method == "learner" else "has no attention to a context"
            raise UsageError(f"classes: method {method} was asked for, the model {why}; leave it out")
    return list(methods or have)


def run_method(
    method: str,
    model: StatefulLM,
    stream: ClassIncrementalStream,
    config: FinetuneConfig,
    log: Callable[[str], None] | None,
) -> StreamResult:
    """One method on one order."""
    told = None if log is None else lambda text: log(f"{stream.name}, {method}, {text}")
    if method == "joint":
        mixed = FinetunedLearner(model, stream, config)
        return run_joint(mixed, stream, told)
    return run_stream(build_learner(method, model, stream, config), stream, told)


def build_learner(
    method: str, model: StatefulLM, stream: ClassIncrementalStream, config: FinetuneConfig
) -> ClassIncrementalLearner:
    """A way to learn, with nothing learned yet."""
    match method:
        case "learner":
            return StatefulLearner(model, stream, config.loss_on)
        case "icl":
            return InContextLearner(model, stream, model.config.max_position_embeddings)
        case "ncm" | "ncm-shared":
            return NearestClassMean(model, stream, shared_covariance=method == "ncm-shared")
        case "finetune":
            return FinetunedLearner(model, stream, config)
        case "ewc":
            return FinetunedLearner(model, stream, config, ewc=EWCPenalty())
        case "replay":
            return FinetunedLearner(model, stream, config, replay=ReplayReservoir(config.replay_per_class, stream.seed))
        case _:
            return FrozenModel(model, stream)


def summarise_results(results: Sequence[StreamResult]) -> dict[str, Any]:
    """Figures by way, whole matrices of every order, and what the method says of itself."""
    ways = {
        way: {
            "figures": metrics_to_json(estimate_metrics([one.matrices[way] for one in results])),
            "matrices": [one.matrices[way] for one in results],
        }
        for way in results[0].matrices
    }
    return {"ways": ways, "notes": [one.notes for one in results]}


def load_results(folder: Path) -> dict[str, Any]:
    """The figures of classes that are kept, method by method in our order. Raises `BadInput` (66) for another form."""
    found = json.loads(results_store.read_result(folder))
    if "methods" not in found:
        raise InputError(f"{folder}: classes kept in a form of before, without figures; remove it and evaluate again")
    return found | {"methods": {name: found["methods"][name] for name in METHODS if name in found["methods"]}}
