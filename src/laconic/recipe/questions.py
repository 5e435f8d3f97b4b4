"""Questions as a run reads them: of a set, of a file, of its own recipe, or a single one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from laconic.core.contract import Example, Source
from laconic.core.errors import BadInput, Usage
from laconic.data.examples import read_examples
from laconic.data.maths import load
from laconic.data.reasoning import Questions
from laconic.data.sets import known, parted
from laconic.data.settings import Data, is_file
from laconic.evaluation import protocols
from laconic.evaluation.protocols import Protocol
from laconic.recipe.opened import Opened
from laconic.recipe.rows import held_out, in_words
from laconic.recipe.schema import Recipe

OWN = ("test", "valid")  # the sets that a recipe itself names


@dataclass(frozen=True)
class QuestionSet:
    """Questions as a run reads them; `examples` hold their gold answers, `order` is that of asking, the longest first.

    `longest` is the positions of the longest question, `words` whether answers are no numbers.
    """

    name: str
    source: Source
    examples: Sequence[Example]
    protocol: Protocol
    order: Sequence[int]
    longest: int
    words: bool
    notes: tuple[str, ...] = ()


def question_set(
    run: Opened,
    name: str,
    protocol: Protocol,
    *,
    root: str | None = None,
    rows: int | None = None,
    chains: bool = False,
) -> QuestionSet:
    """The questions of a set: a name, a file, or the run's own test or valid; the first `rows` of them.

    With `chains`, rows have their chain and answer too. Raises `Usage` (2) for a protocol that cannot read the run's
    answers, `BadInput` (66) for one that cannot judge against the set's, and for questions that do not fit.
    """
    data = run.recipe.data
    protocols.check_format(protocol, data.format, str(run.folder))
    if data.kind == "digits":
        return generated(run, name, protocol, rows)
    path, how = place(run.recipe, name, str(run.folder)), reading(data, root, name in OWN)
    file = name in OWN and data.kind == "jsonl"
    read = read_examples(path, how, rows) if file else load(path, "valid" if name == "valid" else "test", how, rows)
    protocols.check_gold(protocol, read.examples, path)
    return encoded(run, title(path), read.examples, protocol, how, chains)


def single(run: Opened, question: str, steps: Sequence[str], gold: str | None, protocol: Protocol) -> QuestionSet:
    """One question with its chain. Raises `BadInput` (66) where the model has too few positions for it."""
    data = reading(run.recipe.data, None, True).model_copy(update={"too_long": "error", "on_bad": "error"})
    made = encoded(run, "question", [Example("question", question, tuple(steps), gold or "0")], protocol, data, True)
    return made if gold is not None else replace(made, words=protocol.name == "text" or in_words(data))


def encoded(
    run: Opened, name: str, examples: Sequence[Example], protocol: Protocol, how: Data, chains: bool
) -> QuestionSet:
    """Examples as the protocol puts them, made of the run's words."""
    put = [
        replace(each, question=protocol.question(each.question), steps=each.steps if chains else ())
        for each in examples
    ]
    M = run.recipe.thinking.count if run.recipe.thinking else 0
    source = Questions(
        put if chains else [replace(each, answer="0") for each in put],  # what stands for the answer is not asked
        run.parts.tokenizer, how, context=run.parts.decoder.config.max_position_embeddings, thoughts=M,
    )  # fmt: skip
    there = {each.id for each in source.examples}
    asked = [each for each in put if each.id in there]
    lengths = [len(source.row(i).question) for i in range(len(source))]
    order = sorted(range(len(asked)), key=lambda i: -lengths[i])
    words = protocols.whole_decimal(asked[0].answer) is None
    notes = [f"{name}: {line}" for line in source.counts.lines() if "left out" in line or "cut" in line]
    return QuestionSet(name, source, asked, protocol, order, max(lengths), words, tuple(notes))


def generated(run: Opened, name: str, protocol: Protocol, rows: int | None) -> QuestionSet:
    """The questions of the digits task."""
    place(run.recipe, name, str(run.folder))
    tokenizer, context = run.parts.tokenizer, run.parts.decoder.config.max_position_embeddings
    found = held_out(run.recipe, tokenizer, context, "valid" if name == "valid" else "test", rows)
    protocols.check_gold(protocol, found.examples, name)
    longest = cast(Any, found.source.batch([0], 0, 0)).question.shape[1]
    return QuestionSet(name, found.source, found.examples, protocol, range(len(found.examples)), longest, False)


def place(recipe: Recipe, name: str, run: str) -> str:
    """The set or file that a name stands for: the recipe's own test or valid, or itself."""
    data = recipe.data
    if data.kind == "digits" and name not in OWN:
        raise Usage(f"--on {name}: {run} was trained on generated digits, and has words for no other; ask test")
    path = getattr(data, name) if name in OWN and data.kind != "digits" else name
    if path is None:
        raise BadInput(f"{name}: {run} names no data.{name}; name a set or a file")
    return path


def reading(data: Data, root: str | None, own: bool) -> Data:
    """How rows are read to be asked: all of them; a chain is the recipe's field of its `own` rows alone."""
    asks = {"closed": False, "rows": None, "drop_negative": False, "max_tokens": None}
    field = data.field if own else None
    return data.model_copy(update={**asks, "field": field, "root": data.root if root is None else root})


def title(asked: str) -> str:
    """What a set is called: our name for it, or that of its file."""
    if is_file(asked):
        return Path(asked).stem
    name, split = parted(asked)
    found = known(asked)
    return (found.name if found else name) + (f":{split}" if split not in (None, "test") else "")


def check_titles(recipe: Recipe, names: Sequence[str], run: str) -> None:
    """Raises `Usage` (2) for two files, or a file and a set, whose answers would be kept under one name."""
    places: dict[str, str] = {}
    for name in names:
        path = place(recipe, name, run)
        asked = str(Path(path).resolve()) if is_file(path) else title(path)
        other = places.setdefault(kept_as(title(path)), asked)
        if other != asked:
            raise Usage(f"--on: {other} and {asked} are both called {title(path)}; rename one of the files")


def kept_as(name: str) -> str:
    """A name that a folder may have."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", name)
