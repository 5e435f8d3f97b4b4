"""Read special tokens, added tokens and the chat template of a checkpoint's tokenizer as transformers does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from laconic.errors import InputError
from laconic.storage.file_names import resolve_inside
from laconic.storage.strict_json import read_foreign_json

SPECIAL_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
END_OF_TEXT = "<|endoftext|>"
CLASS_SPECIAL_TOKENS: dict[str, dict[str, str]] = {  # what transformers' classes use where the files name no token
    "GPT2Tokenizer": {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT},
    "Qwen2Tokenizer": {"eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT, "pad_token": END_OF_TEXT},
}
FAMILY_CLASSES = {"gpt2": "GPT2Tokenizer", "opt": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
TEMPLATES_FOLDER = "additional_chat_templates"  # of templates beside chat_template.jinja, as transformers 5 writes them
TOOL_TEMPLATE_FILE = f"{TEMPLATES_FOLDER}/tool_use.jinja"
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_optional_json(root: Path, name: str) -> dict[str, Any]:
    path = resolve_inside(root, name)
    return read_foreign_json(path) if path.is_file() else {}


def read_named_tokens(root: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json's keys; in older checkpoints special_tokens_map.json takes precedence over them."""
    if "added_tokens_decoder" in config:
        return dict(config)
    return {**config, **read_optional_json(root, "special_tokens_map.json")}


def read_tokenizer_class(root: Path, config: Mapping[str, Any]) -> str:
    """Return the name of the tokenizer's class without "Fast": of the files, or of the model's family, or ""."""
    family = str(read_optional_json(root, "config.json").get("model_type"))
    name = config.get("tokenizer_class") or FAMILY_CLASSES.get(family, "")
    return str(name).removesuffix("Fast")


def find_tokenizer_class(root: Path, config: Mapping[str, Any]) -> str:
    """Return the class that reads vocab.json and merges.txt, by default GPT-2's. Raises InputError for another one."""
    name = read_tokenizer_class(root, config) or "GPT2Tokenizer"
    if name not in CLASS_SPECIAL_TOKENS:
        raise InputError(
            f"tokenizer_class {name[:60]!r} is not supported with vocab.json and merges.txt; write tokenizer.json once "
            "with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return name


def read_special_tokens(
    root: Path, config: Mapping[str, Any], backend: tokenizers.Tokenizer | None = None
) -> dict[str, str]:
    """Return the special tokens by role, without roles that are null, and defaults that `backend` does not have."""
    defaults = CLASS_SPECIAL_TOKENS.get(read_tokenizer_class(root, config), {})
    tokens: dict[str, str | None] = {
        role: text for role, text in defaults.items() if backend is None or backend.token_to_id(text) is not None
    }
    named = read_named_tokens(root, config)
    tokens |= {role: get_token_text(named[role]) for role in SPECIAL_TOKEN_ROLES if role in named}
    return {role: text for role, text in tokens.items() if text is not None}


def read_added_tokens(root: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> list[AddedToken]:
    """Return the tokens that the files name beside the vocabulary, by id; those without an id are last."""
    named = read_named_tokens(root, config)
    try:
        others = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
        others = list(others.values()) if isinstance(others, dict) else others
        roles = [value for key, value in named.items() if key.endswith("_token") and key not in SPECIAL_TOKEN_ROLES]
        texts = (get_token_text(token) for token in [*special_tokens.values(), *roles, *others])
        special = list(dict.fromkeys(text for text in texts if text is not None))
        by_id = config.get("added_tokens_decoder")
        if isinstance(by_id, dict):
            ordered = [entry for _, entry in sorted(by_id.items(), key=lambda item: int(item[0]))]
            added = [build_added_token(entry) for entry in ordered if get_token_text(entry) is not None]
        else:
            ids = read_optional_json(root, "added_tokens.json")
            in_order = sorted(ids, key=lambda text: ids[text])
            added = [AddedToken(text, normalized=text not in special, special=text in special) for text in in_order]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"added tokens of the wrong type: {error}"
        raise InputError(f"tokenizer_config.json or added_tokens.json: {problem}; download them again") from None
    return [*added, *(AddedToken(text, normalized=False, special=True) for text in special)]


def build_added_token(entry: Mapping[str, Any]) -> AddedToken:
    return AddedToken(entry["content"], **{flag: bool(entry[flag]) for flag in TOKEN_FLAGS if flag in entry})


def get_token_text(token: Any) -> str | None:
    """Return the text of a token, which configuration files write as a string or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_chat_template(root: Path, config: Mapping[str, Any], name: str = "default") -> str | None:
    """Return a chat template of a tokenizer, which usually has one, the default.

    It stands in chat_template.jinja, with others in additional_chat_templates/NAME.jinja, or in tokenizer_config.json
    or chat_template.json, which may hold several by name, as a list or an object.
    """
    path = resolve_inside(root, "chat_template.jinja")
    if path.is_file():
        path = path if name == "default" else resolve_inside(root, f"{TEMPLATES_FOLDER}/{name}.jinja")
        try:
            return path.read_text(encoding="utf-8") if path.is_file() else None
        except UnicodeDecodeError as error:
            raise InputError(f"{path.name}: not UTF-8 at byte {error.start}; download it again") from None
    template = config.get("chat_template") or read_optional_json(root, "chat_template.json").get("chat_template")
    if isinstance(template, dict):
        template = template.get(name)
    elif isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in entries if entry.get("name") == name), None)
    elif name != "default":
        return None
    return template if isinstance(template, str) else None
