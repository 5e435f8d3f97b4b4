"""Strict JSON, safetensors headers and file names from untrusted sources."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.errors import InputError, LaconicError, UnsafeFileError
from laconic.storage import atomic, file_names, safetensors_header, strict_json

FILE = "model.safetensors"


def write_safetensors(path: Path, header: object, data: bytes = b"") -> Path:
    """A safetensors file with any header, as bytes or as a JSON value."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[Any], start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{\n  "a": 1,\n  b\n}', "config.json:3:3: not JSON"),
        (b"", "config.json:1:1: not JSON"),
        (b"[1]", "object"),
        (b"\xff{}", "byte 0 is not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', ":1:1: not JSON"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": ' + b"1" * 5000 + b"}", "5,000 digits"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": ' * 65 + b"1" + b"}" * 65, "deeper than 64"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deeper than 64"),
        (b'{"a": [' + b"0," * 600_000 + b"0]}", "600,002"),
    ],
)
def test_read_json_refuses(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(InputError) as caught:
        strict_json.read_json(tmp_path / "config.json")
    assert str(caught.value).startswith("config.json")
    assert message in str(caught.value)


def test_read_json_accepts(tmp_path: Path) -> None:
    """Among others the `model_max_length` of most tokenizers on the hub."""
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": ' * 64 + b"1" + b"}" * 64)
    assert "a" in strict_json.read_json(path)
    path.write_text(json.dumps({"a": [1000000000000000019884624838656, -1, 1e-5, "\U0001f600", None, True]}))
    assert strict_json.read_json(path) == json.loads(path.read_text())


def test_read_json_missing_or_too_long(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json in "):
        strict_json.read_json(tmp_path / "config.json")
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(InputError, match="100,000,001 bytes"):
        strict_json.read_json(tmp_path / "config.json")


def test_validate_json_names_the_first_wrong_key() -> None:
    assert strict_json.validate_json(dict[str, int], {"a": 1}, "f", "remove it") == {"a": 1}
    with pytest.raises(InputError, match=r"^f: b\.0: input should be a valid integer, .*; remove it$"):
        strict_json.validate_json(dict[str, list[int]], {"a": [1], "b": ["x"]}, "f", "remove it")
    with pytest.raises(InputError, match=r"^f: input should be a valid dictionary; remove it$"):
        strict_json.validate_json(dict[str, int], [], "f", "remove it")


def test_canonical_json() -> None:
    assert strict_json.to_canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"\\u00e9","b":[1,2.5]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        strict_json.to_canonical_json(float("nan"))


def test_safetensors_header(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(2, 3),
        "b": torch.zeros(5, dtype=torch.bool),
        "c": torch.zeros(0, 4),
        "d": torch.ones(()),
    }
    atomic.save_tensors(tmp_path / FILE, tensors, {"format": "pt"})
    header = safetensors_header.read_safetensors_header(tmp_path / FILE)
    assert header.metadata == {"format": "pt"}
    assert {name: (spec.dtype, spec.shape) for name, spec in header.tensors.items()} == {
        name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()
    }


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": entry([2], 0, 8)}, 9, "not fully covered"),
        ({"a": entry([2], 0, 8)}, 7, "not fully covered"),
        ({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, 16, "invalid offset for tensor `b`"),
        ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, 8, "invalid offset for tensor `b`"),
        ({"a": entry([2], 4, 12)}, 12, "invalid offset for tensor `a`"),
        ({"a": entry([2], 0, 4)}, 4, "invalid shape"),
        ({"a": entry([2**40, 2**40, 0], 0, 0)}, 0, "overflow"),
        ({"a": entry([-1, -2], 0, 8)}, 8, "-1"),
        ({"a": entry([2.0], 0, 8)}, 8, "floating point"),
        ({"a": entry([0] * 65, 0, 0)}, 0, "65 dimensions"),
        ({"a": entry([2], 8, 0)}, 8, "invalid offset"),
        ({"a": entry([2], 0, 8, "F33")}, 8, "F33"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "missing field"),
        ({"a": 5}, 0, "integer"),
        ({"__metadata__": {"a": 1}}, 0, "string"),
        ([], 0, "object"),
        (b'{"a": {}, "a": {}}', 0, "duplicate key 'a'"),
        (b'{"a": {}} x', 0, "not JSON"),
        (b"\x80abc", 0, "not UTF-8"),
    ],
)
def test_safetensors_header_refuses(tmp_path: Path, header: object, size: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        safetensors_header.read_safetensors_header(write_safetensors(tmp_path / FILE, header, b"\0" * size))
    assert str(caught.value).startswith(FILE)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", InputError, "header of 0 bytes"),
        (b"# Title\nA text.", InputError, r"begins with the text '# Title\n', not with"),
        ("Grüße aus".encode(), InputError, "begins with the text 'Grüße ', not with"),
        ("東京".encode(), InputError, "begins with the text '東京', not with"),
        (b"\xff" * 8, InputError, "18,446,744,073,709,551,615"),
        (b"PK\3\4" + b"\0" * 60, UnsafeFileError, "can run code"),
        (b"\x80\4\x95" + b"\0" * 7 + b"x", UnsafeFileError, "save_pretrained"),
    ],
)
def test_safetensors_header_of_another_file(
    tmp_path: Path, content: bytes, kind: type[LaconicError], message: str
) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(kind) as caught:
        safetensors_header.read_safetensors_header(tmp_path / FILE)
    assert message in str(caught.value)


def test_safetensors_header_too_long_or_missing(tmp_path: Path) -> None:
    with (tmp_path / FILE).open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_100)
    with pytest.raises(InputError, match="header of 100,000,001 bytes"):
        safetensors_header.read_safetensors_header(tmp_path / FILE)
    with pytest.raises(InputError, match=r"no other\.safetensors in "):
        safetensors_header.read_safetensors_header(tmp_path / "other.safetensors")


OUTWARD = (
    "", ".", "..", "a/../b", "../a", "/a", "//host/share/a", "C:a", "C:\\a", "\\\\host\\share\\a", "\\a", "..\\a",
)  # fmt: skip
UNPRINTABLE = ("a\0", "a\nb", "\x1b[2J", "\u202etxt", "a" * 1001)


@pytest.mark.parametrize("name", OUTWARD + UNPRINTABLE)
def test_resolve_inside_refuses(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsafeFileError, match="not the name of a file inside"):
        file_names.resolve_inside(tmp_path, name)


def test_resolve_inside(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_text("1")
    (tmp_path / "link").symlink_to("deep/a")
    for name in ("deep/a", "deep//a", "./deep/a", "link"):
        assert file_names.resolve_inside(tmp_path, name) == tmp_path / name, "a link keeps its own name"
    for name in ("none", "%2e%2e/a", "\u2024\u2024/a", "~", "é", "CON"):
        assert file_names.resolve_inside(tmp_path, name) == tmp_path / name
    (tmp_path / "out").symlink_to(tmp_path.parent)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UnsafeFileError, match="leads out of its folder"):
        file_names.resolve_inside(tmp_path, "out/a")
    with pytest.raises(UnsafeFileError, match="not a regular file"):
        file_names.resolve_inside(tmp_path, "deep")
    for name in ("loop", "a" * 300):
        with pytest.raises(UnsafeFileError, match="cannot be resolved"):
            file_names.resolve_inside(tmp_path, name)


@pytest.mark.parametrize("name", ["", *UNPRINTABLE])
def test_safetensors_header_refuses_tensor_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="not a valid tensor name") as caught:
        safetensors_header.read_safetensors_header(
            write_safetensors(tmp_path / FILE, {name: entry([1], 0, 4)}, b"\0" * 4)
        )
    assert str(caught.value).isprintable()


def test_parse_json_does_not_count_commas_of_a_text() -> None:
    text = b'{"text": "' + b'a,\\"' * strict_json.MAX_JSON_PARTS + b'"}'
    assert strict_json.parse_json(text, "body")["text"].startswith('a,"a')
    with pytest.raises(InputError, match="Unterminated string"):  # takes hours where a pattern backtracks
        strict_json.parse_json(b'"' + b'\\",' * strict_json.MAX_JSON_PARTS * 2 + b"\\", "body")
    with pytest.raises(InputError, match="values; the limit is"):
        strict_json.parse_json(b'{"x": [' + b"1," * strict_json.MAX_JSON_PARTS + b"1]}", "body")
