"""`laconic export`: write a model in Hugging Face layout."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from laconic.cli.arguments import OptionalDtype, OptionalPath, OptionalStr, parse_dtype, refuse_flags
from laconic.cli.files import check_model, check_new_file, write_file
from laconic.cli.model_flags import import_with_status
from laconic.console import log_message, status
from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.storage.temporary import check_new_or_empty

if TYPE_CHECKING:
    from laconic.experiment.load_run import RunStep


@dataclass(frozen=True)
class ExportCommand:
    """Write a model in Hugging Face layout, which transformers, vLLM and SGLang load; or a memory made with compress
    --fit --equal-heads as a cartridge, for peft.

    For a run, the folder also holds what a plain decoder does not have, such as latent thoughts or summary vectors;
    laconic opens the folder like the run itself. With --to vllm, `vllm serve` opens it too and answers with thoughts.

    Example: laconic export runs/kava --to vllm --out served
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """checkpoint (folder, GGUF file, hub or short name), run of laconic train, memory made with compress --fit
    --equal-heads, or with --to vllm a memory of summary vectors"""
    out: Path
    """folder to write; must be new or empty. With --to vllm and a memory: safetensors file"""
    to: Annotated[Literal["vllm"] | None, arg(metavar="{vllm}", help_behavior_hint="")] = None
    """vllm: write a run for vllm serve, or a memory of summary vectors as prompt_embeds"""
    reader: OptionalPath = None
    """with --to vllm and a memory: AutoCompressor (run or checkpoint) that reads the memory"""
    prompt: OptionalStr = None
    """with --to vllm and a memory: text that follows it (default: none)"""
    push: OptionalStr = None
    """then upload the folder of a run to this repository of the Hugging Face Hub, OWNER/NAME, with a model card"""
    private: bool = False
    """with --push: create the repository as a private one"""
    license: OptionalStr = None
    """with --push: licence of the weights for the model card, as the hub names it: apache-2.0, mit, …"""
    dry_run: bool = False
    """with --push: write the folder and its model card, list what would be uploaded, and upload nothing"""
    adapter: OptionalPath = None
    """folder of a peft adapter to merge into the weights"""
    dtype: OptionalDtype = None
    """dtype of the weights (default: as stored)"""

    def run(self) -> int:
        if self.push is None:
            refuse_flags(self, ("private", "license", "dry_run"), "only with --push")
        if self.to is None or not Path(self.model).is_file():  # a memory is written as a file
            check_new_or_empty(self.out)
        check_model(self.model)
        if self.adapter is not None and not self.adapter.is_dir():
            raise InputError(f"no folder {self.adapter}; give that of a peft adapter")
        import_with_status(f"loading {self.model}")
        from laconic.experiment.export import export_model
        from laconic.experiment.from_recipe import build_nested
        from laconic.experiment.load_model import check_is_model
        from laconic.experiment.load_run import find_run
        from laconic.experiment.lora import lora
        from laconic.experiment.lora.adapter_config import read_base_model
        from laconic.models.checkpoints import weights
        from laconic.models.checkpoints.named_models import NAMED_MODELS
        from laconic.storage.atomic import check_new_folder

        if (kind := self.read_memory_kind()) is not None:
            refuse_flags(self, ("adapter", "dtype", "push"), f"{self.model} is a memory")
            return self.export_cartridge(kind) if self.to is None else self.export_prompt_embeds(kind)
        refuse_flags(self, ("reader", "prompt"), f"{self.model} is not a memory")
        if (run_dir := find_run(self.model)) is not None:
            return self.export_run(run_dir)
        check_is_model(self.model)
        if self.push is not None and self.model not in NAMED_MODELS and not Path(self.model).exists():
            raise InputError(f"{self.model}: no such folder; --push uploads a run of laconic train")
        refuse_flags(self, ("push",), f"{self.model} is not a run of laconic train")
        refuse_flags(self, ("to",), f"{self.model} is a checkpoint, which vllm serve opens as it is")
        base = read_base_model(self.model) if self.adapter is None else None
        adapter = self.adapter if base is None else self.model
        with status(f"loading {self.model}"):
            folder = weights.find_checkpoint(base or self.model)
            stored_dtype = weights.stored_dtype(folder)
            dtype = parse_dtype(self.dtype) or stored_dtype
            stored_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            check_new_folder(self.out, stored_bytes * dtype.itemsize // stored_dtype.itemsize)
            decoder = build_nested.load_decoder(folder, dtype, weights.resolve_device("cpu"))
            if adapter is not None:
                decoder = lora.merge_adapter(lora.load_adapter(decoder, adapter))
        with status(f"writing {self.out}"):
            export_model(decoder, self.out, dtype=parse_dtype(self.dtype))
        log_message(f"wrote {self.out}: {sum(p.numel() for p in decoder.parameters()):,} parameters")
        return 0

    def read_memory_kind(self) -> str | None:
        """Return the kind of a memory's file, by its content; None for a GGUF file, a folder or a name."""
        from laconic.storage.atomic import read_artifact_kind

        path = Path(self.model)
        if path.suffix.lower() == ".gguf" or not (path.is_file() or path.suffix == ".safetensors"):
            return None
        try:
            return read_artifact_kind(path)
        except CorruptArtifactError as error:
            raise CorruptArtifactError(f"{error}; to export a checkpoint, give its folder") from None

    def export_cartridge(self, kind: str) -> int:
        from laconic.compression.kv.cartridge_file import save_cartridge
        from laconic.compression.kv.memory import KVMemory
        from laconic.compression.kv.memory_file import FILE_KIND

        refuse_flags(self, ("reader", "prompt"), "only with --to vllm")
        if kind != FILE_KIND:
            raise UsageError(
                f"{self.model} is not a memory made with compress --fit --equal-heads, which alone can be a peft "
                "cartridge; summary vectors are exported with --to vllm"
            )
        memory = KVMemory.load(self.model)
        save_cartridge(memory, self.out)
        log_message(f"wrote {self.out}: a peft cartridge of {memory.M:,} positions")
        return 0

    def export_run(self, run_dir: "RunStep") -> int:
        """Write a run: its decoder with the adapter merged, and what else it needs to answer."""
        import torch

        from laconic.experiment.export import export_run
        from laconic.experiment.load_run import load_run
        from laconic.storage.atomic import check_new_folder

        refuse_flags(self, ("adapter",), f"{self.model} is a run, which is exported as trained")
        card = self.build_card(run_dir)
        check_new_folder(self.out)
        with status(f"loading {self.model}"):
            run = load_run(run_dir.folder, torch.device("cpu"), run_dir.step)
        dtype = parse_dtype(self.dtype)
        if self.to is not None:
            from laconic.serving.vllm_export import SERVER_CONFIG_FILE, export_for_vllm

            with status(f"writing {self.out}"):
                export_for_vllm(run, self.out, dtype=dtype)
            config = self.out / SERVER_CONFIG_FILE
            flags = f" --config {config}" if config.is_file() else ""
            log_message(f"wrote {self.out}: step {run.step} of {run.recipe.method}; vllm serve {self.out}{flags}")
        else:
            with status(f"writing {self.out}"):
                decoder = export_run(run, self.out, dtype=dtype)
            num_parameters = sum(p.numel() for p in decoder.parameters())
            log_message(f"wrote {self.out}: step {run.step} of {run.recipe.method}, {num_parameters:,} parameters")
        if card is not None:
            self.push_folder(card, f"Step {run.step} of {run_dir.folder.name}")
        return 0

    def build_card(self, run: "RunStep") -> str | None:
        """Return the model card for --push, before anything is written."""
        if self.push is None:
            return None
        from laconic.evaluation.model_card import build_model_card
        from laconic.experiment.export import check_repository_name
        from laconic.experiment.load_run import is_export, latest_step

        check_repository_name(self.push)
        step = run.step or (None if is_export(run.folder) else latest_step(run.folder).step)
        return build_model_card(run.folder, self.push, self.license, step)

    def push_folder(self, card: str, message: str) -> None:
        """Add the model card to the exported run, and upload the folder unless this is a dry run."""
        from laconic.experiment.export import upload_folder

        assert self.push is not None
        write_file(self.out / "README.md", card)
        if self.dry_run:
            files = sorted(path for path in self.out.rglob("*") if path.is_file())
            print("\n".join(f"{path.relative_to(self.out)}  {path.stat().st_size:,} bytes" for path in files))
            log_message(f"would upload these {len(files)} files to {self.push}; see {self.out / 'README.md'}")
            return
        with status(f"uploading {self.out}"):
            url = upload_folder(self.out, self.push, private=self.private, message=message)
        log_message(f"uploaded {self.out} to {url}")

    def export_prompt_embeds(self, kind: str) -> int:
        """Write the vectors of a summary memory, and of a prompt after it, as vLLM's prompt_embeds."""
        import laconic
        from laconic.experiment.load_autocompressor import is_compressor
        from laconic.storage import atomic

        if self.reader is None:
            raise UsageError("--reader: missing; name the AutoCompressor that reads the memory")
        if kind != "memory":
            raise UsageError(f"{self.model} holds keys and values, which vLLM does not take; use summary vectors")
        if not is_compressor(self.reader):
            raise UsageError(f"--reader {self.reader}: not an AutoCompressor, which alone reads summary vectors")
        check_new_file("--out", self.out)
        with status(f"loading {self.reader}"):
            compressor = laconic.load(self.reader)
            assert isinstance(compressor, laconic.TextCompressor)
            embeds = compressor.prompt_embeddings(compressor.load_memory(self.model), self.prompt)
        atomic.write_named_file(
            self.out, lambda new: atomic.save_tensors(new, {"prompt_embeds": embeds}, {}), embeds.nbytes
        )
        log_message(f"wrote {self.out}: prompt_embeds of {len(embeds)} positions")
        return 0
