"""Questions as a run reads them: of a set, of a file, of its own recipe, or a single one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig, is_row_file
from laconic.config.recipe import Recipe
from laconic.data.reasoning import answer_matching
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.data.reasoning.catalog import find_dataset, split_name
from laconic.data.reasoning.dataset import ReasoningDataset
from laconic.data.reasoning.load import load_examples
from laconic.data.reasoning.read_examples import read_examples
from laconic.errors import InputError, UsageError
from laconic.experiment.build_data import has_text_answers, load_held_out
from laconic.experiment.load_run import LoadedRun
from laconic.interfaces import TrainingData

RECIPE_SPLITS = ("test", "valid")  # the sets that a recipe itself names


@dataclass(frozen=True)
class QuestionSet:
    """Questions as a run reads them; `examples` hold their gold answers, `order` is that of asking, the longest first.

    `longest` is the positions of the longest question, `words` whether answers are no numbers.
    """

    name: str
    source: TrainingData
    examples: Sequence[ReasoningExample]
    protocol: AnswerProtocol
    order: Sequence[int]
    max_question_tokens: int
    has_text_answers: bool
    notes: tuple[str, ...] = ()


def load_question_set(
    run: LoadedRun,
    name: str,
    protocol: AnswerProtocol,
    *,
    root: str | None = None,
    limit: int | None = None,
    with_chains: bool = False,
) -> QuestionSet:
    """The questions of a set: a name, a file, or the run's own test or valid; the first `rows` of them.

    With `chains`, rows have their chain and answer too. Raises `Usage` (2) for a protocol that cannot read the run's
    answers, `BadInput` (66) for one that cannot judge against the set's, and for questions that do not fit.
    """
    data = run.recipe.data
    answer_matching.check_format(protocol, data.format, str(run.folder))
    if data.source == "digits":
        return generated_questions(run, name, protocol, limit)
    path, how = (
        resolve_set(run.recipe, name, str(run.folder)),
        evaluation_data_config(data, root, name in RECIPE_SPLITS),
    )
    file = name in RECIPE_SPLITS and data.source == "file"
    read = (
        read_examples(path, how, limit)
        if file
        else load_examples(path, "valid" if name == "valid" else "test", how, limit)
    )
    answer_matching.check_gold(protocol, read.examples, path)
    return encode_questions(run, set_title(path), read.examples, protocol, how, with_chains)


def single_question(
    run: LoadedRun, question: str, steps: Sequence[str], gold: str | None, protocol: AnswerProtocol
) -> QuestionSet:
    """One question with its chain. Raises `BadInput` (66) where the model has too few positions for it."""
    data = evaluation_data_config(run.recipe.data, None, True).model_copy(
        update={"too_long": "error", "on_bad": "error"}
    )
    made = encode_questions(
        run, "question", [ReasoningExample("question", question, tuple(steps), gold or "0")], protocol, data, True
    )
    return (
        made if gold is not None else replace(made, has_text_answers=protocol.name == "text" or has_text_answers(data))
    )


def encode_questions(
    run: LoadedRun,
    name: str,
    examples: Sequence[ReasoningExample],
    protocol: AnswerProtocol,
    data_config: DataConfig,
    with_chains: bool,
) -> QuestionSet:
    """Examples as the protocol puts them, made of the run's words."""
    put = [
        replace(each, question=protocol.format_question(each.question), steps=each.steps if with_chains else ())
        for each in examples
    ]
    M = run.recipe.latents.num_latents if run.recipe.latents else 0
    source = ReasoningDataset(
        put if with_chains else [replace(each, answer="0") for each in put],  # what stands for the answer is not asked
        run.parts.tokenizer, data_config, max_positions=run.parts.decoder.config.max_position_embeddings, num_latents=M,
    )  # fmt: skip
    there = {each.id for each in source.examples}
    asked = [each for each in put if each.id in there]
    lengths = [len(source.get_row(i).question_ids) for i in range(len(source))]
    order = sorted(range(len(asked)), key=lambda i: -lengths[i])
    words = answer_matching.parse_gold_decimal(asked[0].answer) is None
    notes = [f"{name}: {line}" for line in source.counts.describe() if "left out" in line or "cut" in line]
    return QuestionSet(name, source, asked, protocol, order, max(lengths), words, tuple(notes))


def generated_questions(run: LoadedRun, name: str, protocol: AnswerProtocol, limit: int | None) -> QuestionSet:
    """The questions of the digits task."""
    resolve_set(run.recipe, name, str(run.folder))
    tokenizer, context = run.parts.tokenizer, run.parts.decoder.config.max_position_embeddings
    found = load_held_out(run.recipe, tokenizer, context, "valid" if name == "valid" else "test", limit)
    answer_matching.check_gold(protocol, found.examples, name)
    longest = cast(Any, found.source.batch([0], 0, 0)).question.shape[1]
    return QuestionSet(name, found.source, found.examples, protocol, range(len(found.examples)), longest, False)


def resolve_set(recipe: Recipe, name: str, run: str) -> str:
    """The set or file that a name stands for: the recipe's own test or valid, or itself."""
    data = recipe.data
    if data.source == "digits" and name not in RECIPE_SPLITS:
        raise UsageError(f"--tasks {name}: {run} was trained on generated digits, and has words for no other; ask test")
    path = getattr(data, name) if name in RECIPE_SPLITS and data.source != "digits" else name
    if path is None:
        raise InputError(f"{name}: {run} names no data.{name}; name a set or a file")
    return path


def evaluation_data_config(data: DataConfig, root: str | None, is_recipe_split: bool) -> DataConfig:
    """How rows are read to be asked: all of them; a chain is the recipe's field of its `own` rows alone."""
    asks = {"forbid_unknown_fields": False, "max_train_rows": None, "require_leading_digit": False, "max_tokens": None}
    field = data.chain_field if is_recipe_split else None
    return data.model_copy(update={**asks, "chain_field": field, "data_dir": data.data_dir if root is None else root})


def set_title(asked: str) -> str:
    """What a set is called: our name for it, or that of its file."""
    if is_row_file(asked):
        return Path(asked).stem
    name, split = split_name(asked)
    found = find_dataset(asked)
    return (found.name if found else name) + (f":{split}" if split not in (None, "test") else "")


def check_unique_titles(recipe: Recipe, names: Sequence[str], run: str) -> None:
    """Raises `Usage` (2) for two files, or a file and a set, whose answers would be kept under one name."""
    places: dict[str, str] = {}
    for name in names:
        path = resolve_set(recipe, name, run)
        asked = str(Path(path).resolve()) if is_row_file(path) else set_title(path)
        other = places.setdefault(folder_safe_name(set_title(path)), asked)
        if other != asked:
            raise UsageError(f"--tasks: {other} and {asked} are both called {set_title(path)}; rename one of the files")


def folder_safe_name(name: str) -> str:
    """A name that a folder may have."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", name)
