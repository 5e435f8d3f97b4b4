"""The streams that a run is evaluated on: held-out data of its recipe, synthetic tasks, needles, texts and books.

Every item is read on a fork of the state before it, with and without weight updates. "levels" reads texts with parts of
the model switched off (Nested Learning, arXiv:2512.24695, Table 6).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from laconic.config.data import SplitName
from laconic.config.recipe import Recipe
from laconic.data.documents.dataset import DocumentDataset, tokenize_documents
from laconic.data.documents.load import load_documents as load_files
from laconic.data.documents.token_bytes import token_byte_lengths
from laconic.data.documents.tokenize import TokenArray
from laconic.data.synthetic.formal_languages import FormalLanguageDataset
from laconic.data.synthetic.needle_in_haystack import NeedleDataset
from laconic.errors import InputError
from laconic.evaluation.reasoning.question_sets import RECIPE_SPLITS
from laconic.evaluation.results_store import EvalItem, EvalJob, EvalMetadata
from laconic.evaluation.streams import metrics, texts
from laconic.evaluation.streams.evaluate import (
    CacheAsState,
    StreamCondition,
    as_stateful,
    build_metrics,
    count_level_updates,
    score_tokens,
)
from laconic.evaluation.suite import EvalRequest, describe_evaluation
from laconic.experiment.from_recipe import build_data
from laconic.experiment.load_run import LoadedRun
from laconic.interfaces import StatefulLM, TrainingData
from laconic.nested import state as fast_weights
from laconic.nested.ablations import build_ablations
from laconic.nested.hope.config import UNLIMITED_POSITIONS
from laconic.nested.hope.model import Hope

TEXT_STREAMS = ("ppl", "books", "levels")
SYNTHETIC_STREAMS = ("mqar", "copying", "continual_translation", "formal_languages")
STREAM_NAMES = (*SYNTHETIC_STREAMS, "needle", *TEXT_STREAMS)
SCORERS = {
    "mqar": metrics.score_mqar,
    "copying": metrics.score_copying,
    "continual_translation": metrics.score_translation,
    "formal_languages": metrics.score_languages,
    "needle": metrics.score_needle,
}
MAX_BATCH_TOKENS = 32_768
LONG_STRINGS = ((51, 100), (101, 200))  # shortest and longest strings of the further bins of a formal language
NEEDLE_LENGTHS = (128, 256, 512, 1024)  # tokens of a haystack
LONG_NEEDLE_LENGTHS = (4096, 8192, 16384)
NEEDLES_PER_CELL = 5


class StreamRequest(NamedTuple):
    """One evaluation of a run: a task's name, its stream and items, how many are read at once, and bytes of each id."""

    name: str
    stream: str
    source: TrainingData
    batch_size: int
    bytes_per_token: Tensor | None = None


def list_tasks(recipe: Recipe) -> tuple[str, ...]:
    """Return the tasks of a run, beside sets with classes: its held-out rows, and streams from its data."""
    source = recipe.data.source
    if source == "text":
        return (*RECIPE_SPLITS, "needle", *TEXT_STREAMS[: 3 if recipe.method == "hope" else 2])  # levels are hope's
    return (*RECIPE_SPLITS, source) if source in SYNTHETIC_STREAMS else ()


def build_stream_jobs(request: EvalRequest, run: LoadedRun, task: str) -> Iterator[EvalJob]:
    limit = request.limit
    for stream in build_requests(run, task, limit):
        variant = {} if stream.stream == stream.name else {"stream": stream.stream}
        key = {"data": stream.source.fingerprint}
        metadata = describe_evaluation(run, "streams", stream.name, limit=limit, variant=variant, key=key)
        conditions = list_conditions(as_stateful(run.parts.decoder), stream.stream)
        yield build_stream_job(metadata, stream, conditions, request.device)


def build_stream_job(
    metadata: EvalMetadata, stream: StreamRequest, conditions: Sequence[StreamCondition], device: torch.device
) -> EvalJob:
    """Return the evaluation of a stream under some conditions; books are read by the first condition's model."""
    _, kind, source, batch_size, bytes_per_token = stream
    rows_by_text = texts.group_rows_by_text(source) if kind in TEXT_STREAMS else {}
    names = list(rows_by_text)
    books = [texts.split_sections(rows, name) for name, rows in rows_by_text.items()] if kind == "books" else []

    def evaluate_rows(rows: Sequence[int]) -> list[list[EvalItem]]:
        return [[item] for item in evaluate_items(conditions, stream, rows, device)]

    def evaluate_books(indices: Sequence[int]) -> list[list[EvalItem]]:
        others = [books[(i + 1) % len(books)] if len(books) > 1 else None for i in indices]
        read_book = partial(texts.evaluate_book, conditions[0].model, source)
        return [read_book(books[i], other, device, bytes_per_token) for i, other in zip(indices, others, strict=True)]

    def evaluate_texts(indices: Sequence[int]) -> list[list[EvalItem]]:
        some = [rows_by_text[names[i]] for i in indices]
        read = {x.name: texts.read_passages(x, source, some, device, bytes_per_token) for x in conditions}
        return [[EvalItem(names[i], {x: read[x][b] for x in read})] for b, i in enumerate(indices)]

    if kind not in TEXT_STREAMS:
        return EvalJob(metadata, len(source), evaluate_rows, batch_size)
    if kind == "books":
        return EvalJob(metadata, len(books), evaluate_books)
    return EvalJob(metadata, len(names), evaluate_texts, batch_size if kind == "ppl" else 1)


def list_conditions(model: StatefulLM, stream: str) -> list[StreamCondition]:
    """Return the conditions of a stream: weight updates on and off, and for text the state carried and reset.

    Those of "levels" are the model, its ablations, and the model without updates. A plain decoder has one condition:
    its cache cannot be switched off and is always reset.
    """
    if stream == "levels":
        return name_ablations({"all levels": model, **build_ablations(cast(Hope, model))})
    if isinstance(model, CacheAsState):
        return [StreamCondition("lm", model, update_weights=False)]
    updates = (("learn", True), ("frozen", False))
    if stream != "ppl":
        return [StreamCondition(name, model, learn) for name, learn in updates]
    states = (("carry", True), ("reset", False))
    return [StreamCondition(f"{a}, {b}", model, learn, carry) for a, learn in updates for b, carry in states]


def name_ablations(models: Mapping[str, StatefulLM]) -> list[StreamCondition]:
    """Return one condition per model, and the first model without updates."""
    first = next(iter(models))
    conditions = [StreamCondition(name, model, True, True) for name, model in models.items()]
    return [*conditions, StreamCondition(f"{first}, frozen", models[first], False, True)]


def evaluate_items(
    conditions: Sequence[StreamCondition], stream: StreamRequest, rows: Sequence[int], device: torch.device
) -> list[EvalItem]:
    batch = texts.load_documents(stream.source, rows).to(device)
    results: list[dict[str, Mapping[str, Any]]] = [{} for _ in rows]
    for condition in conditions:
        state = condition.model.initial_state(batch.B)
        freeze_last = stream.stream == "needle"
        scores = score_tokens(condition.model, batch, state, condition.update_weights, freeze_last)
        score = SCORERS[stream.stream]
        state_bytes = fast_weights.num_bytes(scores.state) // batch.B
        for b, updates in enumerate(count_level_updates(scores.state)):
            sums = score(batch, b, scores.correct[b])
            results[b][condition.name] = build_metrics(sums, updates, state_bytes)
    return [EvalItem(name, result) for name, result in zip(batch.document_ids, results, strict=True)]


def build_requests(run: LoadedRun, name: str, limit: int | None) -> list[StreamRequest]:
    """Return the evaluations of a task name; "test" and "valid" are the recipe's own data."""
    recipe = run.recipe
    kind = recipe.data.source
    part = "valid" if name == "valid" else "test"
    stream = {"text": "ppl"}.get(kind, kind) if name in RECIPE_SPLITS else name
    if stream in TEXT_STREAMS:
        source = held_out_texts(run, part, limit)
        batch_size = 1 if isinstance(run.parts.decoder, Hope) else max(MAX_BATCH_TOKENS // source.max_length, 1)
        return [StreamRequest(name, stream, source, batch_size, token_byte_lengths(run.parts.tokenizer))]
    if stream == "needle":
        return [needle_request(run, limit)]
    source = build_data.load_held_out_rows(recipe, run.parts.tokenizer, UNLIMITED_POSITIONS, part, limit).source
    request = StreamRequest(name, stream, source, max(MAX_BATCH_TOKENS // source.max_length, 1))
    if stream != "formal_languages":
        return [request]
    requests = [request._replace(name=f"{name}-bin-0")]
    for n, (low, high) in enumerate(LONG_STRINGS, 1):
        strings = recipe.data.formal_languages.model_copy(update={"min_length": low, "max_length": high})
        long_source = FormalLanguageDataset(build_data.HELD_OUT_SEED, strings, part, limit)
        rows = max(MAX_BATCH_TOKENS // long_source.max_length, 1)
        requests.append(request._replace(name=f"{name}-bin-{n}", source=long_source, batch_size=rows))
    return requests


def held_out_texts(run: LoadedRun, part: SplitName, limit: int | None) -> DocumentDataset:
    """Return whole held-out texts in passages as long as training rows; of each text the first `limit` passages."""
    config = run.recipe.data.text
    documents, all_ids, _ = build_data.encode_documents(run.recipe, run.parts.tokenizer, part)
    ids = [text_ids[: None if limit is None else limit * config.row_tokens] for text_ids in all_ids]
    whole = {"segment_tokens": config.row_tokens, "min_segment_tokens": None, "max_segment_tokens": None}
    whole_rows = config.model_copy(update={"segment_lengths": "fixed", **whole})
    return DocumentDataset(documents, ids, whole_rows, run.recipe.seed, UNLIMITED_POSITIONS, fixed_segments=True)


def needle_request(run: LoadedRun, limit: int | None) -> StreamRequest:
    """Return facts hidden in filler and in the run's own held-out texts, in lengths that its context allows."""
    context = run.parts.decoder.config.max_position_embeddings
    books = tokenize_documents(load_files(run.recipe.data, "test")[0], run.parts.tokenizer)
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
