"""Recipes of documents: training and held-out rows, tokenizers, and the largest segment that fits."""

import json
from pathlib import Path

import pytest

from laconic.batches import DocumentBatch
from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.experiment.from_recipe.build_data import load_held_out_rows, load_training_rows, max_segment_tokens
from laconic.experiment.from_recipe.build_model import load_model_tokenizer

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


def test_load_text_rows_and_held_out_books(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    tokenizer = load_model_tokenizer(config.model)
    rows, held_out = load_training_rows(config, tokenizer, 512), load_held_out_rows(config, tokenizer, 512, "valid")
    first, same, other = (rows.source.batch([0, 1], 0, step) for step in (0, 0, 1))
    assert isinstance(first, DocumentBatch)
    assert isinstance(same, DocumentBatch)
    assert isinstance(other, DocumentBatch)
    assert first.segment_ends == same.segment_ends != other.segment_ends
    valid_batch = held_out.source.batch(range(len(held_out.source)), 0, 3)
    assert isinstance(valid_batch, DocumentBatch)
    assert valid_batch.segment_ends == (60, 120, 180, 240)
    books = [
        {name.partition("@")[0] for name in batch.ids} for batch in (rows.source.batch(range(24), 0, 0), valid_batch)
    ]
    assert books[0].isdisjoint(books[1])
    assert rows.notes[-1] == "8 documents, 4,536 tokens in all, 24 rows"
    assert "valid: 1 document held out" in rows.notes[0]
    assert len(load_held_out_rows(config, tokenizer, 512, "test", 2).source) == 2
    with pytest.raises(InputError, match="24 rows of 240 tokens, fewer than a batch of 100"):
        load_training_rows(recipe(tmp_path, "train.batch_size=100"), tokenizer, 512)
    long_segments = ("data.text.row_tokens=2000", "data.text.segment_tokens=1000", "data.text.segment_lengths=fixed")
    with pytest.raises(InputError, match="the longest document has 567 tokens, one segment"):
        load_training_rows(recipe(tmp_path, *long_segments), tokenizer, 512)


def test_load_fact_recall_needs_its_tokenizer(tmp_path: Path) -> None:
    config = recipe(tmp_path, *RECALL)
    tokenizer = load_model_tokenizer(config.model)
    rows, held_out = load_training_rows(config, tokenizer, 512), load_held_out_rows(config, tokenizer, 512, "valid", 30)
    assert (len(rows.source), len(held_out.source), tokenizer.vocab_size) == (50, 30, 299)
    batch = rows.source.batch([3], 0, 0)
    assert isinstance(batch, DocumentBatch)
    assert batch.num_facts is not None
    with pytest.raises(CorruptArtifactError, match="generated recall documents need the tokenizer"):
        load_training_rows(config, build_byte_tokenizer(), 512)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), 512 - 3 * 4 - 4 - 2),  # of four segments the last reads the vectors of three and writes its own
        (("compression.memory_policy=replace",), 512 - 4 - 4 - 2),
        (("compression.memory_policy=fifo", "compression.max_memory_vectors=20"), 512 - 20 - 4 - 2),
        (("compression.summary_positions=zero",), 512),
    ],
)
def test_max_segment_tokens(more: tuple[str, ...], expected: int, tmp_path: Path) -> None:
    assert max_segment_tokens(recipe(tmp_path, *more), 512) == expected


def test_segments_that_do_not_fit_the_model(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    with pytest.raises(UsageError, match=r"lengths of 60 to 61 tokens leave nothing to draw for 3 seg"):
        load_training_rows(config, load_model_tokenizer(config.model), 79)


def test_window_of_one_segment(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.text\.segments_per_window=1"):
        recipe(tmp_path, "data.text.segments_per_window=1")


def test_document_sources_go_with_document_methods(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.source.*nocot"):
        recipe(tmp_path, "method=nocot")
    with pytest.raises(UsageError, match=r"data\.source.*no segments"):
        recipe(tmp_path, "data.source=mqar")


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        (
            ("compression.summary=autoregressive", "compression.length_policy=nested_dropout"),
            'length_policy "nested_dropout"',
        ),
        (("compression.memory_policy=budgeted", "compression.max_memory_vectors=200"), 'memory_policy "budgeted"'),
    ],
)
def test_fsdp_needs_equal_passes_on_every_rank(tmp_path: Path, keys: tuple[str, ...], cause: str) -> None:
    with pytest.raises(UsageError, match=f"train.parallel=fsdp.*{cause}"):
        recipe(tmp_path, "train.parallel=fsdp", *keys)
    recipe(tmp_path, "train.parallel=ddp", *keys)
    for fine in (
        (),
        ("compression.summary=autoregressive", "compression.length_policy=fixed"),
        ("compression.length_policy=stop_head",),
    ):
        recipe(tmp_path, "train.parallel=fsdp", "train.reshard=true", *fine)
    load_recipe("coconut-gpt2-aug", ["train.parallel=fsdp", "train.reshard=true"])
    for key in ("coconut.pad_latent_to_max=false", "coconut.uniform_stage_prob=0.1"):
        with pytest.raises(UsageError, match=r"train\.parallel=fsdp.*unequal numbers of passes"):
            load_recipe("coconut-gpt2-aug", ["train.parallel=fsdp", key])
    load_recipe("hope-attention-tiny", ["train.parallel=fsdp"])
    with pytest.raises(UsageError, match=r"train\.reshard=true"):
        load_recipe("hope-attention-tiny", ["train.parallel=fsdp", "train.reshard=true"])


@pytest.mark.parametrize(
    ("source", "tokenizer_name", "first", "rows_name"),
    [
        ("mqar", "mqar", "mqar-train-000000", "mqar documents"),
        ("copying", "mqar", "copying-train-000000", "documents to copy from"),
        ("continual_translation", "mqar", "continual-translation-train-000000", "documents of languages"),
        ("formal_languages", "formal_languages", "parity-train-000000", "strings"),
    ],
)
def test_synthetic_documents_need_their_tokenizer(
    tmp_path: Path, source: str, tokenizer_name: str, first: str, rows_name: str
) -> None:
    keys = ("method=lm", f"data.source={source}", f"model.tokenizer={tokenizer_name}", f"data.{source}.train_rows=50")
    config = recipe(tmp_path, *keys)
    tokenizer = load_model_tokenizer(config.model)
    rows, held_out = load_training_rows(config, tokenizer, 512), load_held_out_rows(config, tokenizer, 512, "test", 20)
    assert (len(rows.source), len(held_out.source)) == (50, 20)
    assert rows.source.batch([0], 0, 0).ids == (first,)
    other = recipe(tmp_path, "seed=6", *keys)
    assert load_training_rows(other, tokenizer, 512).source.fingerprint != rows.source.fingerprint
    assert load_held_out_rows(other, tokenizer, 512, "test", 20).source.fingerprint == held_out.source.fingerprint
    with pytest.raises(CorruptArtifactError, match=f"generated {rows_name} need the tokenizer "):
        load_training_rows(config, build_byte_tokenizer(), 512)


def test_vocabulary_drift_permutes_tokens(tmp_path: Path) -> None:
    still, drifting = (recipe(tmp_path, *more) for more in ((), ("data.text.vocabulary_drift_every=100",)))
    one, other = (
        load_training_rows(config, build_byte_tokenizer(), 512).source.batch(range(24), 0, 0)
        for config in (still, drifting)
    )
    assert isinstance(one, DocumentBatch)
    assert isinstance(other, DocumentBatch)
    assert one.ids == other.ids
    assert not one.input_ids.equal(other.input_ids)
    permutation = dict(zip(one.input_ids[0, :100].tolist(), other.input_ids[0, :100].tolist(), strict=True))
    assert [permutation[token] for token in one.input_ids[0, :100].tolist()] == other.input_ids[0, :100].tolist()
    assert int(other.input_ids.max()) < 256
