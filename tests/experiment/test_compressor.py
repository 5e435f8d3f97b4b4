"""`TextCompressor`: texts in parallel and one by one, in chunks and whole, and prompts on a memory."""

from inspect import signature
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from laconic.compression.kv.config import KVCompressionConfig
from laconic.compression.memory import SummaryMemory
from laconic.errors import CorruptArtifactError, InputError, LaconicError, UsageError
from laconic.experiment.compress import SummaryLength
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.experiment.text_models.text_model import current_time
from laconic.generation.config import GenerationConfig
from tests.compression.compressors import reader
from tests.models.fixtures import FAMILIES
from tests.tolerances import FLOORS, ORACLE, largest

TEXTS = [
    "Three may keep a secret, if two of them are dead; and so on for a while.",
    "Short.",
    "A word to the wise is enough, and many words won't fill a bushel.",
]
CELLS: list[dict[str, Any]] = [
    {"length_policy": "nested_dropout"},
    {"length_policy": "stop_head"},
    {"length_policy": "stop_head", "summary": "autoregressive"},
    {"length_policy": "stop_head", "memory_policy": "replace"},
    {"length_policy": "nested_dropout", "memory_policy": "replace", "summary": "autoregressive"},
    {"summary": "pool"},
    {"summary": "select"},
    {"length_policy": "classifier"},
    {"memory_policy": "fifo", "max_memory_vectors": 9},
    {"memory_policy": "budgeted", "max_memory_vectors": 9},
    {"bos": "sink"},
]


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


def cell_name(cell: dict[str, Any]) -> str:
    return " ".join(str(value) for value in cell.values())


def assert_same_memory(actual: SummaryMemory, expected: SummaryMemory) -> None:
    """Compare row by row, without invalid slots."""
    assert actual.B == expected.B
    for row in range(actual.B):
        one, two = actual.select_rows([row]).compact(), expected.select_rows([row]).compact()
        assert one.segment_ids.equal(two.segment_ids)
        assert largest(one.vectors, two.vectors) <= FLOORS * ORACLE
        assert one.metadata == two.metadata


def test_compress_stores_the_time_of_each_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run, times = reader(), []
    for second in (1, 2):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(second))
        metadata = run.compress(TEXTS[0]).metadata
        times.append(metadata and metadata.created)
    assert times == ["1970-01-01T00:00:01+00:00", "1970-01-01T00:00:02+00:00"]


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_compress_parallel_equals_one_by_one(cell: dict[str, Any]) -> None:
    run = reader(segment=32, **cell)
    rows = [run.compress([text], names=[f"text {i}"]) for i, text in enumerate(TEXTS, 1)]
    assert_same_memory(run.compress(TEXTS), SummaryMemory.concat_rows(*rows))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_stream_chunks_of_any_size_equal_whole_text(family: str) -> None:
    """Chunks may split a character, and a character may cross the end of a segment."""
    run, text = reader(family, length_policy="stop_head"), "Ein Stück weiter, dort. " * 4
    whole = run.compress([text], names=["stream"])
    for size in (1, 7, 1000):
        assert_same_memory(run.stream(text[i : i + size] for i in range(0, len(text), size)), whole)


POSITIONS = {"rope": ("contiguous",), "table": ("zero", "contiguous")}
HEADS = [("llama", "none"), ("opt", "none")]


@pytest.mark.parametrize(("family", "bos"), [*((family, "sink") for family in FAMILIES), *HEADS])
def test_generate_equals_full_passes(family: str, bos: str) -> None:
    """Compare with the argmax of full passes over [bos; memory; prompt; answer so far], for each position scheme."""
    for positions in POSITIONS[reader(family).decoder.config.position_encoding]:
        run = reader(family, summary_positions=positions, bos=bos, length_policy="stop_head")
        memory, prompts = run.compress(TEXTS[:2]), ["And then", "Why?"]
        generations = run.generate(prompts, memory=memory, config=GenerationConfig(max_tokens=3))
        for row, text in enumerate(prompts):
            ids = run.tokenizer.encode(text, add_special_tokens=False)
            assert greedy(run, memory.select_rows([row]), ids, 3) == generations[row].token_ids


def greedy(run: TextCompressor, memory: SummaryMemory, ids: list[int], n: int) -> list[int]:
    """Decode greedily with full passes of `read_text`."""
    new_ids: list[int] = []
    for _ in range(n):
        text = torch.tensor([ids + new_ids])
        with torch.no_grad():
            hidden = run.method.read_text(text, memory=memory)
        new_ids.append(int(run.decoder.logits(hidden[0, -1]).argmax()))
        if new_ids[-1] == run.tokenizer.eos_token_id:
            break
    return new_ids


def test_generate_broadcasts_one_memory_or_one_prompt() -> None:
    run = reader(length_policy="stop_head")
    memory, prompts = run.compress(TEXTS), ["Why", "And what then?", "."]
    outputs = run.generate(prompts, memory=memory, config=GenerationConfig(max_tokens=3))
    assert [
        run.generate([p], memory=memory.select_rows([i]), config=GenerationConfig(max_tokens=3))[0].token_ids
        for i, p in enumerate(prompts)
    ] == [g.token_ids for g in outputs]
    shared = run.generate(prompts, memory=memory.select_rows([1]), config=GenerationConfig(max_tokens=3))
    assert [
        g.token_ids
        for g in run.generate(prompts, memory=memory.select_rows([1, 1, 1]), config=GenerationConfig(max_tokens=3))
    ] == [g.token_ids for g in shared]
    repeated = run.generate(["Why"], memory=memory, config=GenerationConfig(max_tokens=3))
    assert [g.token_ids for g in run.generate(["Why"] * 3, memory=memory, config=GenerationConfig(max_tokens=3))] == [
        g.token_ids for g in repeated
    ]
    assert run.generate(["Why"], config=GenerationConfig(max_tokens=3))[0].token_ids
    assert run.generate([], memory=memory) == []
    assert [g.token_ids for g in run.generate("Why", memory=memory, config=GenerationConfig(max_tokens=3))] == [
        g.token_ids for g in repeated
    ]


def test_compressor_has_the_calls_of_a_language_model(tmp_path: Path) -> None:
    run, size = reader(length_policy="stop_head", dtype=torch.float32), SummaryLength(num_vectors=3)
    memory = run.compress([TEXTS[0]], size)
    assert memory.num_bytes == int(memory.num_vectors) * memory.D * 4
    memory.save(tmp_path / "x.safetensors")
    config = GenerationConfig(max_tokens=2)
    (expected,) = run.generate(["Why"], config, memory=memory)
    (actual,) = run.generate(["Why"], config, memory=run.load_memory(tmp_path / "x.safetensors"))
    assert actual.token_ids == expected.token_ids
    joined = run.generate(["Why"], config, memory=[memory, tmp_path / "x.safetensors"])
    assert (
        joined[0].token_ids
        == run.generate(["Why"], config, memory=SummaryMemory.concat_segments(memory, memory))[0].token_ids
    )
    with pytest.raises(UsageError, match="the list is empty"):
        run.generate(["Why"], memory=[])
    names = [[*signature(model.generate).parameters] for model in (TextCompressor, LanguageModel)]
    assert names[0] == names[1]


@pytest.mark.medium
def test_compress_arguments_override_the_run() -> None:
    run = reader(length_policy="stop_head", max_vectors=8)
    text = [TEXTS[0]]
    assert (run.compress(text, length=SummaryLength(num_vectors=3)).vectors_per_segment == 3).all()
    assert int(run.compress(text, length=SummaryLength(total_vectors=7)).num_vectors) == 7
    lengths = [
        run.compress(text, length=SummaryLength(stop_rule="sample", seed=seed)).vectors_per_segment.tolist()
        for seed in (1, 1, 2)
    ]
    assert lengths[0] == lengths[1] != lengths[2]
    many = run.compress(TEXTS[::-1], length=SummaryLength(stop_rule="sample", seed=1)).vectors_per_segment[2]
    assert many.tolist() != lengths[0][0]  # the random numbers of the third text
    low, high = (int(run.compress(text, length=SummaryLength(quantile=q)).num_vectors) for q in (0.05, 0.95))
    assert low < int(run.compress(text).num_vectors) < high
    assert int(run.compress(text, length=SummaryLength(threshold=0.01)).num_vectors) < int(
        run.compress(text, length=SummaryLength(stop_rule="threshold", threshold=0.99)).num_vectors
    )
    assert run.compress(text, segment_tokens=8).num_segments == 2 * run.compress(text).num_segments - 1


REFUSED = [
    (lambda r: r.compress(["a", ""]), InputError, "text 2: empty"),
    (lambda r: r.stream([]), InputError, "stream: empty"),
    (lambda r: r.compress([]), UsageError, "texts: give at least one text"),
    (lambda r: r.compress(["a"], names=["a", "b"]), UsageError, "names: 2 for 1 texts"),
    (lambda r: r.compress(["a"], segment_tokens=0), UsageError, "segment_tokens 0"),
    (
        lambda r: r.compress(["a"], length=SummaryLength(num_vectors=2, total_vectors=3)),
        UsageError,
        "num_vectors and total_vectors: give only one",
    ),
    (lambda r: r.compress(["a"], length=SummaryLength(total_vectors=0)), UsageError, "total_vectors 0"),
    (lambda r: r.compress(["a"], length=SummaryLength(quantile=1.0)), UsageError, "quantile 1.0"),
    (lambda r: SummaryLength(stop_rule=cast(Any, "")), UsageError, "stop_rule '' is unknown; use one of None, 'q"),
    (
        lambda r: r.compress(["a"], KVCompressionConfig(keep=0.5)),
        UsageError,
        r"length: give length=laconic.SummaryLength\(num_vectors=…\), not KVCompressionConfig",
    ),
    (lambda r: r.compress(["a " * 80], segment_tokens=140), UsageError, "140 .*; use segments of at most 124 tokens"),
    (lambda r: r.compress(["a " * 300], length=SummaryLength(num_vectors=4)), UsageError, "memory_policy"),
    (
        lambda r: r.generate(["a", "b"], memory=r.compress(["x", "y", "z"]), config=GenerationConfig(max_tokens=1)),
        UsageError,
        "2 prompts for a memory of 3 texts",
    ),
    (
        lambda r: r.generate([""], memory=r.compress(["x"]), config=GenerationConfig(max_tokens=1)),
        UsageError,
        "prompt 0 is empty",
    ),
    (
        lambda r: r.generate(["a"], memory=reader(seed=3).compress(["x"]), config=GenerationConfig(max_tokens=1)),
        CorruptArtifactError,
        "was written for weights",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_compressor_invalid_arguments(call: Any, error: type[LaconicError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call(reader(room=128, length_policy="stop_head", max_vectors=4, allowed_lengths=(1, 2, 4)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"stop_rule": "quantile"}, {"quantile": 0.5}, {"total_vectors": 5}])
def test_compress_stop_rule_needs_a_stop_head(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match='length_policy = "stop_head"'):
        reader(length_policy="nested_dropout").compress(["a"], length=SummaryLength(**options))


def test_memory_file_round_trip(tmp_path: Any) -> None:
    run = reader(length_policy="stop_head", dtype=torch.float32)
    memory = run.compress(TEXTS)
    memory.save(tmp_path / "x.safetensors")
    assert run.load_memory(tmp_path / "x.safetensors").is_equal(memory)
    two = GenerationConfig(max_tokens=2)
    assert [g.token_ids for g in run.generate("Why", memory=tmp_path / "x.safetensors", config=two)] == [
        g.token_ids for g in run.generate("Why", memory=memory, config=two)
    ]
    for source in ("", tmp_path):
        with pytest.raises(InputError, match="is a folder; give a file"):
            run.load_memory(source)
    with pytest.raises(CorruptArtifactError, match="was written for weights"):
        reader(seed=3).load_memory(tmp_path / "x.safetensors")
    with pytest.raises(CorruptArtifactError, match="was written with bos "):
        reader(length_policy="stop_head", dtype=torch.float32, bos="sink").load_memory(tmp_path / "x.safetensors")


def test_current_time_from_source_date_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert current_time() == "1970-01-02T00:00:00+00:00"
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert current_time() > "2026"
