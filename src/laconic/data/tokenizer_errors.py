"""Errors and panics of the `tokenizers` library.

A panic of Rust code reaches Python as an exception that is not an `Exception`, after a message on standard error.
"""

import os
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress

from laconic.errors import InputError, LaconicError


def is_panic(error: BaseException) -> bool:
    """Return whether an exception is a panic of Rust code, whose class cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextmanager
def translate_tokenizer_errors(source: str = "the tokenizer") -> Generator[None]:
    """Turn what the `tokenizers` library raises, and its panics, into InputError; `source` begins the message."""
    try:
        yield
    except LaconicError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if str(error).startswith(("TextInputSequence must", "TextEncodeInput must")):  # also for surrogates
            raise InputError("give text (str) without surrogates; remove the characters \\ud800 to \\udfff") from None
        kind = "fails" if isinstance(error, Exception) else "panics"
        raise InputError(f"{source} {kind}: {str(error)[:300]}; save it again with transformers") from None


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
