"""Manifests: hash the files of a folder as they are written, list them, and verify them later."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from laconic import __version__
from laconic.errors import CorruptArtifactError, InputError, translate_os_errors
from laconic.storage import atomic
from laconic.storage.file_names import resolve_inside
from laconic.storage.safetensors_header import read_safetensors_header
from laconic.storage.strict_json import read_json, to_canonical_json

FORMAT_VERSION = 2
MANIFEST_FILE = "MANIFEST.json"
# Files that Finder, Windows, NFS and FUSE put into folders that they show or whose open files are deleted.
SYSTEM_FILE = re.compile(r"\.DS_Store|\._.*|Thumbs\.db|desktop\.ini|\.directory|\.nfs[0-9a-f]+|\.fuse_hidden[0-9a-f]+")
SAFETENSORS_METADATA: Mapping[str, str] = {"format": "pt"}  # required by Hugging Face's loaders


class UnsupportedFormatError(CorruptArtifactError):
    """A folder written by a version of laconic with another format."""


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of MANIFEST.json of a folder of some kind, for example "step".

    `fingerprints` are the SHA-256 of what the folder depends on: recipe, data, base weights, tokenizer, config.
    """

    kind: str
    step: int
    files: Mapping[str, FileEntry]
    fingerprints: Mapping[str, str]
    laconic: str = __version__
    format: int = FORMAT_VERSION

    @property
    def canonical_text(self) -> str:
        """Canonical JSON with a `sha256` of all other keys; equal folders have equal texts."""
        return to_canonical_json({**asdict(self), "sha256": hash_json(asdict(self))})


class ManifestWriter:
    """Writes files into a folder and records the hash of what was to be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, FileEntry] = {}

    def add_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file; raise NonFiniteError, before that, if a tensor holds NaN or infinity."""
        path = self._create_parent(name)
        copies = atomic.unshare_tensors(tensors)
        atomic.save_tensors(path, copies, SAFETENSORS_METADATA)
        self._add_entry(name, _hash_expected_file(path, copies))

    def add_text(self, name: str, text: str) -> None:
        data = text.encode()
        with self._create_parent(name).open("xb") as file:
            file.write(data)
        self._add_entry(name, FileEntry(len(data), hashlib.sha256(data).hexdigest()))

    def add_json(self, name: str, value: object) -> None:
        self.add_text(name, to_canonical_json(value) + "\n")

    def add_existing(self, names: Iterable[str] | None = None) -> None:
        """Record files that other libraries wrote into the folder, by default all; their tensors must be finite."""
        for name in _list_files(self.folder) if names is None else names:
            if name not in self.entries:
                path = self.folder / name
                if name.endswith(".safetensors"):
                    tensors = atomic.open_tensors(path, read_safetensors_header(path).tensors)
                    for tensor_name, tensor in tensors.items():
                        atomic.check_finite(tensor_name, tensor)
                self._add_entry(name, FileEntry(*hash_file(path)))

    def finish(self, kind: str, step: int, fingerprints: Mapping[str, str]) -> Manifest:
        self.add_existing()
        configs = {stem: self.entries.get(f"{stem}.json") for stem in ("config", "tokenizer")}
        hashes = {stem: entry.sha256 for stem, entry in configs.items() if entry}
        manifest = Manifest(kind, step, dict(self.entries), {**hashes, **fingerprints})
        self.add_text(MANIFEST_FILE, manifest.canonical_text)
        for folder, _, _ in os.walk(self.folder, topdown=False):
            atomic.fsync_path(Path(folder))
        return manifest

    def _create_parent(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _add_entry(self, name: str, entry: FileEntry) -> None:
        atomic.fsync_path(self.folder / name)
        self.entries[name] = entry


def _hash_expected_file(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Hash the header of a file and the tensors in memory, so that a write error cannot enter the hash."""
    header = read_safetensors_header(path)
    stored = {name: (spec.dtype, spec.shape) for name, spec in header.tensors.items()}
    if stored != {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}:
        raise CorruptArtifactError(f"{path}: the header on disk lists other tensors than were written; check the disk")
    with path.open("rb") as file:
        start = file.read(8)
        start += file.read(int.from_bytes(start, "little"))
    digest = hashlib.sha256(start)
    for name, _ in sorted(header.tensors.items(), key=lambda item: item[1].start):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return FileEntry(len(start) + sum(tensor.nbytes for tensor in tensors.values()), digest.hexdigest())


def hash_file(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _list_files(folder: Path) -> list[str]:
    """Return every file below a folder, and links to folders, but no files of the operating system."""
    paths: list[str] = []
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        names = [name for name in files + links if not SYSTEM_FILE.fullmatch(name)]
        paths += [Path(parent, name).relative_to(folder).as_posix() for name in names]
    return sorted(paths)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder without verifying the files; raise CorruptArtifactError if it was changed."""
    try:
        fields = read_json(resolve_inside(folder, MANIFEST_FILE, allow_links=False))
    except InputError as error:
        raise CorruptArtifactError(f"{folder} is incomplete: {error}") from None
    version = fields.get("format")
    if type(version) is int and version != FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"{folder} has format {version} and was written by laconic {str(fields.get('laconic'))[:20]}; "
            f"laconic {__version__} reads format {FORMAT_VERSION}. Use that version"
        )
    changed = CorruptArtifactError(f"{folder}: {MANIFEST_FILE} was changed after it was written")
    try:
        manifest = TypeAdapter(Manifest).validate_python(fields)
    except ValidationError:
        raise changed from None
    if manifest.canonical_text != (folder / MANIFEST_FILE).read_text(encoding="utf-8"):
        raise changed
    return manifest


def verify_folder(folder: Path, kind: str, step: int | None = None) -> Manifest:
    """Check kind and step (unless None) of a folder, size and hash of its files, and their safetensors headers.

    Raises CorruptArtifactError for the first file that is missing, extra or changed, UnsafeFileError for a link out.
    """
    with translate_os_errors(folder):
        manifest = read_manifest(folder)
        if manifest.kind != kind or step not in (None, manifest.step):
            expected = kind if step is None else f"{kind} {step}"
            raise CorruptArtifactError(
                f"{folder}: {MANIFEST_FILE} is of {manifest.kind} {manifest.step}, expected {expected}"
            )
        present = set(_list_files(folder))
        missing = set(manifest.files) - present
        extra = present - {*manifest.files, MANIFEST_FILE}
        if missing or extra:
            what = f"{min(missing)} is missing" if missing else f"{min(extra)} is not listed"
            raise CorruptArtifactError(f"{folder}: {what}")
        for name, expected in manifest.files.items():
            _check_file(folder, name, expected)
    return manifest


def _check_file(folder: Path, name: str, expected: FileEntry) -> None:
    path = resolve_inside(folder, name, allow_links=False)
    size = path.stat().st_size
    if size != expected.bytes:
        raise CorruptArtifactError(f"{folder}: {name} has {size:,} bytes, expected {expected.bytes:,}")
    _, sha256 = hash_file(path)
    if sha256 != expected.sha256:
        raise CorruptArtifactError(f"{folder}: {name} has sha256 {sha256}, expected {expected.sha256}")
    if name.endswith(".safetensors"):
        try:
            read_safetensors_header(path)
        except InputError as error:
            raise CorruptArtifactError(f"{folder}: {error}") from None


def hash_line(previous: str, line: str) -> str:
    """Return the SHA-256 of a line and of all before it: `previous` is that of the line before, "" for the first."""
    return hashlib.sha256(f"{previous}{line}".encode()).hexdigest()


def hash_json(value: Any) -> str:
    return hashlib.sha256(to_canonical_json(value).encode()).hexdigest()
