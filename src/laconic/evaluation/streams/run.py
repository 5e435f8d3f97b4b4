"""What a run is evaluated on as a stateful model: held-out data of its recipe, synthetic tasks, needles, books."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from laconic.config.data import SplitName
from laconic.data.documents.dataset import DocumentDataset, tokenize_documents
from laconic.data.documents.load import load_documents
from laconic.data.documents.token_bytes import token_byte_lengths
from laconic.data.documents.tokenize import TokenArray
from laconic.data.synthetic.formal_languages import FormalLanguageDataset
from laconic.data.synthetic.needle_in_haystack import NeedleDataset
from laconic.errors import InputError, UsageError
from laconic.evaluation.streams.evaluate import CacheAsState
from laconic.experiment import build_data
from laconic.experiment.load_run import LoadedRun
from laconic.interfaces import StatefulLM, TrainingData
from laconic.nested.ablations import build_ablations
from laconic.nested.hope.config import UNLIMITED_POSITIONS
from laconic.nested.hope.model import Hope

RECIPE_SPLITS = ("test", "valid")
STREAM_NAMES = ("mqar", "copying", "formal_languages", "needle", "ppl", "books", "levels")
MAX_BATCH_TOKENS = 32_768
TEXT_STREAMS = ("ppl", "books", "levels")
SYNTHETIC_STREAMS = ("mqar", "copying", "formal_languages")
LONG_STRING_BIN = {"min_length": 51, "max_length": 100}  # strings longer than those of training
NEEDLE_LENGTHS = (128, 256, 512, 1024)  # tokens of a haystack
LONG_NEEDLE_LENGTHS = (4096, 8192, 16384)
NEEDLES_PER_CELL = 5


class StreamRequest(NamedTuple):
    """One evaluation of a run.

    Attributes:
        name: Name of the task.
        stream: Which stream it is.
        source: Its items.
        batch_size: Items read at once.
        bytes_per_token: Bytes of each token id, for text.
    """

    name: str
    stream: str
    source: TrainingData
    batch_size: int
    bytes_per_token: Tensor | None = None


def stateful_model(run: LoadedRun) -> StatefulLM:
    """Return the model of a run; the state of a plain decoder is its KV cache."""
    decoder = run.parts.decoder
    return decoder if isinstance(decoder, Hope) else CacheAsState(decoder)


def ablated_models(run: LoadedRun) -> Mapping[str, StatefulLM]:
    """Return a model and its ablations by name; `UsageError` for a model without levels."""
    model = run.parts.decoder
    if not isinstance(model, Hope):
        raise UsageError(f"{run.folder}: task levels needs a run of method hope, this is {run.recipe.method}")
    return {"all levels": model, **build_ablations(model)}


def build_requests(run: LoadedRun, name: str, limit: int | None) -> list[StreamRequest]:
    """Return the evaluations of a task name; "test" and "valid" are the recipe's own data.

    Raises:
        InputError: The run has no such data.
    """
    recipe, kind, part = run.recipe, run.recipe.data.source, "valid" if name == "valid" else "test"
    stream = {"text": "ppl"}.get(kind, kind) if name in RECIPE_SPLITS else name
    if stream in TEXT_STREAMS:
        source = held_out_texts(run, part, limit)
        batch_size = 1 if isinstance(run.parts.decoder, Hope) else max(MAX_BATCH_TOKENS // source.max_length, 1)
        return [StreamRequest(name, stream, source, batch_size, token_byte_lengths(run.parts.tokenizer))]
    if stream == "needle":
        return [needle_request(run, limit)]
    if stream not in SYNTHETIC_STREAMS or kind != stream:
        raise InputError(
            f"--tasks {name}: {run.folder} was trained on data.source {kind}; its own tasks are test and valid"
        )
    source = build_data.load_held_out(recipe, run.parts.tokenizer, UNLIMITED_POSITIONS, part, limit).source
    request = StreamRequest(name, stream, source, max(MAX_BATCH_TOKENS // source.max_length, 1))
    if stream != "formal_languages":
        return [request]
    long_strings = recipe.data.formal_languages.model_copy(update=LONG_STRING_BIN)
    long_source = FormalLanguageDataset(build_data.HELD_OUT_SEED, long_strings, part, limit)
    return [
        request._replace(name=f"{name}-bin-0"),
        request._replace(name=f"{name}-bin-1", source=long_source),
    ]


def held_out_texts(run: LoadedRun, part: SplitName, limit: int | None) -> DocumentDataset:
    """Return whole held-out texts in passages as long as training rows; of each text the first `limit` passages."""
    config = run.recipe.data.text
    if run.recipe.data.source != "text":
        raise InputError(
            f"{run.folder} was trained on data.source {run.recipe.data.source}; this task needs data.source text"
        )
    documents, all_ids, _ = build_data.encode_documents(run.recipe, run.parts.tokenizer, part)
    ids = [text_ids[: None if limit is None else limit * config.row_tokens] for text_ids in all_ids]
    whole = config.model_copy(
        update={
            "segment_lengths": "fixed",
            "segment_tokens": config.row_tokens,
            "min_segment_tokens": None,
            "max_segment_tokens": None,
        }
    )
    return DocumentDataset(documents, ids, whole, run.recipe.seed, UNLIMITED_POSITIONS, fixed_segments=True)


def needle_request(run: LoadedRun, limit: int | None) -> StreamRequest:
    """Return facts hidden in filler and in the run's own held-out texts, in lengths that its context allows."""
    context = run.parts.decoder.config.max_position_embeddings
    if run.recipe.data.source != "text":
        raise InputError(
            f"{run.folder} was trained on data.source {run.recipe.data.source}; this task needs data.source text"
        )
    documents, _ = load_documents(run.recipe.data, "test")
    books = tokenize_documents(documents, run.parts.tokenizer)
    shortest = shortest_haystack(run, books)
    long_lengths = LONG_NEEDLE_LENGTHS if LONG_NEEDLE_LENGTHS[0] <= context < UNLIMITED_POSITIONS else ()
    lengths = tuple(n for n in (*NEEDLE_LENGTHS, *long_lengths) if shortest <= n <= context) or (shortest,)
    source = NeedleDataset(run.parts.tokenizer, books, lengths=lengths, items_per_cell=limit or NEEDLES_PER_CELL)
    return StreamRequest("needle", "needle", source, max(MAX_BATCH_TOKENS // source.max_length, 1))


def shortest_haystack(run: LoadedRun, books: Sequence[TokenArray]) -> int:
    """Return the shortest length that has room for every kind of item."""
    for n in NEEDLE_LENGTHS[:-1]:
        try:
            NeedleDataset(run.parts.tokenizer, books, lengths=(n,), depths=(0.5,), items_per_cell=1)
        except InputError:
            continue
        return n
    return NEEDLE_LENGTHS[-1]
