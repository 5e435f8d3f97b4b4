"""Check what is released: two builds of the wheel are equal, run nothing at start, and hashed packages can be had.

python -m tools.check_release
"""

import shutil
import sys
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path

from tools.check_wheel import ROOT, build_wheel, run
from tools.hash_requirements import FILE


def check_wheels(folder: Path, python: Path) -> None:
    """Build the wheel here and from a copy at another path with other times; both must be the same bytes."""
    copy = folder / "copy"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copy)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    wheels = [build_wheel(folder / str(number), python, source) for number, source in enumerate((ROOT, copy))]
    one, other = (sha256(wheel.read_bytes()).hexdigest() for wheel in wheels)
    assert one == other, f"two builds of the wheel differ: {one}, {other}"
    names = zipfile.ZipFile(wheels[0]).namelist()
    assert not [name for name in names if name.endswith(".pth")], "a .pth file runs code at every start of Python"
    print(f"two equal wheels of {len(names)} files, SHA-256 {one}")


def check_hashes(folder: Path, python: Path) -> None:
    """Download the packages of requirements-hashed.txt; pip compares the hashes."""
    run(python, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps", "-r", FILE, "--dest", folder)
    print(f"{len(list(folder.iterdir()))} packages have the hashes of {FILE.name}")


def main() -> None:
    """Run both checks in a temporary folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run(sys.executable, "-m", "venv", folder / "build")
        python = folder / "build/bin/python"
        check_wheels(folder, python)
        check_hashes(folder / "packages", python)


if __name__ == "__main__":
    main()
