"""A module whose parameters have a file of their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from torch import nn

from laconic.storage import atomic


class SavedModule(nn.Module):
    """Writes its tensors to a file, with `settings`, JSON values that a module must have to load them."""

    artifact_kind: ClassVar[str]
    settings: Mapping[str, object]

    def save(self, path: str | Path, metadata: Mapping[str, object]) -> None:
        """Write the parameters to a safetensors file at `path`, with the fingerprints in `metadata`."""
        stored = {**metadata, "settings": self.settings}
        atomic.save_artifact(Path(path), self.state_dict(), self.artifact_kind, stored)

    def load(self, path: str | Path, metadata: Mapping[str, object]) -> Self:
        """Load what `save` wrote with the same `metadata` and settings, and return self; else CorruptArtifactError."""
        atomic.load_into_module(self, Path(path), self.artifact_kind, {**metadata, "settings": self.settings})
        return self
