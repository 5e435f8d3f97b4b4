"""Runs measured on streams: the items are those of the recipe, and what has no such stream is refused."""

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from laconic.core.contract import Documents
from laconic.core.errors import BadInput
from laconic.evaluation.listening import Cached, Row
from laconic.evaluation.streams import measure
from laconic.methods.hope_model import Hope
from laconic.recipe import models, rows
from laconic.recipe.listening import Asked, asked, learner_of
from laconic.recipe.methods import method_of
from laconic.recipe.opened import Opened, start
from laconic.recipe.read import read

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


def heard(found: Opened, one: Asked) -> list[Row]:
    """What a run makes of what is asked."""
    return measure(learner_of(found), one.stream, one.source, CPU, batch=one.batch, bytes_of=one.bytes_of)


def ids_of(one: Asked) -> Tensor:
    """The first item's."""
    return cast(Documents, one.source.batch([0], 0, 0)).text[0]


def test_pairs_and_strings_are_the_recipes(tmp_path: Path) -> None:
    mqar = run(tmp_path, "mqar", "data.mqar.pairs=[2]", "data.mqar.length=8")
    (one,) = asked(mqar, "test", 3)
    told = heard(mqar, one)
    assert [row.id for row in told] == [f"mqar-test-{i:06d}" for i in range(3)]
    assert set(told[0].ways) == {"learn", "still"}
    assert {cell.partition(",")[0] for cell in told[0].ways["learn"].cells} == {"all", "2 pairs"}
    assert told[0].ways["learn"].updates == (1,)
    assert told[0].ways["still"].updates == (0,)
    copying = run(tmp_path, "copying", "data.copying.counts=[2]", "data.copying.length=8", "model.tokenizer=mqar")
    (one,) = asked(copying, "copying", 3)
    told = heard(copying, one)
    assert [row.id for row in told] == [f"copying-test-{i:06d}" for i in range(3)]
    assert {cell: n for cell, (_, n) in told[0].ways["learn"].cells.items()} == {"all": 2, "2 values": 2, "whole": 1}
    strings = run(tmp_path, "languages", "data.languages.language=anbn", "data.languages.high=20")
    near, far = asked(strings, "languages", 2)
    assert [row.id for row in heard(strings, near)] == ["anbn-test-000000", "anbn-test-000001"]
    assert (near.name, far.name) == ("languages-bin-0", "languages-bin-1")
    assert len(ids_of(near)) < 30 < 51 <= len(ids_of(far))


def test_texts_are_whole_documents_and_needles_lie_in_them(tmp_path: Path) -> None:
    found = run(tmp_path, "bytes")
    row = heard(found, asked(found, "ppl", None)[0])[0]
    assert list(row.ways) == ["learn, carry", "learn, reset", "still, carry", "still, reset"]
    cells = row.ways["learn, carry"].cells
    length = len("0 " + "a sentence of a book. " * 30)
    assert cells["all"][1] == cells["a byte"][1] == length - -(-length // 64)
    (needles,) = asked(found, "needle", 1)
    assert len(needles.source) % (6 * 5) == 0


def test_held_out_texts_drift_as_those_of_training_do(tmp_path: Path) -> None:
    plain, drifting = (run(tmp_path, "bytes", *keys) for keys in ((), ("data.text.drift=16",)))
    ids = [ids_of(asked(each, "ppl", None)[0]) for each in (plain, drifting)]
    own = rows.encoded(drifting.recipe, drifting.parts.tokenizer, "test")[1][0]
    assert ids[1].tolist() == own[: len(ids[1])].tolist()
    assert ids[0].tolist() != ids[1].tolist()


def test_a_plain_run_is_read_with_its_cache(tmp_path: Path) -> None:
    found = run(tmp_path, "bytes", "method=plain", "model.max_position_embeddings=128")
    row = heard(found, asked(found, "ppl", 1)[0])[0]
    assert list(row.ways) == ["plain"]
    assert isinstance(learner_of(found), Cached)
    assert isinstance(learner_of(run(tmp_path, "bytes")), Hope)
    assert not isinstance(found.parts.decoder, Hope)


def test_streams_that_a_run_has_not_are_refused(tmp_path: Path) -> None:
    found = run(tmp_path, "mqar")
    with pytest.raises(BadInput, match=r"is a run of data.kind mqar; it has no texts of its own"):
        asked(found, "ppl", None)
    with pytest.raises(BadInput, match=r"is a run of data.kind mqar; its own sets are test and valid"):
        asked(found, "languages", None)
