"""The rows of a recipe: those trained on, and those held out, each with the text it was made of."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig, SplitName, TextConfig
from laconic.config.methods import CompressionConfig
from laconic.config.recipe import DOCUMENT_SOURCES, Recipe
from laconic.data.documents.dataset import DocumentDataset, tokenize_documents
from laconic.data.documents.load import Document, load_documents
from laconic.data.documents.stateful_batches import StatefulBatches
from laconic.data.documents.tokenize import TokenArray
from laconic.data.documents.vocabulary_drift import permute_vocabulary
from laconic.data.reasoning import load as reasoning_load
from laconic.data.reasoning.answer_matching import CODI, DIGIT, AnswerProtocol, default_protocol
from laconic.data.reasoning.dataset import ReasoningDataset
from laconic.data.reasoning.read_examples import ExamplesFile, read_examples
from laconic.data.synthetic.digits import DigitsDataset, build_digits_tokenizer, generate_digit_examples
from laconic.data.synthetic.fact_recall import FactRecallDataset, build_recall_tokenizer
from laconic.data.synthetic.formal_languages import FormalLanguageDataset, build_languages_tokenizer
from laconic.data.synthetic.mqar import MQARDataset, build_mqar_tokenizer
from laconic.data.synthetic.selective_copying import SelectiveCopyingDataset
from laconic.data.tokenizer import Tokenizer
from laconic.errors import CorruptArtifactError, InputError

ProgressCallback = Callable[[str, int, int], None]
SPLIT_NAMES = get_args(SplitName)
SyntheticData = FactRecallDataset | MQARDataset | SelectiveCopyingDataset | FormalLanguageDataset
HELD_OUT_EPOCH = 0  # seed of the order of generated problems held out: the same for every run


class RowSet(NamedTuple):
    """Rows as batches, as text, and how an answer to one is judged; `notes` say what was left out or cut.

    Documents are no questions: they have no examples, and nobody judges them.
    """

    source: ReasoningDataset | DigitsDataset | DocumentDataset | StatefulBatches | SyntheticData
    examples: Sequence[ReasoningExample]
    answer_matcher: AnswerProtocol | None
    notes: tuple[str, ...] = ()


def load_training_rows(
    recipe: Recipe, tokenizer: Tokenizer, context: int, show: ProgressCallback | None = None
) -> RowSet:
    """The rows trained on; `show` is told how far they are encoded.

    Raises `BadInput` (66) for rows that do not do, or that are held out elsewhere.
    """
    data = recipe.data
    if data.source in DOCUMENT_SOURCES:
        return of_documents(recipe, tokenizer, context, "train", show=show)
    if data.source == "digits":
        check_synthetic_tokenizer(tokenizer, build_digits_tokenizer(), "digits")
        made = DigitsDataset(recipe.seed, data.digits, "train", drop_last=data.chain_steps == "drop_last")
        check_row_lengths(made, recipe.latents.num_latents if recipe.latents else 0, context)
        return RowSet(made, (), DIGIT)
    read = reasoning_load.load_training_examples(data) if data.source == "catalog" else load_file_rows(data)
    M = recipe.latents.num_latents if recipe.latents else 0
    made = ReasoningDataset(
        read.examples,
        tokenizer,
        data,
        max_positions=context,
        num_latents=M,
        min_rows=recipe.train.batch_size,
        progress=show,
    )
    return RowSet(made, made.examples, default_answer_matcher(data), (*read.notes, *made.counts.describe(M)))


def of_documents(
    recipe: Recipe,
    tokenizer: Tokenizer,
    context: int,
    part: SplitName,
    count: int | None = None,
    show: ProgressCallback | None = None,
) -> RowSet:
    """Documents: those trained on, or `count` rows of those held out, whose segments are not drawn."""
    data, train = recipe.data, part == "train"
    if data.source != "text":
        return RowSet(build_synthetic(data, tokenizer, recipe.seed if train else HELD_OUT_EPOCH, part, count), (), None)
    found, ids, notes = encode_documents(recipe, tokenizer, part, show)
    if recipe.train.stateful:
        many = recipe.train.batch_size if train or recipe.validation is None else recipe.validation.batch_size
        lanes = many if train else min(many, len(found))
        made = StatefulBatches(found, ids, data.text.row_tokens, lanes, recipe.seed if train else HELD_OUT_EPOCH, count)
    else:
        how, room = segment_boundaries(recipe), max_segment_tokens(recipe, context)
        least = recipe.train.batch_size if train else 1
        whole = train and recipe.train.parallel == "fsdp"
        made = DocumentDataset(
            found,
            ids,
            how,
            recipe.seed,
            room,
            fixed_segments=not train,
            pad_to_row_tokens=whole,
            max_rows=count,
            min_rows=least,
        )
    said = f"{len(found):,} documents of {sum(map(len, ids)):,} tokens, {len(made):,} rows"
    return RowSet(made, (), None, (*notes, said))


def encode_documents(
    recipe: Recipe, tokenizer: Tokenizer, part: SplitName, show: ProgressCallback | None = None
) -> tuple[list[Document], list[TokenArray], list[str]]:
    """The documents of a part, each as ids, which drift where the recipe says so; and notes."""
    found, notes = load_documents(recipe.data, part)
    ids, every = tokenize_documents(found, tokenizer, show), recipe.data.text.vocabulary_drift_every
    if every:
        words = tokenizer.backend.get_vocab_size(with_added_tokens=False)
        key = (recipe.seed if part == "train" else HELD_OUT_EPOCH, SPLIT_NAMES.index(part))
        ids = [permute_vocabulary(each, every, words, (*key, d)) for d, each in enumerate(ids)]
    return found, ids, notes


def segment_boundaries(recipe: Recipe) -> TextConfig:
    """How documents are cut: a model that learns while it reads takes a row at once."""
    text = recipe.data.text
    if recipe.method != "hope":
        return text
    return text.model_copy(
        update={
            "segment_lengths": "fixed",
            "segment_tokens": text.row_tokens,
            "min_segment_tokens": None,
            "max_segment_tokens": None,
        }
    )


def build_synthetic(
    data: DataConfig, tokenizer: Tokenizer, seed: int, part: SplitName, count: int | None
) -> SyntheticData:
    """Documents made by arithmetic, of a tokenizer of their own. Raises `Damaged` (76) for another."""
    if data.source == "mqar":
        check_synthetic_tokenizer(tokenizer, build_mqar_tokenizer(), "mqar documents")
        return MQARDataset(seed, data.mqar, part, count)
    if data.source == "copying":
        check_synthetic_tokenizer(tokenizer, build_mqar_tokenizer(), "documents to copy from")
        return SelectiveCopyingDataset(seed, data.copying, part, count)
    if data.source == "formal_languages":
        check_synthetic_tokenizer(tokenizer, build_languages_tokenizer(), "strings")
        return FormalLanguageDataset(seed, data.formal_languages, part, count)
    check_synthetic_tokenizer(tokenizer, build_recall_tokenizer(), "recall documents")
    return FactRecallDataset(seed, data.recall, part, count)


def max_segment_tokens(recipe: Recipe, context: int) -> int:
    """Positions that the longest memory, its successor's summaries, a trigger and a first token leave for a segment."""
    how, text = recipe.compression, recipe.data.text
    if how is None or how.summary_positions == "zero":
        return context
    return context - max_memory_slots(how, text.row_tokens // text.mean_segment_tokens - 1) - how.max_vectors - 2


def max_memory_slots(how: CompressionConfig, segments: int) -> int:
    """Vectors at most that so many segments have left in a memory."""
    blocks = min(segments, 1) if how.memory_policy == "replace" else segments
    return (how.max_memory_vectors or blocks * how.max_vectors) if blocks else 0


def load_file_rows(data: DataConfig) -> ExamplesFile:
    """The rows of data.path, none of which is held out."""
    path = str(data.path)
    kept: dict[SplitName, ExamplesFile] = {
        part: load_held_out_file(data, part) for part in reasoning_load.HELD_OUT_PARTS if getattr(data, part)
    }
    return reasoning_load.merge_training_files(data, {path: read_examples(path, data, data.max_train_rows)}, kept)


def check_synthetic_tokenizer(tokenizer: Tokenizer, expected: Tokenizer, rows: str) -> None:
    """Raises `Damaged` (76) for another tokenizer than that of generated rows, whose ids they are made of."""
    ours = expected.fingerprint
    if tokenizer.fingerprint != ours:
        raise CorruptArtifactError(
            f"generated {rows} need the tokenizer {ours}, this is {tokenizer.fingerprint}; take a file of rows"
        )


def check_row_lengths(source: DigitsDataset, thoughts: int, context: int) -> None:
    """Raises `BadInput` (66) where a generated row, by its chain or with its thoughts, is longer than the context."""
    row, thinking = source.batch([0], 0, 0), thoughts + 2 if thoughts else 0
    need = row.question_ids.shape[1] + max(source.max_length, thinking) + row.answer_ids.shape[1]
    if need > context:
        raise InputError(
            f"a row of {need} positions, the model has {context}; take fewer data.digits.num_operations or thoughts"
        )


def load_held_out(
    recipe: Recipe, tokenizer: Tokenizer, context: int, part: SplitName, count: int | None = None
) -> RowSet:
    """The first rows of validation or test. Raises `BadInput` (66)."""
    data = recipe.data
    if data.source in DOCUMENT_SOURCES:
        return of_documents(recipe, tokenizer, context, part, count)
    if data.source == "digits":
        made = DigitsDataset(HELD_OUT_EPOCH, data.digits, part, drop_last=data.chain_steps == "drop_last")
        return RowSet(
            made, generate_digit_examples(HELD_OUT_EPOCH, min(count or len(made), len(made)), data.digits, part), DIGIT
        )
    examples = (
        reasoning_load.load_held_out(data, part, count)
        if data.source == "catalog"
        else load_held_out_file(data, part, count)
    ).examples
    M = recipe.latents.num_latents if recipe.latents else 0
    made = ReasoningDataset(examples, tokenizer, data, max_positions=context, num_latents=M)
    return RowSet(made, made.examples, default_answer_matcher(data))


def load_held_out_file(data: DataConfig, part: SplitName, count: int | None = None) -> ExamplesFile:
    """The rows of data.valid or data.test."""
    path = data.valid if part == "valid" else data.test
    if path is None:
        raise InputError(f"data.{part}: absent; name the file of rows that are held out")
    return read_examples(path, data, count)


def default_answer_matcher(data: DataConfig) -> AnswerProtocol:
    """How an answer of this kind of data is judged during training."""
    if data.source == "digits":
        return DIGIT
    return default_protocol(data.format, text_answers=True) if has_text_answers(data) else CODI


def has_text_answers(data: DataConfig) -> bool:
    """Whether answers are no numbers, but the whole text of one."""
    return data.answer_type == "text" or (data.source == "catalog" and reasoning_load.get_answer_kind(data) != "number")
