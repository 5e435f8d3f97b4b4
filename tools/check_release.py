"""Check what is released: two builds of the wheel are equal and run nothing at start, the packages have their hashes,
and none has a known vulnerability.

python -m tools.check_release            pip-audit asks PyPI; its PIP_AUDIT_* variables choose another service
python -m tools.check_release --offline  without the list of vulnerabilities
"""

import argparse
import shutil
import subprocess
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


def check_vulnerabilities(python: Path) -> None:
    """Ask for known vulnerabilities of the packages of constraints.txt; a package that is not found fails too."""
    run(python, "-m", "pip", "install", "--quiet", "pip-audit")
    options = ("--disable-pip", "--no-deps", "--strict", "--progress-spinner", "off")
    command = (python, "-m", "pip_audit", *options, "-r", ROOT / "constraints.txt")
    print("$", *command, flush=True)
    if subprocess.run([str(part) for part in command], check=False).returncode:
        sys.exit("pip-audit: vulnerabilities, or no answer about a package; without network: --offline")


def main() -> None:
    """Run the checks in a temporary folder."""
    parser = argparse.ArgumentParser(description="Check what is released.")
    parser.add_argument("--offline", action="store_true", help="do not ask for known vulnerabilities")
    offline = parser.parse_args().offline
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run(sys.executable, "-m", "venv", folder / "build")
        python = folder / "build/bin/python"
        check_wheels(folder, python)
        check_hashes(folder / "packages", python)
        if offline:
            print("known vulnerabilities: not checked (--offline)")
        else:
            check_vulnerabilities(python)


if __name__ == "__main__":
    main()
