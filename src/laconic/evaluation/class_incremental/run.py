"""Class-incremental evaluation of a model: build the streams, run every method on them, and summarise."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
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
from laconic.evaluation.class_incremental.protocol import (
    ClassIncrementalLearner,
    LogFunction,
    StreamResult,
    run_joint,
    run_stream,
)
from laconic.evaluation.class_incremental.tasks import ClassIncrementalStream
from laconic.evaluation.results_store import EvalMetadata, EvalRecord
from laconic.evaluation.streams.evaluate import CacheAsState
from laconic.interfaces import StatefulLM
from laconic.models.decoder import Decoder
from laconic.nested.hope.model import Hope

METHODS = ("learner", "frozen", "icl", "ncm", "ncm-shared", "finetune", "ewc", "replay", "joint")
NUM_ORDERS = 5


@dataclass(frozen=True)
class ClassIncrementalPlan:
    """Methods to run on class orders; each pair is a unit of work, numbered order by order.

    Attributes:
        learner: Model.
        methods: Names of the methods.
        streams: A stream for each class order.
        config: Settings of the fine-tuned methods.
        description: What the summary says about the data.
    """

    learner: StatefulLM
    methods: Sequence[str]
    streams: Sequence[ClassIncrementalStream]
    config: FinetuneConfig
    description: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.methods) * len(self.streams)

    def run_units(
        self, units: Sequence[int], metadata: EvalMetadata, log: LogFunction | None = None
    ) -> list[list[EvalRecord]]:
        """Run some units; each gives one record with its accuracy matrices and notes."""
        return [[self.run_unit(unit, metadata, log)] for unit in units]

    def run_unit(self, unit: int, metadata: EvalMetadata, log: LogFunction | None) -> EvalRecord:
        """Run one method on one order."""
        order, method = divmod(unit, len(self.methods))
        name = self.methods[method]
        result = run_method(name, self.learner, self.streams[order], self.config, log)
        metrics = {"order": result.seed, "matrices": result.matrices, "notes": result.notes}
        return metadata.new_record(f"order-{result.seed}", name, metrics)

    def summarise(self, records: Sequence[EvalRecord]) -> dict[str, Any]:
        """Return the metrics and matrices of all units by method, as JSON values."""
        results: dict[str, list[StreamResult]] = {method: [] for method in self.methods}
        for record in records:
            values = record.metrics
            results[record.condition].append(StreamResult(values["order"], values["matrices"], values["notes"]))
        methods = {method: summarise_results(by_order) for method, by_order in results.items()}
        return {**self.description, "methods": methods}


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
    """Prepare the evaluation of a model on a data set.

    Args:
        model: Model; "learner" is only for models that learn while they read, "icl" only for those with attention.
        tokenizer: Its tokenizer.
        name: Data set.
        path: File of rows, or the folder that contains the data sets; None loads from the Hub.
        orders: Seeds of the class orders.
        max_test_per_class: Limit on test examples.
        max_train_per_class: Limit on training examples.
        methods: Names from `METHODS`; by default all that the model has.
        config: Settings of the fine-tuned methods.
        part: "valid" evaluates on validation rows, for choosing options.
        classes_per_task: Classes of a task; by default the data set's own number.

    Raises:
        UsageError: For an unknown method, or one that the model does not have.
        InputError: If the data set is missing or invalid.
    """
    learner: StatefulLM = model if isinstance(model, Hope) else CacheAsState(model)
    method_names, config = choose_methods(learner, methods), config or FinetuneConfig()
    intents = load_intents(name, path)
    streams = [
        build_stream(
            intents,
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
    description = {
        "set": name,
        "part": part,
        "orders": list(orders),
        "tasks": [len(classes) for classes in streams[0].task_classes],
        "test_examples": sum(map(len, streams[0].test)),
        "train_examples": sum(map(len, streams[0].train)),
        "dropped": intents.num_dropped,
        "finetuning": asdict(config),
    }
    return ClassIncrementalPlan(learner, method_names, streams, config, description)


def choose_methods(model: StatefulLM, methods: Sequence[str] | None) -> list[str]:
    """Return the given methods, or all that a model has. Raises `UsageError` for others."""
    unavailable: dict[str, str] = {}
    if isinstance(model, CacheAsState):
        unavailable["learner"] = "does not learn while it reads"
    elif has_no_attention(model.initial_state(1)):
        unavailable["icl"] = "has no attention to a context"
    for method in methods or ():
        if method not in METHODS:
            near = difflib.get_close_matches(method, METHODS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"available: {', '.join(METHODS)}"
            raise UsageError(f"unknown class-incremental method {method}; {hint}")
        if method in unavailable:
            raise UsageError(f"class-incremental method {method}: the model {unavailable[method]}; leave it out")
    return list(methods or (method for method in METHODS if method not in unavailable))


def run_method(
    method: str, model: StatefulLM, stream: ClassIncrementalStream, config: FinetuneConfig, log: LogFunction | None
) -> StreamResult:
    """Run one method on one order."""
    prefixed: Callable[[str], None] | None = None
    if log is not None:
        prefixed = lambda text: log(f"{stream.name}, {method}, {text}")  # noqa: E731
    if method == "joint":
        return run_joint(FinetunedLearner(model, stream, config), stream, prefixed)
    return run_stream(build_learner(method, model, stream, config), stream, prefixed)


def build_learner(
    method: str, model: StatefulLM, stream: ClassIncrementalStream, config: FinetuneConfig
) -> ClassIncrementalLearner:
    """Return a new learner for a method."""
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
    """Return the metrics and matrices by criterion, and the notes of every order."""
    criteria = {
        criterion: {
            "metrics": metrics_to_json(estimate_metrics([result.matrices[criterion] for result in results])),
            "matrices": [result.matrices[criterion] for result in results],
        }
        for criterion in results[0].matrices
    }
    return {"criteria": criteria, "notes": [result.notes for result in results]}
