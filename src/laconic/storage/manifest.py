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
from laconic.errors import CorruptArtifactError, InputError, translate_os_errors
from laconic.storage import atomic
from laconic.storage.strict_json import read_json, read_safetensors_header, resolve_inside, to_canonical_json

FORMAT_VERSION = 1  # of manifests; newer ones are refused
MANIFEST_FILE = "MANIFEST.json"
SAFETENSORS_METADATA: Mapping[str, str] = {"format": "pt"}  # what Hugging Face's readers ask of safetensors


class NewerFormatError(CorruptArtifactError):
    """A folder of a later laconic: not bad, but not for this one."""


@dataclass(frozen=True)
class FileEntry:
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
    files: Mapping[str, FileEntry]
    fingerprints: Mapping[str, str]
    laconic: str = __version__
    format: int = FORMAT_VERSION

    @property
    def canonical_text(self) -> str:
        """Canonical JSON; two folders are the same if these are."""
        return to_canonical_json({**asdict(self), "sha256": hash_json(asdict(self))})


class ManifestWriter:
    """The files of a folder under way: each is written, synced, and entered by the bytes that were meant.

    What another library wrote into `folder` is taken up by `adopt`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, FileEntry] = {}

    def add_tensors(
        self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = SAFETENSORS_METADATA
    ) -> None:
        """A safetensors file of finite tensors; `NonFinite` (65) for others, before anything is written."""
        path = self._create_parent(name)
        held = atomic.unshare_tensors(tensors)
        atomic.save_tensors(path, held, metadata)
        self._add_entry(name, _hash_expected_file(path, held))

    def add_bytes(self, name: str, data: bytes) -> None:
        """A file with these bytes."""
        path = self._create_parent(name)
        with path.open("xb") as file:
            file.write(data)
        self._add_entry(name, FileEntry(len(data), hashlib.sha256(data).hexdigest()))

    def add_text(self, name: str, text: str) -> None:
        """A file of UTF-8."""
        self.add_bytes(name, text.encode())

    def add_json(self, name: str, value: object) -> None:
        """A file of canonical JSON."""
        self.add_text(name, to_canonical_json(value) + "\n")

    def add_existing(self, names: Iterable[str] | None = None) -> None:
        """Enters files that others wrote, by default all there are: tensors finite and headers sound, or an error."""
        for name in _list_files(self.folder) if names is None else names:
            if name not in self.entries:
                path = self.folder / name
                if name.endswith(".safetensors"):
                    for tensor, values in atomic.open_tensors(path, read_safetensors_header(path).tensors).items():
                        atomic.check_finite(tensor, values)
                self._add_entry(name, FileEntry(*_hash_file(path)))

    def finish(self, kind: str, step: int, fingerprints: Mapping[str, str]) -> Manifest:
        """Writes the manifest over all files, then syncs it and every folder."""
        self.add_existing()
        own = {stem: self.entries.get(f"{stem}.json") for stem in ("config", "tokenizer")}
        made = {stem: file.sha256 for stem, file in own.items() if file}
        manifest = Manifest(kind, step, dict(self.entries), {**made, **fingerprints})
        self.add_text(MANIFEST_FILE, manifest.canonical_text)
        for folder, _, _ in os.walk(self.folder, topdown=False):
            atomic.fsync_path(Path(folder))
        return manifest

    def _create_parent(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _add_entry(self, name: str, file: FileEntry) -> None:
        atomic.fsync_path(self.folder / name)
        self.entries[name] = file


def _hash_expected_file(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """The hash over the header, which must promise these tensors, and their bytes in memory; no byte is read back."""
    header = read_safetensors_header(path)
    promised = {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()}
    if promised != {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}:
        raise CorruptArtifactError(
            f"{path}: the header written promises other tensors than were given; try another disk"
        )
    with path.open("rb") as file:
        start = file.read(8)
        start += file.read(int.from_bytes(start, "little"))
    digest = hashlib.sha256(start)
    for name, _ in sorted(header.tensors.items(), key=lambda item: item[1].start):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return FileEntry(len(start) + sum(tensor.nbytes for tensor in tensors.values()), digest.hexdigest())


def _hash_file(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _list_files(folder: Path) -> list[str]:
    """Every file below a folder, links and all that is no folder among them."""
    found: list[str] = []
    for where, folders, files in os.walk(folder):
        links = [name for name in folders if Path(where, name).is_symlink()]
        found += [Path(where, name).relative_to(folder).as_posix() for name in files + links]
    return sorted(found)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, nothing else looked at. Raises `Damaged`, and `TooNew` for a later format."""
    try:
        fields = read_json(folder / MANIFEST_FILE)
    except InputError as error:
        raise CorruptArtifactError(f"{folder} is no committed folder: {error}") from None
    if type(fields.get("format")) is int and fields["format"] > FORMAT_VERSION:
        there = f"format {fields['format']} of laconic {str(fields.get('laconic'))[:20]}"
        raise NewerFormatError(f"{folder}: {there}, this one reads format {FORMAT_VERSION}; take a newer laconic")
    try:
        files = {name: FileEntry(int(file["bytes"]), str(file["sha256"])) for name, file in fields["files"].items()}
        bound = cast(dict[str, str], dict(fields["bound"]))
        manifest = Manifest(fields["kind"], fields["step"], files, bound, fields["laconic"], fields["format"])
        sound = manifest.canonical_text == (folder / MANIFEST_FILE).read_text(encoding="utf-8")
    except (KeyError, TypeError, ValueError, AttributeError):
        sound, manifest = False, Manifest("", 0, {}, {})
    if not sound:
        raise CorruptArtifactError(f"{folder}: {MANIFEST_FILE} is not as it was written")
    return manifest


def verify_folder(folder: Path, kind: str, step: int | None = None) -> Manifest:
    """The manifest of a folder all of whose files are as it says; `Damaged` names the first that is not.

    One pass of SHA-256 over every file, then the headers of safetensors; no tensor is opened.
    """
    with translate_os_errors(folder):
        manifest = read_manifest(folder)
        there = (manifest.kind, manifest.step if step is not None else None)
        if there != (kind, step):
            raise CorruptArtifactError(
                f"{folder}: {MANIFEST_FILE} is of {there[0]} {manifest.step}, asked was {kind} {step}"
            )
        missing, more = (
            set(manifest.files) - set(_list_files(folder)),
            set(_list_files(folder)) - {*manifest.files, MANIFEST_FILE},
        )
        if missing or more:
            what = f"{min(missing)} is missing" if missing else f"{min(more)} is not listed"
            raise CorruptArtifactError(f"{folder}: {what}")
        for name, promised in manifest.files.items():
            _check_file(folder, name, promised)
    return manifest


def _check_file(folder: Path, name: str, expected: FileEntry) -> None:
    path = resolve_inside(folder, name)
    size = path.stat().st_size
    if size != expected.bytes:
        raise CorruptArtifactError(f"{folder}: {name} has {size:,} bytes, {expected.bytes:,} expected")
    _, found = _hash_file(path)
    if found != expected.sha256:
        raise CorruptArtifactError(f"{folder}: {name} has sha256 {found}, {expected.sha256} expected")
    if name.endswith(".safetensors"):
        try:
            read_safetensors_header(path)
        except InputError as error:
            raise CorruptArtifactError(f"{folder}: as listed, but {error}") from None


def hash_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(to_canonical_json(value).encode()).hexdigest()
