"""The rows of a recipe: those trained on, and those held out, each with the text it was made of."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

from laconic.core.contract import Example
from laconic.core.errors import BadInput, Damaged
from laconic.data import maths
from laconic.data.copying import Copies
from laconic.data.drift import drifted
from laconic.data.encoding import Ids
from laconic.data.examples import Read, read_examples
from laconic.data.lanes import Lanes
from laconic.data.languages import Strings, languages_tokenizer
from laconic.data.mqar import Mqar, mqar_tokenizer
from laconic.data.passages import Passages, tokenized
from laconic.data.reasoning import Questions
from laconic.data.recall import Recalls, recall_tokenizer
from laconic.data.settings import Data, Part, Text
from laconic.data.synthetic import DigitsSource, digits, digits_tokenizer
from laconic.data.text import Document, documents
from laconic.data.tokens import Tokenizer
from laconic.evaluation.protocols import CODI, DIGIT, Protocol, own
from laconic.methods.settings import Reading
from laconic.recipe.schema import DOCUMENTS, Recipe

Show = Callable[[str, int, int], None]
PARTS = get_args(Part)
Generated = Recalls | Mqar | Copies | Strings
HELD_OUT = 0  # seed of the order of generated problems held out: the same for every run


class Rows(NamedTuple):
    """Rows as batches, as text, and how an answer to one is judged; `notes` say what was left out or cut.

    Documents are no questions: they have no examples, and nobody judges them.
    """

    source: Questions | DigitsSource | Passages | Lanes | Generated
    examples: Sequence[Example]
    protocol: Protocol | None
    notes: tuple[str, ...] = ()


def training(recipe: Recipe, tokenizer: Tokenizer, context: int, show: Show | None = None) -> Rows:
    """The rows trained on; `show` is told how far they are encoded.

    Raises `BadInput` (66) for rows that do not do, or that are held out elsewhere.
    """
    data = recipe.data
    if data.kind in DOCUMENTS:
        return of_documents(recipe, tokenizer, context, "train", show=show)
    if data.kind == "digits":
        check_own(tokenizer, digits_tokenizer(), "digits")
        made = DigitsSource(recipe.seed, data.digits, "train", drop_last=data.chain == "drop_last")
        check_room(made, recipe.thinking.count if recipe.thinking else 0, context)
        return Rows(made, (), DIGIT)
    read = maths.training(data) if data.kind == "maths" else from_file(data)
    M = recipe.thinking.count if recipe.thinking else 0
    made = Questions(read.examples, tokenizer, data, context=context, thoughts=M, least=recipe.train.batch, show=show)
    return Rows(made, made.examples, protocol(data), (*read.notes, *made.counts.lines(M)))


def of_documents(
    recipe: Recipe, tokenizer: Tokenizer, context: int, part: Part, count: int | None = None, show: Show | None = None
) -> Rows:
    """Documents: those trained on, or `count` rows of those held out, whose segments are not drawn."""
    data, train = recipe.data, part == "train"
    if data.kind != "text":
        return Rows(generated(data, tokenizer, recipe.seed if train else HELD_OUT, part, count), (), None)
    found, ids, notes = encoded(recipe, tokenizer, part, show)
    if recipe.train.carry:
        many = recipe.train.batch if train or recipe.validation is None else recipe.validation.batch
        lanes = many if train else min(many, len(found))
        made = Lanes(found, ids, data.text.tokens, lanes, recipe.seed if train else HELD_OUT, count)
    else:
        how, room = segmented(recipe), room_of(recipe, context)
        least = recipe.train.batch if train else 1
        whole = train and recipe.train.parallel == "fsdp"
        made = Passages(found, ids, how, recipe.seed, room, fixed=not train, whole=whole, count=count, least=least)
    said = f"{len(found):,} documents of {sum(map(len, ids)):,} tokens, {len(made):,} rows"
    return Rows(made, (), None, (*notes, said))


def encoded(
    recipe: Recipe, tokenizer: Tokenizer, part: Part, show: Show | None = None
) -> tuple[list[Document], list[Ids], list[str]]:
    """The documents of a part, each as ids, which drift where the recipe says so; and notes."""
    found, notes = documents(recipe.data, part)
    ids, every = tokenized(found, tokenizer, show), recipe.data.text.drift
    if every:
        words = tokenizer.inner.get_vocab_size(with_added_tokens=False)
        key = (recipe.seed if part == "train" else HELD_OUT, PARTS.index(part))
        ids = [drifted(each, every, words, (*key, d)) for d, each in enumerate(ids)]
    return found, ids, notes


def segmented(recipe: Recipe) -> Text:
    """How documents are cut: a model that learns while it reads takes a row at once."""
    text = recipe.data.text
    if recipe.method != "hope":
        return text
    return text.model_copy(update={"segments": "fixed", "segment": text.tokens, "low": None, "high": None})


def generated(data: Data, tokenizer: Tokenizer, seed: int, part: Part, count: int | None) -> Generated:
    """Documents made by arithmetic, of a tokenizer of their own. Raises `Damaged` (76) for another."""
    if data.kind == "mqar":
        check_own(tokenizer, mqar_tokenizer(), "mqar documents")
        return Mqar(seed, data.mqar, part, count)
    if data.kind == "copying":
        check_own(tokenizer, mqar_tokenizer(), "documents to copy from")
        return Copies(seed, data.copying, part, count)
    if data.kind == "languages":
        check_own(tokenizer, languages_tokenizer(), "strings")
        return Strings(seed, data.languages, part, count)
    check_own(tokenizer, recall_tokenizer(), "recall documents")
    return Recalls(seed, data.recall, part, count)


def room_of(recipe: Recipe, context: int) -> int:
    """Positions that the longest memory, its successor's summaries, a trigger and a first token leave for a segment."""
    how, text = recipe.reading, recipe.data.text
    if how is None or how.positions == "zero":
        return context
    return context - slots_before(how, text.tokens // text.mean - 1) - how.cap - 2


def slots_before(how: Reading, segments: int) -> int:
    """Vectors at most that so many segments have left in a memory."""
    blocks = min(segments, 1) if how.memory == "replace" else segments
    return (how.budget or blocks * how.cap) if blocks else 0


def from_file(data: Data) -> Read:
    """The rows of data.path, none of which is held out."""
    path = str(data.path)
    kept: dict[Part, Read] = {part: held_file(data, part) for part in maths.HELD_OUT if getattr(data, part)}
    return maths.apart(data, {path: read_examples(path, data, data.rows)}, kept)


def check_own(tokenizer: Tokenizer, own: Tokenizer, rows: str) -> None:
    """Raises `Damaged` (76) for another tokenizer than that of generated rows, whose ids they are made of."""
    ours = own.fingerprint
    if tokenizer.fingerprint != ours:
        raise Damaged(
            f"generated {rows} need the tokenizer {ours}, this is {tokenizer.fingerprint}; take a file of rows"
        )


def check_room(source: DigitsSource, thoughts: int, context: int) -> None:
    """Raises `BadInput` (66) where a generated row, by its chain or with its thoughts, is longer than the context."""
    row, thinking = source.batch([0], 0, 0), thoughts + 2 if thoughts else 0
    need = row.question.shape[1] + max(source.longest, thinking) + row.answer.shape[1]
    if need > context:
        raise BadInput(
            f"a row of {need} positions, the model has {context}; take fewer data.digits.operations or thoughts"
        )


def held_out(recipe: Recipe, tokenizer: Tokenizer, context: int, part: Part, count: int | None = None) -> Rows:
    """The first rows of validation or test. Raises `BadInput` (66)."""
    data = recipe.data
    if data.kind in DOCUMENTS:
        return of_documents(recipe, tokenizer, context, part, count)
    if data.kind == "digits":
        made = DigitsSource(HELD_OUT, data.digits, part, drop_last=data.chain == "drop_last")
        return Rows(made, digits(HELD_OUT, min(count or len(made), len(made)), data.digits, part), DIGIT)
    examples = (maths.held(data, part, count) if data.kind == "maths" else held_file(data, part, count)).examples
    M = recipe.thinking.count if recipe.thinking else 0
    made = Questions(examples, tokenizer, data, context=context, thoughts=M)
    return Rows(made, made.examples, protocol(data))


def held_file(data: Data, part: Part, count: int | None = None) -> Read:
    """The rows of data.valid or data.test."""
    path = data.valid if part == "valid" else data.test
    if path is None:
        raise BadInput(f"data.{part}: absent; name the file of rows that are held out")
    return read_examples(path, data, count)


def protocol(data: Data) -> Protocol:
    """How an answer of this kind of data is judged during training."""
    if data.kind == "digits":
        return DIGIT
    return own(data.format, words=True) if in_words(data) else CODI


def in_words(data: Data) -> bool:
    """Whether answers are no numbers, but the whole text of one."""
    return data.answers == "text" or (data.kind == "maths" and maths.answers(data) != "number")
