"""Memory files: contents, dtype, which model may read them, and damaged metadata."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_file import MemoryMetadata, SourceDocument
from laconic.errors import CorruptArtifactError, NonFiniteError, UsageError
from laconic.storage.atomic import load_artifact, save_artifact
from tests.compression.test_memory import METADATA, make_memory

FILE = "book.safetensors"


def save_example(path: Path, dtype: torch.dtype | None = None) -> SummaryMemory:
    memory = make_memory([[2, 0, 3], [1, 2, 0]], gap=True, with_metadata=True)
    memory.save(path / FILE, dtype)
    return memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_memory_file_round_trip_in_each_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    memory = save_example(tmp_path, dtype)
    loaded = SummaryMemory.load(tmp_path / FILE, METADATA)
    assert loaded.metadata is not None
    assert loaded.metadata.dtype == str(dtype).removeprefix("torch.")
    assert memory.metadata is not None
    assert loaded.is_equal(replace(memory.compact().to(dtype=dtype), metadata=loaded.metadata))
    assert replace(loaded.metadata, dtype="float32") == memory.metadata
    loaded.save(tmp_path / "again.safetensors")
    assert SummaryMemory.load(tmp_path / "again.safetensors").is_equal(loaded)


def test_memory_file_contents(tmp_path: Path) -> None:
    memory = save_example(tmp_path)
    tensors, metadata = load_artifact(tmp_path / FILE, "memory")[0], SummaryMemory.load(tmp_path / FILE).metadata
    assert metadata is not None
    assert tensors.keys() == {"vectors", "offsets", "segment_ids", "segment_tokens"}
    assert torch.equal(tensors["vectors"], memory.to_ragged()[0])
    assert memory.num_bytes == tensors["vectors"].nbytes
    assert memory.metadata is not None
    assert metadata.method == memory.metadata.method
    assert metadata.documents[0][0].segments == (7, 14, 21)
    name = metadata.documents[0][0].name
    assert f"<tr><td>{name}</td><td>42</td><td>5</td></tr>" in memory._repr_html_()


def test_memory_file_of_an_empty_memory(tmp_path: Path) -> None:
    memory = replace(SummaryMemory.empty(1, 5), metadata=replace(METADATA, documents=((),)))
    memory.save(tmp_path / FILE)
    assert SummaryMemory.load(tmp_path / FILE, METADATA).is_equal(memory)


MISMATCHES: list[tuple[dict[str, Any], str]] = [  # in the order in which they are reported
    ({"width": 7}, "width 5 .* has 7"),
    ({"reader": "3f9a" + 58 * "0" + "c1"}, "aaaa…aa .* 3f9a…c1"),
    ({"positions": "zero"}, "positions contiguous .* zero"),
    ({"bos": "sink"}, "bos none .* sink"),
    ({"tokenizer": "9" * 64}, "tokenizer cccc…cc .* 9999…99"),
]


@pytest.mark.parametrize("first", range(len(MISMATCHES)))
def test_memory_file_reports_the_first_mismatch(tmp_path: Path, first: int) -> None:
    save_example(tmp_path)
    changes: dict[str, Any] = {}
    for change, _ in MISMATCHES[first:]:
        changes |= change
    with pytest.raises(CorruptArtifactError, match=rf"^memory: {FILE} .*{MISMATCHES[first][1]}"):
        SummaryMemory.load(tmp_path / FILE, replace(METADATA, **changes))


def test_memory_file_fields_that_may_differ_from_the_reader(tmp_path: Path) -> None:
    save_example(tmp_path)
    reader = replace(METADATA, laconic="9.9", created="later", dtype="float16", writer="f" * 64)
    SummaryMemory.load(tmp_path / FILE, reader)


def rewrite_file(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Replace entries of a memory file and give it a valid digest, as somebody else could; None removes a tensor."""
    old_tensors, old_metadata = load_artifact(path, "memory")
    new_tensors = {name: x.clone() for name, x in {**old_tensors, **tensors}.items() if x is not None}
    save_artifact(path, new_tensors, "memory", {**old_metadata, **metadata})


DOCUMENT = {"name": "n", "sha256": "s", "tokens": 1, "segments": [1], "first": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 5.0}, "field width"),
        ({"width": True}, "field width"),
        ({"reader": None}, "field reader"),
        ({"method": []}, "field method"),
        ({"method": {"compression": 5}}, "field method"),
        ({"documents": {"a": 1}}, "field documents"),
        ({"documents": [[{}]]}, "field documents"),
        ({"documents": None}, "field documents"),
        ({"documents": [[{**DOCUMENT, "tokens": -1}], []]}, "field documents"),
        ({"documents": [[{**DOCUMENT, "segments": [1.5]}], []]}, "field documents"),
        ({"documents": [[]]}, "offsets is missing or inconsistent"),
        ({"documents": [[], []]}, "segment_tokens is missing or inconsistent"),
        ({"width": 6}, "vectors is missing or inconsistent"),
    ],
)
def test_memory_file_rejects_invalid_metadata(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_example(tmp_path)
    rewrite_file(tmp_path / FILE, changes, {})
    with pytest.raises(CorruptArtifactError, match=message):
        SummaryMemory.load(tmp_path / FILE)


def test_memory_metadata_documents_follow_their_segments() -> None:
    one, two = SourceDocument("a", "s", 9, (4, 5)), SourceDocument("b", "t", 6, (3, 3))
    parts = [replace(METADATA, documents=((one,),)), replace(METADATA, documents=((two,),))]
    both = MemoryMetadata.concat_segments(parts, [0, 2])
    assert both.documents == ((one, replace(two, first=2)),)
    middle = ((replace(one, segments=(5,)), replace(two, segments=(3,), first=1)),)
    assert both.slice_segments(1, 3).documents == middle
    assert both.slice_segments(2, 4).documents == ((two,),)
    assert both.slice_segments(0, 0).documents == ((),)


def test_memory_save_rejects_soft_undescribed_and_nonfinite_memories(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="soft memory"):
        make_memory([[1]], soft=True).save(tmp_path / FILE)
    with pytest.raises(UsageError, match="no metadata"):
        make_memory([[1]]).save(tmp_path / FILE)
    bad = make_memory([[2]], with_metadata=True)
    bad.vectors[0, 1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"\[1, 2\]"):
        bad.save(tmp_path / FILE)
    assert not list(tmp_path.iterdir())


def test_memory_save_rejects_more_documents_than_a_header_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.compression.saved_memory.MAX_JSON_PARTS", 60)
    with pytest.raises(UsageError, match="2 texts are too many"):
        save_example(tmp_path)
    assert not list(tmp_path.iterdir())
