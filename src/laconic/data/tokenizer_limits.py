"""Limits on strangers' tokenizers: how much they may lengthen a text, and panics of the `tokenizers` library.

A panic of Rust code reaches Python as an exception that is not an `Exception`, after a message on standard error.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import tokenizers

from laconic.errors import InputError

MAX_GROWTH = 1000  # output per character of a text; published tokenizers stay below 20
MAX_TEMPLATE_TOKENS = 1000  # special tokens that a post-processor adds
SAMPLE = "Hello, world! 123 naïve 日本 😀\n\t " + "a" * 40 + " " * 40 + "<s>é"


def is_panic(error: BaseException) -> bool:
    """Return whether an exception is a panic of Rust code, whose class cannot be imported."""
    return type(error).__name__ == "PanicException"


def check_tokenizer(backend: tokenizers.Tokenizer, source: str) -> None:
    """Refuse a tokenizer that could make a text a thousand times longer, or that panics at a sample text."""
    steps = {"normalizer": backend.normalizer, "post_processor": backend.post_processor, "decoder": backend.decoder}
    for name, component in steps.items():
        settings = json.loads(component.__getstate__()) if component is not None else {}
        growth = measure_growth(settings)
        if growth > MAX_GROWTH:
            raise InputError(f"{source}: the {name} makes a text {growth:,} times longer; the limit is {MAX_GROWTH:,}")
        added = count_added_tokens(settings)
        if added > MAX_TEMPLATE_TOKENS:
            raise InputError(f"{source}: the {name} adds {added:,} tokens; the limit is {MAX_TEMPLATE_TOKENS:,}")
    for has_special in (False, True):
        try:
            backend.decode(backend.encode(SAMPLE, add_special_tokens=has_special).ids)
        except Exception:  # a small vocabulary need not have the sample's characters
            continue


def measure_growth(settings: Mapping[str, Any]) -> int:
    """Return how many characters or tokens a component writes for one that it reads, at most."""
    kind = settings.get("type")
    growth = 1
    if kind == "Replace":
        growth = replacement_growth(settings["pattern"], settings["content"])
    elif kind == "TemplateProcessing":
        growth = max(1, sum("Sequence" in piece for piece in settings["single"]))
    for part in list_parts(settings):
        growth *= measure_growth(part)
    return growth


def replacement_growth(pattern: Mapping[str, str], content: str) -> int:
    """Return how much a replacement lengthens a text; an expression that fits nothing also inserts everywhere."""
    if "String" in pattern:
        return max(1, -(-len(content) // max(1, len(pattern["String"]))))
    try:
        fits_nothing = re.match(pattern["Regex"], "") is not None
    except (re.error, RecursionError, OverflowError):  # the library's dialect knows more
        fits_nothing = True
    return max(1, len(content)) + fits_nothing


def count_added_tokens(settings: Mapping[str, Any]) -> int:
    """Return how many special tokens a post-processor adds to a text."""
    added = sum(count_added_tokens(part) for part in list_parts(settings))
    if settings.get("type") != "TemplateProcessing":
        return added
    tokens = settings["special_tokens"]
    names = [piece["SpecialToken"]["id"] for piece in settings["single"] if "SpecialToken" in piece]
    return added + sum(len(tokens[name]["ids"]) if name in tokens else 1 for name in names)


def list_parts(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [part for name in ("normalizers", "processors", "decoders") for part in settings.get(name) or ()]


@contextmanager
def hide_panic_message() -> Generator[None]:
    """Hold back what is written to standard error; drop it if the block panics, because the error says the same."""
    with ExitStack() as stack:
        try:
            sys.stderr.flush()
            file = stack.enter_context(tempfile.TemporaryFile())
            terminal = os.dup(2)
        except OSError:  # there is no folder for temporary files, or standard error is closed
            yield
            return
        has_panicked = False
        try:
            os.dup2(file.fileno(), 2)
            yield
        except BaseException as error:
            has_panicked = is_panic(error)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            file.seek(0)
            if not has_panicked:
                with suppress(OSError):  # nobody reads messages, or a file of them is on a full disk
                    os.write(2, file.read())
