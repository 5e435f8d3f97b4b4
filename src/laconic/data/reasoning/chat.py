"""Conversations as question, chain and answer: rows of `messages`, of `prompt` and `completion`, and chat prompts.

The last message is the assistant's answer; the messages before it are the question. A chain of thought is the field
`reasoning_content` of the last message, or the text between `<think>` and `</think>` at its beginning.
"""

import re
from collections.abc import Mapping
from typing import Any

from laconic.batches import ReasoningExample
from laconic.data.strict_jsonl import RowError, make_excerpt
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError

Row = dict[str, Any]
Message = Mapping[str, Any]
THINKING = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def convert_messages(row: Row) -> Row:
    """Convert a row `{"messages": [{"role": …, "content": …}, …]}`, whose last message is the assistant's.

    Raises:
        RowError: The messages are not a conversation that ends with an answer.
    """
    messages = row["messages"]
    if not isinstance(messages, list) or not all(is_text_message(message) for message in messages):
        raise chat_row_error("messages", messages, "a list of messages with role and content (strings)")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise chat_row_error("messages", messages, "messages of which the last is the assistant's")
    reply = messages[-1]
    content, thinking = reply["content"], reply.get("reasoning_content") or ""
    match = THINKING.match(content)
    if match:
        content, thinking = content[match.end() :], match[1]
    steps = [line.strip() for line in str(thinking).splitlines() if line.strip()]
    users = [message["content"] for message in messages[:-1] if message["role"] == "user"]
    question = users[-1] if users else messages[-2]["content"]
    return row | {"messages": messages[:-1], "question": question, "steps": steps, "answer": content}


def convert_prompt_completion(row: Row) -> Row:
    """Convert a row of `prompt` and `completion`, both strings or both lists of messages.

    Raises:
        RowError: They are neither.
    """
    prompt, completion = row["prompt"], row["completion"]
    rest = {key: value for key, value in row.items() if key not in ("prompt", "completion")}
    if isinstance(prompt, str) and isinstance(completion, str):
        return rest | {"question": prompt, "steps": [], "answer": completion}
    if isinstance(prompt, list) and isinstance(completion, list):
        return convert_messages(rest | {"messages": [*prompt, *completion]})
    raise chat_row_error("prompt", prompt, "prompt and completion that are both strings, or both lists of messages")


def is_text_message(message: Any) -> bool:
    """Return whether a value is a message with a role and text."""
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def chat_row_error(field: str, value: Any, expected: str) -> RowError:
    return RowError(1, "other formats", f"{field}: expected {expected}: {make_excerpt(str(value))}")


def render_chat_prompt(example: ReasoningExample, tokenizer: Tokenizer) -> str:
    """Return the prompt of an example: its `messages`, or its question as the user's, up to the assistant's reply.

    Raises:
        InputError: There is no chat template, or a message contains a special token of the tokenizer.
    """
    messages = example.metadata.get("messages") or [{"role": "user", "content": example.question}]
    special = {t.content for t in tokenizer.backend.get_added_tokens_decoder().values() if t.special}
    text = "\n".join(message["content"] for message in messages)
    offending = min((token for token in special if token in text), default=None)
    if offending is not None:
        raise InputError(f"a message contains the special token {offending}; remove it")
    return tokenizer.apply_chat_template(messages)
