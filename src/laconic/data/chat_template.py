"""Render untrusted chat templates in Jinja's sandbox, with limits on time and on the length of strings."""

import json
import re
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from laconic.errors import InputError, UnsafeFileError

MAX_SECONDS = 1.0  # of the thread's CPU time, since a busy machine must not refuse a conversation
MAX_CHARS = 1_000_000  # characters of the template and of any string it builds; largest integer argument
WIDE_FIELD = re.compile(r"\d{7,}")  # a field width of seven or more digits in a format string


class RenderLimitError(Exception):
    """A chat template exceeded a limit on time or length."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`, which marks assistant text for training; its content is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the options, filters and functions that chat templates on the hub expect."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
        for name in ("center", "indent"):
            self.filters[name] = refuse_huge_arguments(self.filters[name])
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Evaluate a binary operation; raise `RenderLimitError` if its result could be huge."""
        length = max(len(x) if isinstance(x, str | list | tuple) else 0 for x in (left, right))
        number = max((abs(x) for x in (left, right) if isinstance(x, int)), default=0)
        if operator == "*" and length * number > MAX_CHARS:
            raise RenderLimitError(f"repeats a value into more than {MAX_CHARS:,} items")
        if operator == "**" and number > 1000:
            raise RenderLimitError("computes a huge power")
        if operator == "%" and isinstance(left, str) and WIDE_FIELD.search(left):
            raise RenderLimitError("formats a wide field")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, and refuse huge numbers as arguments of string methods such as `ljust`."""
        owner = getattr(obj, "__self__", None)
        if not isinstance(owner, str):
            return super().call(context, obj, *args, **kwargs)
        if WIDE_FIELD.search(owner) and obj.__name__ in ("format", "format_map"):
            raise RenderLimitError("formats a wide field")
        return super().call(context, refuse_huge_arguments(obj), *args, **kwargs)


def refuse_huge_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, int) and x > MAX_CHARS for x in (*args, *kwargs.values())):
            raise RenderLimitError(f"passes a number over {MAX_CHARS:,}")
        return function(*args, **kwargs)

    return checked


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(f"the template rejects the messages: {message}")


def to_json(
    x: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def compile_template(template: str) -> jinja2.Template:
    if len(template) > MAX_CHARS:
        raise RenderLimitError(f"has more than {MAX_CHARS:,} characters")
    return ChatTemplateEnvironment().from_string(template)


@contextmanager
def limit_execution() -> Generator[None]:
    """Raise `RenderLimitError` once the code in the block has run too long or returned too long a string.

    A trace function sees every executed line, so it also stops a loop that produces no output.
    """
    deadline, cpu_deadline = time.monotonic() + MAX_SECONDS, time.thread_time() + MAX_SECONDS
    previous = sys.gettrace()

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        if time.monotonic() > deadline and time.thread_time() > cpu_deadline:  # the first is ten times as fast
            raise RenderLimitError(f"took more than {MAX_SECONDS:g} s")
        if event == "return" and isinstance(value, str) and len(value) > MAX_CHARS:
            raise RenderLimitError(f"built a string of more than {MAX_CHARS:,} characters")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


def render_chat_template(template: str, variables: Mapping[str, Any]) -> str:
    """Render a chat template from `messages`, special tokens and the other names that it uses.

    Raises:
        InputError: If the template is invalid or rejects the messages.
        UnsafeFileError: If it leaves the sandbox or exceeds a limit.
    """
    parts: list[str] = []
    length = 0
    try:
        compiled = compile_template(template)
        with limit_execution():
            for part in compiled.generate(**variables):
                parts.append(part)
                length += len(part)
                if length > MAX_CHARS:
                    raise RenderLimitError(f"produced more than {MAX_CHARS:,} characters")
    except (SecurityError, RenderLimitError, MemoryError) as error:
        message = f"chat template: {type(error).__name__}: {error}; refused. Pass the prompt as text instead"
        raise UnsafeFileError(message) from None
    except Exception as error:  # a template can raise anything that its expressions do
        raise InputError(f"chat template: {type(error).__name__}: {error}"[:500]) from None
    return "".join(parts)
