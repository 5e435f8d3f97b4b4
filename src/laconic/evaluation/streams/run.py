"""A run as streams ask it: itself as a learner, and what it reads: its recipe's own data, tasks, needles, books."""

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
from laconic.evaluation.streams.tasks import StreamName
from laconic.experiment import build_data
from laconic.experiment.load_run import LoadedRun
from laconic.interfaces import StatefulLM, TrainingData
from laconic.nested.ablations import build_ablations
from laconic.nested.hope.config import UNLIMITED_POSITIONS
from laconic.nested.hope.model import Hope

RECIPE_SPLITS = ("test", "valid")
STREAM_NAMES = ("mqar", "copying", "formal_languages", "needle", "ppl", "books", "levels")
MAX_BATCH_TOKENS = 32_768  # tokens of items read at once
SYNTHETIC_STREAMS: dict[str, StreamName] = {
    "mqar": "mqar",
    "copying": "copying",
    "formal_languages": "formal_languages",
}
LONG_STRING_BIN = {"min_length": 51, "max_length": 100}  # lengths of strings beyond those of training
NEEDLE_LENGTHS = (128, 256, 512, 1024)  # tokens of a haystack, of models that see no further: small ones
LONG_NEEDLE_LENGTHS = (4096, 8192, 16384)
NEEDLES_PER_CELL = 5  # needles of a cell


class StreamRequest(NamedTuple):
    """What is asked of a run under one name: which stream it is, its items, how many at once, bytes of its ids."""

    name: str
    stream: StreamName
    source: TrainingData
    batch_size: int
    bytes_per_token: Tensor | None = None


def stateful_model(run: LoadedRun) -> StatefulLM:
    """The model of a run; a plain decoder is heard with its cache for a state."""
    decoder = run.parts.decoder
    return decoder if isinstance(decoder, Hope) else CacheAsState(decoder)


def ablated_models(run: LoadedRun) -> Mapping[str, StatefulLM]:
    """A model, and the same with each of its parts taken out in turn. Raises `Usage` (2) for one that has no levels."""
    model = run.parts.decoder
    if not isinstance(model, Hope):
        raise UsageError(f"{run.folder}: levels are of method hope, this is {run.recipe.method}; leave them out")
    return {"all levels": model, **build_ablations(model)}


def build_requests(run: LoadedRun, name: str, count: int | None) -> list[StreamRequest]:
    """The items of a name; test and valid are the recipe's own data. Raises `BadInput` (66) where it has none."""
    recipe, kind, part = run.recipe, run.recipe.data.source, "valid" if name == "valid" else "test"
    stream = {"text": "ppl"}.get(kind, kind) if name in RECIPE_SPLITS else name
    if stream in ("ppl", "books", "levels"):
        source = held_out_texts(run, part, count)
        bytes_of = token_byte_lengths(run.parts.tokenizer)
        batch = 1 if isinstance(run.parts.decoder, Hope) else max(MAX_BATCH_TOKENS // source.max_length, 1)
        return [StreamRequest(name, "ppl", source, batch, bytes_of)]
    if stream == "needle":
        return [needle_request(run, count)]
    if stream not in SYNTHETIC_STREAMS or kind != stream:
        raise InputError(
            f"--tasks {name}: {run.folder} is a run of data.source {kind}; its own sets are test and valid"
        )
    made = build_data.load_held_out(recipe, run.parts.tokenizer, UNLIMITED_POSITIONS, part, count).source
    found = [StreamRequest(name, SYNTHETIC_STREAMS[stream], made, max(MAX_BATCH_TOKENS // made.max_length, 1))]
    if stream == "formal_languages":
        far = FormalLanguageDataset(
            build_data.HELD_OUT_EPOCH, recipe.data.formal_languages.model_copy(update=LONG_STRING_BIN), part, count
        )
        found = [
            found[0]._replace(name=f"{name}-bin-0"),
            StreamRequest(f"{name}-bin-1", "formal_languages", far, found[0].batch_size),
        ]
    return found


def held_out_texts(run: LoadedRun, part: SplitName, count: int | None) -> DocumentDataset:
    """Held-out texts whole, in stretches as long as those of training; of each the first `count`."""
    how = run.recipe.data.text
    if run.recipe.data.source != "text":
        raise InputError(f"{run.folder} is a run of data.source {run.recipe.data.source}; it has no texts of its own")
    found, every, _ = build_data.encode_documents(run.recipe, run.parts.tokenizer, part)
    ids = [each[: None if count is None else count * how.row_tokens] for each in every]
    whole = how.model_copy(
        update={
            "segment_lengths": "fixed",
            "segment_tokens": how.row_tokens,
            "min_segment_tokens": None,
            "max_segment_tokens": None,
        }
    )
    return DocumentDataset(found, ids, whole, run.recipe.seed, UNLIMITED_POSITIONS, fixed_segments=True)


def needle_request(run: LoadedRun, count: int | None) -> StreamRequest:
    """Facts hidden in a filler and in the run's own held-out texts, in lengths that its positions allow."""
    limit = run.parts.decoder.config.max_position_embeddings
    if run.recipe.data.source != "text":
        raise InputError(f"{run.folder} is a run of data.source {run.recipe.data.source}; it has no texts of its own")
    found, _ = load_documents(run.recipe.data, "test")
    books = tokenize_documents(found, run.parts.tokenizer)
    least = shortest_haystack(run, books)
    deep = LONG_NEEDLE_LENGTHS if LONG_NEEDLE_LENGTHS[0] <= limit < UNLIMITED_POSITIONS else ()
    lengths = tuple(n for n in (*NEEDLE_LENGTHS, *deep) if least <= n <= limit) or (least,)
    source = NeedleDataset(run.parts.tokenizer, books, lengths=lengths, items_per_cell=count or NEEDLES_PER_CELL)
    return StreamRequest("needle", "needle", source, max(MAX_BATCH_TOKENS // source.max_length, 1))


def shortest_haystack(run: LoadedRun, books: Sequence[TokenArray]) -> int:
    """The first of the lengths that leaves a haystack to every kind of item. Raises `BadInput` (66) where none does."""
    for n in NEEDLE_LENGTHS[:-1]:
        try:
            NeedleDataset(run.parts.tokenizer, books, lengths=(n,), depths=(0.5,), items_per_cell=1)
        except InputError:
            continue
        return n
    return NEEDLE_LENGTHS[-1]
