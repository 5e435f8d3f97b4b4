"""Text lines of an evaluation on disk, until every evaluation uses `results_store`."""

import io
import shutil
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from laconic.errors import BusyError
from laconic.storage import manifest
from laconic.storage.atomic import write_file_atomically, write_folder_atomically

REMOVE_HINT = "remove it, or give your file of questions another name"
RECORDS_FILE, KEY_FILE, RESULT_FILE = "answers.jsonl", "key.json", "result.json"


def run_resumable(
    folder: Path | None,
    mark: str,
    count: int,
    compute: Callable[[range], Sequence[str]],
    *,
    batch_size: int,
    summarize: Callable[[Sequence[str]], Mapping[str, Any]] | None = None,
    extra_files: Mapping[str, str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[str]:
    """The lines of `count` rows, `batch` of them made at once; with a folder they are kept, and gone on with.

    `result` are the figures that lie beside them. Raises `Busy` (73) for a folder of another `mark`.
    """
    if folder is not None and (there := load_committed(folder, mark)):
        return there
    part = None if folder is None else partial_folder(folder)
    found = [] if part is None else load_partial(part, mark)
    with (part / RECORDS_FILE).open("a", encoding="utf-8") if part else io.StringIO() as file:
        while len(found) < count:
            made = compute(range(len(found), min(len(found) + batch_size, count)))
            file.writelines(made)
            file.flush()
            found += made
            if progress:
                progress("", len(found), count)
    if folder is not None:
        commit_results(folder, found, summarize(found) if summarize else {}, extra_files or {})
    return found


def partial_folder(folder: Path) -> Path:
    """Where the lines of an evaluation lie until it is whole."""
    return folder.with_name(f".part-{folder.name}")


def load_partial(partial: Path, mark: str) -> list[str]:
    """The lines of an evaluation that was stopped, in the order of asking; a half last line is cut off."""
    answers, key = partial / RECORDS_FILE, partial / KEY_FILE
    if not key.exists():
        partial.mkdir(parents=True, exist_ok=True)
        write_file_atomically(key, lambda new: new.write_text(mark, encoding="utf-8"))
    elif key.read_text(encoding="utf-8") != mark:
        raise BusyError(f"{partial} holds answers to other questions or of another step; {REMOVE_HINT}")
    whole = answers.read_text(encoding="utf-8").splitlines(keepends=True) if answers.exists() else []
    if whole and not whole[-1].endswith("\n"):
        whole.pop()
        write_file_atomically(answers, lambda new: new.write_text("".join(whole), encoding="utf-8"))
    return whole


def commit_results(
    folder: Path, lines: Sequence[str], result: Mapping[str, Any], extra_files: Mapping[str, str]
) -> None:
    """The folder of an evaluation: answers, figures, what they belong to, and a manifest of all that."""
    part = partial_folder(folder)
    mark, answers = (part / KEY_FILE).read_text(encoding="utf-8"), "".join(lines)

    def write(new: Path) -> None:
        files = manifest.ManifestWriter(new)
        for name, text in {**extra_files, KEY_FILE: mark, RECORDS_FILE: answers}.items():
            files.add_text(name, text)
        files.add_json(RESULT_FILE, result)
        files.finish("evaluation", 0, {"key": sha256(mark.encode()).hexdigest()})

    write_folder_atomically(folder, write, len(answers))
    shutil.rmtree(part)


def load_committed(folder: Path, mark: str) -> list[str]:
    """The lines of an evaluation that is done, and that is of this key; none where there is no such folder."""
    if not folder.exists():
        return []
    lines = read_lines(folder)
    if (folder / KEY_FILE).read_text(encoding="utf-8") != mark:
        raise BusyError(f"{folder} is the evaluation of other questions or of another step; {REMOVE_HINT}")
    return lines


def read_lines(folder: Path) -> list[str]:
    """The lines of an evaluation that is done. Raises `Damaged` (76) if a file is not as it was written."""
    manifest.verify_folder(folder, "evaluation")
    return (folder / RECORDS_FILE).read_text(encoding="utf-8").splitlines(keepends=True)


def read_result(folder: Path) -> str:
    """The figures beside the lines, as JSON. Raises `Damaged` (76) if a file is not as it was written."""
    manifest.verify_folder(folder, "evaluation")
    return (folder / RESULT_FILE).read_text(encoding="utf-8")
