"""A decoder's float64 twin, against which the noise of float32 is measured; it never exists as a whole."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from laconic.models.block import add_submodule
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder


def to_float64(module: nn.Module) -> nn.Module:
    """A copy in float64; no copy in the module's own type is made on the way."""
    wide: dict[int, Any] = {id(p): nn.Parameter(p.detach().double(), False) for p in module.parameters()}
    return copy.deepcopy(module, wide).double()


class LazyFloat64Block(nn.Module):
    """A block in float64, made when it is called and kept until the next one is."""

    def __init__(self, block: nn.Module, shared_cache: dict[str, Any]) -> None:
        super().__init__()
        self.source, self.shared_cache = [block], shared_cache

    def materialise(self) -> Any:
        """The block itself; only one is held at a time."""
        if self.shared_cache.get("of") is not self:
            self.shared_cache.clear()
            block = to_float64(self.source[0])
            block._forward_hooks.clear()
            self.shared_cache |= {"of": self, "block": block}
        return self.shared_cache["block"]

    def forward(self, *args: Any) -> Any:
        return self.materialise()(*args)


class Float64Decoder(Decoder):
    """A decoder's float64 twin, of which one block and a slice of the head exist at a time."""

    source: list[Decoder]

    def __init__(self, config: DecoderConfig, seed: int | None = 0) -> None:
        super().__init__(config, seed)
        self.block_cache: dict[str, Any] = {}

    @classmethod
    def from_decoder(cls, decoder: Decoder) -> "Float64Decoder":
        """The twin; it shares the decoder's weights and follows their changes."""
        with torch.device("meta"):
            twin = cls(replace(decoder.config), seed=None)
        names, shelf = decoder.weight_names, twin.block_cache
        add_submodule(twin, names.layers, nn.ModuleList(LazyFloat64Block(block, shelf) for block in decoder.layers))
        for name in (names.final_norm, names.position_embedding):
            if name:
                add_submodule(twin, name, to_float64(decoder.get_submodule(name)))
        twin.source = [decoder]
        return twin.eval()

    def logits(self, hidden: Tensor) -> Tensor:
        """Eq. C20, some thousand rows of the head at a time."""
        decoder = self.source[0]
        self.block_cache.clear()
        tied = self.config.tie_word_embeddings
        head: Any = decoder.token_embedding if tied else decoder.get_submodule(self.weight_names.head)
        return torch.cat([hidden @ rows.to(hidden.dtype).T for rows in head.weight.split(8192)], -1)


def compute_dtype(decoder: Decoder) -> torch.dtype:
    """The type a decoder computes in."""
    return torch.float64 if isinstance(decoder, Float64Decoder) else decoder.token_embedding.weight.dtype


def get_block(decoder: Decoder, l: int) -> Any:
    """Layer `l`, in float64 if the decoder is a twin."""
    block = decoder.layers[l]
    return block.materialise() if isinstance(block, LazyFloat64Block) else block
