"""The model part of a step: written into its folder, and read back into the modules that are there."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from laconic.core.decoder import Decoder
from laconic.core.errors import Damaged
from laconic.core.manifest import Files
from laconic.recipe import adapters
from laconic.recipe.models import Parts


class ModelPart:
    """The decoder or its adapter, what is learned beside it and the tokenizer of a run (training.checkpoint.Model)."""

    def __init__(self, parts: Parts, method: str, what: str) -> None:
        self.parts, self.method, self.what = parts, method, what

    def save(self, files: Files) -> None:
        """Writes what was trained, in the layouts that transformers and peft read."""
        folder, parts = files.folder, self.parts
        if self.what == "full":
            moved(folder, parts.decoder.save_pretrained)
        if parts.adapter is not None:
            adapter = parts.adapter
            moved(folder, lambda new: adapters.save_adapter(adapter, new))
        for name, module in parts.beside.items():
            module.save(folder / name, self.about)
        parts.tokenizer.save(folder)

    def save_rest(self, files: Files) -> None:
        """What stands beside the tensors where they lie in shards."""
        parts = self.parts
        if self.what == "full":
            files.text("config.json", json.dumps(parts.decoder.config.to_source(), indent=2) + "\n")
        if parts.adapter is not None:
            adapters.save_settings(parts.adapter, files.folder)
        parts.tokenizer.save(files.folder)

    def load(self, folder: Path) -> None:
        """Reads that back; parameters keep their type and place. Raises `BadInput` (66), `Damaged` (76)."""
        parts = self.parts
        if self.what == "full":
            copy_weights(parts.decoder, folder)
        if parts.adapter is not None:
            adapters.refill(parts.adapter, folder)
        for name, module in parts.beside.items():
            module.load(folder / name, self.about)

    @property
    def about(self) -> dict[str, str]:
        """What stands beside a decoder belongs to: the method that trained it, the decoder, its tokenizer."""
        base = self.parts.decoder.fingerprint if self.what == "full" else self.parts.base
        return {"method": self.method, "base": base, "tokenizer": self.parts.tokenizer.fingerprint}


def moved(folder: Path, write: Callable[[Path], None]) -> None:
    """What `write` makes of a new folder, moved up into this one."""
    new = folder / ".model"
    write(new)
    for path in new.iterdir():
        os.replace(path, folder / path.name)
    new.rmdir()


@torch.no_grad()
def copy_weights(decoder: Decoder, folder: Path) -> None:
    """The weights of a folder into a decoder's own parameters."""
    first = decoder.words.weight
    found = type(decoder).from_pretrained(folder, first.dtype, first.device)
    sizes = [{name: tuple(p.shape) for name, p in module.named_parameters()} for module in (found, decoder)]
    if sizes[0] != sizes[1]:
        raise Damaged(f"{folder}: its weights are of another model than the recipe's; take the recipe it was made by")
    stored = dict(found.named_parameters())
    for name, p in decoder.named_parameters():
        p.copy_(stored[name])
