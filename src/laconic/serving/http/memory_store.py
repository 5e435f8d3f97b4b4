"""Memories of the server: one file each in a folder, written atomically, and joined for the prompts that name them."""

import os
import re
import secrets
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import torch

from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.memory_file import FILE_KIND as KV_KIND
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_file import FILE_KIND as SUMMARY_KIND
from laconic.console import log_message
from laconic.errors import CorruptArtifactError, LaconicError, UsageError, translate_os_errors
from laconic.experiment.text_models.chat_session import ChatPrefix
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.experiment.text_models.kv_compressor import load_kv_memories
from laconic.models.decoder import Decoder
from laconic.serving.http.api_error import ApiError
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.schemas import MemoryCard
from laconic.storage.atomic import read_artifact_header, remove_temporary, write_file_atomically

SUFFIX = ".safetensors"
TEMPORARY_PREFIX = ".tmp-"  # begins the names of unfinished uploads
MEMORY_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_PREFIXES = 8  # KV caches of recently used memories that stay in RAM


@dataclass(frozen=True)
class StoredMemory:
    """A memory file with what requests may know about it. The digest in its header changes with its content."""

    path: Path
    digest: str
    card: MemoryCard
    is_pinned: bool = False  # given on the command line, and so cannot be replaced or deleted


class MemoryStore:
    """Memories by id: those in a folder, where what an interrupted write left is removed, and pinned `memory_files`.

    Every method may be called from any thread. `decoder` reads the memories, as the engine runs it. Raises
    CorruptArtifactError if a pinned file is damaged or belongs to another model; UsageError if a pinned id is invalid,
    or the model reads no memories.
    """

    def __init__(self, served: ApiModel, decoder: Decoder, folder: Path) -> None:
        self.served = served
        self.decoder = decoder
        self.folder = folder
        self.lock = threading.RLock()
        self.entries = dict[str, StoredMemory]()
        self.prefixes = OrderedDict[tuple[str, ...], ChatPrefix]()
        remove_temporary(folder)
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            try:
                if not MEMORY_ID.fullmatch(path.stem):
                    raise UsageError("an id has up to 64 letters, digits, - and _; rename the file")
                self.entries[path.stem] = self.describe(path.stem, path)
            except LaconicError as error:
                log_message(f"laconic: {path} is left out: {error}")
        for id, path in served.options.memory_files.items():
            if not MEMORY_ID.fullmatch(id):
                raise UsageError(f"--memory {id}={path}: a name has up to 64 letters, digits, - and _; choose another")
            self.load([path])
            self.entries[id] = replace(self.describe(id, path), is_pinned=True)

    def describe(self, id: str, path: Path) -> StoredMemory:
        """Read the header of a file. Raises CorruptArtifactError if it is not a memory."""
        header, data = read_artifact_header(path)
        kind = data.get("kind")
        reader = self.served.memory_metadata
        if kind not in (KV_KIND, SUMMARY_KIND):
            raise CorruptArtifactError(f"{path.name} has no vectors, keys or values; upload a state to /v1/sessions")
        try:
            documents = [document for row in data["documents"] for document in row]
            if kind == KV_KIND:
                slots = header.tensors["positions"].shape[0] / max(1, data["layers"] * data["kv_heads"])
                method = str(data["method"])
                model_key = "model"
            else:
                slots = header.tensors["vectors"].shape[0]
                method = "autocompressor"
                model_key = "reader"
            card = MemoryCard(
                id=id,
                created=int(datetime.fromisoformat(data["created"]).timestamp()),
                name=", ".join(str(document["name"]) for document in documents)[:200],
                kind="kv" if kind == KV_KIND else "summary",
                method=method,
                tokens=sum(int(document["tokens"]) for document in documents),
                slots=round(slots, 1),
                bytes=path.stat().st_size,
                is_readable=all(data[key] == getattr(reader, key, None) for key in (model_key, "tokenizer")),
            )
        except (KeyError, TypeError, ValueError, IndexError):
            raise CorruptArtifactError(f"{path.name} has invalid metadata; use an intact copy") from None
        return StoredMemory(path, header.metadata.get("digest", ""), card)

    def list(self) -> list[MemoryCard]:
        """Return the metadata of all memories, the oldest first."""
        with self.lock:
            return sorted((entry.card for entry in self.entries.values()), key=lambda card: (card.created, card.id))

    def find(self, name: str) -> StoredMemory:
        """Return a memory by its id, or by its name if only one memory that the served model may read has it."""
        with self.lock:
            named = [entry for entry in self.entries.values() if entry.card.name == name]
            entries = [self.entries[name]] if name in self.entries else named
        entries = [entry for entry in entries if entry.card.is_readable] or entries
        if not entries:
            message = f"memory {name[:80]!r} does not exist; GET /v1/memories lists all"
            raise ApiError(404, message, "memory", "not_found")
        if len(entries) > 1:
            ids = ", ".join(entry.card.id for entry in entries[:4])
            message = f"{len(entries)} memories have the name {name[:80]!r}; give the id of one: {ids}"
            raise ApiError(409, message, "memory", "ambiguous_name")
        return entries[0]

    def open(self, entry: StoredMemory) -> tuple[BinaryIO, int]:
        """Open the file of a memory, and return its size. The file stays readable if the memory is deleted."""
        try:
            file = entry.path.open("rb")
        except FileNotFoundError:
            raise build_deleted_error(entry) from None
        return file, os.fstat(file.fileno()).st_size

    @contextmanager
    def new_file(self) -> Iterator[Path]:
        """Yield a path for a file that is not a memory yet, which is removed at the end unless it has become one."""
        path = self.folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        with translate_os_errors(path):
            self.folder.mkdir(parents=True, exist_ok=True)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def check_name(self, name: str) -> None:
        """Raise ApiError (409) for a name that is another memory's id, because requests would get that memory."""
        if name in self.entries:
            raise ApiError(409, f"name: {name!r} is the id of another memory; choose another name", "name")

    def check_space(self, id: str | None = None) -> None:
        """Raise ApiError if a memory cannot be added: 400 if the store is full, 409 if the id is of a pinned memory."""
        with self.lock:
            entry = None if id is None else self.entries.get(id)
            count = sum(not entry.is_pinned for entry in self.entries.values())
        if entry is not None and entry.is_pinned:
            raise ApiError(409, f"memory {id} was given when the server started; it cannot be changed", "id")
        if entry is None and count >= self.served.options.max_memories:
            message = f"the server stores {count} memories, its limit; delete one first"
            raise ApiError(400, message, code="too_many_memories")

    def add(self, source: Path, id: str | None = None) -> MemoryCard:
        """Move a checked file into the store, under its id or a new one, replacing a memory of that id."""
        with self.lock:
            self.check_space(id)  # again, since another memory may have been added while this one arrived
            id = f"mem_{secrets.token_hex(12)}" if id is None else id
            path = self.folder / f"{id}{SUFFIX}"
            write_file_atomically(path, lambda new: os.replace(source, new))
            self.forget(id)
            entry = self.entries[id] = self.describe(id, path)
        return entry.card

    def delete(self, id: str) -> None:
        """Delete a memory and its file. Raises ApiError (409) if it was given on the command line."""
        with self.lock:
            self.check_space(id)
            if (entry := self.forget(id)) is not None:
                entry.path.unlink(missing_ok=True)

    def forget(self, id: str) -> StoredMemory | None:
        """Remove a memory from RAM and return it, if there is one; the caller holds the lock."""
        entry = self.entries.pop(id, None)
        for key in [key for key in self.prefixes if entry is not None and entry.digest in key]:
            del self.prefixes[key]
        return entry

    @torch.inference_mode()
    def load_prefix(self, names: tuple[str, ...]) -> ChatPrefix:
        """Return the KV cache of memories, by id or name and in order, as a beginning of prompts."""
        self.served.check_reads_memories()
        entries = [self.find(name) for name in names]
        for entry in entries:
            if not entry.card.is_readable:
                message = f"memory {entry.card.id} was written for another model; write it again"
                raise ApiError(409, message, "memory", "memory_of_another_model")
            if not entry.path.exists():
                raise build_deleted_error(entry)
        key = tuple(entry.digest for entry in entries)
        with self.lock:
            if key in self.prefixes:
                self.prefixes.move_to_end(key)
                return self.prefixes[key]
        try:
            prefix = self.build_prefix(self.load([entry.path for entry in entries]))
            for entry in entries:
                self.check_digest(entry)
        except LaconicError as error:
            message = f"memory: {error}"
            for entry in entries:
                if not entry.path.exists():  # deleted while it was read
                    raise build_deleted_error(entry) from None
                message = hide_path(message, entry.path, entry.card.id)
            raise ApiError(409 if isinstance(error, CorruptArtifactError) else 400, message, "memory") from None
        # a copy, since a file that is overwritten in place changes the tensors that were loaded from it
        prefix = replace(prefix, cache=prefix.cache.map_tensors(torch.clone))
        with self.lock:
            if all(self.entries.get(entry.card.id) is entry for entry in entries):  # none was deleted meanwhile
                self.prefixes[key] = prefix
            while len(self.prefixes) > MAX_PREFIXES:
                self.prefixes.popitem(last=False)
        return prefix

    def check_digest(self, entry: StoredMemory) -> None:
        """Raise CorruptArtifactError for a file that another program has replaced; a client may have uploaded it."""
        digest = self.describe(entry.card.id, entry.path).digest
        current = self.entries.get(entry.card.id, entry)
        if digest not in (entry.digest, current.digest):
            raise CorruptArtifactError(
                f"the file of {entry.card.id} was replaced by another; upload it, or restart the server"
            )

    def load(self, paths: Sequence[Path]) -> KVMemory | SummaryMemory:
        """Load memories of one text each that the served model reads, on its device, and join them in order."""
        self.served.check_reads_memories()
        model = self.served.model
        if isinstance(model, TextCompressor):
            memory = model.join_memories(paths)
        else:
            memory = load_kv_memories(paths, self.decoder, self.served.tokenizer)
        if memory.B != 1:
            raise UsageError(f"{paths[0].name} holds {memory.B} texts; a prompt continues a memory of one text")
        return memory

    def build_prefix(self, memory: KVMemory | SummaryMemory) -> ChatPrefix:
        """Return the cache of a KV memory, or of bos and summary vectors."""
        if isinstance(memory, KVMemory):
            return ChatPrefix.from_kv_memory(memory, self.served.tokenizer)
        compressor = self.served.model
        assert isinstance(compressor, TextCompressor)
        # the engine's decoder reads, since another thread may switch the adapters of the compressor's
        model = replace(compressor.method.segment_model, decoder=self.decoder, base_model_context=None)
        model.check_fits(memory, 1)
        cache = model.prefill_memory(memory)
        if cache is None:
            raise UsageError("the memory has no vectors; compress a longer text")
        position_ids = model.build_prompt(memory, memory.valid.new_ones(1, 1)).position_ids
        return ChatPrefix(cache, cache.S if position_ids is None else int(position_ids[0, -1]))


def build_deleted_error(entry: StoredMemory) -> ApiError:
    return ApiError(404, f"memory {entry.card.id} has been deleted", "memory", "not_found")


def hide_path(message: str, path: Path, id: str) -> str:
    """Return a message with the id of a memory in place of its file."""
    return message.replace(str(path), id).replace(path.name, id)
