"""Load the training and held-out rows of a recipe."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from laconic.batches import ReasoningBatch, ReasoningExample
from laconic.config.data import DataConfig, SplitName, TextConfig
from laconic.config.methods import CompressionConfig
from laconic.config.recipe import COT_TEACHER_METHODS, DOCUMENT_SOURCES, FULL_CHAIN_METHODS, Recipe
from laconic.console import ProgressFn
from laconic.data.documents.dataset import DocumentDataset, permute_vocabulary, tokenize_documents
from laconic.data.documents.load import Document, load_documents
from laconic.data.documents.stateful_batches import StatefulBatches
from laconic.data.documents.tokenize import TokenArray
from laconic.data.reasoning import load as reasoning_load
from laconic.data.reasoning.answer_matching import DIGIT, AnswerProtocol, check_gold, default_protocol, pccot_protocol
from laconic.data.reasoning.dataset import ReasoningDataset, answer_prefix_ids
from laconic.data.reasoning.read_examples import ExamplesFile
from laconic.data.synthetic.continual_translation import ContinualTranslationDataset
from laconic.data.synthetic.digit_documents import DigitDocumentsDataset, build_digit_documents_tokenizer
from laconic.data.synthetic.digits import DigitsDataset, build_digits_tokenizer
from laconic.data.synthetic.fact_recall import FactRecallDataset
from laconic.data.synthetic.formal_languages import FormalLanguageDataset
from laconic.data.synthetic.mqar import MQARDataset
from laconic.data.synthetic.selective_copying import SelectiveCopyingDataset
from laconic.data.tokenizer import Tokenizer
from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.models.config import DecoderConfig

SPLIT_NAMES = get_args(SplitName)
SyntheticData = (
    FactRecallDataset | MQARDataset | SelectiveCopyingDataset | ContinualTranslationDataset | FormalLanguageDataset
)
SYNTHETIC_TASKS: Mapping[str, tuple[type[SyntheticData], str]] = {
    "recall": (FactRecallDataset, "recall documents"),
    "mqar": (MQARDataset, "mqar documents"),
    "copying": (SelectiveCopyingDataset, "documents to copy from"),
    "continual_translation": (ContinualTranslationDataset, "documents of languages"),
    "formal_languages": (FormalLanguageDataset, "strings"),
}  # data set, and what its rows are called in messages
HELD_OUT_SEED = 0  # of generated held-out rows, which are the same for every run


class RowSet(NamedTuple):
    """Rows of a split; documents and generated rows are no text examples, and documents have no protocol of answers."""

    source: ReasoningDataset | DigitsDataset | DocumentDataset | StatefulBatches | SyntheticData
    examples: Sequence[ReasoningExample]
    protocol: AnswerProtocol | None
    notes: tuple[str, ...] = ()


def load_training_rows(
    recipe: Recipe, tokenizer: Tokenizer, context: int, progress: ProgressFn | None = None
) -> RowSet:
    data = recipe.data
    if data.source in DOCUMENT_SOURCES:
        return load_documents_split(recipe, tokenizer, context, "train", progress=progress)
    if data.source == "digits":
        digits = build_digits(data, tokenizer, recipe.seed, "train")
        check_row_lengths(digits, recipe, context)
        return RowSet(digits, (), DIGIT)
    file = reasoning_load.load_training_examples(data, recipe.reads_documents)
    return encode_training_rows(recipe, tokenizer, file, context, progress)


def encode_training_rows(
    recipe: Recipe, tokenizer: Tokenizer, file: ExamplesFile, context: int, progress: ProgressFn | None = None
) -> RowSet:
    """Encode training examples, and check that a method has the chains and documents that it learns from."""
    rows = encode_examples(recipe, tokenizer, file.examples, context, recipe.train.batch_size, progress)
    check_chains(recipe, rows)
    if recipe.reads_documents and not rows.counts.num_documents:
        raise InputError(
            "no row has a document, which the table [compression] is for; add a field document (a string), name yours: "
            'data.columns = { document = "FIELD" }, or remove the table'
        )
    protocol = choose_default_protocol(recipe.data)
    notes = [*file.notes, *rows.counts.describe(recipe.num_latents), *describe_answers(protocol, rows.examples)]
    if rows.counts.num_documents and not recipe.reads_documents:
        notes.append("documents of rows are not read; a table [compression] makes summary vectors of them")
    return RowSet(rows, rows.examples, protocol, tuple(notes))


def encode_examples(
    recipe: Recipe,
    tokenizer: Tokenizer,
    examples: Sequence[ReasoningExample],
    context: int,
    min_rows: int = 1,
    progress: ProgressFn | None = None,
) -> ReasoningDataset:
    return ReasoningDataset(
        examples,
        tokenizer,
        recipe.data,
        max_positions=context,
        num_latents=recipe.num_latents,
        min_rows=min_rows,
        count_memory_positions=memory_counter(recipe),
        progress=progress,
    )


def check_chains(recipe: Recipe, rows: ReasoningDataset) -> None:
    """Raise `InputError` if no row has a chain for a method that learns from chains."""
    learns_hidden = recipe.distillation is not None and recipe.distillation.hidden_weight > 0
    needs_chains = recipe.method in (*FULL_CHAIN_METHODS, "kava") or (
        recipe.method in COT_TEACHER_METHODS and learns_hidden
    )
    if not needs_chains or rows.max_length:
        return
    if any(example.steps for example in rows.examples):
        raise InputError(
            'every chain has one step, which data.chain_steps = "drop_last" leaves out; if it is a text of several, '
            'set data.chain_split = "spaces" or "sentences", else data.chain_steps = "all"'
        )
    files = ", ".join(Path(name).name for name in recipe.data.name or (str(recipe.data.path),))
    raise InputError(
        f"{files}: no row has a chain, from which method {recipe.method} learns; add a field steps (a list of "
        'strings), or cot or rationale (a text), name yours: data.columns = { cot = "FIELD" }, or begin answers with '
        "<think>CHAIN</think>"
    )


def memory_counter(recipe: Recipe) -> Callable[[int], int] | None:
    """Return the map from a document's tokens to the positions of its memory; None if documents are not read."""
    config, segment_tokens = recipe.compression, recipe.data.segment_tokens
    if config is None or not recipe.reads_documents:
        return None
    return lambda num_tokens: -(-num_tokens // segment_tokens) * config.fixed_length + 1  # and bos


def build_digits(data: DataConfig, tokenizer: Tokenizer, seed: int, part: SplitName) -> DigitsDataset:
    """Build a split of the digits task, over documents if they are configured."""
    drop_last_step = data.chain_steps == "drop_last"
    with_documents = build_digit_documents_tokenizer()  # whose first words are those of the other
    if data.digits.document_tokens is not None:
        check_synthetic_tokenizer(tokenizer, with_documents, "documents of digits")
        return DigitDocumentsDataset(seed, data.digits, part, drop_last_step=drop_last_step)
    if tokenizer.fingerprint != with_documents.fingerprint:
        check_synthetic_tokenizer(tokenizer, build_digits_tokenizer(), "digits")
    return DigitsDataset(seed, data.digits, part, drop_last_step=drop_last_step)


def describe_answers(protocol: AnswerProtocol, examples: Sequence[ReasoningExample]) -> list[str]:
    """Return a note on answers that are trained but could not be judged, such as those that are not plain numbers."""
    unclear = [example for example in examples if not protocol.is_valid_gold(example.answer)]
    if not unclear:
        return []
    first = unclear[0]
    count = f"{len(unclear):,} row{'' if len(unclear) == 1 else 's'}"
    example = f"such as {first.answer[:40]!r} of {first.label}"
    return [f"{count} whose answer is not {protocol.expected_answer}, {example}; held-out rows must have one"]


def load_documents_split(
    recipe: Recipe,
    tokenizer: Tokenizer,
    context: int,
    part: SplitName,
    max_rows: int | None = None,
    progress: ProgressFn | None = None,
) -> RowSet:
    """Load the documents of a split; held-out documents have fixed segment lengths."""
    data, is_train = recipe.data, part == "train"
    seed = recipe.seed if is_train else HELD_OUT_SEED
    if data.source != "text":
        dataset, name = SYNTHETIC_TASKS[data.source]
        check_synthetic_tokenizer(tokenizer, dataset.build_tokenizer(), name)
        return RowSet(dataset(seed, getattr(data, data.source), part, max_rows), (), None)
    documents, ids, notes = encode_documents(recipe, tokenizer, part, progress)
    rows = build_document_rows(recipe, documents, ids, context, part, max_rows)
    note = f"{len(documents):,} documents, {sum(map(len, ids)):,} tokens in all, {len(rows):,} rows"
    return RowSet(rows, (), None, (*notes, note))


def build_document_rows(
    recipe: Recipe,
    documents: Sequence[Document],
    ids: Sequence[TokenArray],
    context: int,
    part: SplitName,
    max_rows: int | None = None,
) -> DocumentDataset | StatefulBatches:
    is_train = part == "train"
    if recipe.train.stateful:
        lanes = recipe.train.batch_size
        if not is_train:
            lanes = min(recipe.validation.batch_size if recipe.validation else lanes, len(documents))
        seed = recipe.seed if is_train else HELD_OUT_SEED
        return StatefulBatches(documents, ids, recipe.data.text.row_tokens, lanes, seed, max_rows)
    rows = DocumentDataset(
        documents,
        ids,
        segment_config(recipe),
        recipe.seed,
        max_segment_tokens(recipe, context),
        fixed_segments=not is_train,
        pad_to_row_tokens=is_train and recipe.train.parallel == "fsdp",
        max_rows=max_rows,
        min_rows=recipe.train.batch_size if is_train else 1,
    )
    if is_train and recipe.method == "autocompressor" and rows.max_length <= rows.boundaries.shortest_segment:
        raise InputError(
            f"the longest document has {rows.max_length:,} tokens, one segment, so no text would be read after a "
            "summary; give longer documents, or lower data.text.segment_tokens"
        )
    return rows


def encode_documents(
    recipe: Recipe, tokenizer: Tokenizer, part: SplitName, progress: ProgressFn | None = None
) -> tuple[list[Document], list[TokenArray], list[str]]:
    """Return the documents of a split, their token ids with vocabulary drift, and notes."""
    documents, notes = load_documents(recipe.data, part)
    ids = tokenize_documents(documents, tokenizer, progress)
    every = recipe.data.text.vocabulary_drift_every
    if every:
        vocab_size = tokenizer.backend.get_vocab_size(with_added_tokens=False)
        key = (recipe.seed if part == "train" else HELD_OUT_SEED, SPLIT_NAMES.index(part))
        ids = [permute_vocabulary(document, every, vocab_size, (*key, d)) for d, document in enumerate(ids)]
    return documents, ids, notes


def segment_config(recipe: Recipe) -> TextConfig:
    """Return how documents are cut; a nested model reads a row as one segment."""
    text = recipe.data.text
    if recipe.method != "hope":
        return text
    limits = {"min_segment_tokens": None, "max_segment_tokens": None}
    return text.model_copy(update={"segment_lengths": "fixed", "segment_tokens": text.row_tokens, **limits})


def max_segment_tokens(recipe: Recipe, context: int) -> int:
    """Return the positions left for a segment beside the longest memory, new summaries, a trigger and bos."""
    config, text = recipe.compression, recipe.data.text
    if config is None or config.summary_positions == "zero":
        return context
    slots = max_memory_slots(config, text.row_tokens // text.mean_segment_tokens - 1)
    return context - slots - config.max_vectors - 2


def max_memory_slots(config: CompressionConfig, num_segments: int) -> int:
    blocks = min(num_segments, 1) if config.memory_policy == "replace" else num_segments
    return (config.max_memory_vectors or blocks * config.max_vectors) if blocks else 0


def check_synthetic_tokenizer(tokenizer: Tokenizer, expected: Tokenizer, rows: str) -> None:
    """Raise CorruptArtifactError unless the tokenizer is that of the generated rows, which are made of its ids."""
    if tokenizer.fingerprint != expected.fingerprint:
        raise CorruptArtifactError(
            f"generated {rows} need the tokenizer {expected.fingerprint}, not {tokenizer.fingerprint}; "
            "use a file of rows"
        )


def check_row_lengths(data: DigitsDataset, recipe: Recipe, context: int) -> None:
    """Raise InputError if a generated row, with its memory and its chain or latents, exceeds the context."""
    row = data.batch([0], 0, 0)
    latents = recipe.num_latent_positions
    length = row.question_ids.shape[1] + max(data.max_length, latents) + row.answer_ids.shape[1]
    count_positions = memory_counter(recipe)
    if row.document_ids is not None and count_positions is not None:
        length += count_positions(row.document_ids.shape[1])
    if length > context:
        raise InputError(f"a row has {length} positions, the model {context}; lower data.digits.num_operations")


def load_held_out_rows(
    recipe: Recipe, tokenizer: Tokenizer, context: int, part: SplitName, max_rows: int | None = None
) -> RowSet:
    data = recipe.data
    if data.source in DOCUMENT_SOURCES:
        return load_documents_split(recipe, tokenizer, context, part, max_rows)
    if data.source == "digits":
        digits = build_digits(data, tokenizer, HELD_OUT_SEED, part)
        num_rows = min(max_rows or len(digits), len(digits))
        return RowSet(digits, digits.generate_examples(num_rows), DIGIT)
    file = reasoning_load.load_held_out(data, part, max_rows)
    rows = encode_examples(recipe, tokenizer, file.examples, context)
    notes = rows.counts.describe_left_out(len(file.problems))
    return RowSet(rows, rows.examples, choose_default_protocol(data), notes)


def load_validation_questions(recipe: Recipe, tokenizer: Tokenizer, config: DecoderConfig) -> RowSet:
    """Load the questions of validation, and check that answers can be judged and fit the model."""
    assert recipe.validation is not None
    context, max_tokens = config.max_position_embeddings, recipe.validation.max_tokens
    rows = load_held_out_rows(recipe, tokenizer, context, "valid", recipe.validation.max_rows)
    assert rows.protocol is not None
    check_gold(rows.protocol, rows.examples, "data.valid", 'set data.answer_type = "text", or correct the row')
    questions = rows.source.batch(range(len(rows.examples)), 0, 0)
    assert isinstance(questions, ReasoningBatch)
    prompt = int(questions.question_mask.sum(1).max()) + recipe.num_latent_positions
    note = describe_short_answers(recipe, questions)
    if recipe.method not in FULL_CHAIN_METHODS:  # the others write what precedes the answer
        prompt += len(answer_prefix_ids(tokenizer, recipe.data))
    if config.position_encoding == "table" and prompt + max_tokens > context:
        raise UsageError(
            f"validation.max_tokens {max_tokens}: exceeds the {context} positions of the model after a prompt of "
            f"{prompt}; lower it to {max(0, context - prompt)}"
        )
    return rows._replace(notes=(*rows.notes, *note))


def describe_short_answers(recipe: Recipe, questions: ReasoningBatch) -> list[str]:
    """Return a note if `validation.max_tokens` cuts answers of the held-out rows, or chains that are written out."""
    config = recipe.validation
    assert config is not None
    lengths = questions.answer_mask.sum(1)
    part = "answer"
    metric = "accuracy"
    writes_chain = recipe.method in FULL_CHAIN_METHODS
    if writes_chain or (config.with_cot and recipe.method in COT_TEACHER_METHODS):
        lengths = lengths + questions.chain_mask.sum(1)
        part = "chain and answer"
        metric = "accuracy" if writes_chain else "teacher_accuracy"
    longest = int(lengths.max())
    if longest <= config.max_tokens:
        return []
    return [
        f"validation.max_tokens {config.max_tokens} cuts the longest {part} of the held-out rows, {longest} tokens, "
        f"which can lower {metric}; set {longest} or more"
    ]


def check_validation(recipe: Recipe, tokenizer: Tokenizer, config: DecoderConfig) -> tuple[str, ...]:
    """Check held-out questions that are local, and return notes; of local documents, check that some are held out."""
    data = recipe.data
    if recipe.validation is None:
        return ()
    if data.source in DOCUMENT_SOURCES:
        if data.path is not None and Path(data.path).is_file():
            load_documents(data, "valid")
        return ()
    if data.source != "catalog" or (data.valid is not None and reasoning_load.is_local(data.valid, data, "valid")):
        return load_validation_questions(recipe, tokenizer, config).notes
    return ()


def choose_default_protocol(data: DataConfig) -> AnswerProtocol:
    """Return how answers are judged, in validation and by default in evaluation."""
    protocol = default_protocol(data.format, text_answers=has_text_answers(data))
    return pccot_protocol(data.answer_prompt) if protocol.name == "pccot" else protocol


def has_text_answers(data: DataConfig) -> bool:
    return data.answer_type == "text" or (data.source == "catalog" and reasoning_load.get_answer_kind(data) != "number")
