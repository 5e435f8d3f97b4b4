"""The commands that repeat the stored evaluations of a run, for its model card."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from laconic.config.recipe import Recipe
from laconic.data.reasoning.catalog import find_dataset
from laconic.evaluation.class_incremental.intent_data import FILE_PREFIX, INTENT_DATASETS
from laconic.evaluation.compression.run import EXCERPT
from laconic.evaluation.reasoning.question_sets import RECIPE_SPLITS, set_title
from laconic.evaluation.reasoning.run import COT_CONDITION
from laconic.evaluation.results_store import EVALUATIONS_FOLDER, EvalKind, EvalMetadata, latest_evaluations
from laconic.evaluation.runs import seed_runs
from laconic.experiment.from_recipe.build_data import choose_default_protocol


def list_evaluation_commands(run: str | Path, recipe: Recipe, target: str) -> list[str]:
    """Return the commands that repeat a run's stored evaluations on `target`; tasks of the same options share one.

    Files of rows and documents are not in a run; only their names are given. For a run without results, the command
    evaluates it on what its recipe holds out.
    """
    conditions = dict[tuple[bool, str, str], dict[str, list[str]]]()  # by command, task and options: flags and values
    evaluations = seed_runs(run)[0] / EVALUATIONS_FOLDER
    stored = [x.metadata for kind in get_args(EvalKind) for x in latest_evaluations(evaluations, kind).values()]
    for metadata in stored:
        key = metadata.kind == "audit", name_task(metadata, recipe), describe_options(metadata, recipe)
        flags = conditions.setdefault(key, {})
        for flag, value in parse_condition(metadata.variant.get("condition", "")):
            flags.setdefault(flag, []).append(value)
    audits, tasks = list[str](), dict[str, list[str]]()  # tasks by options
    for (is_audit, task, options), flags in conditions.items():
        options = "".join(f" {flag} {','.join(x)}".rstrip() for flag, x in sorted(flags.items())) + options
        if is_audit:
            audits.append(f"laconic audit {target} --task {shlex.quote(task)}{options}")
        else:
            tasks.setdefault(options, []).append(task)
    commands = [
        f"laconic evaluate {target} --tasks {shlex.quote(','.join(x))}{options}" for options, x in tasks.items()
    ]
    return [*commands, *audits] or [f"laconic evaluate {target}{task}" for task in list_held_out(recipe)]


def list_held_out(recipe: Recipe) -> list[str]:
    """Return the flag that evaluates a run on what its recipe holds out; nothing if it holds out no rows."""
    data = recipe.data
    if data.source not in ("file", "catalog") or data.test is not None:
        return [""]
    return [] if data.valid is None else [" --tasks valid"]


def name_task(metadata: EvalMetadata, recipe: Recipe) -> str:
    """Return the name that `--tasks` takes for a stored evaluation."""
    task = metadata.task
    match metadata.kind:
        case "compression":
            return EXCERPT if EXCERPT in task else task.partition("-")[0]
        case "context_qa":
            return f"{task}.jsonl"
        case "class_incremental" if task not in INTENT_DATASETS:
            return f"{FILE_PREFIX}{task}.jsonl"
        case "streams":
            return task.partition("-bin-")[0]
        case "reasoning" | "audit":
            return name_question_set(task, recipe)
        case _:
            return task


def name_question_set(title: str, recipe: Recipe) -> str:
    """Return the recipe's split, the data set or the file whose title is that of a stored evaluation."""
    if recipe.data.source == "digits":
        return title
    for split in RECIPE_SPLITS:
        path = getattr(recipe.data, split)
        if path is not None and set_title(path) == title:
            return split
    return title if find_dataset(title) is not None else f"{title}.jsonl"


def describe_options(metadata: EvalMetadata, recipe: Recipe) -> str:
    """Return the flags of the protocol, and of how much was evaluated; for documents of a file also which."""
    variant, flags = metadata.variant, list[tuple[str, Any]]()
    if metadata.kind in ("reasoning", "audit"):
        name, _, tolerance = variant["protocol"].partition(", tolerance ")
        flags.append(("protocol", None if name == choose_default_protocol(recipe.data).name else name))
        flags.append(("tolerance", tolerance or None))
    flags += [(name, variant.get(name)) for name in ("keep", "tokens")]
    flags += [("limit", metadata.limit), ("shots", metadata.shots)]
    text = "".join(f" --{name} {value}" for name, value in flags if value is not None)
    return f"{text}  # with --documents or --questions: {variant['data']}" if "tokens" in variant else text


def parse_condition(name: str) -> Iterator[tuple[str, str]]:
    """Yield the flag of a condition of `EvalCondition.name`, and its value; nothing for a run as trained."""
    if name == COT_CONDITION:
        yield "--with-cot", ""
    elif name.endswith(" iterations"):
        yield "--jacobi-iterations", name.partition(" ")[0]
    elif name:
        yield "--jacobi-tolerance", name.rpartition(" ")[2]
