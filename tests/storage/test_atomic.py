"""Errors and their codes, strict JSON, headers, names in files, commits, and single files with a digest."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.errors import (
    BusyError,
    CorruptArtifactError,
    DiskError,
    InputError,
    LaconicError,
    NonFiniteError,
    UnsafeFileError,
    UsageError,
)
from laconic.storage import atomic, strict_json

FILE = "model.safetensors"


def raw(path: Path, header: object, data: bytes = b"") -> Path:
    """A safetensors file as it comes: `header` as text or as what JSON is made of."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[Any], start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_codes() -> None:
    codes = {
        UsageError: 2,
        NonFiniteError: 65,
        InputError: 66,
        BusyError: 73,
        DiskError: 74,
        CorruptArtifactError: 76,
        UnsafeFileError: 77,
        LaconicError: 70,
    }
    assert {kind: kind.code for kind in codes} == codes
    assert all(issubclass(kind, LaconicError) and str(kind("one line")) == "one line" for kind in codes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{\n  "a": 1,\n  b\n}', "config.json:3:3: not JSON: Expecting property name"),
        (b"", "config.json:1:1: not JSON: Expecting value"),
        (b"[1]", "config.json:1:1: a JSON object is asked for"),
        (b"\xff{}", "config.json: byte 0 is not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "config.json:1:1: not JSON: Unexpected UTF-8 BOM"),
        (b'{"a": 1, "a": 2}', "config.json: not strict JSON: key 'a' stands twice"),
        (b'{"a": NaN}', "config.json: not strict JSON: NaN is no JSON number"),
        (b'{"a": -Infinity}', "config.json: not strict JSON: -Infinity is no JSON number"),
        (b'{"a": 9007199254740993}', "config.json: not strict JSON: integer 9007199254740993 is beyond 2^53"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is beyond 2^53"),
        (b'{"a": 1e999}', "config.json: not strict JSON: 1e999 is beyond the range of numbers"),
        (b'{"a": "\\ud800"}', "config.json: not strict JSON: a lone surrogate stands in a string"),
        (b'{"a": ' * 65 + b"1" + b"}" * 65, "config.json: not strict JSON: nested deeper than 64"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "config.json: not strict JSON: nested deeper than 64"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "config.json: nested deeper than 64"),
        (b'{"a": [' + b"0," * 600_000 + b"0]}", "config.json: 600,002 parts, 500,000 are read"),
    ],
)
def test_json_that_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(InputError) as caught:
        strict_json.read_json(tmp_path / "config.json")
    assert message in str(caught.value)


def test_json_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": ' * 64 + b"1" + b"}" * 64)
    assert "a" in strict_json.read_json(path)
    path.write_text(json.dumps({"a": [9007199254740992, -1, 1e-5, "\U0001f600", None, True]}))
    assert strict_json.read_json(path) == json.loads(path.read_text())


def test_json_missing_or_too_long(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^no config\.json in "):
        strict_json.read_json(tmp_path / "config.json")
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(InputError, match=r"config\.json has 100,000,001 bytes, 100,000,000 are read"):
        strict_json.read_json(tmp_path / "config.json")


def test_canonical() -> None:
    assert strict_json.to_canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"\\u00e9","b":[1,2.5]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        strict_json.to_canonical_json(float("nan"))


def test_header_that_is_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(2, 3),
        "b": torch.zeros(5, dtype=torch.bool),
        "c": torch.zeros(0, 4),
        "d": torch.ones(()),
    }
    atomic.save_tensors(tmp_path / FILE, tensors, {"format": "pt"})
    header = strict_json.read_safetensors_header(tmp_path / FILE)
    assert header.metadata == {"format": "pt"}
    assert {name: (e.dtype, e.shape) for name, e in header.tensors.items()} == {
        name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()
    }


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": entry([2], 0, 8)}, 9, "header promises 8 bytes of data, file has 9; fetch it again"),
        ({"a": entry([2], 0, 8)}, 7, "header promises 8 bytes of data, file has 7; fetch it again"),
        ({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, 16, "header: gap before b, byte 8"),
        ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, 8, "header: overlap at b, byte 4"),
        ({"a": entry([2], 4, 12)}, 12, "header: gap before a, byte 0"),
        ({"a": entry([2], 0, 4)}, 4, "header: a: 4 bytes for torch.float32 [2]"),
        ({"a": entry([2**40], 0, 8)}, 8, "header: a: 8 bytes for torch.float32 [1099511627776]"),
        ({"a": entry([-1, -2], 0, 8)}, 8, "header: a: no known type, shape and place"),
        ({"a": entry([2.0], 0, 8)}, 8, "no known type"),
        ({"a": entry([True], 0, 4)}, 4, "no known type"),
        ({"a": entry([0] * 65, 0, 0)}, 0, "no known type"),
        ({"a": entry([2], 8, 0)}, 8, "a: -8 bytes for torch.float32"),
        ({"a": entry([2], "0", "8")}, 8, "no known type"),
        ({"a": entry([2], 0, 8, "F33")}, 8, "no known type"),
        ({"a": entry([2], 0, 8, ["F32"])}, 8, "no known type"),
        ({"a": {**entry([2], 0, 8), "more": 1}}, 8, "no known type"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "no known type"),
        ({"a": {**entry([2], 0, 8), "data_offsets": [0, 4, 8]}}, 8, "no known type"),
        ({"a": {**entry([2], 0, 8), "shape": None}}, 8, "no known type"),
        ({"a": 5}, 0, "no known type"),
        ({"__metadata__": {"a": 1}}, 0, "header: __metadata__ is not a table of texts"),
        ({"__metadata__": ["a"]}, 0, "header: __metadata__ is not a table of texts"),
        ([], 0, "header:1:1: a JSON object is asked for"),
        (b'{"a": {}, "a": {}}', 0, "header: not strict JSON: key 'a' stands twice"),
        (b'{"a": {}} x', 0, "header:1:11: not JSON: Extra data"),
        (b"\x80abc", 0, "header: byte 0 is not UTF-8"),
    ],
)
def test_header_that_is_refused(tmp_path: Path, header: object, size: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        strict_json.read_safetensors_header(raw(tmp_path / FILE, header, b"\0" * size))
    assert str(caught.value).startswith(FILE)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", InputError, "0 bytes of header promised, file has 0; fetch it again"),
        (b"\xff" * 8, InputError, "18,446,744,073,709,551,615 bytes of header promised, file has 8"),
        (
            b"PK\3\4" + b"\0" * 60,
            UnsafeFileError,
            f"{FILE} is a pickle or zip by its first bytes and can run code; not opened",
        ),
        (
            b"\x80\4\x95" + b"\0" * 7 + b"x",
            UnsafeFileError,
            "transformers' save_pretrained in an environment you trust",
        ),
    ],
)
def test_no_safetensors_at_all(tmp_path: Path, content: bytes, kind: type[LaconicError], message: str) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(kind) as caught:
        strict_json.read_safetensors_header(tmp_path / FILE)
    assert message in str(caught.value)


def test_header_too_long_or_missing(tmp_path: Path) -> None:
    with (tmp_path / FILE).open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_100)
    with pytest.raises(InputError, match=r"100,000,001 bytes of header promised, at most 100,000,000 are read"):
        strict_json.read_safetensors_header(tmp_path / FILE)
    with pytest.raises(InputError, match=r"no other\.safetensors in "):
        strict_json.read_safetensors_header(tmp_path / "other.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_finite(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(6, 20)
    atomic.check_finite("w", x.to(dtype))
    x[5, 17] = bad
    with pytest.raises(NonFiniteError, match=r"^w: 1 value not finite, first at \[5, 17\]$"):
        atomic.check_finite("w", x.to(dtype))
    x[2, 19] = bad
    with pytest.raises(NonFiniteError, match=r"^w: 2 values not finite, first at \[2, 19\]$"):
        atomic.check_finite("w", x.to(dtype))


def test_finite_says_nothing_of_whole_numbers_and_nothing() -> None:
    for tensor in (torch.ones(3, dtype=torch.int64), torch.ones(0), torch.ones(2, dtype=torch.bool), torch.ones(())):
        atomic.check_finite("w", tensor)
    atomic.check_finite("w", torch.full((3,), 3.4e38))  # their sum would be infinite


def test_saved_tensors_are_what_was_given(tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    given = {"turned": x.t(), "same": x, "again": x, "part": x[1:3], "wide": x[:1].expand(3, 6), "half": x.bfloat16()}
    atomic.save_tensors(tmp_path / FILE, given, {})
    found = atomic.open_tensors(tmp_path / FILE, given)
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in given.items())
    with pytest.raises(NonFiniteError, match=r"^bad: 1 value not finite, first at \[0\]$"):
        atomic.save_tensors(tmp_path / "other", {"bad": torch.tensor([float("nan")])}, {})


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_modes_follow_the_umask(tmp_path: Path, umask: int) -> None:
    def write(folder: Path) -> None:
        atomic.save_tensors(folder / FILE, {"a": torch.ones(2)}, {})
        (folder / "config.json").write_text("{}")

    before = os.umask(umask)
    try:
        atomic.write_folder_atomically(tmp_path / "out", write)
        atomic.save_artifact(tmp_path / "cache", {"a": torch.ones(2)}, "cache", {})
    finally:
        os.umask(before)
    modes = {
        p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "out", tmp_path / "cache", *(tmp_path / "out").iterdir())
    }
    plain = 0o666 & ~umask
    assert modes == {"out": 0o777 & ~umask, "cache": plain, FILE: plain, "config.json": plain}


def test_a_folder_is_whole_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with pytest.raises(RuntimeError, match="half way"):
        atomic.write_folder_atomically(target, lambda folder: half_way(folder))
    assert list(target.parent.iterdir()) == []
    atomic.write_folder_atomically(target, lambda folder: (folder / "a").write_text("1") and None)
    assert [p.name for p in target.parent.iterdir()] == ["out"]
    assert (target / "a").read_text() == "1"


def half_way(folder: Path) -> None:
    (folder / "a").write_text("1")
    raise RuntimeError("half way")


def test_an_empty_folder_may_be_filled_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    atomic.write_folder_atomically(tmp_path / "empty", lambda folder: (folder / "a").write_text("1") and None)
    (tmp_path / "file").write_text("mine")
    for name in ("empty", "file"):
        with pytest.raises(BusyError, match=rf"/{name} exists and is not empty$"):
            atomic.write_folder_atomically(tmp_path / name, half_way)
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "empty" / "a").read_text() == "1"


def test_somebody_else_was_first(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("1")

    with pytest.raises(BusyError, match="exists and is not empty"):
        atomic.write_folder_atomically(tmp_path / "out", write)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["out", "theirs"]


def test_a_file_is_old_or_new(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    atomic.write_file_atomically(path, lambda new: new.write_text("1") and None)
    with pytest.raises(DiskError, match="No such file or directory"):
        atomic.write_file_atomically(path, lambda new: new.write_text("2") and (tmp_path / "none").unlink())
    assert path.read_text() == "1"
    atomic.write_file_atomically(path, lambda new: new.write_text("2") and None)
    assert path.read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["latest"]


def test_room_is_asked_for_first(tmp_path: Path) -> None:
    for commit in (atomic.write_folder_atomically, atomic.write_file_atomically):
        with pytest.raises(DiskError, match=r"bytes are asked for to write 1,000,000,000,000,000,000, [\d,]+ are free"):
            commit(tmp_path / "out", half_way, 10**18)
    assert list(tmp_path.iterdir()) == []


TENSORS: dict[str, Tensor] = {
    "keys": torch.arange(24.0).view(2, 3, 4),
    "live": torch.tensor([True, False]),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "one": torch.tensor(7),
    "none": torch.zeros(0, 4),
}


def test_single_file_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    for _ in range(2):  # a second time replaces it
        atomic.save_artifact(path, TENSORS, "cache", {"model": "3f9a"})
    tensors, about = atomic.load_artifact(path, "cache")
    assert about == {"format": 1, "kind": "cache", "model": "3f9a"}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_single_file_of_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.safetensors"
    with pytest.raises(InputError, match=r"no cache\.safetensors in "):
        atomic.load_artifact(path, "cache")
    atomic.save_artifact(path, TENSORS, "cache", {})
    assert atomic.read_artifact_kind(path) == "cache"
    says = r"is a cache of format 1, asked was a memory \(summary vectors\) of format 1; open it with what made it"
    with pytest.raises(CorruptArtifactError, match=says):
        atomic.load_artifact(path, "memory")
    monkeypatch.setattr(atomic, "FORMAT_VERSION", 2)
    atomic.save_artifact(path, TENSORS, "cache", {})
    monkeypatch.setattr(atomic, "FORMAT_VERSION", 1)
    with pytest.raises(CorruptArtifactError, match=r"is a cache of format 2, asked was a cache of format 1"):
        atomic.load_artifact(path, "cache")
    atomic.save_tensors(path, TENSORS, {"format": "pt"})
    with pytest.raises(
        CorruptArtifactError, match=r"^no artifact of laconic: cache\.safetensors: metadata:1:1: not JSON"
    ):
        atomic.load_artifact(path, "cache")


def test_single_file_is_finite(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="keys: 1 value not finite"):
        atomic.save_artifact(tmp_path / "x", {"keys": torch.tensor([1.0, float("nan")])}, "cache", {})
    assert list(tmp_path.iterdir()) == []


OUTWARD = (
    "",
    ".",
    "..",
    "a/../b",
    "../a",
    "/a",
    "//host/share/a",
    "C:a",
    "C:\\a",
    "\\\\host\\share\\a",
    "\\a",
    "..\\a",
)
UNPRINTABLE = ("a\0", "a\nb", "\x1b[2J", "\u202etxt", "a" * 1001)


@pytest.mark.parametrize("name", OUTWARD + UNPRINTABLE)
def test_names_that_lead_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsafeFileError, match=r"^'.*' is no name of a file inside .*; not opened$"):
        strict_json.resolve_inside(tmp_path, name)


def test_names_that_stay(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_text("1")
    (tmp_path / "link").symlink_to("deep/a")
    for name in ("deep/a", "deep//a", "./deep/a", "link"):
        assert strict_json.resolve_inside(tmp_path, name) == (tmp_path / "deep" / "a").resolve()
    for name in ("none", "%2e%2e/a", "\u2024\u2024/a", "~", "é", "CON"):
        assert strict_json.resolve_inside(tmp_path, name).is_relative_to(tmp_path.resolve())
    (tmp_path / "out").symlink_to(tmp_path.parent)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UnsafeFileError, match=r"out/a leads out of its folder, to .*; not opened\. Put a copy there$"):
        strict_json.resolve_inside(tmp_path, "out/a")
    with pytest.raises(UnsafeFileError, match=r"/deep is no regular file; not opened$"):
        strict_json.resolve_inside(tmp_path, "deep")
    for name in ("loop", "a" * 300):
        with pytest.raises(UnsafeFileError, match=r" cannot be followed \(.*\); not opened$"):
            strict_json.resolve_inside(tmp_path, name)


@pytest.mark.parametrize("name", ["", *UNPRINTABLE])
def test_names_of_tensors(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"header: '.*' is no name of a tensor; fetch it again$") as caught:
        strict_json.read_safetensors_header(raw(tmp_path / FILE, {name: entry([1], 0, 4)}, b"\0" * 4))
    assert str(caught.value).isprintable()
