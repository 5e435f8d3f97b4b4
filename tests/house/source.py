"""Read the project's own files: syntax trees, fenced blocks of pages, and a sandbox to run their commands in."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.conftest import REPO, find_shared, shared_dir
from tools.equation_markers import parse_text

# a shell function for the command line
LACONIC = f"""laconic() {{ "{sys.executable}" -c 'import sys; sys.argv[0] = "laconic"
from laconic.cli.main import main; sys.exit(main())' "$@"; }}"""


def texts(*folders: str) -> Iterator[tuple[Path, str]]:
    """Yield every Python file under the folders and its text; paths are relative to the repository."""
    for folder in folders:
        for path in sorted((REPO / folder).rglob("*.py")):
            yield path.relative_to(REPO), path.read_text(encoding="utf-8")


def syntax_trees(*folders: str, pattern: str = "") -> Iterator[tuple[Path, ast.Module]]:
    """Yield the syntax trees of the files that match a regular expression; each file is parsed once."""
    for path, text in texts(*folders):
        if re.search(pattern, text):
            yield path, parse_text(str(REPO / path), text)


@cache
def walk(tree: ast.AST) -> tuple[Any, ...]:
    """Return the nodes of a syntax tree; the result is cached."""
    return tuple(ast.walk(tree))


def imported_modules(node: ast.AST) -> list[str]:
    """Return the dotted names that an import statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """Yield the fenced blocks of a page in these languages: number of the first line inside (from 1) and text."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start, language = 0, None
    for number, line in enumerate(lines, 1):
        fence = re.match(r"\s*```(\w*)", line)
        if fence and language is None:
            start, language = number + 1, fence.group(1)
        elif fence:
            if language in languages:
                yield start, "\n".join(lines[start - 1 : number - 1])
            language = None


def commands(page: Path) -> list[tuple[int, str]]:
    """Return line number and command of `$ laconic ...` lines in console blocks, joined at backslashes."""
    lines: list[tuple[int, str]] = []
    for start, text in blocks(page, "console", "sh", "bash", "shell"):
        number = start
        for line in re.sub(r"\\\n\s*", "\0", text).split("\n"):
            if line.startswith("$ laconic"):
                lines.append((number, line[2:].replace("\0", " ")))
            number += 1 + line.count("\0")
    return lines


def sandbox(folder: Path, wants_shared: bool) -> Path:
    """Create a folder with links to the repository's files, with ../shared beside it if it exists; return its path."""
    inside = folder / "repository"
    inside.mkdir()
    for name in ("README.md", "docs", "examples", "tests"):
        if (REPO / name).exists():
            (inside / name).symlink_to(REPO / name)
    data = shared_dir() if wants_shared else find_shared()
    if data is not None:
        (folder / "shared").symlink_to(data)
    return inside


def run(arguments: list[str], inside: Path, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a program in the sandbox from this source tree, offline, on one thread."""
    return subprocess.run(
        arguments,
        cwd=inside,
        env=os.environ | settings(inside),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def settings(inside: Path) -> dict[str, str]:
    """Return the environment variables that commands in the sandbox get."""
    path = os.pathsep.join(filter(None, [str(REPO / "src"), os.environ.get("PYTHONPATH")]))
    data = inside.parent / "shared"
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"} | (
        {"LACONIC_DATA": str(data)} if data.exists() else {}
    )
