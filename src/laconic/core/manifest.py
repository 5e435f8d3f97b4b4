"""What a committed folder holds: files hashed as they are written, the manifest that lists them, and its check."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from laconic import __version__
from laconic.core import artifact
from laconic.core.errors import BadInput, Damaged, on_disk
from laconic.core.strict import canonical, check_header, inside, read_json

FORMAT = 1  # of manifests; newer ones are refused
NAME = "MANIFEST.json"
PLAIN: Mapping[str, str] = {"format": "pt"}  # what Hugging Face's readers ask of safetensors


class TooNew(Damaged):
    """A folder of a later laconic: not bad, but not for this one."""


@dataclass(frozen=True)
class File:
    """One file as it was meant: its bytes and their SHA-256."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder says of itself; `bound` holds SHA-256 values of what it belongs to.

    On disk it has one more key, `sha256`, of the canonical JSON of all others.
    """

    kind: str
    step: int
    files: Mapping[str, File]
    bound: Mapping[str, str]
    laconic: str = __version__
    format: int = FORMAT

    @property
    def text(self) -> str:
        """Canonical JSON; two folders are the same if these are."""
        return canonical({**asdict(self), "sha256": fingerprint(asdict(self))})


class Files:
    """The files of a folder under way: each is written, synced, and entered by the bytes that were meant.

    What another library wrote into `folder` is taken up by `adopt`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entered: dict[str, File] = {}

    def tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = PLAIN) -> None:
        """A safetensors file of finite tensors; `NonFinite` (65) for others, before anything is written."""
        path = self._new(name)
        held = artifact.apart(tensors)
        artifact.save_tensors(path, held, metadata)
        self._enter(name, _meant(path, held))

    def bytes(self, name: str, data: bytes) -> None:
        """A file with these bytes."""
        path = self._new(name)
        with path.open("xb") as file:
            file.write(data)
        self._enter(name, File(len(data), hashlib.sha256(data).hexdigest()))

    def text(self, name: str, text: str) -> None:
        """A file of UTF-8."""
        self.bytes(name, text.encode())

    def json(self, name: str, value: object) -> None:
        """A file of canonical JSON."""
        self.text(name, canonical(value) + "\n")

    def adopt(self, names: Iterable[str] | None = None) -> None:
        """Enters files that others wrote, by default all there are: tensors finite and headers sound, or an error."""
        for name in _names(self.folder) if names is None else names:
            if name not in self.entered:
                path = self.folder / name
                if name.endswith(".safetensors"):
                    for tensor, values in artifact.open_tensors(path, check_header(path).tensors).items():
                        artifact.check_finite(tensor, values)
                self._enter(name, File(*_read(path)))

    def seal(self, kind: str, step: int, bound: Mapping[str, str]) -> Manifest:
        """Writes the manifest over all files, then syncs it and every folder."""
        self.adopt()
        own = {stem: self.entered.get(f"{stem}.json") for stem in ("config", "tokenizer")}
        made = {stem: file.sha256 for stem, file in own.items() if file}
        manifest = Manifest(kind, step, dict(self.entered), {**made, **bound})
        self.text(NAME, manifest.text)
        for folder, _, _ in os.walk(self.folder, topdown=False):
            artifact.sync(Path(folder))
        return manifest

    def _new(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _enter(self, name: str, file: File) -> None:
        artifact.sync(self.folder / name)
        self.entered[name] = file


def _meant(path: Path, tensors: Mapping[str, Tensor]) -> File:
    """The hash over the header, which must promise these tensors, and their bytes in memory; no byte is read back."""
    header = check_header(path)
    promised = {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()}
    if promised != {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}:
        raise Damaged(f"{path}: the header written promises other tensors than were given; try another disk")
    with path.open("rb") as file:
        start = file.read(8)
        start += file.read(int.from_bytes(start, "little"))
    digest = hashlib.sha256(start)
    for name, _ in sorted(header.tensors.items(), key=lambda item: item[1].start):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return File(len(start) + sum(tensor.nbytes for tensor in tensors.values()), digest.hexdigest())


def _read(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _names(folder: Path) -> list[str]:
    """Every file below a folder, links and all that is no folder among them."""
    found: list[str] = []
    for where, folders, files in os.walk(folder):
        links = [name for name in folders if Path(where, name).is_symlink()]
        found += [Path(where, name).relative_to(folder).as_posix() for name in files + links]
    return sorted(found)


def read(folder: Path) -> Manifest:
    """The manifest of a folder, nothing else looked at. Raises `Damaged`, and `TooNew` for a later format."""
    try:
        fields = read_json(folder / NAME)
    except BadInput as error:
        raise Damaged(f"{folder} is no committed folder: {error}") from None
    if type(fields.get("format")) is int and fields["format"] > FORMAT:
        there = f"format {fields['format']} of laconic {str(fields.get('laconic'))[:20]}"
        raise TooNew(f"{folder}: {there}, this one reads format {FORMAT}; take a newer laconic")
    try:
        files = {name: File(int(file["bytes"]), str(file["sha256"])) for name, file in fields["files"].items()}
        bound = cast(dict[str, str], dict(fields["bound"]))
        manifest = Manifest(fields["kind"], fields["step"], files, bound, fields["laconic"], fields["format"])
        sound = manifest.text == (folder / NAME).read_text(encoding="utf-8")
    except (KeyError, TypeError, ValueError, AttributeError):
        sound, manifest = False, Manifest("", 0, {}, {})
    if not sound:
        raise Damaged(f"{folder}: {NAME} is not as it was written")
    return manifest


def check(folder: Path, kind: str, step: int | None = None) -> Manifest:
    """The manifest of a folder all of whose files are as it says; `Damaged` names the first that is not.

    One pass of SHA-256 over every file, then the headers of safetensors; no tensor is opened.
    """
    with on_disk(folder):
        manifest = read(folder)
        there = (manifest.kind, manifest.step if step is not None else None)
        if there != (kind, step):
            raise Damaged(f"{folder}: {NAME} is of {there[0]} {manifest.step}, asked was {kind} {step}")
        missing, more = set(manifest.files) - set(_names(folder)), set(_names(folder)) - {*manifest.files, NAME}
        if missing or more:
            what = f"{min(missing)} is missing" if missing else f"{min(more)} is not listed"
            raise Damaged(f"{folder}: {what}")
        for name, promised in manifest.files.items():
            _check_file(folder, name, promised)
    return manifest


def _check_file(folder: Path, name: str, promised: File) -> None:
    path = inside(folder, name)
    size = path.stat().st_size
    if size != promised.bytes:
        raise Damaged(f"{folder}: {name} has {size:,} bytes, {promised.bytes:,} expected")
    _, found = _read(path)
    if found != promised.sha256:
        raise Damaged(f"{folder}: {name} has sha256 {found}, {promised.sha256} expected")
    if name.endswith(".safetensors"):
        try:
            check_header(path)
        except BadInput as error:
            raise Damaged(f"{folder}: as listed, but {error}") from None


def fingerprint(value: Any) -> str:
    """SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()
