"""Question sets as a run encodes them: of a data set, of a file, of its own recipe, or a single question."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig, is_row_file
from laconic.config.recipe import Recipe
from laconic.data.reasoning import answer_matching
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.data.reasoning.catalog import find_dataset, parse_hub_name, split_name
from laconic.data.reasoning.dataset import ReasoningDataset
from laconic.data.reasoning.load import load_examples
from laconic.data.reasoning.read_examples import read_examples
from laconic.errors import InputError, UsageError
from laconic.evaluation.checkpoints import NO_FILE, format_example, load_shots, read_prompt
from laconic.evaluation.results_store import folder_safe_name
from laconic.evaluation.runs import describe_folder
from laconic.experiment.from_recipe.build_data import has_text_answers, load_held_out_rows
from laconic.experiment.load_run import LoadedRun
from laconic.interfaces import TrainingData

RECIPE_SPLITS = ("test", "valid")  # question sets that a recipe itself names
PLACEHOLDER_ANSWER = "0"  # encoded where the gold answer is not needed


@dataclass(frozen=True)
class QuestionSet:
    """Questions as a run encodes them; row i of `source` is `examples[i]`.

    `order` is that in which to ask them, the longest first. Notes have to be said beside figures on the set.
    """

    name: str
    source: TrainingData
    examples: Sequence[ReasoningExample]
    protocol: AnswerProtocol
    order: Sequence[int]
    max_question_tokens: int
    has_text_answers: bool
    notes: tuple[str, ...] = ()
    suffix: str = ""  # of its file


def load_question_set(
    run: LoadedRun,
    name: str,
    protocol: AnswerProtocol,
    *,
    root: str | None = None,
    limit: int | None = None,
    with_chains: bool = False,
) -> QuestionSet:
    """Load a question set for a run: a data set, a file, or the recipe's own "test" or "valid".

    `root` is the folder of the data sets' files, by default the recipe's. With `with_chains`, the chain and the answer
    of each question are encoded too.
    """
    data = run.recipe.data
    answer_matching.check_format(protocol, data.format, describe_folder(run.folder))
    if data.source == "digits":
        return generated_questions(run, name, protocol, limit)
    is_recipe_split = name in RECIPE_SPLITS
    path = resolve_set(run.recipe, name, describe_folder(run.folder))
    data_config = evaluation_data_config(data, root, is_recipe_split)
    if is_recipe_split and data.source == "file":
        read = read_examples(path, data_config, limit)
    else:
        read = load_examples(path, "valid" if name == "valid" else "test", data_config, limit)
    answer_matching.check_gold(protocol, read.examples, path)
    prompt = read_prompt(run.folder)
    shots = [] if prompt is None else load_shots(prompt, path, data_config, read.examples)
    questions = encode_questions(run, set_title(path), read.examples, protocol, data_config, with_chains, shots)
    return replace(questions, suffix=Path(path).suffix if is_row_file(path) else "")


def single_question(
    run: LoadedRun, question: str, steps: Sequence[str], gold: str | None, protocol: AnswerProtocol
) -> QuestionSet:
    """Encode one question with the steps of its chain, which may be none, and its gold answer, if known."""
    data = evaluation_data_config(run.recipe.data, None, True)
    data = data.model_copy(update={"on_too_long": "error", "on_invalid_row": "error"})
    example = ReasoningExample("question", question, tuple(steps), gold or PLACEHOLDER_ANSWER)
    questions = encode_questions(run, "question", [example], protocol, data, True)
    if gold is not None:
        return questions
    return replace(questions, has_text_answers=protocol.name == "text" or has_text_answers(data))


def encode_questions(
    run: LoadedRun,
    name: str,
    examples: Sequence[ReasoningExample],
    protocol: AnswerProtocol,
    data_config: DataConfig,
    with_chains: bool,
    shots: Sequence[ReasoningExample] = (),
) -> QuestionSet:
    """Encode examples with a run's tokenizer, their questions in the protocol's form, for a model in its prompt's."""
    formatted = [replace(example, question=protocol.format_question(example.question)) for example in examples]
    if not with_chains:
        formatted = [replace(example, steps=()) for example in formatted]
    prompts = formatted
    prompt = read_prompt(run.folder)
    if prompt is not None:
        prompts = [format_example(example, prompt, shots, run.recipe.data.answer_prompt) for example in formatted]
    source = ReasoningDataset(
        prompts if with_chains else [replace(example, answer=PLACEHOLDER_ANSWER) for example in prompts],
        run.parts.tokenizer,
        data_config,
        max_positions=run.parts.decoder.config.max_position_embeddings,
        num_latents=run.recipe.num_latents,
    )
    encoded_ids = {example.id for example in source.examples}
    encoded = [example for example in formatted if example.id in encoded_ids]
    lengths = [len(source.get_row(i).question_ids) for i in range(len(source))]
    order = sorted(range(len(encoded)), key=lambda i: -lengths[i])
    is_text = any(answer_matching.parse_gold_decimal(example.answer) is None for example in encoded)
    notes = [f"{name}: {line}" for line in source.counts.describe_left_out()]
    if source.counts.num_documents and not run.recipe.reads_documents:
        notes.append(f"{name}: {describe_folder(run.folder)} does not read the documents that questions are about")
    return QuestionSet(
        name,
        source=source,
        examples=encoded,
        protocol=protocol,
        order=order,
        max_question_tokens=max(lengths),
        has_text_answers=is_text,
        notes=tuple(notes),
    )


def generated_questions(run: LoadedRun, name: str, protocol: AnswerProtocol, limit: int | None) -> QuestionSet:
    resolve_set(run.recipe, name, describe_folder(run.folder))
    context = run.parts.decoder.config.max_position_embeddings
    rows = load_held_out_rows(run.recipe, run.parts.tokenizer, context, "valid" if name == "valid" else "test", limit)
    answer_matching.check_gold(protocol, rows.examples, name)
    max_tokens = cast(Any, rows.source.batch([0], 0, 0)).question_ids.shape[1]
    return QuestionSet(
        name,
        source=rows.source,
        examples=rows.examples,
        protocol=protocol,
        order=range(len(rows.examples)),
        max_question_tokens=max_tokens,
        has_text_answers=False,
    )


def resolve_set(recipe: Recipe, name: str, run: str) -> str:
    """Return the data set or file of a name: of "test" and "valid" what the recipe names, else the name itself."""
    data = recipe.data
    if data.source == "digits" and name not in RECIPE_SPLITS:
        raise UsageError(f"--tasks {name}: {run} was trained on generated digits and has no other tokens; use test")
    path = getattr(data, name) if name in RECIPE_SPLITS and data.source != "digits" else name
    if path is None and Path(str(data.path)).name == NO_FILE:
        raise UsageError(f"--tasks {name}: a model has no {name} set of its own; name a data set or a file")
    if path is None:
        raise InputError(f"{name}: the recipe of {run} has no data.{name}; name a data set or a file")
    return path


def evaluation_data_config(data: DataConfig, root: str | None, is_recipe_split: bool) -> DataConfig:
    """Return how rows are read for evaluation: all of them; the recipe's chain field counts for its own splits only."""
    chain_field = data.chain_field if is_recipe_split else None
    data_dir = data.data_dir if root is None else root
    all_rows = {"max_train_rows": None, "require_leading_digit": False}
    update = {**all_rows, "max_tokens": None, "chain_field": chain_field, "data_dir": data_dir}
    return data.model_copy(update=update)


def set_title(name: str) -> str:
    """Return the title of a data set: its name in the catalog, or the stem of its file."""
    if is_row_file(name):
        return Path(name).stem
    base, split = split_name(name)
    known = find_dataset(name)
    parts = [known.name] if known else [base, parse_hub_name(name).config]
    return ":".join(filter(None, [*parts, None if split == "test" else split]))


def check_tasks(recipe: Recipe, names: Sequence[str], run: str) -> None:
    """Raise, before the run is loaded, `InputError` for a file that does not exist, and `UsageError` for two data sets
    whose results would be stored under one name.
    """
    by_title: dict[str, str] = {}
    for name in names:
        path = resolve_set(recipe, name, run)
        if is_row_file(path) and not Path(path).is_file():
            origin = f"data.{name} of {run}" if name in RECIPE_SPLITS else f"task {name}"
            raise InputError(f"{origin}: no file {path}; name another one, or a task that laconic tasks list shows")
        title = set_title(path)
        identity = str(Path(path).resolve()) if is_row_file(path) else title
        other = by_title.setdefault(folder_safe_name(title), identity)
        if other != identity:
            raise UsageError(f"--tasks: {other} and {identity} are both called {title}; rename one of the files")
