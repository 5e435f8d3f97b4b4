"""`laconic export`: a model in Hugging Face layout."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from laconic.console import note, say
from laconic.core.errors import Usage
from laconic.verbs.arguments import Dtype, torch_dtype

if TYPE_CHECKING:
    from laconic.core.decoder import Decoder


@dataclass(frozen=True)
class Export:
    """Writes a model in Hugging Face layout, which transformers, vLLM and SGLang load as it is.

    Example: laconic export stories260K.bin --out stories260k
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """a checkpoint (folder or hub name), a run of laconic train, or a llama2.c file (.bin)"""
    out: Path
    """the folder to write; it must not exist, or be empty"""
    adapter: Path | None = None
    """folder of an adapter in the layout of peft, to be merged into the weights"""
    dtype: Dtype | None = None
    """type of the numbers written; by default as stored"""
    shard_bytes: float = 5e9
    """bytes of one file at most"""

    def run(self) -> int:
        """Loads, merges, writes."""
        from laconic.core import weights
        from laconic.core.decoder import Decoder
        from laconic.recipe import adapters, learners
        from laconic.recipe.opened import is_run

        with note(f"loading {self.model}"):
            if is_run(self.model):
                decoder = self.of_run()
            elif self.model.endswith(".bin"):
                decoder = Decoder.from_llama2c(self.model)
            else:
                folder = weights.find(self.model)
                dtype = torch_dtype(self.dtype) or weights.stored_dtype(folder)
                decoder = learners.loaded(folder, dtype, weights.place_of("cpu"))
            if self.adapter is not None:
                decoder = adapters.merged(adapters.load_adapter(decoder, self.adapter))
        with note(f"writing {self.out}"):
            decoder.save_pretrained(self.out, dtype=torch_dtype(self.dtype), shard_bytes=self.shard_bytes)
        say(f"wrote {self.out}: {sum(p.numel() for p in decoder.parameters()):,} parameters")
        return 0

    def of_run(self) -> "Decoder":
        """The decoder of a run's newest step, its adapter merged."""
        import torch

        from laconic.recipe.opened import opened

        if self.adapter is not None:
            raise Usage(f"--adapter: {self.model} is a run, which has its own; leave it out")
        run = opened(self.model, torch.device("cpu"))
        if run.parts.thoughts is not None:
            say("laconic: the thoughts are no part of this layout; they stay in the run")
        return run.plain()
