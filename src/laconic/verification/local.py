"""The stages of a decoder as functions, fed with somebody else's inputs."""

from typing import Any

import torch
from torch import Tensor

from laconic.models import activations as models_activations
from laconic.models.activations import Activation, BlockContext
from laconic.models.decoder import Decoder
from laconic.verification.float64_copy import compute_dtype, get_block
from laconic.verification.traces import LayerActivations, ParityCase, build_block_context, default_position_ids


def stages_at_layer(decoder: Decoder, layer: int) -> tuple[Activation, ...]:
    """The stages made at a layer: -1 before the layers, L after them."""
    if layer < 0:
        return models_activations.MODEL_ACTIVATIONS[:1]
    return (
        models_activations.MODEL_ACTIVATIONS[1:]
        if layer >= len(decoder.layers)
        else models_activations.layer_activations(decoder.config)
    )


class LocalStages:
    """A decoder's functions on one case, one piece after another; the masks of only one piece are held."""

    def __init__(self, decoder: Decoder, case: ParityCase) -> None:
        self.decoder, self.case, self.pieces = decoder, case, case.pieces()
        self.dtype, self.embeddings = compute_dtype(decoder), case.embed(decoder)
        self.contexts: dict[int, Any] = {}

    def compute(
        self, recorded: LayerActivations, past: tuple[Tensor, Tensor] | None, names: frozenset[str] | None = None
    ) -> dict[str, Tensor]:
        """Each stage (or each of `names`) that the reference's inputs in `made` allow."""
        S, T = self.pieces[recorded.piece]
        given = {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in recorded.activations.items()}
        if recorded.layer < 0:
            told = (
                self.case.position_ids[:, S : S + T]
                if self.case.pass_positions
                else default_position_ids(self.case, S)[:, S:]
            )
            given |= {"vectors": self.embeddings[:, S : S + T], "positions": told}
        given["live"] = self.case.valid_mask[:, S : S + T]
        at = self.build_stage_context(recorded, past)
        with torch.no_grad():
            return {
                stage.name: stage.function(at, *(given[name] for name in stage.inputs))
                for stage in stages_at_layer(self.decoder, recorded.layer)
                if (names is None or stage.name in names) and all(name in given for name in stage.inputs)
            }

    def build_stage_context(self, recorded: LayerActivations, past: tuple[Tensor, Tensor] | None) -> Any:
        """What a stage's function is told besides its inputs."""
        if not 0 <= recorded.layer < len(self.decoder.layers):
            return self.decoder
        if recorded.piece not in self.contexts:
            self.contexts = {
                recorded.piece: build_block_context(self.decoder, self.case, *self.pieces[recorded.piece], self.dtype)
            }
        before = None if past is None else (past[0].to(self.dtype), past[1].to(self.dtype))
        return BlockContext(get_block(self.decoder, recorded.layer), self.contexts[recorded.piece], before)
