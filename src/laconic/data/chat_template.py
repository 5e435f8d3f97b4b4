"""A stranger's chat template rendered in a process of its own, with a second of time and a megabyte of text.

The sandbox keeps a template from running code; only another process can stop a loop without end, or take back what
a string of 200 MB has cost. Run as a program, this file is that process: a job as JSON on standard input, the text or
an error as JSON on standard output.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 1.0  # of rendering
START = 60.0  # seconds until a loaded machine has surely started the process
MAX_TEXT_BYTES = 1_000_000  # bytes rendered
MEMORY = 512 * 2**20  # bytes of the process


def render_chat_template(template: str, variables: Mapping[str, Any]) -> tuple[str | None, str]:
    """The text and "", or None and why there is none."""
    job = json.dumps({"template": template, "variables": dict(variables)})
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__], input=job.encode(), capture_output=True, timeout=START, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"rendering did not end in {START:g} s"
    if done.returncode == -signal.SIGALRM:
        return None, f"rendering took more than {MAX_SECONDS:g} s"
    if done.returncode != 0:
        return None, "rendering ended without a text"
    answer = json.loads(done.stdout)
    return answer["text"], answer["error"]


class RenderLimitError(Exception):
    """More text than is taken."""


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks what the model wrote; here it is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        """The statements between the marks."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(message: str) -> None:
    """What a template calls when a conversation does not fit it."""
    raise jinja2.exceptions.TemplateError(f"the template refuses the messages: {message}")


def to_json(
    x: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is, where jinja2's own filter would escape it for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def build_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, with the options and functions that chat templates are written for."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def render_in_sandbox(template: str, variables: Mapping[str, Any]) -> str:
    """The text, here and now. Raises `TooLong` beyond a megabyte."""
    pieces: list[str] = []
    length = 0
    for piece in build_environment().from_string(template).generate(**variables):
        pieces.append(piece)
        length += len(piece.encode())
        if length > MAX_TEXT_BYTES:
            raise RenderLimitError(f"rendering made more than {MAX_TEXT_BYTES:,} bytes")
    return "".join(pieces)


def confine() -> None:
    """Time and memory for this process; the alarm kills it wherever it is."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)


def main() -> None:
    """The job of standard input."""
    job = json.loads(sys.stdin.buffer.read())
    confine()
    try:
        answer = {"text": render_in_sandbox(job["template"], job["variables"]), "error": ""}
    except RenderLimitError as error:
        answer = {"text": None, "error": str(error)}
    except MemoryError:
        answer = {"text": None, "error": f"rendering took more than {MEMORY // 2**20} MB"}
    except Exception as error:
        answer = {"text": None, "error": f"{type(error).__name__}: {error}"[:500]}
    sys.stdout.buffer.write(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
