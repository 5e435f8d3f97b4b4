"""Where a memory comes from: who may read it, in which order that is asked, and what stands in its file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_file import FORMAT_VERSION, MemoryMetadata, SourceDocument, load_memory
from laconic.errors import CorruptArtifactError, NonFiniteError, UsageError
from laconic.storage.atomic import save_artifact
from tests.compression.test_memory import ABOUT, made

FILE = "book.safetensors"


def saved(path: Path, dtype: torch.dtype | None = None) -> SummaryMemory:
    memory = made([[2, 0, 3], [1, 2, 0]], gap=True, known=True)
    memory.save(path / FILE, dtype)
    return memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_file_is_the_memory_in_its_type(tmp_path: Path, dtype: torch.dtype) -> None:
    memory = saved(tmp_path, dtype)
    found = SummaryMemory.load(tmp_path / FILE, ABOUT)
    assert found.metadata is not None
    assert found.metadata.dtype == str(dtype).removeprefix("torch.")
    assert memory.metadata is not None
    assert found.is_equal(replace(memory.compact().to(dtype=dtype), metadata=found.metadata))
    assert replace(found.metadata, dtype="float32") == memory.metadata
    found.save(tmp_path / "again.safetensors")
    assert SummaryMemory.load(tmp_path / "again.safetensors").is_equal(found)


def test_what_the_file_holds(tmp_path: Path) -> None:
    memory = saved(tmp_path)
    tensors, about = load_memory(tmp_path / FILE)
    assert tensors.keys() == {"vectors", "offsets", "block", "spans"}
    assert torch.equal(tensors["vectors"], memory.to_ragged()[0])
    assert memory.num_bytes == tensors["vectors"].nbytes
    assert about.method_digest == memory.metadata.method_digest if memory.metadata else False
    assert about.documents[0][0].segments == (7, 14, 21)


def test_an_empty_memory_is_a_file_too(tmp_path: Path) -> None:
    memory = replace(SummaryMemory.empty(1, 5), metadata=replace(ABOUT, documents=((),)))
    memory.save(tmp_path / FILE)
    assert SummaryMemory.load(tmp_path / FILE, ABOUT).is_equal(memory)


ORDER = [
    ({"schema": FORMAT_VERSION + 1}, "has schema 2, this laconic reads up to 1; take a newer one"),
    ({"width": 7}, r"has vectors of width 5 \(llama\), this model reads 7 \(llama\); load the run that wrote it or"),
    (
        {"reader": "3f9a" + 58 * "0" + "c1"},
        r"was written for weights aaaa…aa \(llama, width 5\), this model is 3f9a…c1 \(llama, width 5\); load the run",
    ),
    ({"summary_positions": "zero"}, "was written with positions contiguous, this run has positions zero; load the run"),
    ({"bos": "sink"}, "was written with bos none, this run has bos sink; load the run that wrote it or compress again"),
    ({"tokenizer": "9" * 64}, "was written with tokenizer cccc…cc, this run has tokenizer 9999…99; load the run"),
]


@pytest.mark.parametrize("first", range(1, len(ORDER)))
def test_the_first_reason_is_told(tmp_path: Path, first: int) -> None:
    """All that differ from here on: the one in front is what the line says."""
    saved(tmp_path)
    changes: dict[str, Any] = {}
    for change, _ in ORDER[first:]:
        changes |= change
    with pytest.raises(CorruptArtifactError, match=rf"^memory: {FILE} {ORDER[first][1]}"):
        SummaryMemory.load(tmp_path / FILE, replace(ABOUT, **changes))


def test_what_may_differ(tmp_path: Path) -> None:
    saved(tmp_path)
    SummaryMemory.load(
        tmp_path / FILE, replace(ABOUT, laconic="9.9", created="later", dtype="float16", writer="f" * 64)
    )


def rewritten(path: Path, about: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The same file with other entries and a digest that holds: what a stranger can write."""
    found, provenance = load_memory(path)
    plain = {**provenance.to_json(), **about}
    save_artifact(path, {k: v for k, v in {**found, **tensors}.items() if v is not None}, "memory", plain)


@pytest.mark.parametrize(
    ("about", "says"),
    [
        (ORDER[0][0], ORDER[0][1]),
        ({"schema": FORMAT_VERSION + 1, "width": "new"}, ORDER[0][1]),
        ({"schema": "1"}, "its provenance has no sound schema; take another copy"),
        ({"width": 5.0}, "has no sound width"),
        ({"width": True}, "has no sound width"),
        ({"reader": None}, "has no sound reader"),
        ({"reread_memory": 1}, "has no sound recurrent"),
        ({"method": []}, "has no sound method"),
        ({"method": {"compression": 5}}, "has no sound method"),
        ({"method": {"compression": {"max_vectors": 1}}}, "has no sound settings"),
        ({"documents": {"a": 1}}, "has no sound documents"),
        ({"documents": [[{}]]}, "has no sound documents"),
        ({"documents": None}, "has no sound documents"),
        (
            {"documents": [[{"name": "n", "sha256": "s", "tokens": -1, "segments": [], "first": 0}], []]},
            "has no sound documents",
        ),
        (
            {"documents": [[{"name": "n", "sha256": "s", "tokens": 1, "segments": [1.5], "first": 0}], []]},
            "has no sound documents",
        ),
        ({"documents": [[]]}, "offsets is missing or does not fit the others; take another copy"),
        ({"documents": [[], []]}, "spans is missing or does not fit the others"),
        ({"width": 6}, "vectors is missing or does not fit the others"),
    ],
)
def test_provenance_that_is_none(tmp_path: Path, about: dict[str, Any], says: str) -> None:
    saved(tmp_path)
    rewritten(tmp_path / FILE, about, {})
    with pytest.raises(CorruptArtifactError, match=says):
        SummaryMemory.load(tmp_path / FILE)


def test_documents_are_cut_and_moved_with_their_blocks() -> None:
    one, two = SourceDocument("a", "s", 9, (4, 5)), SourceDocument("b", "t", 6, (3, 3))
    both = MemoryMetadata.concat_segments(
        [replace(ABOUT, documents=((one,),)), replace(ABOUT, documents=((two,),))], [0, 2]
    )
    assert both.documents == ((one, replace(two, first=2)),)
    assert both.slice_segments(1, 3).documents == ((replace(one, segments=(5,)), replace(two, segments=(3,), first=1)),)
    assert both.slice_segments(2, 4).documents == ((two,),)
    assert both.slice_segments(0, 0).documents == ((),)


def test_what_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a soft memory has no lengths to write; harden it first"):
        made([[1]], soft=True).save(tmp_path / FILE)
    with pytest.raises(
        UsageError, match="this memory has no provenance, so nobody could know who may read it; give it one"
    ):
        made([[1]]).save(tmp_path / FILE)
    bad = made([[2]], known=True)
    bad.vectors[0, 1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"vectors: 1 value not finite, first at \[1, 2\]"):
        bad.save(tmp_path / FILE)
    assert not list(tmp_path.iterdir())


def test_more_texts_than_a_header_holds_are_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.compression.memory_file.JSON_PARTS", 60)
    with pytest.raises(UsageError, match="2 texts are more than one file describes; write several"):
        saved(tmp_path)
    assert not list(tmp_path.iterdir())
