"""A model that learns while it reads, as generation and evaluation ask it, whatever paper it is of."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from laconic.models.config import DecoderConfig
from laconic.models.decoder import DecoderOutput
from laconic.nested.state import FastWeightState


@runtime_checkable
class StatefulLM(Protocol):
    """Reads ids on a `State`, which is a value: what reads on an old one is a fork, and changes nothing.

    With `learn` False fast weights stand still, while convolutions, cache and position move on; ids where `taught` is
    False are no targets of what is learned. `Seen.state` is the new state; `logits` are of `Seen.hidden`.
    """

    @property
    def config(self) -> DecoderConfig: ...
    def initial_state(self, batch_size: int) -> FastWeightState: ...
    def read_tokens(
        self,
        input_ids: Tensor,
        state: Any = None,
        *,
        attention_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        update_weights: bool = True,
    ) -> DecoderOutput: ...
    def logits(self, hidden_states: Tensor) -> Tensor: ...
