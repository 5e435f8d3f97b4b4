"""Compute each activation with the decoder's own function from the reference's inputs (the local error)."""

from typing import Any

import torch
from torch import Tensor

from laconic.models import activations as models_activations
from laconic.models.activations import Activation, BlockContext
from laconic.models.block import ForwardContext, build_context
from laconic.models.decoder import Decoder
from laconic.verification.float64_copy import compute_dtype, get_block
from laconic.verification.traces import (
    LayerActivations,
    ParityCase,
    expected_position_ids,
    forward_arguments,
    layer_index,
)


def stages_at_layer(decoder: Decoder, layer: int) -> tuple[Activation, ...]:
    """Return the activations that a layer computes: -1 is before the first layer, L after the last."""
    if layer < 0:
        return models_activations.MODEL_ACTIVATIONS[:1]
    if layer >= len(decoder.layers):
        return models_activations.MODEL_ACTIVATIONS[1:]
    return models_activations.layer_activations(decoder.config)


class LocalStages:
    def __init__(self, decoder: Decoder, case: ParityCase) -> None:
        self.decoder = decoder
        self.case = case
        self.pieces = case.pieces()
        self.dtype = compute_dtype(decoder)
        self.embeddings = case.embed(decoder)
        self.contexts = [self.build_context(S, T) for S, T in self.pieces]

    def compute(
        self, recorded: LayerActivations, past: tuple[Tensor, Tensor] | None, names: frozenset[str] | None = None
    ) -> dict[str, Tensor]:
        """Return each activation (or each of `names`) of one layer whose inputs the reference recorded.

        `past` are the reference's cached keys and values of that layer before this piece.
        """
        S, T = self.pieces[recorded.piece]
        inputs = {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in recorded.activations.items()}
        if recorded.layer < 0:
            positions = expected_position_ids(self.case, S, T)[:, S:]
            inputs |= {"inputs_embeds": self.embeddings[:, S : S + T], "position_ids": positions}
        inputs["attention_mask"] = self.case.valid_mask[:, S : S + T]
        layer = layer_index(self.decoder, recorded.layer)
        place: Any = self.decoder  # the first argument of the functions
        if layer is not None:
            cached = None if past is None else (past[0].to(self.dtype), past[1].to(self.dtype))
            place = BlockContext(get_block(self.decoder, layer), self.contexts[recorded.piece], cached)
        with torch.no_grad():
            return {
                stage.name: stage.function(place, *(inputs[name] for name in stage.inputs))
                for stage in stages_at_layer(self.decoder, recorded.layer)
                if (names is None or stage.name in names) and all(name in inputs for name in stage.inputs)
            }

    def build_context(self, S: int, T: int) -> ForwardContext:
        return build_context(
            self.decoder.config,
            expected_position_ids(self.case, S, T),
            self.case.valid_mask[:, : S + T],
            S,
            forward_arguments(self.case, S, T)["attention_bias"],
            self.dtype,
            backend=self.decoder.attn_implementation,
            all_valid=False,
            needs_visible=True,
        )
