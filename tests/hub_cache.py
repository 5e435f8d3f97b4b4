"""A hub cache as huggingface_hub lays it out: a snapshot is a folder of links to blobs named after their contents."""

import shutil
from hashlib import sha1
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def add_to_hub_cache(cache: Path, name: str, files: Path) -> Path:
    """Put a folder's files into a hub cache under a model's name on the hub; return the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in (file for file in sorted(files.rglob("*")) if file.is_file()):
        blob = repository / "blobs" / sha1(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        link = snapshot / file.relative_to(files)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path("../" * len(link.relative_to(repository).parts[:-1])) / "blobs" / blob.name)
    return snapshot
