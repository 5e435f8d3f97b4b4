"""Write requirements-hashed.txt: the versions of constraints.txt with the hashes of all their files on PyPI.

It has what laconic needs with the extras hf, serve, gguf and report, but for torch and the packages that only torch
needs: torch comes from different indexes for CPUs and GPUs. Needs uv and the network.

    python tools/hash_requirements.py
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "requirements-hashed.txt"
EXTRAS = ("hf", "serve", "gguf", "report")
LEFT_OUT = re.compile(r"(torch|triton|(nvidia|cuda)-[a-z0-9-]+|httpx2-jsfetch)==")  # the last is for browsers
HEADER = """# Versions of constraints.txt with hashes, by tools/hash_requirements.py; torch is installed by itself:
# pip install --require-hashes --no-deps -r requirements-hashed.txt
"""


def main() -> None:
    """Resolve the packages with uv and write the file."""
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    options = ["--generate-hashes", "--universal", "--python-version", "3.11", "--no-annotate", "--no-header"]
    command = ["uv", "pip", "compile", "--quiet", "pyproject.toml", *extras, "-c", "constraints.txt", *options]
    text = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    packages = [block for block in re.split(r"^(?=[a-z])", text, flags=re.MULTILINE) if "--hash" in block]
    FILE.write_text(HEADER + "".join(block for block in packages if not LEFT_OUT.match(block)), encoding="utf-8")


if __name__ == "__main__":
    main()
