"""A decoder's float64 twin, against which the noise of float32 is measured; it never exists as a whole."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from laconic.core.block import plant
from laconic.core.decoder import Decoder
from laconic.core.families import DecoderConfig


def widened(module: nn.Module) -> nn.Module:
    """A copy in float64; no copy in the module's own type is made on the way."""
    wide: dict[int, Any] = {id(p): nn.Parameter(p.detach().double(), False) for p in module.parameters()}
    return copy.deepcopy(module, wide).double()


class Lazy(nn.Module):
    """A block in float64, made when it is called and kept until the next one is."""

    def __init__(self, block: nn.Module, shelf: dict[str, Any]) -> None:
        super().__init__()
        self.source, self.shelf = [block], shelf

    def made(self) -> Any:
        """The block itself; only one is held at a time."""
        if self.shelf.get("of") is not self:
            self.shelf.clear()
            block = widened(self.source[0])
            block._forward_hooks.clear()
            self.shelf |= {"of": self, "block": block}
        return self.shelf["block"]

    def forward(self, *given: Any) -> Any:
        return self.made()(*given)


class Widened(Decoder):
    """A decoder's float64 twin, of which one block and a slice of the head exist at a time."""

    source: list[Decoder]

    def __init__(self, config: DecoderConfig, seed: int | None = 0) -> None:
        super().__init__(config, seed)
        self.shelf: dict[str, Any] = {}

    @classmethod
    def of(cls, decoder: Decoder) -> "Widened":
        """The twin; it shares the decoder's weights and follows their changes."""
        with torch.device("meta"):
            twin = cls(replace(decoder.config), seed=None)
        names, shelf = decoder.names, twin.shelf
        plant(twin, names.blocks, nn.ModuleList(Lazy(block, shelf) for block in decoder.blocks))
        for name in (names.final_norm, names.places):
            if name:
                plant(twin, name, widened(decoder.get_submodule(name)))
        twin.source = [decoder]
        return twin.eval()

    def logits(self, hidden: Tensor) -> Tensor:
        """Eq. C20, some thousand rows of the head at a time."""
        decoder = self.source[0]
        self.shelf.clear()
        tied = self.config.tie_word_embeddings
        head: Any = decoder.words if tied else decoder.get_submodule(self.names.head)
        return torch.cat([hidden @ rows.to(hidden.dtype).T for rows in head.weight.split(8192)], -1)


def kind_of(decoder: Decoder) -> torch.dtype:
    """The type a decoder computes in."""
    return torch.float64 if isinstance(decoder, Widened) else decoder.words.weight.dtype


def block_of(decoder: Decoder, l: int) -> Any:
    """Layer `l`, in float64 if the decoder is a twin."""
    block = decoder.blocks[l]
    return block.made() if isinstance(block, Lazy) else block
