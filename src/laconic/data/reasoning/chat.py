"""Conversations as question, chain and answer: `messages`, `prompt` and `completion`, ShareGPT, and chat prompts.

The last message is the assistant's answer; the messages before it are the question. A chain of thought is a field of
the row (steps, cot, rationale), the field `reasoning_content` of the last message, or the text between `<think>` and
`</think>` at the beginning of an answer of any form. A field `tools`, a list of JSON schemas or its JSON text, is given
to the chat template.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from laconic.batches import ReasoningExample
from laconic.data.messages import check_messages, drop_nulls
from laconic.data.strict_jsonl import RowError, make_excerpt
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError

Row = dict[str, Any]
SHAREGPT_ROLES: Mapping[str, str] = {
    "human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant",
    "tool": "tool", "observation": "tool", "function_call": "assistant",
    **dict.fromkeys(("chatgpt", "bing", "bard"), "assistant"),
}  # fmt: skip
CHAIN_FIELDS = ("steps", "cot", "rationale")  # of a row that has several, the first is used
CONVERSATION_FIELDS = ("conversations", "conversation", "system", "system_prompt")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # of a message, as servers write them
# DeepSeek's template opens the mark in the prompt; OpenThoughts and Sky-T1 have marks of their own.
THINKING = re.compile(
    r"\s*(?:<think>(?P<full>.*?)</think>\s*|(?P<closed>(?:(?!<think>).)+?)</think>[ \t]*\n\s*"
    r"|<\|begin_of_thought\|>(?P<marked>.*?)<\|end_of_thought\|>\s*(?:<\|begin_of_solution\|>\s*)?)",
    re.DOTALL,
)


def convert_messages(row: Row) -> Row:
    """Convert a row of `messages`, the last of which is the assistant's. Raises `RowError`."""
    try:
        messages = check_messages(row["messages"], "messages")
    except InputError as error:
        raise RowError("other formats", str(error)) from None
    if len(messages) == 1 and messages[0]["role"] == "assistant":
        raise chat_row_error("messages", "a question before the assistant's answer")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise chat_row_error("messages", "messages that end with the assistant's, nothing after it")
    reply = messages[-1]
    if reply.get("tool_calls"):
        problem = "the last one has tool_calls, which cannot be trained"
        raise RowError("tool calls", problem, "end the row with a reply in text", field="messages")
    users = [message["content"] for message in messages[:-1] if message["role"] == "user"]
    question = users[-1] if users else messages[-2]["content"]
    row = row | {"messages": messages[:-1], "question": question, "answer": reply["content"]}
    key = next((key for key in REASONING_KEYS if reply.get(key)), None)
    if key is None or find_thinking(reply["content"]):
        return with_chain_field(row)
    return add_chain(row, str(reply[key]), f"{key} of the last message")


def split_thinking(row: Row) -> Row:
    """Take `<think>…</think>` at the beginning of a row's answer as its chain. Raises `RowError` as `add_chain`."""
    match = find_thinking(row["answer"]) if isinstance(row.get("answer"), str) else None
    if match is None:
        return row
    answer = row["answer"][match.end() :]
    if match["marked"] is not None:
        answer = answer.rstrip().removesuffix("<|end_of_solution|>").rstrip()
    return add_chain(row | {"answer": answer}, extract_thinking(row["answer"]), "<think> in the answer")


def extract_thinking(text: str) -> str:
    """Return the text between the marks of thinking at the beginning of a chain, or the whole chain."""
    match = find_thinking(text)
    return text if match is None else match[match.lastgroup or 0]


def find_thinking(text: str) -> re.Match[str] | None:
    return THINKING.match(text) if "</think>" in text or "<|end_of_thought|>" in text else None


def add_chain(row: Row, thinking: str, place: str) -> Row:
    """Add a chain whose lines are steps, found at `place`. Raises `RowError` if the row has a chain in a field."""
    other = next((field for field in CHAIN_FIELDS if row.get(field)), None)
    if other is not None and thinking.strip():
        raise RowError("two chains", f"a chain, and another one is {place}", "keep one of them", field=other)
    lines = filter(None, map(str.strip, thinking.splitlines()))
    return row if other is not None else row | {"steps": list(lines)}


def with_chain_field(row: Row) -> Row:
    """Return a row with an empty field `steps`, unless it has a field of a chain's type, or null."""
    has_field = any(isinstance(row.get(x, 0), (list if x == "steps" else str) | None) for x in CHAIN_FIELDS)
    return row if has_field else row | {"steps": []}


def parse_tools(value: Any) -> list[Row]:
    """Return the schemas of a row's tools: a list of objects or of their JSON texts, its JSON text, or nothing.

    Keys with null are left out of a list, as of messages. Raises `InputError`.
    """
    tools = parse_if_text(value)
    if tools is None:
        return []
    tools = [parse_if_text(tool) for tool in tools] if isinstance(tools, list) else [tools]
    if not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"tools: expected a list of JSON schemas, or its JSON text: {make_excerpt(str(value))}")
    return drop_nulls(tools) if isinstance(value, list) else tools


def parse_if_text(value: Any) -> Any:
    """Return the value of a JSON text, None for an empty text, and any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError:
        return value


def convert_prompt_completion(row: Row) -> Row:
    """Convert a row of `prompt` and `completion`: strings, lists of messages, or a list and a reply."""
    prompt, completion = row["prompt"], row["completion"]
    rest = {key: value for key, value in row.items() if key not in ("prompt", "completion")}
    if isinstance(prompt, str) and isinstance(completion, str):
        rest.pop("messages", None)
        return with_chain_field(rest | {"question": prompt, "answer": completion})
    if isinstance(prompt, list) and isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if isinstance(prompt, list) and isinstance(completion, list):
        return convert_messages(rest | {"messages": [*prompt, *completion]})
    raise chat_row_error("prompt", "prompt and completion that are both strings, or both lists of messages")


def convert_conversations(row: Row) -> Row:
    """Convert a row of ShareGPT, `{"conversations": [{"from": "human", "value": …}, …]}`, with `system` if it has one.

    The field may also be called `conversation`, as in LMSYS-Chat and WildChat, and turns may have `role` and `content`.
    Turns of the user after the last answer are left out. Raises `RowError`.
    """
    turns = row.get("conversations", row.get("conversation"))
    messages: list[dict[str, Any]] = []
    for turn in turns if isinstance(turns, list) else [turns]:
        fields = turn if isinstance(turn, dict) else {}
        message = {"role": SHAREGPT_ROLES.get(str(fields.get("from"))), "content": fields.get("value")}
        messages.append(fields if fields.get("role") else message)
        if messages[-1]["role"] is None:
            raise chat_row_error("conversations", "turns from human, gpt, system or tool, with a value")
    system = row.get("system") or row.get("system_prompt")
    if isinstance(system, str) and system.strip() and messages[:1] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    while messages[-1:] and messages[-1]["role"] == "user" and any(x["role"] == "assistant" for x in messages):
        messages.pop()  # has no answer
    rest = {key: value for key, value in row.items() if key not in CONVERSATION_FIELDS}
    return convert_messages(rest | {"messages": messages})


def has_history(example: ReasoningExample) -> bool:
    """Return whether an example is a conversation with more messages before its answer than the question."""
    messages = example.metadata.get("messages") or ()
    return sum(message["role"] != "system" or bool(message["content"].strip()) for message in messages) > 1


def chat_row_error(field: str, expected: str) -> RowError:
    return RowError("other formats", f"expected {expected}", field=field)


def iter_strings(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value that are not blank, stripped."""
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from iter_strings(part)
    elif value is not None and str(value).strip():
        yield str(value).strip()


def render_chat_prompt(example: ReasoningExample, tokenizer: Tokenizer) -> str:
    """Return the prompt of an example up to the assistant's reply. Raises `InputError`, also for special tokens."""
    messages = example.metadata.get("messages")
    tools = parse_tools(example.metadata.get("tools")) if messages else []
    messages = messages or [{"role": "user", "content": example.question}]
    special = {t.content for t in tokenizer.backend.get_added_tokens_decoder().values() if t.special}
    texts = list(iter_strings([*messages, *tools]))
    offending = min((token for token in special if any(token in text for text in texts)), default=None)
    if offending is not None:
        raise InputError(f"a message or tool contains the special token {offending}; remove it")
    return tokenizer.apply_chat_template(messages, tools=tools)
