"""A float64 copy of a decoder that measures the rounding noise of float32; it holds one block at a time."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from laconic.models.decoder import Decoder
from laconic.models.init import add_submodule


def to_float64(module: nn.Module) -> nn.Module:
    """Return a float64 copy without an intermediate copy in the module's own dtype."""
    parameters: dict[int, Any] = {id(p): nn.Parameter(p.detach().double(), False) for p in module.parameters()}
    return copy.deepcopy(module, parameters).double()


class LazyFloat64Block(nn.Module):
    """A transformer block that is converted whenever it is called."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.source = [block]  # a list, so that the block is not a submodule

    def forward(self, *args: Any) -> Any:
        return to_float64(self.source[0])(*args)


class Float64Decoder(Decoder):
    """A decoder in float64 that shares the weights of its source and holds one block and a slice of the head."""

    source: list[Decoder]

    @classmethod
    def from_decoder(cls, decoder: Decoder) -> "Float64Decoder":
        """Return the float64 copy; later changes of the decoder's block weights show in it."""
        with torch.device("meta"):
            wide = cls(replace(decoder.config), seed=None)
        names = decoder.weight_names
        add_submodule(wide, names.layers, nn.ModuleList(map(LazyFloat64Block, decoder.layers)))
        for name in (names.final_norm, names.position_embedding):
            if name:
                add_submodule(wide, name, to_float64(decoder.get_submodule(name)))
        wide.source = [decoder]
        return wide.eval()

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits (Eq. C20), converting 8,192 rows of the output matrix at a time."""
        decoder = self.source[0]
        tied, names = self.config.tie_word_embeddings, self.weight_names
        head: Any = decoder.get_submodule(names.token_embedding if tied else names.head)
        return torch.cat([hidden @ rows.to(hidden.dtype).T for rows in head.weight.split(8192)], -1)


def compute_dtype(decoder: Decoder) -> torch.dtype:
    return torch.float64 if isinstance(decoder, Float64Decoder) else decoder.dtype


def get_block(decoder: Decoder, l: int) -> Any:
    block = decoder.layers[l]
    return to_float64(block.source[0]) if isinstance(block, LazyFloat64Block) else block
