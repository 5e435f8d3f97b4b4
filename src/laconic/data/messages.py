"""Chat messages: validate them, read and write them as JSON, and put a system message before them."""

import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.errors import InputError, UsageError, translate_os_errors
from laconic.storage.strict_json import parse_json

Message = dict[str, Any]


def check_messages(value: Any, name: str) -> list[Message]:
    """Return a list of messages with `role` and `content`; other keys are passed on to the chat template.

    Content in OpenAI's list form is joined into one text. Keys with null are left out: in Parquet, and in JSONL that
    the library `datasets` writes, every object has the keys of all others. Raises InputError.
    """
    if not isinstance(value, list) or not value:
        raise InputError(f'{name}: expected a list of messages such as [{{"role": "user", "content": "Hello"}}]')
    messages: list[Message] = []
    for index, message in enumerate(drop_nulls(value), 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f'{name}: message {index} has no role; expected {{"role": …, "content": …}}')
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
            content = None if None in parts else "".join(map(str, parts))
        if content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise InputError(f"{name}: the content of message {index} ({message['role']}) is not text")
        messages.append({**message, "content": content})
    return messages


def drop_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return value


def add_system_message(messages: Sequence[Message], system: str | None) -> list[Message]:
    """Put a system message first; None changes nothing. Raise UsageError if there already is one."""
    if system is None:
        return list(messages)
    if messages and messages[0]["role"] == "system":
        raise UsageError("--system: the messages already begin with a system message; remove one of them")
    return [{"role": "system", "content": system}, *messages]


def parse_messages(data: bytes, name: str) -> list[Message]:
    data = data.removeprefix(codecs.BOM_UTF8)
    if data.lstrip().startswith(b"["):
        data = b'{"messages": ' + data + b"}"
    return check_messages(parse_json(data, name).get("messages"), name)


def read_messages(path: Path) -> list[Message]:
    """Read a JSON file with a list of messages, or an object with `messages`. Raises InputError."""
    if not path.is_file():
        raise InputError(f"no file {path}; give a JSON list of messages")
    with translate_os_errors(path):
        return parse_messages(path.read_bytes(), path.name)
