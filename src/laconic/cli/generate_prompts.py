"""Prompts of `laconic generate`: from arguments, standard input, text files, files of messages, and JSONL rows."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laconic.cli.files import STANDARD_INPUT, name_source
from laconic.config.data import DataConfig
from laconic.console import log_message, pluralize
from laconic.data.messages import check_messages, parse_messages
from laconic.data.reasoning.chat import parse_tools
from laconic.data.reasoning.columns import find_question
from laconic.data.strict_jsonl import RowError, convert_rows, iter_lines, parse_lines, read_rows
from laconic.errors import InputError, UsageError, translate_os_errors
from laconic.experiment.text_models.prompts import PromptRow


def read_bytes(path: Path) -> bytes:
    if str(path) == STANDARD_INPUT:
        return sys.stdin.buffer.read()
    with translate_os_errors(path):
        return path.read_bytes()


def read_text(path: Path) -> str:
    """Read a UTF-8 text, or standard input for "-", without byte-order mark and the line end at its end."""
    from laconic.data.documents.tokenize import decode_utf8

    return "".join(decode_utf8([read_bytes(path)], name_source(path))).removesuffix("\n")


def read_texts(prompts: Sequence[str], file: Path | None) -> list[PromptRow]:
    """Return the prompts of the command line; "-" is standard input. Raises `UsageError` (2) if it is given twice."""
    if file is not None:
        return [PromptRow(str(file), read_text(file))]
    if prompts.count(STANDARD_INPUT) > 1:
        raise UsageError("- given twice; standard input is one prompt")
    return [
        PromptRow("standard input", read_text(Path(prompt)))
        if prompt == STANDARD_INPUT
        else PromptRow(f"prompt {number}", prompt, should_echo=True)
        for number, prompt in enumerate(prompts, 1)
    ]


def read_message_file(path: Path, system: str | None) -> PromptRow:
    name = name_source(path)
    return PromptRow(name, None, parse_messages(read_bytes(path), name)).to_chat(system)


def read_prompt_rows(
    path: Path, is_chat: bool, system: str | None, question_column: str = "question"
) -> list[PromptRow]:
    """Return the rows of a JSONL file, or of standard input for "-", with `prompt` or `messages`.

    Where a row has neither, its question is the prompt, as in files of training rows. Other fields are copied to the
    output, but for "generation", which an output that is read again has. Raises `InputError` (66) for invalid rows,
    which are listed with their lines.
    """
    num_generated = 0

    def convert(row: dict[str, Any], name: str) -> PromptRow:
        nonlocal num_generated
        fields = [name for name in ("prompt", "messages") if name in row] or [question_column]
        value = row[fields[0]] if fields[0] in row else find_question(row, question_column)
        if len(fields) > 1 or (value is None and fields[0] not in row):
            raise RowError("missing fields", f'expected one of "prompt", "messages" and "{question_column}"')
        num_generated += row.pop("generation", None) is not None
        if fields[0] != "messages" and not isinstance(value, str):
            raise RowError("wrong types", "is not text", field=fields[0])
        try:
            messages = check_messages(value, "messages") if fields[0] == "messages" else ()
            tools = parse_tools(row.get("tools")) if messages else ()
        except InputError as error:
            raise RowError("messages", str(error)) from None
        prompt = PromptRow(name, None if messages else value, messages, source=row, tools=tools)
        return prompt.to_chat(system) if is_chat or messages else prompt

    name = name_source(path)
    if str(path) == STANDARD_INPUT:
        rows = convert_rows(name, parse_lines(iter_lines(sys.stdin.buffer)), convert)
    else:
        rows = read_rows(path, convert)
    if system is not None and all(row.text is not None for row in rows):
        raise UsageError(f'--system: the rows of {name} have "prompt", which is continued as text; add --chat')
    if num_generated:
        log_message(f"{name}: the field generation of {pluralize(num_generated, 'row')} is replaced")
    return rows


def to_questions(rows: Sequence[PromptRow], data: DataConfig, reads_documents: bool) -> list[PromptRow]:
    """Return rows as the questions of a run; of messages as in a training row, the answer at the end is left out.

    Raises `UsageError` (2) for a row that is no question, or has a document, which would be left out.
    """
    document = data.columns.get("document", "document")
    questions = list[PromptRow]()
    for number, row in enumerate(rows, 1):
        if row.messages and data.format != "chat":
            problem = f'has messages, and the run was trained on single questions (data.format = "{data.format}")'
            raise UsageError(f"{row.name} {problem}; give a question")
        messages = row.messages[:-1] if row.messages and row.messages[-1]["role"] == "assistant" else row.messages
        if not (row.text or messages):
            raise UsageError(f"{row.name} {'is empty' if row.text == '' else 'has no question'}; give a question")
        if reads_documents and document in row.source:
            raise UsageError(
                f'--input: row {number} has a "{document}", which laconic evaluate --tasks FILE reads; here, '
                "compress it with laconic compress, and give --memory"
            )
        questions.append(replace(row, messages=messages))
    return questions
