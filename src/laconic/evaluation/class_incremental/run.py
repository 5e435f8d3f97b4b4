"""Class-incremental evaluation of a model: build the streams, run every method on them, and summarise."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from laconic.console import log_message
from laconic.data.tokenizer import Tokenizer
from laconic.evaluation.class_incremental import intent_data
from laconic.evaluation.class_incremental.finetune_baselines import (
    EWCPenalty,
    FinetuneConfig,
    FinetunedLearner,
    ReplayReservoir,
)
from laconic.evaluation.class_incremental.learners import InContextLearner, NearestClassMean, StatefulLearner
from laconic.evaluation.class_incremental.protocol import (
    METHODS,
    ClassIncrementalLearner,
    LogFunction,
    estimate_metrics,
    metrics_to_json,
    run_stream,
)
from laconic.evaluation.class_incremental.tasks import ClassIncrementalStream
from laconic.evaluation.results_store import EvalItem, EvalJob
from laconic.evaluation.streams.evaluate import as_stateful
from laconic.evaluation.suite import EvalRequest, describe_evaluation
from laconic.experiment.from_recipe.untrained_levels import parse_level_options
from laconic.experiment.load_run import LoadedRun
from laconic.interfaces import StatefulLM
from laconic.models.decoder import Decoder
from laconic.nested.hope.model import Hope, HopeAttention

NUM_ORDERS = 5
RATE_TIMES_WIDTH = 0.064  # learning rate of fine-tuning × hidden_size; 1e-3 and 1e-4 are good for widths of 64 and 576
MAX_CONTEXT_TOKENS = 2048  # of in-context learning
LEVELS = {"inner_lr": 0.1, "chunk_sizes": [128], "max_update_ratio": 0}  # of a plain checkpoint


@dataclass(frozen=True)
class ClassIncrementalPlan:
    """Methods to run on class orders; each pair is a unit of work, numbered order by order.

    The levels of `learner` learn; the other methods begin with `model`. There is a stream for each class order;
    `description` is what the summary says about the data.
    """

    learner: StatefulLM
    model: StatefulLM
    methods: Sequence[str]
    streams: Sequence[ClassIncrementalStream]
    config: FinetuneConfig
    description: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.methods) * len(self.streams)

    def run_unit(self, unit: int, log: LogFunction | None = None) -> EvalItem:
        order, method = divmod(unit, len(self.methods))
        name, stream = self.methods[method], self.streams[order]
        prefixed = None if log is None else (lambda text: log(f"{stream.name}, {name}, {text}"))
        learner = build_learner(name, self.learner if name == "learner" else self.model, stream, self.config)
        matrix = run_stream(learner, stream, prefixed, is_joint=name == "joint")
        result = {"order": stream.seed, "matrix": matrix, "notes": getattr(learner, "notes", {})}
        return EvalItem(f"order-{stream.seed}", {name: result})

    def summarise(self, items: Sequence[EvalItem]) -> dict[str, Any]:
        methods: dict[str, Any] = {}
        for name in self.methods:
            orders = [item.conditions[name] for item in items]
            matrices, notes = [order["matrix"] for order in orders], [order["notes"] for order in orders]
            metrics = metrics_to_json(estimate_metrics(matrices))
            methods[name] = {"metrics": metrics, "matrices": matrices, "notes": notes}
        return {**self.description, "methods": methods}


def build_class_job(request: EvalRequest, run: LoadedRun, task: str) -> EvalJob:
    data_dir = request.data_dir or run.recipe.data.data_dir
    parts, limit, shots = run.parts, request.limit, request.shots
    plan = plan_class_incremental(parts.decoder, parts.tokenizer, task, data_dir, limit, shots)
    stream = plan.streams[0]
    key = {"data": stream.fingerprint}
    suffix = Path(task).suffix if task.startswith(intent_data.FILE_PREFIX) else ""
    options: dict[str, Any] = {"limit": limit, "shots": shots, "key": key, "suffix": suffix}
    metadata = describe_evaluation(run, "class_incremental", stream.name, **options)

    def evaluate(units: Sequence[int]) -> list[list[EvalItem]]:
        return [[plan.run_unit(i, lambda text: log_message(f"{metadata.run}: {text}"))] for i in units]

    return EvalJob(metadata, len(plan), evaluate, summarize=plan.summarise)


def plan_class_incremental(
    model: Decoder,
    tokenizer: Tokenizer,
    task: str,
    path: str | Path | None,
    max_test_per_class: int | None = None,
    max_train_per_class: int | None = None,
    orders: Sequence[int] = range(NUM_ORDERS),
) -> ClassIncrementalPlan:
    """Prepare the evaluation of a model on a data set, whose files are in `path`, or on `classes:FILE`.

    Texts beyond the model's positions are left out.
    """
    learner = model if isinstance(model, Hope) else add_levels(model)
    file = intent_data.find_class_file(task)
    name = task if file is None else file.stem
    context = model.config.max_position_embeddings
    drop = partial(intent_data.drop_long_texts, tokenizer=tokenizer, max_tokens=context, name=name)
    intents = intent_data.load_intents(task, path, drop)
    config = FinetuneConfig(learning_rate=RATE_TIMES_WIDTH / model.config.hidden_size)
    streams = [
        intent_data.build_stream(
            intents,
            tokenizer,
            seed,
            name=name,
            classes_per_task=intent_data.INTENT_DATASETS[task].classes_per_task if file is None else None,
            max_test_per_class=max_test_per_class,
            max_train_per_class=max_train_per_class,
        )
        for seed in orders
    ]
    description = {
        "set": name,
        "part": "test",
        "orders": list(orders),
        "tasks": [len(classes) for classes in streams[0].task_classes],
        "test_examples": sum(map(len, streams[0].test)),
        "train_examples": sum(map(len, streams[0].train)),
        "dropped": intents.num_dropped,
        "finetuning": {**asdict(config), "loss_on": "label"},
    }
    methods = available_methods(learner)
    return ClassIncrementalPlan(learner, as_stateful(model), methods, streams, config, description)


def add_levels(decoder: Decoder) -> Hope:
    """Return a plain decoder whose MLPs learn, each as a level of its own."""
    levels = parse_level_options(LEVELS)
    return HopeAttention.from_decoder(decoder, levels.chunk_sizes, options=levels.options)


def available_methods(learner: Hope) -> list[str]:
    """Return the methods that a model has: without attention, all but those that read a context or adapt attention."""
    missing = ("icl", "lora") if learner.initial_state(1).attention_cache is None else ()
    return [method for method in METHODS if method not in missing]


def build_learner(
    method: str, model: StatefulLM, stream: ClassIncrementalStream, config: FinetuneConfig
) -> ClassIncrementalLearner:
    match method:
        case "learner":
            return StatefulLearner(model, stream)
        case "icl":
            return InContextLearner(model, stream, min(model.config.max_position_embeddings, MAX_CONTEXT_TOKENS))
        case "ncm" | "ncm-shared":
            return NearestClassMean(model, stream, shared_covariance=method == "ncm-shared")
        case "lora":
            return FinetunedLearner(model, stream, config, use_lora=True)
        case "ewc":
            return FinetunedLearner(model, stream, config, ewc=EWCPenalty())
        case "replay":
            return FinetunedLearner(model, stream, config, replay=ReplayReservoir(config.replay_per_class, stream.seed))
        case "frozen":
            return InContextLearner(model, stream, max_positions=0)
        case _:  # finetune, joint
            return FinetunedLearner(model, stream, config)
