"""Build the wheel, install it into an empty environment, and run it there, away from the clone.

The environment has the extra `serve` alone, so a command that needs another package without saying so fails.

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

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
SECONDS = 120.0


def run(*command: object, **options: Any) -> str:
    """Run a command, show it, and return its output; stop at a failure."""
    print("$", *command, flush=True)
    result = subprocess.run([str(part) for part in command], text=True, stdout=subprocess.PIPE, check=True, **options)
    return result.stdout


def build_wheel(folder: Path, python: Path) -> Path:
    """Build the wheel in an environment of its own."""
    run(python, "-m", "pip", "install", "--quiet", "build")
    run(python, "-m", "build", "--wheel", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


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
    """Check the wheel in a temporary folder, or in the one that is given."""
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
        installed = run(python, "-m", "pip", "list", "--format=freeze")
        absent = [
            name for name in ("transformers", "peft", "matplotlib", "lm_eval", "gguf") if f"{name}==" in installed
        ]
        assert not absent, f"the extra serve installs {absent}"
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
