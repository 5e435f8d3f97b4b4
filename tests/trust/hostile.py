"""Hostile model folders: each entry takes a folder that loads and spoils one thing in it."""

import gzip
import io
import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
Spoil = Callable[[Path], object]
CASES: dict[str, tuple[Spoil, int]] = {}  # name -> what is done, the code that must come


def case(name: str, code: int, spoil: Spoil) -> None:
    assert name not in CASES
    CASES[name] = (spoil, code)


def header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    content = (folder / WHOLE).read_bytes()
    n = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + n]), content[8 + n :]


def put(folder: Path, header: bytes, data: bytes = b"") -> None:
    (folder / WHOLE).write_bytes(len(header).to_bytes(8, "little") + header + data)


def changed(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """The header with a change, the data as they were."""

    def spoil(folder: Path) -> None:
        header, data = header_of(folder)
        change(header)
        put(folder, json.dumps(header).encode(), data)

    return spoil


def content(make: Callable[[Path], bytes]) -> Spoil:
    return lambda folder: (folder / WHOLE).write_bytes(make(folder))


def sparse(start: bytes, size: int) -> Spoil:
    def spoil(folder: Path) -> None:
        with (folder / WHOLE).open("wb") as file:
            file.write(start)
            file.truncate(size)

    return spoil


def canary(folder: Path) -> bytes:
    """A pickle, protocol 0, that would make the file CANARY."""
    return f"cos\nsystem\n(S'touch {folder}/CANARY'\ntR.".encode()


def zipped(folder: Path, name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


def tarred(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder / CONFIG, "data.pkl")
    return buffer.getvalue()


# --- other things under the name of a safetensors file
case("pickle of protocol 0", 66, content(canary))
for protocol in (2, 3, 4, 5):
    case(f"pickle of protocol {protocol}", 77, content(lambda f, p=protocol: bytes([0x80, p]) + canary(f)))
case("torch.save zip", 77, content(lambda f: zipped(f, "archive/data.pkl", canary(f))))
case("zip bomb", 77, content(lambda f: zipped(f, "data", b"\0" * 50_000_000)))
case("7z", 66, content(lambda f: b"7z\xbc\xaf\x27\x1c" + b"\0" * 100))
case("gzip", 66, content(lambda f: gzip.compress((f / WHOLE).read_bytes())))
case("tar", 66, content(tarred))
case(
    "zip behind a safetensors file", 66, content(lambda f: (f / WHOLE).read_bytes() + zipped(f, "data.pkl", canary(f)))
)
case("empty file", 66, content(lambda f: b""))
case("seven bytes", 66, content(lambda f: b"\1" * 7))
case("cut by one byte", 66, content(lambda f: (f / WHOLE).read_bytes()[:-1]))
case("one byte more", 66, content(lambda f: (f / WHOLE).read_bytes() + b"\0"))
case("cut in the header", 66, content(lambda f: (f / WHOLE).read_bytes()[:100]))

# --- headers
case("header of 2^63 bytes", 66, content(lambda f: (2**63).to_bytes(8, "little") + b"{}"))
case("header of 2^64 - 1 bytes", 66, content(lambda f: b"\xff" * 8 + b"{}"))
case("header over the limit, sparse", 66, sparse((100_000_001).to_bytes(8, "little"), 2**40))
case("header at the limit, of zeros", 66, sparse((100_000_000).to_bytes(8, "little"), 100_000_008))
case("header of spaces", 66, lambda f: put(f, b" " * 30_000_000))
case("header of commas", 66, lambda f: put(f, b'{"a":[' + b"0," * 30_000_000 + b"0]}"))
case("header of empty tensors", 66, lambda f: put(f, b"{" + b",".join(empty(n) for n in range(150_000)) + b"}"))
case("header of one long name", 66, lambda f: put(f, b'{"' + b"a" * 50_000_000 + b'": {}}'))
case("name with line ends", 66, lambda f: put(f, b"{" + empty(1).replace(b"1", b"a\\n\\u001b[2J") + b"}"))
case("name turned around", 66, lambda f: put(f, b"{" + empty(1).replace(b"1", b"\\u202etxt") + b"}"))
case("name of nothing", 66, lambda f: put(f, b"{" + empty(1).replace(b"1", b"") + b"}"))
case("header 65 deep", 66, lambda f: put(f, b'{"a":' * 65 + b"1" + b"}" * 65))
case("header 100,000 deep", 66, lambda f: put(f, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"))
case("header that is a list", 66, lambda f: put(f, b"[]"))
case("header that is not UTF-8", 66, lambda f: put(f, b'{"\xff": {}}'))
case("header with text behind", 66, lambda f: put(f, b"{} {}"))
case("header without tensors", 66, lambda f: put(f, b"{}"))
case("header with a lone surrogate", 66, lambda f: put(f, b'{"\\udc80": {}}'))
case("header with NaN", 66, lambda f: put(f, b'{"a": NaN}'))
case("header with 10^4000", 66, lambda f: put(f, b'{"a": 1' + b"0" * 4000 + b"}"))
case("header with 10^100000", 66, lambda f: put(f, b'{"a": 1' + b"0" * 100_000 + b"}"))


def empty(n: int) -> bytes:
    return b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n


def twice(folder: Path) -> None:
    header, data = header_of(folder)
    text = json.dumps(header)
    name = next(iter(header))
    put(folder, f'{{"{name}": {json.dumps(header[name])}, {text[1:]}'.encode(), data)


def first(header: dict[str, Any]) -> dict[str, Any]:
    return next(field for name, field in header.items() if name != "__metadata__")


def moved(by: int) -> Spoil:
    def change(header: dict[str, Any]) -> None:
        last = max((f for n, f in header.items() if n != "__metadata__"), key=lambda f: f["data_offsets"][1])
        last["data_offsets"] = [n + by for n in last["data_offsets"]]

    return changed(change)


case("a key twice", 66, twice)
case("metadata twice", 66, lambda f: put(f, b'{"__metadata__":{},"__metadata__":{"a":"b"}}'))
case("overlap", 66, moved(-4))
case("gap", 66, moved(4))
for what, value in {
    "negative shape": {"shape": [-1, -48]},
    "shape of floats": {"shape": [97.0, 48.0]},
    "shape of truths": {"shape": [True]},
    "shape of text": {"shape": "97"},
    "shape null": {"shape": None},
    "2^40 elements": {"shape": [2**40]},
    "product overflows": {"shape": [2**32, 2**32, 2**32]},
    "product wraps to nothing": {"shape": [2**40, 2**40, 0]},
    "5,000 dimensions": {"shape": [1] * 5000},
    "unknown type": {"dtype": "F33"},
    "type null": {"dtype": None},
    "type of a list": {"dtype": ["F32"]},
    "offsets reversed": {"data_offsets": [8, 0]},
    "three offsets": {"data_offsets": [0, 4, 8]},
    "offsets of 2^60": {"data_offsets": [2**60, 2**60 + 4]},
    "offsets of text": {"data_offsets": "01"},
    "whole numbers": {"dtype": "I32"},
}.items():
    case(what, 66, changed(lambda header, value=value: first(header).update(value)))
case("entry that is a number", 66, changed(lambda header: header.update(a=5)))
case("metadata of numbers", 66, changed(lambda header: header.update(__metadata__={"a": 5})))
case("2^40 elements in a sparse file", 66, lambda f: sparse(*huge())(f))


def huge() -> tuple[bytes, int]:
    field = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    text = json.dumps({"model.embed_tokens.weight": field}).encode()
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + 2**42


# --- what stands under the name
def instead(make: Callable[[Path], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / WHOLE).rename(folder.parent / "outside.safetensors")
        make(folder / WHOLE)

    return spoil


case("link to a file outside", 77, instead(lambda path: path.symlink_to("../outside.safetensors")))
case("link to a device", 77, instead(lambda path: path.symlink_to("/dev/zero")))
case("link to itself", 77, instead(lambda path: path.symlink_to(WHOLE)))
case("link to nothing outside", 77, instead(lambda path: path.symlink_to("../none")))
case("link to nothing inside", 66, instead(lambda path: path.symlink_to("none")))
case("folder", 77, instead(lambda path: path.mkdir()))
case("pipe", 77, instead(lambda path: os.mkfifo(path)))
case("device of its own", 66, instead(lambda path: None))


# --- the index
def indexed(weight_map: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        shutil.copy(folder / WHOLE, folder.parent / "outside.safetensors")
        (folder / WHOLE).unlink()
        (folder / INDEX).write_text(weight_map if isinstance(weight_map, str) else json.dumps(weight_map))

    return spoil


def shard(name: str) -> Spoil:
    return indexed({"weight_map": {"model.embed_tokens.weight": name}})


for name in (
    "../outside.safetensors", "a/../../outside.safetensors", "/etc/passwd", "//server/share/x", "C:\\x.safetensors",
    "C:x.safetensors", "\\\\server\\share\\x", "\\x", "..\\outside.safetensors", "a\0b", "", ".", "..", "a" * 5000,
):  # fmt: skip
    case(f"shard {name[:30]!r}", 77, shard(name))
for name in ("%2e%2e/outside.safetensors", "CON", "~/outside.safetensors", "\u2024\u2024/outside.safetensors"):
    case(f"shard {name!r}", 66, shard(name))
case("map of names with line ends", 66, indexed({"weight_map": {"a\n\33[2Jall is well": "b"}}))
case("shard that is a pickle", 77, shard("pytorch_model.bin"))
case("map that is a list", 66, indexed({"weight_map": ["a"]}))
case("map to numbers", 66, indexed({"weight_map": {"a": 1}}))
case("no map", 66, indexed({}))
case("empty map", 66, indexed({"weight_map": {}}))
case("index with a key twice", 66, indexed('{"weight_map": {"a": "b", "a": "c"}}'))
case("index 100,000 deep", 66, indexed('{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}"))


def a_million(folder: Path) -> None:
    indexed('{"weight_map": {' + ",".join(f'"{n}":"{n}"' for n in range(10**6)) + "}}")(folder)


case("index of a million shards", 66, a_million)

# --- the configuration
for what, text in {
    "nothing": b"",
    "a list": b"[]",
    "a pickle": b"\x80\4cos\nsystem\n",
    "no UTF-8": b'{"\xff": 1}',
    "65 deep": b'{"a":' * 65 + b"1" + b"}" * 65,
    "a key twice": b'{"model_type": "llama", "model_type": "gpt2"}',
    "NaN": b'{"rms_norm_eps": NaN}',
    "1e999": b'{"rms_norm_eps": 1e999}',
    "2^53 + 1": b'{"vocab_size": 9007199254740993}',
    "a lone surrogate": b'{"model_type": "\\ud800"}',
    "an odd family": b'{"model_type": "../../x"}',
    "no family": b"{}",
    "a family of a list": b'{"model_type": ["llama"]}',
    "a million numbers": b'{"a": [' + b"0," * 10**6 + b"0]}",
}.items():
    case(f"configuration with {what}", 66, lambda f, text=text: (f / CONFIG).write_bytes(text))
case("configuration that is a pipe", 66, lambda f: ((f / CONFIG).unlink(), os.mkfifo(f / CONFIG)))
case("configuration of 2^40 bytes", 66, lambda f: os.truncate(f / CONFIG, 2**40))

# --- nothing but pickles
for suffix in ("bin", "pt", "pth", "ckpt"):
    case(f"only model.{suffix}", 77, lambda f, s=suffix: (f / WHOLE).rename(f / f"model.{s}"))
