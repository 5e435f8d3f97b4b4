"""Runs measured on streams: the items are those of the recipe, and what has no such stream is refused."""

import json
from pathlib import Path

import pytest
import torch

from laconic.core.decoder import Decoder
from laconic.core.errors import BadInput, Damaged
from laconic.evaluation.listening import Cached
from laconic.methods.hope_model import Hope
from laconic.recipe import models
from laconic.recipe.methods import method_of
from laconic.recipe.opened import Opened, start
from laconic.recipe.read import read
from laconic.recipe.streaming import reader, source_of, streamed

pytestmark = pytest.mark.usefixtures("unchecked")
CPU = torch.device("cpu")
SMALL = """method = "hope"
[model]
family = "llama"
tokenizer = "{kind}"
hidden_size = 8
num_hidden_layers = 1
num_attention_heads = 1
[memory]
heads = 1
[memory.self]
chunk_memory = 8
chunk_projections = 8
[levels]
chunks = [8]
inner = "associative"
[data]
{data}
[train]
steps = 1
batch = 1
what = "full"
"""
TEXT = """kind = "text"
path = "books.jsonl"
text = { tokens = 64, segment = 32 }"""


def run(folder: Path, kind: str, *keys: str) -> Opened:
    """A run as it begins."""
    rows = [{"book": f"b{i}", "text": f"{i} " + "a sentence of a book. " * 30} for i in range(10)]
    (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = TEXT if kind == "bytes" else f'kind = "{kind}"'
    (folder / "small.toml").write_text(SMALL.replace("{kind}", kind).replace("{data}", data))
    recipe = read(folder / "small.toml", keys)[0]
    decoder, tokenizer = start(recipe, CPU)
    parts = models.fresh(recipe, decoder, tokenizer, "")
    return Opened(folder, recipe, 0, parts, method_of(parts, recipe, 1).eval())


def test_pairs_and_strings_are_the_recipes(tmp_path: Path) -> None:
    mqar = run(tmp_path, "mqar", "data.mqar.pairs=[2]", "data.mqar.length=8")
    rows = streamed(mqar, "mqar", CPU, count=3)
    assert [row.id for row in rows] == [f"mqar-test-{i:06d}" for i in range(3)]
    assert set(rows[0].ways) == {"learn", "still"}
    assert {cell.partition(",")[0] for cell in rows[0].ways["learn"].cells} == {"all", "2 pairs"}
    assert rows[0].ways["learn"].updates == (1,)
    assert rows[0].ways["still"].updates == (0,)
    strings = run(tmp_path, "languages", "data.languages.language=anbn", "data.languages.high=20")
    again = streamed(strings, "languages", CPU, part="valid", count=2, folder=tmp_path / "kept", key={"step": "0"})
    assert [row.id for row in again] == ["anbn-valid-000000", "anbn-valid-000001"]
    assert (tmp_path / "kept").is_dir()


def test_texts_are_whole_documents_and_needles_lie_in_them(tmp_path: Path) -> None:
    found = run(tmp_path, "bytes")
    (row,) = streamed(found, "ppl", CPU, count=1)
    assert list(row.ways) == ["learn, carry", "learn, reset", "still, carry", "still, reset"]
    cells = row.ways["learn, carry"].cells
    length = len("0 " + "a sentence of a book. " * 30)
    assert cells["all"][1] == cells["a byte"][1] == length - -(-length // 64)
    needles = source_of(found, "needle", "test", 1, (500, 600))
    assert len(needles) == 2 * 6 * 5
    assert needles.longest == 600


def test_a_plain_run_is_read_with_its_cache(tmp_path: Path) -> None:
    keys = ("method=plain", "model.max_position_embeddings=128")
    found = run(tmp_path, "bytes", *keys)
    (row,) = streamed(found, "ppl", CPU, count=1)
    assert list(row.ways) == ["plain"]
    assert isinstance(reader(found.plain()), Cached)
    assert isinstance(reader(run(tmp_path, "bytes").plain()), Hope)
    assert not isinstance(found.parts.decoder, Hope)
    assert isinstance(found.parts.decoder, Decoder)
    with pytest.raises(BadInput, match="needle: the model reads 128 tokens, lengths are 200 and more; ask for shorter"):
        source_of(found, "needle", "test", 1, (200, 300))


def test_streams_that_a_run_has_not_are_refused(tmp_path: Path) -> None:
    found = run(tmp_path, "mqar")
    with pytest.raises(BadInput, match=r"ppl: this run was trained on mqar, which is no text; give a run of data.kind"):
        source_of(found, "ppl", "test", None, ())
    with pytest.raises(Damaged, match="generated strings need the tokenizer"):
        source_of(found, "languages", "test", None, ())
