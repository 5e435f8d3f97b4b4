"""The tokenizer of a checkpoint: its own files, read by `tokenizers`, and its chat template in a sandbox."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from laconic.data import chat_template as data_chat_template
from laconic.errors import InputError, UnsafeFileError, translate_os_errors
from laconic.storage.strict_json import read_json, resolve_inside, to_canonical_json

SPECIAL_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Tokenizer:
    """Text to ids and back, as the checkpoint's own files say; `fingerprint` is the SHA-256 of those files.

    `files` are all that were read, by name, so that what is saved is what was loaded.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        fingerprint: str,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.backend, self.special_tokens, self.chat_template, self.fingerprint = (
            backend,
            dict(special_tokens),
            chat_template,
            fingerprint,
        )
        self.files = dict(files or {})
        backend.no_truncation()
        backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added ones too."""
        return self.backend.get_vocab_size()

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the files name one."""
        return self.special_token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if the files name one."""
        return self.special_token_id("eos_token")

    def special_token_id(self, role: str) -> int | None:
        """The id of a special token by its role, `bos_token` say."""
        return self.backend.token_to_id(self.special_tokens[role]) if role in self.special_tokens else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids, with those that the file's post-processor adds; a rendered chat brings its own: `special=False`."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text, without special tokens."""
        return self.backend.decode(list(ids))

    def save(self, folder: str | Path) -> None:
        """Its files into a folder that exists; loaded from there, the tokenizer has the same fingerprint."""
        for name, data in self.files.items():
            with translate_os_errors(Path(folder) / name):
                (Path(folder) / name).write_bytes(data)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Messages (role, content) by the chat template; `answer` asks for the beginning of the next one.

        Raises `BadInput` where there is no template or it refuses the messages, `Unsafe` where it leaves its bounds.
        """
        if self.chat_template is None:
            raise InputError("the tokenizer has no chat template; give the prompt as text")
        variables = {
            **self.special_tokens,
            "messages": [dict(m) for m in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        text, error = data_chat_template.render_chat_template(
            self.chat_template, {**variables, "tools": None, "documents": None}
        )
        if text is not None:
            return text
        if error.startswith(("rendering", "SecurityError")):
            raise UnsafeFileError(f"chat template: {error}; not used. Give the prompt as text")
        raise InputError(f"chat template: {error}")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """From tokenizer.json, else from vocab.json and merges.txt as GPT-2 and OPT have them. Raises `BadInput`."""
    root = Path(folder)
    config = read_optional_json(root, "tokenizer_config.json")
    maps = (read_optional_json(root, "special_tokens_map.json"), config)  # the second wins where it names one
    special = {
        role: token
        for named in maps
        for role in SPECIAL_TOKEN_ROLES
        if (token := get_token_text(named.get(role))) is not None
    }
    whole = resolve_inside(root, "tokenizer.json")
    files = [whole] if whole.is_file() else [resolve_inside(root, name) for name in ("vocab.json", "merges.txt")]
    if not all(file.is_file() for file in files):
        raise InputError(
            f"no tokenizer.json in {root}, and no vocab.json with merges.txt; take them from the model's hub"
        )
    try:
        if whole.is_file():
            inner = tokenizers.Tokenizer.from_file(str(whole))
        else:
            special = {**dict.fromkeys(SPECIAL_TOKEN_ROLES[:3], "<|endoftext|>"), **special}
            inner = build_byte_level_bpe(files[0], files[1], special, config)
    except Exception as error:  # tokenizers raises bare exceptions
        raise InputError(f"{files[0].name}: no tokenizer: {error}") from None
    fingerprint = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    beside = [resolve_inside(root, name) for name in CONFIG_FILES]
    read = {file.name: file.read_bytes() for file in [*files, *beside] if file.is_file()}
    return Tokenizer(inner, special, read_chat_template(root, config), fingerprint, read)


def build_byte_level_bpe(
    vocab: Path, merges: Path, special_tokens: Mapping[str, str], config: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """Byte-level BPE: GPT-2's, and OPT's, whose configuration asks for a first token."""
    inner = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))  # pyright: ignore[reportCallIssue]
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    inner.decoder = decoders.ByteLevel()
    listed = [
        token for _, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    ]
    for token in dict.fromkeys(
        [text for text in map(get_token_text, listed) if text is not None] + list(special_tokens.values())
    ):
        inner.add_special_tokens([AddedToken(token, normalized=False, special=True)])
    bos = special_tokens["bos_token"]
    if config.get("add_bos_token"):
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    return inner


def read_optional_json(root: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file that may be absent."""
    path = resolve_inside(root, name)
    return read_json(path) if path.is_file() else {}


def get_token_text(token: Any) -> str | None:
    """The text of a token, which files give as text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_chat_template(root: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else what tokenizer_config.json holds: a text, or a list with one named default."""
    path = resolve_inside(root, "chat_template.jinja")
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path.name}: not UTF-8 at byte {error.start}; fetch it again") from None
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def build_byte_tokenizer() -> Tokenizer:
    """Every byte of a text is a token, whose id it is; 256 is eos."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other = [byte for byte in range(256) if byte not in kept]
    # The letters that ByteLevel has for bytes: those that can be seen stand for themselves, others follow from 256 on.
    letters = {**{byte: chr(byte) for byte in kept}, **{byte: chr(256 + i) for i, byte in enumerate(other)}}
    words = {letters[byte]: byte for byte in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    special = {"eos_token": "<eos>"}
    inner.add_special_tokens(list(special.values()))
    return wrap_backend(inner, special)


def wrap_backend(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> Tokenizer:
    """A tokenizer that came from no files, with those that it is saved as."""
    file = backend.to_str(pretty=True).encode()
    files = {"tokenizer.json": file, "tokenizer_config.json": to_canonical_json(dict(special_tokens)).encode()}
    return Tokenizer(backend, special_tokens, None, hashlib.sha256(file).hexdigest(), files)
