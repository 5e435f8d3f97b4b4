"""What an evaluation keeps on disk: a line for each row, written as they come, and committed as a folder."""

import io
import shutil
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from laconic.core import manifest
from laconic.core.artifact import commit_folder, replace_file
from laconic.core.errors import Busy

REMOVE = "remove it, or give your file of questions another name"
ROWS, KEY, RESULT = "answers.jsonl", "key.json", "result.json"


def lines(
    folder: Path | None,
    mark: str,
    count: int,
    make: Callable[[range], Sequence[str]],
    *,
    batch: int,
    result: Callable[[Sequence[str]], Mapping[str, Any]] | None = None,
    texts: Mapping[str, str] | None = None,
    show: Callable[[str, int, int], None] | None = None,
) -> list[str]:
    """The lines of `count` rows, `batch` of them made at once; with a folder they are kept, and gone on with.

    `result` are the figures that lie beside them. Raises `Busy` (73) for a folder of another `mark`.
    """
    if folder is not None and (there := committed(folder, mark)):
        return there
    part = None if folder is None else part_of(folder)
    found = [] if part is None else begun(part, mark)
    with (part / ROWS).open("a", encoding="utf-8") if part else io.StringIO() as file:
        while len(found) < count:
            made = make(range(len(found), min(len(found) + batch, count)))
            file.writelines(made)
            file.flush()
            found += made
            if show:
                show("", len(found), count)
    if folder is not None:
        commit(folder, found, result(found) if result else {}, texts or {})
    return found


def part_of(folder: Path) -> Path:
    """Where the lines of an evaluation lie until it is whole."""
    return folder.with_name(f".part-{folder.name}")


def begun(part: Path, mark: str) -> list[str]:
    """The lines of an evaluation that was stopped, in the order of asking; a half last line is cut off."""
    answers, key = part / ROWS, part / KEY
    if not key.exists():
        part.mkdir(parents=True, exist_ok=True)
        replace_file(key, lambda new: new.write_text(mark, encoding="utf-8"))
    elif key.read_text(encoding="utf-8") != mark:
        raise Busy(f"{part} holds answers to other questions or of another step; {REMOVE}")
    whole = answers.read_text(encoding="utf-8").splitlines(keepends=True) if answers.exists() else []
    if whole and not whole[-1].endswith("\n"):
        whole.pop()
        replace_file(answers, lambda new: new.write_text("".join(whole), encoding="utf-8"))
    return whole


def commit(folder: Path, lines: Sequence[str], result: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """The folder of an evaluation: answers, figures, what they belong to, and a manifest of all that."""
    part = part_of(folder)
    mark, answers = (part / KEY).read_text(encoding="utf-8"), "".join(lines)

    def write(new: Path) -> None:
        files = manifest.Files(new)
        for name, text in {**texts, KEY: mark, ROWS: answers}.items():
            files.text(name, text)
        files.json(RESULT, result)
        files.seal("evaluation", 0, {"key": sha256(mark.encode()).hexdigest()})

    commit_folder(folder, write, len(answers))
    shutil.rmtree(part)


def committed(folder: Path, mark: str) -> list[str]:
    """The lines of an evaluation that is done, and that is of this key; none where there is no such folder."""
    if not folder.exists():
        return []
    lines = lines_of(folder)
    if (folder / KEY).read_text(encoding="utf-8") != mark:
        raise Busy(f"{folder} is the evaluation of other questions or of another step; {REMOVE}")
    return lines


def lines_of(folder: Path) -> list[str]:
    """The lines of an evaluation that is done. Raises `Damaged` (76) if a file is not as it was written."""
    manifest.check(folder, "evaluation")
    return (folder / ROWS).read_text(encoding="utf-8").splitlines(keepends=True)


def result_of(folder: Path) -> str:
    """The figures beside the lines, as JSON. Raises `Damaged` (76) if a file is not as it was written."""
    manifest.check(folder, "evaluation")
    return (folder / RESULT).read_text(encoding="utf-8")
