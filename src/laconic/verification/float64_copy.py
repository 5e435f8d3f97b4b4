"""A float64 copy of a decoder that measures the rounding noise of float32; it holds one block at a time."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.models.init import add_submodule


def to_float64(module: nn.Module) -> nn.Module:
    """Return a float64 copy without an intermediate copy in the module's own dtype."""
    parameters: dict[int, Any] = {id(p): nn.Parameter(p.detach().double(), False) for p in module.parameters()}
    return copy.deepcopy(module, parameters).double()


class LazyFloat64Block(nn.Module):
    """A transformer block that is converted when it is called; the converted block replaces the previous one."""

    def __init__(self, block: nn.Module, shared_cache: dict[str, Any]) -> None:
        super().__init__()
        self.source = [block]  # a list, so that the block is not a submodule
        self.shared_cache = shared_cache

    def materialise(self) -> Any:
        if self.shared_cache.get("owner") is not self:
            self.shared_cache.clear()
            block = to_float64(self.source[0])
            block._forward_hooks.clear()
            self.shared_cache |= {"owner": self, "block": block}
        return self.shared_cache["block"]

    def forward(self, *args: Any) -> Any:
        return self.materialise()(*args)


class Float64Decoder(Decoder):
    """A decoder in float64 that shares the weights of its source and holds one block and a slice of the head."""

    source: list[Decoder]

    def __init__(self, config: DecoderConfig, seed: int | None = 0) -> None:
        super().__init__(config, seed)
        self.block_cache: dict[str, Any] = {}

    @classmethod
    def from_decoder(cls, decoder: Decoder) -> "Float64Decoder":
        """Return the float64 copy; later changes of the decoder's block weights show in it."""
        with torch.device("meta"):
            wide = cls(replace(decoder.config), seed=None)
        names, cache = decoder.weight_names, wide.block_cache
        add_submodule(wide, names.layers, nn.ModuleList(LazyFloat64Block(block, cache) for block in decoder.layers))
        for name in (names.final_norm, names.position_embedding):
            if name:
                add_submodule(wide, name, to_float64(decoder.get_submodule(name)))
        wide.source = [decoder]
        return wide.eval()

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits (Eq. C20), converting 8,192 rows of the output matrix at a time."""
        decoder = self.source[0]
        self.block_cache.clear()
        tied, names = self.config.tie_word_embeddings, self.weight_names
        head: Any = decoder.get_submodule(names.token_embedding if tied else names.head)
        return torch.cat([hidden @ rows.to(hidden.dtype).T for rows in head.weight.split(8192)], -1)


def compute_dtype(decoder: Decoder) -> torch.dtype:
    return torch.float64 if isinstance(decoder, Float64Decoder) else decoder.token_embedding.weight.dtype


def get_block(decoder: Decoder, l: int) -> Any:
    block = decoder.layers[l]
    return block.materialise() if isinstance(block, LazyFloat64Block) else block
