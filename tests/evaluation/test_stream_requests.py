"""Runs measured on streams: the items are those of the recipe, and what has no such stream is refused."""

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.config.load import load_recipe
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.streams.evaluate import CacheAsState, as_stateful
from laconic.evaluation.streams.tasks import StreamRequest, build_requests, list_tasks
from laconic.experiment.from_recipe import build_data, build_model
from laconic.experiment.from_recipe.methods import build_method
from laconic.experiment.load_run import LoadedRun, load_initial_model
from laconic.nested.hope.model import Hope
from tests.evaluation.streamed import evaluate_stream, sums

pytestmark = pytest.mark.usefixtures("unchecked")
CPU = torch.device("cpu")
SMALL = """method = "hope"
[model]
family = "llama"
tokenizer = "{kind}"
hidden_size = 8
num_hidden_layers = 1
num_attention_heads = 1
[mixer]
num_heads = 1
[mixer.self_modifying]
memory_chunk_size = 8
projection_chunk_size = 8
[cms]
chunk_sizes = [8]
inner_objective = "associative"
[data]
{data}
[train]
steps = 1
batch_size = 1
trainable = "full"
"""
TEXT = """source = "text"
path = "books.jsonl"
text = { row_tokens = 64, segment_tokens = 32 }"""


def run(folder: Path, kind: str, *keys: str) -> LoadedRun:
    """A run as it begins."""
    rows = [{"book": f"b{i}", "text": f"{i} " + "a sentence of a book. " * 30} for i in range(10)]
    (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = TEXT if kind == "bytes" else f'source = "{kind}"'
    (folder / "small.toml").write_text(SMALL.replace("{kind}", kind).replace("{data}", data))
    recipe = load_recipe(folder / "small.toml", keys)[0]
    decoder, tokenizer, _ = load_initial_model(recipe, CPU)
    parts = build_model.build_parts(recipe, decoder, tokenizer, "")
    return LoadedRun(folder, recipe, 0, parts, build_method(parts, recipe, 1).eval())


def heard(result: LoadedRun, one: StreamRequest) -> list[EvalItem]:
    """What a run makes of what is asked."""
    return evaluate_stream(
        as_stateful(result.parts.decoder),
        one.stream,
        one.source,
        batch_size=one.batch_size,
        bytes_per_token=one.bytes_per_token,
    )


def ids_of(one: StreamRequest) -> Tensor:
    """The first item's."""
    return cast(DocumentBatch, one.source.batch([0], 0, 0)).input_ids[0]


def test_build_requests_synthetic_streams(tmp_path: Path) -> None:
    mqar = run(tmp_path, "mqar", "data.mqar.num_pairs=[2]", "data.mqar.row_tokens=8")
    (one,) = build_requests(mqar, "test", 3)
    results = heard(mqar, one)
    assert [row.id for row in results] == [f"mqar-test-{i:06d}" for i in range(3)]
    assert set(results[0].conditions) == {"learn", "frozen"}
    assert {cell.partition(",")[0] for cell in sums(results[0], "learn")} == {"all", "2 pairs"}
    assert results[0].conditions["learn"]["level_updates"] == [1]
    assert results[0].conditions["frozen"]["level_updates"] == [0]
    copying = run(
        tmp_path, "copying", "data.copying.num_copied=[2]", "data.copying.row_tokens=8", "model.tokenizer=mqar"
    )
    (one,) = build_requests(copying, "copying", 3)
    results = heard(copying, one)
    assert [row.id for row in results] == [f"copying-test-{i:06d}" for i in range(3)]
    assert {cell: n for cell, (_, n) in sums(results[0], "learn").items()} == {
        "all": 2,
        "2 values": 2,
        "whole documents": 1,
    }
    strings = run(
        tmp_path, "formal_languages", "data.formal_languages.language=anbn", "data.formal_languages.max_length=20"
    )
    near, far, farther = build_requests(strings, "formal_languages", 2)
    assert [row.id for row in heard(strings, near)] == ["anbn-test-000000", "anbn-test-000001"]
    assert [bin_.name for bin_ in (near, far, farther)] == [f"formal_languages-bin-{n}" for n in range(3)]
    assert len(ids_of(near)) < 30 < 51 <= len(ids_of(far)) < 101 <= len(ids_of(farther))


@pytest.mark.medium
def test_build_requests_texts_and_needles(tmp_path: Path) -> None:
    result = run(tmp_path, "bytes")
    row = heard(result, build_requests(result, "ppl", None)[0])[0]
    assert list(row.conditions) == ["learn, carry", "learn, reset", "frozen, carry", "frozen, reset"]
    cells = sums(row, "learn, carry")
    length = len("0 " + "a sentence of a book. " * 30)
    assert cells["all"][1] == cells["per byte"][1] == length - -(-length // 64)
    (needles,) = build_requests(result, "needle", 1)
    assert len(needles.source) % (6 * 5) == 0


def test_held_out_texts_drift_as_in_training(tmp_path: Path) -> None:
    plain, drifting = (run(tmp_path, "bytes", *keys) for keys in ((), ("data.text.vocabulary_drift_every=16",)))
    ids = [ids_of(build_requests(item, "ppl", None)[0]) for item in (plain, drifting)]
    training_ids = build_data.encode_documents(drifting.recipe, drifting.parts.tokenizer, "test")[1][0]
    assert ids[1].tolist() == training_ids[: len(ids[1])].tolist()
    assert ids[0].tolist() != ids[1].tolist()


def test_as_stateful_of_a_plain_run_is_its_cache(tmp_path: Path) -> None:
    result = run(tmp_path, "bytes", "method=lm", "model.max_position_embeddings=128")
    row = heard(result, build_requests(result, "ppl", 1)[0])[0]
    assert list(row.conditions) == ["lm"]
    assert isinstance(as_stateful(result.parts.decoder), CacheAsState)
    assert isinstance(as_stateful(run(tmp_path, "bytes").parts.decoder), Hope)
    assert not isinstance(result.parts.decoder, Hope)


@pytest.mark.parametrize(
    ("kind", "method", "streams"),
    [
        ("mqar", "hope", ["mqar"]),
        ("bytes", "hope", ["needle", "ppl", "books", "levels"]),
        ("bytes", "lm", ["needle", "ppl", "books"]),
    ],
)
def test_list_tasks_has_what_the_data_of_a_run_allows(
    kind: str, method: str, streams: list[str], tmp_path: Path
) -> None:
    recipe = run(tmp_path, kind, f"method={method}").recipe
    assert set(list_tasks(recipe)) == {"test", "valid", *streams}


def test_list_tasks_of_data_without_streams(tmp_path: Path) -> None:
    assert list_tasks(run(tmp_path, "recall").recipe) == ()
