"""Evaluate a published checkpoint as a run that was never trained, with a chat or plain prompt and solved examples.

A checkpoint gets a folder for its results in laconic's cache, with a recipe that says how it is prompted. The rest of
the evaluation treats this folder as a run at step 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli_w
import torch

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig, is_row_file
from laconic.config.load import load_recipe
from laconic.data.reasoning.catalog import find_dataset
from laconic.data.reasoning.load import load_examples
from laconic.data.reasoning.read_examples import read_examples
from laconic.data.tokenizer import load_tokenizer
from laconic.errors import InputError, UsageError
from laconic.evaluation.runs import create_results_folder, prepare_export
from laconic.experiment.from_recipe.build_model import build_parts
from laconic.experiment.from_recipe.methods import build_method
from laconic.experiment.load_run import RECIPE_FILE, LoadedRun, find_run, is_export
from laconic.models.checkpoints.weights import find_checkpoint
from laconic.models.decoder import Decoder
from laconic.storage.cache_dir import cache_dir
from laconic.storage.strict_json import read_json, to_canonical_json

PromptStyle = Literal["chat", "plain"]
Quantization = Literal["int8"]
MARKER_FILE = "checkpoint.json"
NO_FILE = "no-training-rows.jsonl"  # a recipe names training rows; a checkpoint has none
QUESTION, ANSWER = "Question:", "Answer:"
STOP_STRINGS = (f"\n\n{QUESTION}", f"\n{QUESTION}")  # where a plain prompt's answer ends


class CheckpointPrompt(NamedTuple):
    """How a checkpoint is asked: by chat template or as plain text, after how many examples, with which weights."""

    style: PromptStyle
    shots: int = 0
    shots_from: str | None = None
    quantize: Quantization | None = None


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path or name is that of a model, and not of a run or a folder of runs."""
    folder = Path(path)
    return find_run(path) is None and (not folder.is_dir() or (folder / "config.json").is_file())


def find_hub_model(path_or_name: str) -> tuple[Path | None, Path | None]:
    """Return the folder of a model, and the results folder of an exported run on the hub; at most one is not None.

    For a run, a folder of runs or a local export, both are None.
    """
    if not is_checkpoint(path_or_name):
        return None, None
    folder = find_checkpoint(path_or_name)
    return (None, prepare_export(folder, path_or_name)) if is_export(folder) else (folder, None)


def resolve_run(path_or_name: str) -> str:
    """Return a run as it is given, and for an exported run on the hub the folder of its results."""
    model, export = find_hub_model(path_or_name)
    if model is not None:
        raise InputError(f"{path_or_name} is a model; give a run of laconic train, or one that laconic export wrote")
    return path_or_name if export is None else str(export)


def prepare_checkpoint(
    folder: Path,
    name: str,
    style: PromptStyle | None = None,
    shots: int = 0,
    shots_from: str | None = None,
    quantize: Quantization | None = None,
) -> Path:
    """Create the folder in which the results of a checkpoint are stored, as those of a run are.

    `name` is the checkpoint's in tables and messages. `style` says how it is asked, by default with its chat template
    if it has one. `shots` solved examples precede each question, from `shots_from`, by default the training split of
    the task's data set. With `quantize`, its weights are rounded.
    """
    tokenizer = load_tokenizer(folder)
    if style == "chat" and tokenizer.chat_template is None:
        raise InputError(f"--prompt chat: {name} has no chat template; use --prompt plain")
    prompt = CheckpointPrompt(style or ("chat" if tokenizer.chat_template else "plain"), shots, shots_from, quantize)
    fields = {field: value for field, value in prompt._asdict().items() if field != "quantize" or value}
    title = "-".join(filter(None, [Path(name).name, quantize, prompt.style, f"{shots}-shot"]))
    row_format = "chat" if prompt.style == "chat" else "codi"
    data = {"path": NO_FILE, "chain_steps": "all", "format": row_format, "on_too_long": "drop"}
    recipe = {"method": "cot", "model": {"name": str(folder.resolve())}, "data": data, "train": {"steps": 1}}
    files = {MARKER_FILE: to_canonical_json(fields | {"model": name}), RECIPE_FILE: tomli_w.dumps(recipe)}
    return create_results_folder([str(folder.resolve()), *fields.values()], [title], files)


def find_results(path_or_name: str) -> list[Path]:
    """Return the folders in which the results of a checkpoint are stored, in order of their names.

    A run is its own, and an exported run on the hub has one.
    """
    model, export = find_hub_model(path_or_name)
    if model is None:
        return [export or Path(path_or_name)]
    recipes = sorted((cache_dir() / "evaluations").glob(f"*/*/{RECIPE_FILE}"), key=lambda file: file.parent.name)
    checkpoints = [file for file in recipes if read_prompt(file.parent) is not None]
    folders = [file.parent for file in checkpoints if load_recipe(file)[0].model.name == str(model.resolve())]
    if not folders:
        raise InputError(f"{path_or_name}: no stored results; run laconic evaluate on it first")
    return folders


def read_prompt(folder: Path) -> CheckpointPrompt | None:
    """Return how the checkpoint of a results folder is asked; None for a run."""
    path = folder / MARKER_FILE
    if not path.is_file():
        return None
    marker: dict[str, Any] = read_json(path)
    return CheckpointPrompt(**{name: marker[name] for name in CheckpointPrompt._fields if name in marker})


def load_checkpoint_run(folder: Path, device: torch.device) -> LoadedRun:
    """Load the checkpoint of a results folder as a run at step 0, whose method writes out its answers."""
    recipe, _ = load_recipe(folder / RECIPE_FILE)
    prompt = read_prompt(folder)
    decoder = Decoder.from_pretrained(str(recipe.model.name), device=device, quantize=prompt and prompt.quantize)
    parts = build_parts(recipe, decoder, load_tokenizer(str(recipe.model.name)), decoder.fingerprint)
    return LoadedRun(folder, recipe, 0, parts, build_method(parts, recipe, 1).eval())


def load_shots(
    prompt: CheckpointPrompt, task: str, config: DataConfig, excluded: Sequence[ReasoningExample]
) -> list[ReasoningExample]:
    """Load the solved examples of a task, from `shots_from` or its training split: the first with a chain.

    If no example has a chain, the first of all. The questions of `excluded` examples, which are asked, are left out.
    """
    if not prompt.shots:
        return []
    name = task.rpartition(":")[0] or task
    source = prompt.shots_from or f"{name}:train"
    info = find_dataset(task)
    if prompt.shots_from is None and (is_row_file(task) or (info is not None and "train" not in info.splits)):
        raise UsageError(f"--shots {prompt.shots}: {task} has no training split; add --shots-from")
    read = read_examples(source, config) if is_row_file(source) else load_examples(source, "train", config)
    examples = read.examples
    questions = {example.question for example in excluded}
    others = [example for example in examples if example.question not in questions]
    solved = [example for example in others if example.steps] or others
    if len(solved) < prompt.shots:
        raise InputError(f"--shots {prompt.shots}: {source} has {len(solved)} examples that are not asked; lower it")
    return solved[: prompt.shots]


def format_example(
    example: ReasoningExample, prompt: CheckpointPrompt, shots: Sequence[ReasoningExample], answer_prompt: str
) -> ReasoningExample:
    """Put a question after the solved examples, as messages or as one text.

    A system message stays the first; the document that a question is about becomes a part of it.
    """
    if prompt.style == "chat":
        turns = [
            {"role": role, "content": content}
            for shot in shots
            for role, content in (("user", write_question(shot)), ("assistant", write_solution(shot, answer_prompt)))
        ]
        question = example.metadata.get("messages") or [{"role": "user", "content": write_question(example)}]
        n = int(question[0]["role"] == "system")
        messages = [*question[:n], *turns, *question[n:]]
        return replace(example, document=None, metadata={**example.metadata, "messages": messages})
    parts = [f"{QUESTION} {write_question(shot)}\n{ANSWER} {write_solution(shot, answer_prompt)}" for shot in shots]
    text = "\n\n".join([*parts, f"{QUESTION} {write_question(example)}\n{ANSWER}"])
    return replace(example, document=None, question=text)


def write_question(example: ReasoningExample) -> str:
    return "\n\n".join(filter(None, (example.document, example.question)))


def write_solution(example: ReasoningExample, answer_prompt: str) -> str:
    chain = str(example.metadata.get("rationale") or " ".join(example.steps))
    return f"{chain}\n{answer_prompt} {example.answer}".strip()
