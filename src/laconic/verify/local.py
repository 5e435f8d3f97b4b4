"""The stages of a decoder as functions, fed with somebody else's inputs."""

from typing import Any

import torch
from torch import Tensor

from laconic.core import stages
from laconic.core.decoder import Decoder
from laconic.core.stages import At, Stage
from laconic.verify.traces import Case, Made, default_places, frame
from laconic.verify.twin import block_of, kind_of


def table(decoder: Decoder, layer: int) -> tuple[Stage, ...]:
    """The stages made at a layer: -1 before the layers, L after them."""
    if layer < 0:
        return stages.MODEL[:1]
    return stages.MODEL[1:] if layer >= len(decoder.blocks) else stages.layer_stages(decoder.config)


class Local:
    """A decoder's functions on one case, one piece after another; the masks of only one piece are held."""

    def __init__(self, decoder: Decoder, case: Case) -> None:
        self.decoder, self.case, self.pieces = decoder, case, case.pieces()
        self.dtype, self.vectors = kind_of(decoder), case.read(decoder)
        self.frames: dict[int, Any] = {}

    def made(
        self, made: Made, past: tuple[Tensor, Tensor] | None, names: frozenset[str] | None = None
    ) -> dict[str, Tensor]:
        """Each stage (or each of `names`) that the reference's inputs in `made` allow."""
        S, T = self.pieces[made.piece]
        given = {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in made.stages.items()}
        if made.layer < 0:
            told = self.case.places[:, S : S + T] if self.case.given else default_places(self.case, S)[:, S:]
            given |= {"vectors": self.vectors[:, S : S + T], "positions": told}
        given["live"] = self.case.alive[:, S : S + T]
        at = self.at(made, past)
        with torch.no_grad():
            return {
                stage.name: stage.function(at, *(given[name] for name in stage.inputs))
                for stage in table(self.decoder, made.layer)
                if (names is None or stage.name in names) and all(name in given for name in stage.inputs)
            }

    def at(self, made: Made, past: tuple[Tensor, Tensor] | None) -> Any:
        """What a stage's function is told besides its inputs."""
        if not 0 <= made.layer < len(self.decoder.blocks):
            return self.decoder
        if made.piece not in self.frames:
            self.frames = {made.piece: frame(self.decoder, self.case, *self.pieces[made.piece], self.dtype)}
        before = None if past is None else (past[0].to(self.dtype), past[1].to(self.dtype))
        return At(block_of(self.decoder, made.layer), self.frames[made.piece], before)
