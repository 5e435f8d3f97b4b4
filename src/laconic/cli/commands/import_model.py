"""`laconic import`: write the file of another program as a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from laconic.cli.arguments import OptionalDtype, parse_dtype
from laconic.cli.files import check_file
from laconic.console import log_message, progress
from laconic.errors import UsageError, translate_os_errors
from laconic.storage.temporary import check_new_or_empty


@dataclass(frozen=True)
class ImportCommand:
    """Write a GGUF file (llama.cpp) or a llama2.c file as a Hugging Face folder.

    Example: laconic import SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2
    """

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """file to read: GGUF with weights, tokenizer and chat template, or .bin of llama2.c with weights"""
    out: Path
    """folder to write; must be new or empty"""
    dtype: OptionalDtype = None
    """dtype of the weights (default: as stored; float32 for quantised ones)"""

    def run(self) -> int:
        check_file(self.file, "a .gguf file, or a .bin file of llama2.c")
        check_new_or_empty(self.out)
        from laconic.experiment.export import export_model
        from laconic.models.decoder import Decoder
        from laconic.models.gguf.convert import convert_gguf
        from laconic.models.gguf.header import MAGIC

        dtype = parse_dtype(self.dtype)
        suffix = self.file.suffix.lower()
        with translate_os_errors(self.file), self.file.open("rb") as file:
            is_gguf = file.read(len(MAGIC)) == MAGIC  # also of Ollama, whose files have no suffix
        if is_gguf or suffix == ".gguf":
            with progress("converting") as on_progress:
                convert_gguf(self.file, self.out, dtype, on_progress=on_progress)
        elif suffix == ".bin":
            export_model(Decoder.from_llama2c(self.file), self.out, dtype=dtype)
        else:
            raise UsageError(f"{self.file}: expected a GGUF file, or a .bin file of llama2.c")
        log_message(f"wrote {self.out}")
        return 0
