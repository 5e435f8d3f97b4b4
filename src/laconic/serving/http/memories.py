"""Routes of memories: compress a text, upload a file, list, download, delete."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator, Field

from laconic.compression.kv.config import KVCompressionConfig
from laconic.errors import LaconicError, UsageError
from laconic.experiment.compress import CompressionJob
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.experiment.text_models.kv_compressor import compress_text
from laconic.serving.http.api_error import ApiError
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.memory_store import MEMORY_ID, MemoryStore, hide_path
from laconic.serving.http.schemas import MemoryCard, RequestBody
from laconic.serving.http.services import ServicesDependency, StrictRoute, get_deadline, run_while_connected, save_body
from laconic.serving.http.worker import run_in_thread

router = APIRouter(prefix="/v1/memories", route_class=StrictRoute)
CHUNK_BYTES = 2**20


def check_text(text: str) -> str:
    """Return a text; raise ValueError if it is empty, or only white space."""
    if not text.strip():
        raise ValueError("empty; give text")
    return text


class MemoryRequest(RequestBody):
    """Body of POST /v1/memories. The fields from `chat` on are for plain models, which select keys and values."""

    text: Annotated[str, AfterValidator(check_text)]
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    chat: bool | None = None
    method: Annotated[str, Field(max_length=40)] | None = None
    keep: float | None = None
    slots: int | None = None
    max_loss: float | None = None


@router.post("")
async def create_memory(body: MemoryRequest, request: Request, services: ServicesDependency) -> MemoryCard:
    """Compress a text with the loaded run, or with a rule that selects keys and values of a plain model."""
    services.served.check_reads_memories()
    store = services.memories
    store.check_space()
    if body.name is not None:
        store.check_name(body.name)
    write = build_writer(services.served, body)

    def compress(check: Callable[[], None]) -> MemoryCard:
        with store.new_file() as path:
            write(path, check)
            return store.add(path)

    return await run_while_connected(request, services.worker.run(compress, get_deadline(request)))


@router.put("/{id}")
async def upload_memory(id: str, request: Request, services: ServicesDependency) -> MemoryCard:
    """Store a file that `laconic compress` wrote, under an id that the client chooses."""
    services.served.check_reads_memories()
    if not MEMORY_ID.fullmatch(id):
        raise ApiError(400, "id: give up to 64 letters, digits, - and _", "id")
    store = services.memories
    store.check_space(id)
    with store.new_file() as path:
        await save_body(request, path)
        return await run_in_thread(check_and_add, store, path, id)


@router.get("")
async def list_memories(services: ServicesDependency) -> dict[str, Any]:
    return {"object": "list", "data": services.memories.list()}


@router.get("/{id}")
async def read_memory(id: str, services: ServicesDependency) -> MemoryCard:
    """Return a memory by its id, or by its name as prompts do: if only one readable memory has it."""
    return services.memories.find(id).card


@router.get("/{id}/content")
async def read_content(id: str, services: ServicesDependency) -> StreamingResponse:
    """Return the file of a memory, which `laconic generate --memory` reads."""
    file, size = services.memories.open(services.memories.find(id))
    headers = {"Content-Length": str(size)}
    return StreamingResponse(read_chunks(file), media_type="application/octet-stream", headers=headers)


@router.delete("/{id}")
async def delete_memory(id: str, services: ServicesDependency) -> dict[str, Any]:
    """Delete a memory that `id` names as in `read_memory`, and return its id."""
    id = services.memories.find(id).card.id
    services.memories.delete(id)
    return {"id": id, "object": "memory", "deleted": True}


def build_writer(served: ApiModel, body: MemoryRequest) -> Callable[[Path, Callable[[], None]], None]:
    """Return a function that compresses the text into a file, and calls its second argument often."""
    name = body.name or "text"
    text = body.text
    model = served.model
    options = body.model_dump(exclude={"text", "name"}, exclude_none=True)
    if isinstance(model, TextCompressor):
        if options:
            field = next(iter(options))
            raise ApiError(400, f"{field}: {served.name} is trained to compress; remove {field}", field)

        def write_summaries(path: Path, check: Callable[[], None]) -> None:
            job = CompressionJob(model.method)
            for _ in job.run([[model.token_stream(name, [text])]]):
                check()
            model.with_metadata(job).save(path)

        return write_summaries
    chat = options.pop("chat", False)
    if chat and served.tokenizer.chat_template is None:
        raise ApiError(400, f"chat: {served.name} has no chat template; remove chat", "chat")
    try:
        config = KVCompressionConfig(**options)
    except UsageError as error:
        raise ApiError(400, str(error), next(iter(options))) from None

    def write_selection(path: Path, check: Callable[[], None]) -> None:
        def on_progress(*_: object) -> None:
            check()

        decoder, tokenizer = served.decoder, served.tokenizer
        compress_text(decoder, tokenizer, text, config, name=name, chat=chat, on_progress=on_progress).memory.save(path)

    return write_selection


def check_and_add(store: MemoryStore, path: Path, id: str) -> MemoryCard:
    """Add an uploaded file to the store, if it is a memory of one text for the served model."""
    try:
        card = store.describe(id, path).card
        if not card.is_readable:
            message = f"memory {id} was written for another model than {store.served.name}; compress the text again"
            raise ApiError(409, message, "id", "memory_of_another_model")
        store.load([path])
    except LaconicError as error:
        raise ApiError(400, hide_path(str(error), path, id)) from None
    return store.add(path, id)


def read_chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        yield from iter(partial(file.read, CHUNK_BYTES), b"")
