"""Compress texts into KV memories with a plain checkpoint, and prompt the model that holds one."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import laconic
from laconic.compression.kv.cartridge_file import is_cartridge, load_cartridge
from laconic.compression.kv.compress import DocumentCompression, compress_document
from laconic.compression.kv.config import KVCompressionConfig
from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.memory_file import KVMemoryMetadata
from laconic.compression.kv.selection import RepeatPrompt
from laconic.compression.memory_file import SourceDocument, abbreviate_hash
from laconic.console import ProgressFn
from laconic.data.messages import Message
from laconic.data.tokenizer import Tokenizer
from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.experiment.text_models.text_model import check_memory_type, current_time
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder

MARK = "\uf8ff"  # placeholder (private-use character) of a document or question while a template is rendered
TEMPLATE_KEY = "chat_template"  # setting of a memory of a chat: the hash of the template
MemorySource = KVMemory | str | Path  # a memory, its file, or the folder of a peft cartridge
SEPARATOR = "\n\n"  # between a document and a question in one user message


def build_repeat_prompt(tokenizer: Tokenizer) -> RepeatPrompt:
    """Return the ids of KVzip's request to repeat a document, as its authors word it."""
    request, later, suffix = (
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for text in (
            "\n\nRepeat the previous context exactly.",
            "\n\nRepeat the part of the previous context exactly, starting with",
            "\n",
        )
    )
    return RepeatPrompt(request, later, suffix)


def encode_document(tokenizer: Tokenizer, text: str, chat: bool = False) -> tuple[list[int], int]:
    """Return the ids of a document, and how many of them belong to the chat template.

    With `chat`, the document opens a user message of the chat template; a question continues the message, after an
    empty line. White space at the end of the document is then left out: the tokens of a message have none there.
    """
    if not text.strip():
        raise InputError("the document is empty; give text")
    if not chat:
        return tokenizer.encode(text), 0
    if tokenizer.chat_template is None:
        raise InputError("the tokenizer has no chat template (base models have none); compress the text without chat")
    opening = split_template(tokenizer, MARK)[0]
    prefix = len(tokenizer.encode(opening, add_special_tokens=False))
    return tokenizer.encode(opening + text.rstrip(), add_special_tokens=False), prefix


def encode_messages(tokenizer: Tokenizer, memory: KVMemory, messages: Sequence[Message]) -> list[int]:
    """Return the ids of chat messages that follow a memory; the first user message continues that of a chat memory."""
    if is_chat_memory(memory):
        text = render_after_opening(tokenizer, messages, get_opening(tokenizer, memory))
    else:
        text = tokenizer.apply_chat_template(messages)
    return tokenizer.encode(text, add_special_tokens=False)


def is_chat_memory(memory: KVMemory) -> bool:
    return memory.metadata is not None and memory.metadata.chat


def get_opening(tokenizer: Tokenizer, memory: KVMemory) -> str:
    """Return the chat template up to the text of a memory that opens a user message, "" for another memory."""
    if memory.metadata is None or not memory.metadata.chat:
        return ""
    theirs = str(memory.metadata.settings.get(TEMPLATE_KEY))
    ours = hash_template(tokenizer)
    if theirs != ours:
        raise CorruptArtifactError(
            f"the memory was written with chat template {abbreviate_hash(theirs)}, this model has "
            f"{abbreviate_hash(ours)}; compress again with this model"
        )
    return split_template(tokenizer, MARK)[0]


def hash_template(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a chat template; not of what it renders, which may have a date."""
    return sha256((tokenizer.chat_template or "").encode()).hexdigest()


def render_after_opening(tokenizer: Tokenizer, messages: Sequence[Message], opening: str) -> str:
    """Return a chat after its `opening` and the memory's text, which comes before the first user message."""
    marked = [dict(message) for message in messages]
    first = next((message for message in marked if message["role"] == "user"), None)
    if first is None:
        raise UsageError("the memory opens a user message, and no message is a user's; add one")
    first["content"] = MARK + SEPARATOR + first["content"]
    before, _, after = tokenizer.apply_chat_template(marked).partition(MARK)
    if before != opening:
        raise UsageError(
            "the memory begins the conversation with a user message; remove the system message and all else before "
            "the first question, or compress the text without chat"
        )
    return after


def split_template(tokenizer: Tokenizer, content: str) -> tuple[str, str]:
    """Return the rendered chat of one user message before and after the mark in its content."""
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": content}])
    before, mark, after = rendered.partition(MARK)
    if not mark:
        raise InputError("the chat template leaves out the user message; compress without chat")
    return before, after


def build_row_caches(memory: KVMemory, rows: Sequence[int]) -> KVCache:
    """Return the cache of each prompt's text; a single text is shared by all prompts, without copies."""
    return memory.to_cache().repeat_rows(len(rows)) if memory.B == 1 else memory.select_rows(list(rows)).to_cache()


def build_metadata(decoder: Decoder, tokenizer: Tokenizer) -> KVMemoryMetadata:
    """Return the metadata of a memory that this model writes now, without method and texts."""
    config = decoder.config
    return KVMemoryMetadata(
        laconic=laconic.__version__,
        model=decoder.fingerprint,
        family=config.family,
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        vocab=config.vocab_size,
        tokenizer=tokenizer.fingerprint,
        method="",
        created=current_time(),
    )


def compress_text(
    decoder: Decoder,
    tokenizer: Tokenizer,
    text: str,
    config: KVCompressionConfig,
    *,
    name: str = "text",
    chat: bool = False,
    on_progress: ProgressFn = lambda name, done, total: None,
) -> DocumentCompression:
    """Compress one text, with `chat` as the beginning of a user message, into a memory that can be saved."""
    ids, prefix = encode_document(tokenizer, text, chat)
    prompt = build_repeat_prompt(tokenizer)
    result = compress_document(decoder, ids, config, prompt, prefix, on_progress)
    document = SourceDocument(name, sha256(text.encode()).hexdigest(), sum(result.windows), tuple(result.windows))
    settings = {key: value for key, value in vars(config).items() if key != "method" and value is not None}
    settings["equal_heads"] = config.equal_heads or len(result.windows) > 1
    settings |= {TEMPLATE_KEY: hash_template(tokenizer)} if chat else {}
    metadata = replace(
        build_metadata(decoder, tokenizer),
        method=config.method,
        chat=chat,
        settings=settings,
        measured=result.measured,
        documents=((document,),),
    )
    return result._replace(memory=replace(result.memory, metadata=metadata))


def load_kv_memories(
    sources: MemorySource | Sequence[MemorySource], decoder: Decoder, tokenizer: Tokenizer
) -> KVMemory:
    """Return memories, or those of files, that this model may read, one document after the other, on its device.

    A folder is a peft cartridge, which does not name its model's weights.
    """
    sources = [sources] if isinstance(sources, str) or not isinstance(sources, Sequence) else sources
    if not sources:
        raise UsageError("memory: the list is empty; give at least one memory, or None")
    reader = build_metadata(decoder, tokenizer)
    memories = list[KVMemory]()
    for source in sources:
        if not isinstance(source, str | Path):
            check_memory_type(source, KVMemory)
            if source.metadata is not None:
                source.metadata.check_reader("the one given", reader)
            memory = source
        elif Path(source).is_dir():
            if not is_cartridge(source):
                name = f"{source} is a folder" if str(source) else "the name is empty"
                raise InputError(
                    f"memory: {name}; give a file that laconic compress wrote, or the folder of a cartridge"
                )
            memory = load_cartridge(source, decoder, replace(reader, method="cartridge of peft", documents=((),)))
        else:
            memory = KVMemory.load(source, reader)
        memories.append(memory.to(decoder.device, decoder.dtype))
    if len(memories) == 1:
        return memories[0]
    for source, memory in zip(sources, memories, strict=True):
        if is_chat_memory(memory):
            name = source if isinstance(source, str | Path) else "a memory of a chat"
            raise UsageError(f"{name} cannot be joined with others: it opens a user message; compress without chat")
    return KVMemory.concat_documents(decoder.config, *memories)
