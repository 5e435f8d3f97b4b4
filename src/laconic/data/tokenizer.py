"""Load a checkpoint's tokenizer from its own files, and render its chat template."""

import hashlib
import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsIndex, cast

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from laconic.batches.padding import PaddedIds, pad_rows
from laconic.data.chat_template import render_chat_template
from laconic.data.tokenizer_files import (
    CLASS_SPECIAL_TOKENS,
    TOOL_TEMPLATE_FILE,
    find_tokenizer_class,
    read_added_tokens,
    read_chat_template,
    read_optional_json,
    read_special_tokens,
)
from laconic.data.tokenizer_limits import check_tokenizer, hide_panic_message, is_panic
from laconic.errors import InputError, LaconicError, UsageError, translate_os_errors
from laconic.models.checkpoints.weights import find_checkpoint
from laconic.storage.export_record import warn_of_changed_vocabulary
from laconic.storage.file_names import resolve_inside
from laconic.storage.strict_json import read_small_file, to_canonical_json

CONFIG_FILES = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", TOOL_TEMPLATE_FILE,
)  # fmt: skip
MAX_LOCKED_CHARACTERS = 10_000  # encoded at once; `encode_batch` lets other threads run, `encode` does not
QWEN_SPLIT = (  # where the classes of Qwen 2 and 3 split a text into words
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@contextmanager
def translate_tokenizer_errors(source: str = "the tokenizer") -> Generator[None]:
    """Turn what the `tokenizers` library raises, and its panics, into InputError; `source` begins the message."""
    try:
        yield
    except LaconicError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if str(error).startswith(("TextInputSequence must", "TextEncodeInput must")):  # also for surrogates
            raise InputError("give text (str) without surrogates; remove the characters \\ud800 to \\udfff") from None
        kind = "fails" if isinstance(error, Exception) else "panics"
        raise InputError(f"{source} {kind}: {str(error)[:300]}; save it again with transformers") from None


class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    Args:
        backend: Tokenizer of the `tokenizers` library; truncation and padding are switched off.
        special_tokens: Special tokens by role, such as `eos_token`.
        chat_template: Jinja source, if there is one.
        fingerprint: SHA-256 of the vocabulary files.
        files: Contents of all files that were read, by name; `save` writes them unchanged.
        tool_template: Jinja source for messages with tools, if it is another one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        fingerprint: str,
        files: Mapping[str, bytes] | None = None,
        tool_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.tool_template = tool_template
        self.chat_template = chat_template
        self.fingerprint = fingerprint
        self.files = dict(files or {})
        backend.no_truncation()
        backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens."""
        return self.backend.get_vocab_size()

    @property
    def base_vocab_size(self) -> int:
        """Number of ids without added tokens; published models lack embeddings for some of those."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    @property
    def bos_token_id(self) -> int | None:
        return self.special_token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self.special_token_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self.special_token_id("pad_token")

    def __repr__(self) -> str:
        template = "with" if self.chat_template else "without"
        named = ", ".join(f"{role}={text!r}" for role, text in self.special_tokens.items())
        return f"Tokenizer({self.vocab_size:,} tokens, {named or 'no special tokens'}, {template} chat template)"

    def __call__(self, texts: str | Sequence[str], add_special_tokens: bool = True) -> PaddedIds:
        """Return the ids of one text, or of several `texts`, padded on the left, as tensors for `laconic.generate`.

        `add_special_tokens` is as in `encode`.

        Examples:
            >>> import laconic
            >>> from laconic.data.tokenizer import build_byte_tokenizer
            >>> batch = build_byte_tokenizer()(["hello", "hi"])
            >>> batch.input_ids.tolist(), batch.attention_mask.sum(1).tolist()
            ([[104, 101, 108, 108, 111], [256, 256, 256, 104, 105]], [5, 2])
        """
        batch = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else [texts]
        if other := next((type(text).__name__ for text in batch if not isinstance(text, str)), None):
            raise UsageError(f"texts: give a text or a list of texts, not {other}; decode takes ids")
        with translate_tokenizer_errors():
            encodings = self.backend.encode_batch(batch, add_special_tokens=add_special_tokens)
        pad = next((id for id in (self.pad_token_id, self.eos_token_id) if id is not None), 0)
        return pad_rows([encoding.ids for encoding in encodings], pad, pad_left=True)

    def special_token_id(self, role: str) -> int | None:
        """Return the id of a special token by its role, such as `unk_token`."""
        return self.backend.token_to_id(self.special_tokens[role]) if role in self.special_tokens else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a `text`; `add_special_tokens` is False for a rendered chat, which has them already."""
        return self.encode_with_offsets(text, add_special_tokens).ids

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """Return the ids of a text with the characters of each, and a mask of the special tokens; see `encode`."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"encode takes one text, not {type(text).__name__}; call the tokenizer to encode several")
        with translate_tokenizer_errors():
            if len(text) > MAX_LOCKED_CHARACTERS:
                return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: SupportsIndex | Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, or of a single id, without special tokens if `skip_special_tokens` is set."""
        with translate_tokenizer_errors():
            try:
                is_single = isinstance(ids, SupportsIndex) and not getattr(ids, "ndim", 0)
                row: Any = [ids] if is_single else list(cast(Sequence[int], ids))
                return self.backend.decode(row, skip_special_tokens=skip_special_tokens)
            except (TypeError, OverflowError):
                raise UsageError(f"decode takes the ids of one text, integers of at least 0, not {ids!r:.60}") from None

    def save(self, folder: str | Path) -> None:
        """Write the files into an existing folder; loading them gives the same fingerprint."""
        for name, data in self.files.items():
            path = Path(folder) / name
            with translate_os_errors(path):
                if "/" in name:
                    path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages with the chat template.

        Args:
            messages: Messages with `role` and `content`.
            add_generation_prompt: Whether to append the beginning of the assistant's reply.
            tools: JSON schemas of tools, for templates that list them.
            variables: Further variables of the template, such as `enable_thinking`.

        Raises:
            UsageError: If the messages are no list of messages.
            InputError: If there is no template, or it is invalid or rejects the messages.
            UnsafeFileError: If the template leaves the sandbox or exceeds a limit.
        """
        values: Any = messages
        if not isinstance(values, Sequence) or not all(isinstance(message, Mapping) for message in values):
            raise UsageError('messages: give a list of messages such as [{"role": "user", "content": "Hello"}]')
        if self.chat_template is None:
            raise InputError("the tokenizer has no chat template (base models have none); give plain text")
        variables = {
            **self.special_tokens,
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
        }
        template = self.tool_template if tools and self.tool_template else self.chat_template
        return render_chat_template(template, variables)


def load_tokenizer(model: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint.

    Args:
        model: Folder with `tokenizer.json`, or with `vocab.json` and `merges.txt` (GPT-2, OPT); or a GGUF file, a short
            name or a model on the hub, as in `Decoder.from_pretrained`.

    Returns:
        The tokenizer, with its chat template if the checkpoint has one.

    Raises:
        InputError: If the files are missing or invalid.

    Examples:
        >>> import tempfile, laconic
        >>> from laconic.data.tokenizer import build_byte_tokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     build_byte_tokenizer().save(folder)
        ...     tokenizer = laconic.load_tokenizer(folder)
        >>> tokenizer.decode(tokenizer.encode("hello"))
        'hello'
    """
    root = find_checkpoint(model, with_weights=False)
    config = read_optional_json(root, "tokenizer_config.json")
    files = find_vocabulary_files(root)
    warn_of_changed_vocabulary(root, [file.name for file in files])
    contents = {file.name: read_small_file(file) for file in files}
    with translate_tokenizer_errors(f"{files[0].name}: invalid tokenizer: it"), hide_panic_message():
        if len(files) == 1:
            backend = tokenizers.Tokenizer.from_buffer(contents["tokenizer.json"])
            special_tokens = read_special_tokens(root, config, backend)
            add_missing_tokens(backend, read_added_tokens(root, config, special_tokens))
        else:
            tokenizer_class = find_tokenizer_class(root, config)
            special_tokens = {**CLASS_SPECIAL_TOKENS[tokenizer_class], **read_special_tokens(root, config)}
            added_tokens = read_added_tokens(root, config, special_tokens)
            is_qwen = tokenizer_class == "Qwen2Tokenizer"
            bpe = read_bpe(contents["vocab.json"], contents["merges.txt"])
            backend = build_byte_level_bpe(bpe, added_tokens, special_tokens, config, is_qwen=is_qwen)
        check_tokenizer(backend, files[0].name)
    fingerprint = hashlib.sha256(b"".join(contents.values())).hexdigest()
    config_files = {name: resolve_inside(root, name) for name in CONFIG_FILES}
    contents |= {name: read_small_file(file) for name, file in config_files.items() if file.is_file()}
    template, tool_template = (read_chat_template(root, config, name) for name in ("default", "tool_use"))
    return Tokenizer(backend, special_tokens, template, fingerprint, contents, tool_template)


def find_vocabulary_files(root: Path) -> list[Path]:
    whole = resolve_inside(root, "tokenizer.json")
    if whole.is_file():
        return [whole]
    files = [resolve_inside(root, name) for name in ("vocab.json", "merges.txt")]
    if all(file.is_file() for file in files):
        return files
    if (root / "tokenizer.model").is_file():
        raise InputError(
            f"{root} has only tokenizer.model, which is not read; write tokenizer.json once with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    raise InputError(f"{root} has neither tokenizer.json nor vocab.json with merges.txt; download them")


def add_missing_tokens(backend: tokenizers.Tokenizer, tokens: Iterable[AddedToken]) -> None:
    """Add the tokens that the backend does not have as added tokens; they keep their id in the vocabulary, if any."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in tokens if token.content not in known])


def read_bpe(vocab: bytes, merges: bytes) -> models.BPE:
    pairs = [line.split(" ") for line in merges.decode().splitlines() if line and not line.startswith("#version")]
    return models.BPE(vocab=json.loads(vocab), merges=[(left, right) for left, right in pairs])


def build_byte_level_bpe(
    model: models.BPE,
    added_tokens: Iterable[AddedToken],
    special_tokens: Mapping[str, str],
    config: Mapping[str, Any],
    *,
    is_qwen: bool,
) -> tokenizers.Tokenizer:
    """Build the byte-level BPE of GPT-2, of OPT, whose configuration adds a first token, or of Qwen 2 and 3."""
    backend = tokenizers.Tokenizer(model)
    has_prefix_space = bool(config.get("add_prefix_space", False))
    if is_qwen:
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(tokenizers.Regex(QWEN_SPLIT), behavior="isolated", invert=False)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix_space, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix_space)
    backend.decoder = decoders.ByteLevel()
    add_missing_tokens(backend, added_tokens)
    if config.get("add_bos_token"):
        bos = special_tokens["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


def list_byte_characters() -> list[str]:
    """Return the character with which byte-level BPE writes each byte: printable ones as they are, others from 256."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    others = map(chr, range(256, 512))
    return [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]


def build_byte_tokenizer() -> Tokenizer:
    """Build a tokenizer whose ids 0 to 255 are the bytes of UTF-8, and 256 is end of sequence."""
    characters = list_byte_characters()
    backend = tokenizers.Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special_tokens = {"eos_token": "<eos>"}
    backend.add_special_tokens(list(special_tokens.values()))
    return wrap_backend(backend, special_tokens)


def wrap_backend(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> Tokenizer:
    data = backend.to_str(pretty=True).encode()
    files = {"tokenizer.json": data, "tokenizer_config.json": to_canonical_json(dict(special_tokens)).encode()}
    return Tokenizer(backend, special_tokens, None, hashlib.sha256(data).hexdigest(), files)
