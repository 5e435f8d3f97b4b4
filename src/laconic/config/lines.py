"""Where in a TOML file a key stands, by a small scan; tomllib keeps no lines."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

KEY = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
KEYS = rf"{KEY}(?:[ \t]*\.[ \t]*{KEY})*"
HEADER = re.compile(rf"[ \t]*\[(\[?)[ \t]*({KEYS})[ \t]*\]")
ENTRY = re.compile(rf"[ \t]*({KEYS})[ \t]*=(.*)", re.DOTALL)


def keys(text: str) -> Iterator[tuple[str, int]]:
    """Every table and key as a dotted path, with its line from 1; entries of arrays of tables are numbered from 0."""
    table, counts = "", dict[str, int]()
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        line, start = lines[number], number + 1
        number += 1
        if header := HEADER.match(line):
            table = dotted(header[2])
            if header[1]:
                counts[table] = counts.get(table, -1) + 1
                table = f"{table}.{counts[table]}"
            yield table, start
        elif entry := ENTRY.match(line):
            yield (f"{table}." if table else "") + dotted(entry[1]), start
            value = entry[2]
            while number < len(lines) and not whole(value):
                value += "\n" + lines[number]
                number += 1


def dotted(written: str) -> str:
    """A key as it is written, its parts without quotes and joined by dots."""
    return ".".join(part.strip("\"'") for part in re.findall(KEY, written))


def whole(value: str) -> bool:
    """Whether a value ends here; arrays and some texts go on over lines."""
    if value.count('"""') % 2 == 0 and value.count("'''") % 2 == 0 and not value.lstrip().startswith("["):
        return True
    if "]" not in value.rpartition("\n")[2]:
        return False
    try:
        tomllib.loads(f"x = {value}")
    except tomllib.TOMLDecodeError:
        return False
    return True


def line_of(key: str, places: Mapping[str, Any]) -> Any:
    """The place of a key, or of the nearest table around it that has one."""
    while key and key not in places:
        key = key.rpartition(".")[0]
    return places.get(key)
