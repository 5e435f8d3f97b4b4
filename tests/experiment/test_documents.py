"""Recipes of documents: what is trained on and held out, with which tokenizer, and the room a segment has."""

import json
from pathlib import Path

import pytest

from laconic.batches import DocumentBatch
from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.experiment.build_data import load_held_out, load_training_rows, max_segment_tokens
from laconic.experiment.build_model import load_model_tokenizer

SMALL = """method = "autocompressor"
seed = 5
[model]
family = "llama"
tokenizer = "bytes"
max_position_embeddings = 512
[compression]
max_vectors = 4
[data]
source = "text"
path = "books.jsonl"
text = { row_tokens = 240, segment_tokens = 60 }
[train]
steps = 2
batch_size = 4
learning_rate = 1e-3
trainable = "full"
"""
RECALL = ("data.source=recall", "model.tokenizer=recall", "data.recall.train_rows=50")


def recipe(tmp_path: Path, *more: str) -> Recipe:
    rows = [{"book": f"b{i % 10}", "text": f"{i} " + chr(97 + i % 26) * 90} for i in range(60)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = SMALL.replace('path = "books.jsonl"\n', "") if any("data.source" in key for key in more) else SMALL
    (tmp_path / "small.toml").write_text(text)
    return load_recipe(tmp_path / "small.toml", more)[0]


def test_books_are_read_and_held_out(tmp_path: Path) -> None:
    found = recipe(tmp_path)
    tokenizer = load_model_tokenizer(found.model)
    rows, held = load_training_rows(found, tokenizer, 512), load_held_out(found, tokenizer, 512, "valid")
    first, same, other = (rows.source.batch([0, 1], 0, step) for step in (0, 0, 1))
    assert isinstance(first, DocumentBatch)
    assert isinstance(same, DocumentBatch)
    assert isinstance(other, DocumentBatch)
    assert first.segment_ends == same.segment_ends != other.segment_ends
    kept = held.source.batch(range(len(held.source)), 0, 3)
    assert isinstance(kept, DocumentBatch)
    assert kept.segment_ends == (60, 120, 180, 240)
    books = [{name.partition("@")[0] for name in each.ids} for each in (rows.source.batch(range(24), 0, 0), kept)]
    assert books[0].isdisjoint(books[1])
    assert rows.notes[-1] == "8 documents of 4,536 tokens, 24 rows"
    assert "valid: 1 documents held out" in rows.notes[0]
    assert len(load_held_out(found, tokenizer, 512, "test", 2).source) == 2
    with pytest.raises(InputError, match="24 rows of 240 tokens in 8 documents, fewer than a batch of 100"):
        load_training_rows(recipe(tmp_path, "train.batch_size=100"), tokenizer, 512)


def test_recall_has_its_own_tokenizer(tmp_path: Path) -> None:
    found = recipe(tmp_path, *RECALL)
    tokenizer = load_model_tokenizer(found.model)
    rows, held = load_training_rows(found, tokenizer, 512), load_held_out(found, tokenizer, 512, "valid", 30)
    assert (len(rows.source), len(held.source), tokenizer.vocab_size) == (50, 30, 299)
    batch = rows.source.batch([3], 0, 0)
    assert isinstance(batch, DocumentBatch)
    assert batch.num_facts is not None
    with pytest.raises(
        CorruptArtifactError, match=r"generated recall documents need the tokenizer .*; take a file of rows"
    ):
        load_training_rows(found, build_byte_tokenizer(), 512)


@pytest.mark.parametrize(
    ("more", "room"),
    [
        ((), 512 - 3 * 4 - 4 - 2),  # four segments: the last reads the vectors of three, and room for its own
        (("compression.memory_policy=replace",), 512 - 4 - 4 - 2),
        (("compression.memory_policy=fifo", "compression.max_memory_vectors=20"), 512 - 20 - 4 - 2),
        (("compression.summary_positions=zero",), 512),
    ],
)
def test_room_of_a_segment(more: tuple[str, ...], room: int, tmp_path: Path) -> None:
    assert max_segment_tokens(recipe(tmp_path, *more), 512) == room


def test_segments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    found = recipe(tmp_path)
    with pytest.raises(UsageError, match=r"lengths of 60 to 61 tokens leave nothing to draw for 3 seg"):
        load_training_rows(found, load_model_tokenizer(found.model), 79)


def test_a_window_of_one_is_refused_at_its_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        recipe(tmp_path, "data.text.segments_per_window=1")
    assert str(error.value) == (
        "data.text.segments_per_window=1: 1 leaves no segment that reads a summary inside its own window, so nothing would learn to "
        "compress; use 2 or more"
    )


def test_documents_are_for_methods_that_read(tmp_path: Path) -> None:
    asked = (
        r'data\.kind: "text" with method nocot: documents, of kind text or recall or mqar or copying or languages, are '
    )
    with pytest.raises(UsageError, match=asked):
        recipe(tmp_path, "method=nocot")
    with pytest.raises(UsageError, match="its documents have no segments to make vectors of; take text or recall"):
        recipe(tmp_path, "data.source=mqar")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            ("compression.summary=autoregressive", "compression.length_policy=nested_dropout"),
            'generator "self" and length "nested"',
        ),
        (("compression.memory_policy=budgeted", "compression.max_memory_vectors=200"), 'memory "budgeted"'),
    ],
)
def test_shards_need_equal_passes_on_every_rank(tmp_path: Path, keys: tuple[str, ...], why: str) -> None:
    said = r'train\.parallel=fsdp: "fsdp": ranks would make unequal numbers of passes with '
    with pytest.raises(UsageError, match=f"{said}{why}, and wait for ever; take "):
        recipe(tmp_path, "train.parallel=fsdp", *keys)
    recipe(tmp_path, "train.parallel=ddp", *keys)
    for fine in (
        (),
        ("compression.summary=autoregressive", "compression.length_policy=fixed"),
        ("compression.length_policy=stop_head",),
    ):
        recipe(tmp_path, "train.parallel=fsdp", *fine)


@pytest.mark.parametrize(
    ("kind", "words", "first", "said"),
    [
        ("mqar", "mqar", "mqar-train-000000", "mqar documents"),
        ("copying", "mqar", "copying-train-000000", "documents to copy from"),
        ("languages", "languages", "parity-train-000000", "strings"),
    ],
)
def test_generated_streams_have_a_tokenizer_of_their_own(
    tmp_path: Path, kind: str, words: str, first: str, said: str
) -> None:
    asked = ("method=plain", f"data.source={kind}", f"model.tokenizer={words}", f"data.{kind}.rows=50")
    found = recipe(tmp_path, *asked)
    tokenizer = load_model_tokenizer(found.model)
    rows, held = load_training_rows(found, tokenizer, 512), load_held_out(found, tokenizer, 512, "test", 20)
    assert (len(rows.source), len(held.source)) == (50, 20)
    assert rows.source.batch([0], 0, 0).ids == (first,)
    other = recipe(tmp_path, "seed=6", *asked)
    assert load_training_rows(other, tokenizer, 512).source.fingerprint != rows.source.fingerprint
    assert load_held_out(other, tokenizer, 512, "test", 20).source.fingerprint == held.source.fingerprint
    with pytest.raises(CorruptArtifactError, match=f"generated {said} need the tokenizer "):
        load_training_rows(found, build_byte_tokenizer(), 512)


def test_a_text_drifts_after_so_many_tokens(tmp_path: Path) -> None:
    plain, moving = (recipe(tmp_path, *more) for more in ((), ("data.text.vocabulary_drift_every=100",)))
    one, other = (
        load_training_rows(each, build_byte_tokenizer(), 512).source.batch(range(24), 0, 0) for each in (plain, moving)
    )
    assert isinstance(one, DocumentBatch)
    assert isinstance(other, DocumentBatch)
    assert one.ids == other.ids
    assert not one.input_ids.equal(other.input_ids)
    map_of = dict(zip(one.input_ids[0, :100].tolist(), other.input_ids[0, :100].tolist(), strict=True))
    assert [map_of[id] for id in one.input_ids[0, :100].tolist()] == other.input_ids[0, :100].tolist()
    assert int(other.input_ids.max()) < 256
