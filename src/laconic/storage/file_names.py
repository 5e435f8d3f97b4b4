"""Check names of files and tensors: untrusted ones, and those of files that must exist."""

import re
from pathlib import Path, PurePosixPath, PureWindowsPath

from laconic.errors import InputError, UnsafeFileError

MAX_NAME_LENGTH = 1000
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def resolve_inside(root: Path, name: str, *, allow_links: bool = True) -> Path:
    """Return `root / name` after checking that neither the name nor a link leads out of the folder.

    Links out of the folder are refused, except those of a Hugging Face hub snapshot to the blobs of its repository, and
    with `allow_links` those to a file of the same name, as in a folder of links to a checkpoint on another disk.

    Raises:
        UnsafeFileError: If the name or a link leads out of `root`, or to something that is not a regular file.
    """
    for relative in (PurePosixPath(name), PureWindowsPath(name)):
        is_inside = bool(relative.parts) and ".." not in relative.parts and not (relative.drive or relative.root)
        if not is_inside or not is_printable(name):
            raise UnsafeFileError(f"{name[:80]!r} is not the name of a file inside {root}; not opened")
    try:
        folder = root.resolve()
        target = (root / name).resolve()
        is_special = target.exists() and not target.is_file()
        is_same_name = allow_links and _leads_to_same_name(root / name, target)
    except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long
        raise UnsafeFileError(f"{root / name} cannot be resolved ({error}); not opened") from None
    if not (target.is_relative_to(folder) or is_same_name or target.parent == _hub_blobs_folder(folder)):
        raise UnsafeFileError(
            f"{root / name} leads out of its folder, to {target}, and was not opened; copy that file into the folder"
        )
    if is_special:
        raise UnsafeFileError(f"{root / name} is not a regular file; not opened")
    return root / name  # with its own name: a hub snapshot links tokenizer.json to a blob that is named after its hash


def check_is_file(path: Path) -> None:
    """Raise `InputError` if a path does not exist or is a folder; an empty path is the current folder."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a file")
    if not path.is_file():
        raise InputError(f"no {path.name} in {'the current folder' if path.parent == Path() else path.parent}")


def check_hub_name(name: str) -> None:
    """Raise `InputError` for a model's name that cannot be one on the hub, or that is a file."""
    if Path(name).expanduser().exists() or not HUB_NAME.fullmatch(name):
        raise InputError(f"{name} is neither a folder nor a name on the hub; pass the folder that holds config.json")


def is_printable(name: str) -> bool:
    """Return whether a name is short and free of control characters, line ends and changes of text direction."""
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def _leads_to_same_name(file: Path, target: Path) -> bool:
    """Return whether a link leads to a file of its own name, or to one of a hub snapshot, which is a link to a blob."""
    if not file.is_symlink():
        return False
    linked = file.parent / file.readlink()
    is_in_snapshot = linked.name == file.name and target.parent == _hub_blobs_folder(linked.parent.resolve())
    return target.name == file.name or is_in_snapshot


def _hub_blobs_folder(folder: Path) -> Path | None:
    """Return the blobs folder of the hub snapshot (models--ORG--NAME/snapshots/COMMIT) around a folder, or None."""
    snapshot = next((p for p in (folder, *folder.parents) if p.parent.name == "snapshots"), None)
    if snapshot is None or not snapshot.parent.parent.name.startswith("models--"):
        return None
    return snapshot.parent.parent / "blobs"
