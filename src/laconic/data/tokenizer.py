"""Load a checkpoint's tokenizer from its own files, and render its chat template."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from laconic.data.chat_template import render_chat_template
from laconic.errors import InputError, translate_os_errors
from laconic.storage.strict_json import read_json, resolve_inside, to_canonical_json

SPECIAL_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    Args:
        backend: Tokenizer of the `tokenizers` library; truncation and padding are switched off.
        special_tokens: Special tokens by role, such as `eos_token`.
        chat_template: Jinja source, if there is one.
        fingerprint: SHA-256 of the vocabulary files.
        files: Contents of all files that were read, by name; `save` writes them unchanged.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        fingerprint: str,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.backend, self.special_tokens = backend, dict(special_tokens)
        self.chat_template, self.fingerprint, self.files = chat_template, fingerprint, dict(files or {})
        backend.no_truncation()
        backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens."""
        return self.backend.get_vocab_size()

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token, if the files name one."""
        return self.special_token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, if the files name one."""
        return self.special_token_id("eos_token")

    def special_token_id(self, role: str) -> int | None:
        """Return the id of a special token by its role, such as `unk_token`."""
        return self.backend.token_to_id(self.special_tokens[role]) if role in self.special_tokens else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: Text.
            add_special_tokens: Whether to add the special tokens of the tokenizer's post-processor. Set it to False for
                a rendered chat, which contains its own.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return self.backend.decode(list(ids))

    def save(self, folder: str | Path) -> None:
        """Write the files into an existing folder; loading them gives the same fingerprint."""
        for name, data in self.files.items():
            with translate_os_errors(Path(folder) / name):
                (Path(folder) / name).write_bytes(data)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Render messages with the chat template.

        Args:
            messages: Messages with `role` and `content`.
            add_generation_prompt: Whether to append the beginning of the assistant's reply.

        Raises:
            InputError: If there is no template, or it is invalid or rejects the messages.
            UnsafeFileError: If the template leaves the sandbox or exceeds a limit.
        """
        if self.chat_template is None:
            raise InputError("the tokenizer has no chat template; give the prompt as text")
        variables = {
            **self.special_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        return render_chat_template(self.chat_template, variables)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint.

    Args:
        folder: Folder with `tokenizer.json`, or with `vocab.json` and `merges.txt` (GPT-2, OPT).

    Raises:
        InputError: If the files are missing or invalid.

    Example:
        >>> import tempfile, laconic
        >>> from laconic.data.tokenizer import build_byte_tokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     build_byte_tokenizer().save(folder)
        ...     tokenizer = laconic.load_tokenizer(folder)
        >>> tokenizer.decode(tokenizer.encode("hello"))
        'hello'
    """
    root = Path(folder)
    config = read_optional_json(root, "tokenizer_config.json")
    special_tokens: dict[str, str] = {}
    for source in (read_optional_json(root, "special_tokens_map.json"), config):  # the second takes precedence
        texts = {role: get_token_text(source.get(role)) for role in SPECIAL_TOKEN_ROLES}
        special_tokens |= {role: text for role, text in texts.items() if text is not None}
    whole = resolve_inside(root, "tokenizer.json")
    files = [whole] if whole.is_file() else [resolve_inside(root, name) for name in ("vocab.json", "merges.txt")]
    if not all(file.is_file() for file in files):
        raise InputError(f"{root} has neither tokenizer.json nor vocab.json with merges.txt; download them")
    try:
        if whole.is_file():
            backend = tokenizers.Tokenizer.from_file(str(whole))
        else:
            special_tokens = {**dict.fromkeys(SPECIAL_TOKEN_ROLES[:3], "<|endoftext|>"), **special_tokens}
            backend = build_byte_level_bpe(files[0], files[1], special_tokens, config)
    except Exception as error:  # tokenizers raises bare exceptions
        raise InputError(f"{files[0].name}: invalid tokenizer: {error}") from None
    fingerprint = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    config_files = [resolve_inside(root, name) for name in CONFIG_FILES]
    contents = {file.name: file.read_bytes() for file in [*files, *config_files] if file.is_file()}
    return Tokenizer(backend, special_tokens, read_chat_template(root, config), fingerprint, contents)


def build_byte_level_bpe(
    vocab: Path, merges: Path, special_tokens: Mapping[str, str], config: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """Build the byte-level BPE of GPT-2, or of OPT, whose configuration adds a first token."""
    backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))  # pyright: ignore[reportCallIssue]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    by_id = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    added = [text for _, token in by_id if (text := get_token_text(token)) is not None]
    for text in dict.fromkeys([*added, *special_tokens.values()]):
        backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])
    if config.get("add_bos_token"):
        bos = special_tokens["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


def read_optional_json(root: Path, name: str) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file does not exist."""
    path = resolve_inside(root, name)
    return read_json(path) if path.is_file() else {}


def get_token_text(token: Any) -> str | None:
    """Return the text of a token, which configuration files write as a string or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_chat_template(root: Path, config: Mapping[str, Any]) -> str | None:
    """Return `chat_template.jinja`, else the string or the entry named "default" in `tokenizer_config.json`."""
    path = resolve_inside(root, "chat_template.jinja")
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path.name}: not UTF-8 at byte {error.start}; download it again") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def build_byte_tokenizer() -> Tokenizer:
    """Build a tokenizer whose ids 0 to 255 are the bytes of UTF-8, and 256 is end of sequence."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    # ByteLevel writes printable bytes as themselves and the others as the characters from 256 on.
    characters = {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special_tokens = {"eos_token": "<eos>"}
    backend.add_special_tokens(list(special_tokens.values()))
    return wrap_backend(backend, special_tokens)


def wrap_backend(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> Tokenizer:
    """Return a `Tokenizer` for one built in memory, with the files that `save` writes."""
    data = backend.to_str(pretty=True).encode()
    files = {"tokenizer.json": data, "tokenizer_config.json": to_canonical_json(dict(special_tokens)).encode()}
    return Tokenizer(backend, special_tokens, None, hashlib.sha256(data).hexdigest(), files)
