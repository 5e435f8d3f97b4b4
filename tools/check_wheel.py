"""Build the wheel, install it into an empty environment, and run it there, away from the clone.

The environment has the extra `serve` alone, so a command that needs another package without saying so fails. What the
other extras would install is compared with what they name, without installing it.

    python tools/check_wheel.py [FOLDER]
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
SECONDS = 120.0
OWN_ENVIRONMENT = ("vllm",)  # pins another torch
INDIRECT = {  # what the packages of an extra need, and another extra names
    "eval": {"datasets", "pyarrow"},
    "track": {"httpx", "uvicorn"},
    "wandb": {"httpx"},
}


def run(*command: object, **options: Any) -> str:
    """Run a command, show it, and return its output; stop at a failure."""
    print("$", *command, flush=True)
    result = subprocess.run([str(part) for part in command], text=True, stdout=subprocess.PIPE, check=True, **options)
    return result.stdout


def build_wheel(folder: Path, python: Path, source: Path = ROOT) -> Path:
    """Build the wheel in an environment of its own."""
    run(python, "-m", "pip", "install", "--quiet", "build")
    run(python, "-m", "build", "--wheel", "--outdir", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def list_packages(python: Path, requirement: str) -> dict[str, Any]:
    """Return the metadata of all packages that pip would install into an empty environment, by name."""
    command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    report = json.loads(run(*command, "-c", ROOT / "constraints.txt", requirement))
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in report["install"]}


def check_extras(python: Path, wheel: Path) -> None:
    """Check that every extra brings what it names, and of what other extras name only what its own packages need."""
    base = list_packages(python, str(wheel))
    metadata = base["laconic"]
    requirements = [Requirement(text) for text in metadata["requires_dist"]]
    named = {
        extra: {canonicalize_name(r.name) for r in requirements if r.marker and r.marker.evaluate({"extra": extra})}
        for extra in metadata["provides_extra"]
        if extra not in OWN_ENVIRONMENT
    }
    for extra, names in named.items():
        added = list_packages(python, f"{wheel}[{extra}]").keys() - base.keys()
        others = {name for other, packages in named.items() if other != extra for name in packages} - names
        foreign = (added & others) - INDIRECT.get(extra, set())
        print(f"extra {extra}: {len(added)} packages")
        assert names <= added | base.keys(), f"the extra {extra} does not install {names - added - base.keys()}"
        assert not foreign, f"the extra {extra} installs {foreign}, which it does not name"


def check_server(laconic: Path, folder: Path) -> None:
    """Start a server on a free port, ask it once, and stop it with SIGTERM."""
    command = [str(laconic), "serve", "stories260k", "--port", "0"]
    print("$", *command, flush=True)
    log = folder / "serve.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + SECONDS
        while not (match := ADDRESS.search(log.read_text())) and server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert match, log.read_text()
        address = match[0]
        body = json.dumps({"model": "stories260k", "prompt": "Once upon a time", "max_tokens": 16}).encode()
        request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            text = json.load(answer)["choices"][0]["text"]
        print(repr(text))
        assert text.startswith(", there was")
    finally:
        server.terminate()
        code = server.wait(60)
    assert code == 0, log.read_text()


def main() -> None:
    """Check the wheel in a temporary folder, or in the folder that the command line names."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        run(sys.executable, "-m", "venv", folder / "build")
        wheel = build_wheel(folder / "dist", folder / "build/bin/python")
        run(sys.executable, "-m", "venv", folder / "venv")
        python, laconic = folder / "venv/bin/python", folder / "venv/bin/laconic"
        pip = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
        run(*pip, "torch")
        run(*pip, f"{wheel}[serve]")
        check_extras(python, wheel)
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LACONIC_MODELS", "LACONIC_DATA")}
        options = {"cwd": folder, "env": {**environment, "LACONIC_CACHE": str(folder / "cache")}}
        print(run(laconic, "version", **options).strip())
        story = run(laconic, "generate", "stories260k", "Once upon a time", "--max-tokens", 20, **options)
        assert "there was a little" in story, story
        check_server(laconic, folder)
        run(laconic, "demo", "--fast", **options)
    print("the wheel works")


if __name__ == "__main__":
    main()
