"""Prompts of `laconic generate`: from arguments, standard input, text files, files of messages, and JSONL rows."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.files import check_file
from laconic.console import escape_controls
from laconic.errors import InputError, UsageError, translate_os_errors

if TYPE_CHECKING:
    from laconic.data.tokenizer import Tokenizer
    from laconic.models.decoder import Decoder

STANDARD_INPUT = "-"


@dataclass(frozen=True)
class PromptRow:
    """A prompt: a text to continue, or chat messages to reply to.

    The name is for error messages. A text may be echoed before its continuation. `source` is the object of the JSONL
    row that it came from, `tools` are its JSON schemas for the chat template. `title` is the name of the memory's row
    that it follows, printed before it if there are several.
    """

    name: str
    text: str | None
    messages: Sequence[dict[str, Any]] = ()
    should_echo: bool = False
    source: dict[str, Any] = field(default_factory=dict)
    tools: Sequence[dict[str, Any]] = ()
    title: str = ""

    def encode(self, tokenizer: "Tokenizer", is_continuation: bool = False) -> list[int]:
        """Return the ids of the text, or of the messages in the chat template; a continuation gets no BOS."""
        if self.text is None:
            text = tokenizer.apply_chat_template(self.messages, tools=self.tools)
            return tokenizer.encode(text, add_special_tokens=False)
        ids = tokenizer.encode(self.text, add_special_tokens=not is_continuation)
        if not ids:
            raise UsageError(f"{self.name} is empty; give text")
        return ids

    def to_json(self) -> dict[str, Any]:
        prompt = {"messages": list(self.messages)} if self.text is None else {"prompt": self.text}
        return prompt | ({"title": self.title.strip()} if self.title else {})


def read_bytes(path: Path) -> bytes:
    if str(path) == STANDARD_INPUT:
        return sys.stdin.buffer.read()
    check_file(path, "an existing file, or - for standard input")
    with translate_os_errors(path):
        return path.read_bytes()


def read_text(path: Path) -> str:
    """Read a UTF-8 text, or standard input for "-", without byte-order mark and the line end at its end."""
    from laconic.data.documents.tokenize import decode_utf8

    name = "standard input" if str(path) == STANDARD_INPUT else path.name
    return "".join(decode_utf8([read_bytes(path)], name)).removesuffix("\n")


def read_texts(prompts: Sequence[str], file: Path | None) -> list[PromptRow]:
    """Return the prompts of the command line; "-" is standard input. Raises `UsageError` (2) if there is none."""
    if file is not None:
        return [PromptRow(str(file), read_text(file))]
    if not prompts:
        raise UsageError("no prompt given; laconic generate MODEL PROMPT, or - for standard input, or --file PATH")
    if prompts.count(STANDARD_INPUT) > 1:
        raise UsageError("- given twice; standard input is one prompt")
    return [
        PromptRow("standard input", read_text(Path(prompt)))
        if prompt == STANDARD_INPUT
        else PromptRow(f"prompt {number}", prompt, should_echo=True)
        for number, prompt in enumerate(prompts, 1)
    ]


def find_row_stop_ids(row: PromptRow, decoder: "Decoder", tokenizer: "Tokenizer") -> tuple[int, ...]:
    """Return the ids that end a row: the model's, and for chat messages the tokenizer's too, which ends a turn."""
    from laconic.experiment.text_models.text_model import find_eos_ids, find_stop_token_ids

    config = decoder.config
    return find_stop_token_ids(tokenizer, config, is_reply=True) if row.text is None else find_eos_ids(config)


def title_rows(rows: Sequence[PromptRow], num_texts: int, documents: Sequence[Sequence[Any]]) -> list[PromptRow]:
    """Return a single prompt once for each of several texts of a memory, with the names of its documents as title."""
    if len(rows) > 1 or num_texts == 1:
        return list(rows)
    names = [f"row {number}" for number in range(1, num_texts + 1)]
    if len(documents) == num_texts:
        names = [", ".join(document.name for document in row) for row in documents]
    return [replace(rows[0], title=f"[{escape_controls(name)}] ") for name in names]


def to_chat(row: PromptRow, system: str | None) -> PromptRow:
    from laconic.data.messages import add_system_message

    messages = row.messages if row.text is None else [{"role": "user", "content": row.text}]
    return replace(row, text=None, messages=add_system_message(messages, system), should_echo=False)


def read_message_file(path: Path, system: str | None) -> PromptRow:
    from laconic.data.messages import parse_messages

    name = "standard input" if str(path) == STANDARD_INPUT else path.name
    return to_chat(PromptRow(name, None, parse_messages(read_bytes(path), name)), system)


def read_prompt_rows(
    path: Path, is_chat: bool, system: str | None, question_column: str = "question"
) -> list[PromptRow]:
    """Return the rows of a JSONL file, or of standard input for "-", with `prompt` or `messages`.

    Where a row has neither, its `question_column` is the prompt, as in files of training rows. Other fields are copied
    to the output. Raises `InputError` (66) for invalid rows, which are listed with their lines.
    """
    from laconic.data.messages import check_messages
    from laconic.data.reasoning.catalog import refuse_csv
    from laconic.data.reasoning.chat import parse_tools
    from laconic.data.strict_jsonl import RowError, read_row_stream, read_rows

    def convert(row: dict[str, Any], name: str) -> PromptRow:
        fields = [name for name in ("prompt", "messages") if name in row] or [question_column]
        if len(fields) > 1 or fields[0] not in row:
            raise RowError("fields", f'expected one of "prompt", "messages" and "{question_column}"')
        if "generation" in row:
            raise RowError("fields", 'has "generation", which is the field for the output', "rename it")
        value = row[fields[0]]
        if fields[0] != "messages" and not isinstance(value, str):
            raise RowError("fields", "is not text", field=fields[0])
        try:
            messages = check_messages(value, "messages") if fields[0] == "messages" else ()
            tools = parse_tools(row.get("tools")) if messages else ()
        except InputError as error:
            raise RowError("messages", str(error)) from None
        prompt = PromptRow(name, None if messages else value, messages, source=row, tools=tools)
        return to_chat(prompt, system) if is_chat or messages else prompt

    name = "standard input" if str(path) == STANDARD_INPUT else path.name
    if str(path) == STANDARD_INPUT:
        rows = read_row_stream(sys.stdin.buffer, name, convert)[0]
    else:
        refuse_csv(path)
        check_file(path, 'a .jsonl whose rows have "prompt", "messages" or "question", or - for standard input')
        rows = read_rows(path, convert)[0]
    if system is not None and all(row.text is not None for row in rows):
        raise UsageError(f'--system: the rows of {name} have "prompt", which is continued as text; add --chat')
    return rows
