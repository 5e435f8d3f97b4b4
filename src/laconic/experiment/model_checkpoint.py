"""Write the model files of a step, and read them back into existing modules."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from laconic.errors import CorruptArtifactError
from laconic.experiment.from_recipe.build_model import ModelParts
from laconic.experiment.lora import lora
from laconic.models.decoder import Decoder
from laconic.storage.manifest import ManifestWriter


class ModelCheckpoint:
    """Writes and reads decoder or adapter, trainable extras and tokenizer of a run (`training.checkpoint.ModelIO`)."""

    def __init__(self, parts: ModelParts, method: str, trainable: str) -> None:
        self.parts, self.method, self.trainable = parts, method, trainable

    def save(self, writer: ManifestWriter) -> None:
        """Write what was trained, in the layouts that transformers and peft read."""
        folder, parts = writer.folder, self.parts
        if self.trainable == "full":
            write_then_move(folder, parts.decoder.save_pretrained)
        if parts.adapter is not None:
            adapter = parts.adapter
            write_then_move(folder, lambda new: lora.save_adapter(adapter, new))
        for name, module in parts.extra_modules.items():
            module.save(folder / name, self.fingerprints)
        parts.tokenizer.save(folder)

    def save_config_files(self, writer: ManifestWriter) -> None:
        """Write configuration and tokenizer beside sharded tensors."""
        parts = self.parts
        if self.trainable == "full":
            fields = {**parts.decoder.config.to_config_json(), **parts.decoder.extra_config_fields}
            writer.add_text("config.json", json.dumps(fields, indent=2) + "\n")
        if parts.adapter is not None:
            lora.save_adapter_config(parts.adapter, writer.folder)
        parts.tokenizer.save(writer.folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote into the existing parameters, which keep dtype and device."""
        parts = self.parts
        if self.trainable == "full":
            load_weights_into(parts.decoder, folder)
        if parts.adapter is not None:
            lora.load_adapter_weights(parts.adapter, folder)
        for name, module in parts.extra_modules.items():
            module.load(folder / name, self.fingerprints)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Method, base decoder and tokenizer that the trainable extras belong to."""
        base = self.parts.decoder.fingerprint if self.trainable == "full" else self.parts.base
        return {"method": self.method, "base": base, "tokenizer": self.parts.tokenizer.fingerprint}


def write_then_move(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new subfolder, and move its files up into `folder`."""
    new = folder / ".model"
    write(new)
    for path in new.iterdir():
        os.replace(path, folder / path.name)
    new.rmdir()


@torch.no_grad()
def load_weights_into(decoder: Decoder, folder: Path) -> None:
    loaded = type(decoder).from_pretrained(folder, decoder.dtype, decoder.device)
    sizes = [{name: tuple(p.shape) for name, p in module.named_parameters()} for module in (loaded, decoder)]
    if sizes[0] != sizes[1]:
        raise CorruptArtifactError(
            f"{folder}: its weights do not fit the recipe's model; use the recipe it was trained with"
        )
    stored = dict(loaded.named_parameters())
    for name, p in decoder.named_parameters():
        p.copy_(stored[name])
