"""Reading the project's own files: syntax trees, fenced blocks of pages, and a sandbox to run their commands in."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPO, find_shared, shared_dir

LACONIC = f"""laconic() {{ "{sys.executable}" -c 'import sys; sys.argv[0] = "laconic"
from laconic.cli.main import main; sys.exit(main())' "$@"; }}"""


def texts(*folders: str) -> Iterator[tuple[Path, str]]:
    """Every Python file under the folders, and what is in it; paths relative to the repository."""
    for folder in folders:
        for path in sorted((REPO / folder).rglob("*.py")):
            yield path.relative_to(REPO), path.read_text(encoding="utf-8")


def trees(*folders: str, word: str = "") -> Iterator[tuple[Path, ast.Module]]:
    """The same as syntax trees, of the files in which a regular expression is found."""
    for path, text in texts(*folders):
        if re.search(word, text):
            yield path, ast.parse(text)


def imported(node: ast.AST) -> list[str]:
    """The dotted modules an import statement names, `from` imports with what they take."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """The fenced blocks of a page in these languages: number of the first line inside (from 1), text."""
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
    """`$ laconic ...` lines of the console blocks, lines ended by a backslash joined; number of the line, command."""
    commands_found: list[tuple[int, str]] = []
    for start, text in blocks(page, "console", "sh", "bash", "shell"):
        number = start
        for line in re.sub(r"\\\n\s*", "\0", text).split("\n"):
            if line.startswith("$ laconic"):
                commands_found.append((number, line[2:].replace("\0", " ")))
            number += 1 + line.count("\0")
    return commands_found


def sandbox(folder: Path, wants_shared: bool) -> Path:
    """A folder that looks like the repository from inside, with ../shared beside it if there is one; its path."""
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
    """Run in the sandbox as a user would, but from this source tree, offline, on one thread."""
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
    """What the environment of a command in the sandbox has besides."""
    path = os.pathsep.join(filter(None, [str(REPO / "src"), os.environ.get("PYTHONPATH")]))
    data = inside.parent / "shared"
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"} | (
        {"LACONIC_DATA": str(data)} if data.exists() else {}
    )
