"""The commands that repeat the stored evaluations of a run, for its model card."""

import shlex
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
from laconic.storage.run_dir import RunDirectory


def list_evaluation_commands(run: str | Path, recipe: Recipe, target: str, step: int | None = None) -> list[str]:
    """Return the commands that repeat a run's stored evaluations on `target`, by default of any step.

    Files of rows and documents are not in a run; only their names are given. For a run without results, the command
    evaluates it on what its recipe holds out.
    """
    folder = seed_runs(run)[0]
    commands: list[str] = []
    checkpoint = "" if step in (None, *RunDirectory(folder).step_numbers()[-1:]) else f" --checkpoint {step}"
    stored = (latest_evaluations(folder / EVALUATIONS_FOLDER, kind, step).values() for kind in get_args(EvalKind))
    for metadata in (evaluation.metadata for evaluations in stored for evaluation in evaluations):
        command = f"audit {target} --task" if metadata.kind == "audit" else f"evaluate {target} --tasks"
        task = shlex.quote(name_task(metadata, recipe))
        commands.append(f"laconic {command} {task}{checkpoint}{describe_options(metadata, recipe)}")
    held_out = [f"laconic evaluate {target}{task}{checkpoint}" for task in list_held_out(recipe)]
    return list(dict.fromkeys(commands)) or held_out


def list_held_out(recipe: Recipe) -> list[str]:
    """Return the flag that evaluates a run on what its recipe holds out; nothing if it holds out no rows."""
    data = recipe.data
    if data.source not in ("file", "catalog") or data.test is not None:
        return [""]
    return [] if data.valid is None else [" --tasks valid"]


def name_task(metadata: EvalMetadata, recipe: Recipe) -> str:
    """Return the name that `--tasks` takes for a stored evaluation."""
    task = metadata.task
    suffix = metadata.suffix or ".jsonl"
    match metadata.kind:
        case "compression":
            return EXCERPT if EXCERPT in task else task.partition("-")[0]
        case "context_qa":
            return f"{task}{suffix}"
        case "class_incremental" if task not in INTENT_DATASETS:
            return f"{FILE_PREFIX}{task}{suffix}"
        case "streams":
            return task.partition("-bin-")[0]
        case "reasoning" | "audit":
            return name_question_set(task, recipe, suffix)
        case _:
            return task


def name_question_set(title: str, recipe: Recipe, suffix: str) -> str:
    """Return the recipe's split, the data set or the file whose title is that of a stored evaluation."""
    if recipe.data.source == "digits":
        return title
    for split in RECIPE_SPLITS:
        path = getattr(recipe.data, split)
        if path is not None and set_title(path) == title:
            return split
    return title if find_dataset(title) is not None else f"{title}{suffix}"


def describe_options(metadata: EvalMetadata, recipe: Recipe) -> str:
    """Return the flags of condition and protocol, and of how much was evaluated; for documents of a file also which."""
    variant = metadata.variant
    flags: list[tuple[str, Any]] = []
    condition = variant.get("condition", "")
    if condition.endswith(" iterations"):
        flags.append(("jacobi-iterations", condition.partition(" ")[0]))
    elif condition and condition != COT_CONDITION:
        flags.append(("jacobi-tolerance", condition.rpartition(" ")[2]))
    if metadata.kind in ("reasoning", "audit"):
        name, _, tolerance = variant["protocol"].partition(", tolerance ")
        flags.append(("protocol", None if name == choose_default_protocol(recipe.data).name else name))
        flags.append(("tolerance", tolerance or None))
    flags += [(name, variant.get(name)) for name in ("keep", "tokens")]
    flags += [("limit", metadata.limit), ("shots", metadata.shots)]
    text = " --with-cot" if condition == COT_CONDITION else ""
    text += "".join(f" --{name} {value}" for name, value in flags if value is not None)
    return f"{text}  # with --documents or --questions: {variant['data']}" if "tokens" in variant else text
