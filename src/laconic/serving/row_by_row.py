"""Read the rows of a batch one after the other, for models with fast weights and decoders with replaced modules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.generation.backends import as_recurrent
from laconic.interfaces import ChecksFiniteState, RecurrentState, StatefulLM
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder


@dataclass
class StateRow:
    """A row with its current state. A state is immutable; reading a segment replaces it by a new one."""

    state: KVCache | RecurrentState | None
    next_position: int | None = None  # of the decoder's next prompt id; None: the one after the last cached position
    update_weights: bool = False  # whether reading updates fast weights
    update_on_output: bool = False  # whether reading after the prompt does

    @property
    def num_bytes(self) -> int:
        return 0 if self.state is None else sum(x.nbytes for x in self.state.tensors().values())

    def drop_last(self, num_slots: int) -> None:
        """Remove the last slots from a KV cache; they must hold the last positions."""
        if num_slots:
            assert isinstance(self.state, KVCache)
            self.state = self.state.crop(self.state.S - num_slots)

    def end_prompt(self) -> None:
        self.update_weights, self.next_position = self.update_on_output, None


class RowByRowModel:
    """A model that reads one row per forward pass. An error in one row does not affect the others."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def forward(self, segments: Sequence[tuple[StateRow, Tensor]]) -> list[Float[Tensor, "n D"] | Exception]:
        """Read a segment of ids [n] or embeddings [n, D] per row; return hidden states after the norm, or the error."""
        results = list[Tensor | Exception]()
        for row, inputs in segments:
            try:
                results.append(self.read(row, inputs))
            except Exception as error:  # the engine ends this row with it
                results.append(error)
        return results

    def read(self, row: StateRow, inputs: Tensor) -> Float[Tensor, "n D"]:
        model: Any = self.decoder
        if isinstance(model, StatefulLM):
            state = model.initial_state(1) if row.state is None else row.state
            output = model.read_tokens(inputs[None], state, update_weights=row.update_weights)
            row.state = as_recurrent(output.cache)
            if row.update_weights and isinstance(model, ChecksFiniteState):
                model.check_finite_state(row.state)
            return output.hidden_states[0]
        embeds = inputs if inputs.is_floating_point() else self.decoder.embed(inputs[None])[0]
        positions = None
        if row.next_position is not None:
            positions = torch.arange(row.next_position, row.next_position + len(embeds), device=embeds.device)[None]
            row.next_position += len(embeds)
        output = self.decoder(embeds[None], row.state, position_ids=positions)
        row.state = output.cache
        return output.hidden_states[0]

    def logits(self, hidden_states: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        return self.decoder.logits(hidden_states)
