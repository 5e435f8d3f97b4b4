"""A model that learns while it reads, as generation and evaluation ask it, whatever paper it is of."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from laconic.core.decoder import Seen
from laconic.core.families import DecoderConfig
from laconic.core.state import State


@runtime_checkable
class Learner(Protocol):
    """Reads ids on a `State`, which is a value: what reads on an old one is a fork, and changes nothing.

    With `learn` False fast weights stand still, while convolutions, cache and position move on; ids where `taught` is
    False are no targets of what is learned. `Seen.state` is the new state; `logits` are of `Seen.hidden`.
    """

    @property
    def config(self) -> DecoderConfig: ...
    def start(self, batch: int) -> State: ...
    def advance(
        self,
        ids: Tensor,
        state: Any = None,
        *,
        live: Tensor | None = None,
        taught: Tensor | None = None,
        learn: bool = True,
    ) -> Seen: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
