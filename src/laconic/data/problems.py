"""What is wrong with rows, said once for all of them: file:line:column, an excerpt, what to do."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

MAX_REPORTED = 20  # problems told one by one; the others are counted by kind
EXCERPT_LENGTH = 80  # characters
ROWS_PER_SKIP = 1000  # one row in so many may be skipped


class RowProblem(NamedTuple):
    """One fault: line and column from 1, in characters (0: none), its kind for counting, and the text."""

    line: int
    column: int
    kind: str
    message: str


def format_problems(problems: Sequence[RowProblem], label: str) -> str:
    """The first twenty, one a line, then the others by kind."""
    lines = [f"{label}:{p.line}:{p.column}: {p.message}" if p.line else p.message for p in problems[:MAX_REPORTED]]
    rest = Counter(p.kind for p in problems[MAX_REPORTED:])
    if rest:
        lines.append(f"and {rest.total():,} more: " + ", ".join(f"{n:,} {kind}" for kind, n in rest.most_common()))
    return "\n".join(lines)


def is_within_skip_limit(bad: int, rows: int) -> bool:
    """Whether so few rows are bad that `on_bad = "skip"` may leave them out."""
    return bad * ROWS_PER_SKIP <= rows


def make_excerpt(text: str, column: int = 1) -> str:
    """At most 80 characters of a line around a column (from 1), controls and bidi controls escaped."""
    start = max(0, min(column - 1 - EXCERPT_LENGTH // 4, len(text) - EXCERPT_LENGTH))
    cut = "".join(map(escape_character, text[start : start + EXCERPT_LENGTH]))
    shown = ("…" if start else "") + cut
    return (
        shown
        if len(shown) <= EXCERPT_LENGTH and start + EXCERPT_LENGTH >= len(text)
        else shown[: EXCERPT_LENGTH - 1] + "…"
    )


def escape_character(c: str) -> str:
    """A character that a terminal can show; controls, format marks, surrogates and odd spaces by their number."""
    if c == " " or unicodedata.category(c)[0] not in "CZ":
        return c
    return f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"
