"""The record of an exported folder, `laconic/export.json`: what was exported, and the SHA-256 of its files.

It covers the files that determine the model's outputs: weights, config.json, and the folder `laconic` (thoughts,
summary vectors, adapter, recipe). Tokenizer files are recorded too, but if they change there is only a warning, because
transformers rewrites tokenizer.json to add a chat template. README.md, generation_config.json and other files are not
recorded.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from laconic.errors import CorruptArtifactError, InputError, translate_os_errors
from laconic.storage.file_names import resolve_inside
from laconic.storage.manifest import hash_json
from laconic.storage.strict_json import read_json

EXPORT_FOLDER, EXPORT_FILE = "laconic", "export.json"
SCHEMA = 1
CONFIG_FILES = ("config.json", "model.safetensors.index.json")
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
NUM_THREADS = 4


@dataclass(frozen=True)
class ExportRecord:
    """Contents of laconic/export.json of a folder: SHA-256 by file name; of a run also its method, step and epoch."""

    folder: Path
    metadata: Mapping[str, Any]
    files: Mapping[str, str]

    @property
    def is_run(self) -> bool:
        return "method" in self.metadata

    def is_unchanged(self, name: str) -> bool:
        """Return whether an existing file has its recorded SHA-256; True if none is recorded."""
        recorded = self.files.get(name)
        return recorded is None or recorded == hash_file(resolve_inside(self.folder, name, allow_links=False))

    def check_files(self, should_check: Callable[[str], bool]) -> None:
        """Check the recorded files whose names `should_check` accepts; raise CorruptArtifactError as `check_file`."""
        for name in filter(should_check, self.files):
            self.check_file(name)

    def check_file(self, name: str) -> None:
        """Check one recorded file; raise CorruptArtifactError if it is missing or was changed."""
        is_missing = not (self.folder / name).is_file()
        if is_missing or not self.is_unchanged(name):
            problem = "is missing" if is_missing else "has changed since the export"
            raise CorruptArtifactError(f"{self.folder}: {name} {problem}; {self.describe_remedy(name)}")

    def describe_remedy(self, name: str) -> str:
        path = self.folder / EXPORT_FOLDER / EXPORT_FILE
        deletion = f'delete {name} from "files" in {path}' if self.is_run else f"delete {path}"
        return f"export it again or use an intact copy; if you changed it, or save_pretrained did, {deletion}"


def write_export_record(folder: Path, metadata: Mapping[str, Any] | None = None) -> None:
    """Record the files of a complete folder; call this last inside an atomic write.

    The key `sha256` covers the metadata alone, so that users can remove a file that they changed from `files`.
    """
    (folder / EXPORT_FOLDER).mkdir(exist_ok=True)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: hash_file(folder / name) for name in names if is_recorded(name)}
    metadata = {"schema": SCHEMA, **(metadata or {})}
    text = json.dumps({**metadata, "files": files, "sha256": hash_json(metadata)}, indent=2)
    (folder / EXPORT_FOLDER / EXPORT_FILE).write_text(text + "\n", encoding="utf-8")


def read_export_record(folder: Path) -> ExportRecord | None:
    """Read the record of a folder; None if it has none. Raises CorruptArtifactError if it is damaged."""
    path = folder / EXPORT_FOLDER / EXPORT_FILE
    if not path.is_file():
        return None
    try:
        metadata = read_json(path)
    except InputError as error:
        raise CorruptArtifactError(f"{path.parent} is damaged: {error}; use an intact copy") from None
    files = metadata.pop("files", {})
    digest = metadata.pop("sha256", None)
    if digest != hash_json(metadata) or not isinstance(files, dict):
        raise CorruptArtifactError(f"{path} was changed after it was written; use an intact copy")
    return ExportRecord(folder, metadata, cast(dict[str, str], files))


def is_weights_file(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def is_recorded(name: str) -> bool:
    if name.startswith(f"{EXPORT_FOLDER}/"):
        return name.endswith((".safetensors", ".json", ".toml")) and name != f"{EXPORT_FOLDER}/{EXPORT_FILE}"
    return name in CONFIG_FILES or name in VOCABULARY_FILES or is_weights_file(name)


def check_config(folder: Path) -> None:
    if record := read_export_record(folder):
        record.check_files(lambda name: name in CONFIG_FILES)


def warn_of_changed_vocabulary(folder: Path, names: Iterable[str]) -> None:
    """Warn about each of these tokenizer files that differs from the record."""
    if record := read_export_record(folder):
        for name in names:
            if name in VOCABULARY_FILES and not record.is_unchanged(name):
                remedy = record.describe_remedy(name)
                warnings.warn(f"{folder / name} has changed since the export; {remedy}", stacklevel=3)


@contextmanager
def check_weights_while_reading(folder: Path) -> Generator[None]:
    """Check the weights of a folder with a record in other threads while the body reads them.

    SHA-256 takes about as long as reading, and releases the GIL. CorruptArtifactError for a changed file replaces an
    error of the body, which the change explains.
    """
    record = read_export_record(folder)
    names = [name for name in record.files if is_weights_file(name)] if record else []
    if record is None or not names:
        yield
        return
    pool = ThreadPoolExecutor(min(NUM_THREADS, len(names)))
    checks = [pool.submit(record.check_file, name) for name in names]
    try:
        try:
            yield
        except Exception:
            for check in checks:
                check.result()
            raise
        for check in checks:
            check.result()
    finally:  # after Ctrl-C, do not wait for the hashes
        pool.shutdown(wait=False, cancel_futures=True)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, of text files with Unix line ends, because git may convert them on Windows."""
    with translate_os_errors(path), path.open("rb") as file:
        if path.suffix in (".json", ".toml", ".txt"):
            return hashlib.sha256(file.read().replace(b"\r\n", b"\n")).hexdigest()
        return hashlib.file_digest(file, "sha256").hexdigest()
