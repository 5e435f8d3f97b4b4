"""`laconic export`: write a model in Hugging Face layout."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from laconic.cli.arguments import OptionalDtype, OptionalPath, parse_dtype, refuse_flags
from laconic.console import log_message, status
from laconic.errors import UsageError

if TYPE_CHECKING:
    from laconic.models.decoder import Decoder


@dataclass(frozen=True)
class ExportCommand:
    """Write a model in Hugging Face layout, which transformers, vLLM and SGLang load; or a memory as a cartridge.

    Example: laconic export runs/kava --out merged
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """checkpoint (folder, GGUF file, hub or short name), run of laconic train, or memory of laconic compress --fit"""
    out: Path
    """folder to write; must be new or empty"""
    adapter: OptionalPath = None
    """folder of a peft adapter to merge into the weights"""
    dtype: OptionalDtype = None
    """dtype of the weights (default: as stored)"""
    max_shard_bytes: int = 5_000_000_000
    """largest size of a safetensors file, in bytes"""

    def run(self) -> int:
        """Load the model, merge the adapter and write the folder."""
        from laconic.experiment import build_nested, lora
        from laconic.experiment.load_run import is_run_dir
        from laconic.models import weights

        if self.model.endswith(".safetensors"):
            return self.export_cartridge()
        with status(f"loading {self.model}"):
            if is_run_dir(self.model):
                decoder = self.load_run_decoder()
            else:
                folder = weights.find_checkpoint(self.model)
                dtype = parse_dtype(self.dtype) or weights.stored_dtype(folder)
                decoder = build_nested.load_decoder(folder, dtype, weights.resolve_device("cpu"))
            if self.adapter is not None:
                decoder = lora.merge_adapter(lora.load_adapter(decoder, self.adapter))
        with status(f"writing {self.out}"):
            decoder.save_pretrained(
                self.out, dtype=parse_dtype(self.dtype), max_shard_bytes=float(self.max_shard_bytes)
            )
        log_message(f"wrote {self.out}: {sum(p.numel() for p in decoder.parameters()):,} parameters")
        return 0

    def export_cartridge(self) -> int:
        """Write a KV memory as a folder that peft loads."""
        from laconic.compression.cartridge_file import save_cartridge
        from laconic.compression.kv_memory import KVMemory

        refuse_flags({"adapter": self.adapter, "dtype": self.dtype}, f"{self.model} is a memory")
        memory = KVMemory.load(self.model)
        save_cartridge(memory, self.out)
        log_message(f"wrote {self.out}: a peft cartridge of {memory.M:,} positions")
        return 0

    def load_run_decoder(self) -> "Decoder":
        """Return the decoder of a run's latest step, with its adapter merged."""
        import torch

        from laconic.experiment.load_run import load_run

        if self.adapter is not None:
            raise UsageError(f"--adapter: {self.model} is a run, which is exported as trained; leave it out")
        run = load_run(self.model, torch.device("cpu"))
        if run.parts.latents is not None:
            log_message("laconic: the latent-token parameters are not exported; they stay in the run")
        return run.merged_decoder()
