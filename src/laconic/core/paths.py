"""The paths of generation, from the ids just chosen to the next logits: the slab, the decoder itself, a learner.

A path is at what has been read so far; rows that have come to their end leave it, each with a state of its own.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.core import finite
from laconic.core import state as values
from laconic.core.cache import Cache
from laconic.core.decoder import Decoder
from laconic.core.learner import Learner
from laconic.core.slab import COPIES, Slab, parts, plain
from laconic.core.state import State

FEW = 16  # steps that are over before copies of the weights have paid for themselves


class Values:
    """The first path: the decoder itself, one token a call, on a cache that is a value."""

    def __init__(self, decoder: Decoder, cache: Cache) -> None:
        self.decoder, self.held = decoder, cache

    def step(self, ids: Int[Tensor, " B"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]]:
        """Reads one id a row: the hidden states after the final norm, and their logits."""
        seen = self.decoder(self.decoder.embed(ids[:, None]), self.held)
        self.held, hidden = seen.state, seen.hidden[:, 0]
        return hidden, self.decoder.logits(hidden)

    def cache(self) -> Cache:
        """What is held now."""
        return self.held

    def take(self, places: list[int]) -> None:
        """Goes on with these rows only."""
        self.held = self.held.take(places)


class Learning:
    """The path of a model that learns while it reads, on a state; `learn` says whether what it writes teaches it."""

    def __init__(self, learner: Learner, state: State, learn: bool) -> None:
        self.learner, self.held, self.learn = learner, state, learn
        self.rows = [f"prompt {row}" for row in range(len(state.position))]

    def step(self, ids: Int[Tensor, " B"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]]:
        """Reads one id a row."""
        seen = self.learner.advance(ids[:, None], self.held, learn=self.learn)
        self.held, hidden = held(seen.state), seen.hidden[:, 0]
        return hidden, self.learner.logits(hidden)

    def take(self, places: list[int]) -> None:
        """Goes on with these rows only."""
        self.held, self.rows = values.take(self.held, places), [self.rows[place] for place in places]

    def check(self, place: int) -> None:
        """Raises `NonFinite` (65) where what a row has learned is not finite."""
        finite.check(values.take(self.held, [place]), [self.rows[place]])

    @torch.inference_mode(False)
    @torch.no_grad()
    def ended(self, place: int, last: int) -> State:
        """The state of a row that ends with an id, which is read too: a gradient may be asked of what follows."""
        ids = torch.tensor([[last]], device=self.learner_device)
        after = held(self.learner.advance(ids, values.take(self.held, [place]), learn=self.learn).state)
        finite.check(after, [self.rows[place]])
        return after

    @property
    def learner_device(self) -> torch.device:
        """Where ids are to be: beside the floating tensors of the state."""
        return next((x.device for _, x in values.named(self.held) if x.is_floating_point()), torch.device("cpu"))


Path = Slab | Values | Learning


def held(state: object) -> State:
    """A learner's state."""
    assert isinstance(state, State)
    return state


def path_of(decoder: Decoder, state: Cache | State, steps: int, learn: bool) -> Path:
    """The fast path where the decoder's weights say all it does; copies of them only where they pay."""
    if isinstance(decoder, Learner):
        return Learning(decoder, held(state), learn)
    assert isinstance(state, Cache)
    if steps == 0 or not plain(decoder) or state.keys[0].dtype != decoder.words.weight.dtype:
        return Values(decoder, state)
    return Slab(parts(decoder, COPIES if steps > FEW else 0), state, steps)


def left(path: Path, place: int, last: int, S: int) -> Cache | State:
    """What a row that ends leaves: the cache of all but its last id, of which S slots came in; or a learner's state."""
    return path.ended(place, last) if isinstance(path, Learning) else cut(path.cache(), place, S)


def nothing(decoder: Decoder, like: Tensor) -> Cache | State:
    """A state of one row in which nothing was read."""
    if isinstance(decoder, Learner):
        return decoder.start(1)
    return Cache.empty(decoder.config, 1, like.dtype, like.device)


def blind(state: State) -> bool:
    """Whether a model sees what it reads only by what it learns of it: it has no attention."""
    return all(layer.cache is None for layer in state.layers)


@torch.inference_mode(False)
@torch.no_grad()
def cut(cache: Cache, place: int, S: int) -> Cache:
    """One row of a cache, as a copy: the first S slots and, of the others, those that are live."""
    slots = torch.cat([torch.arange(S, device=cache.live.device), S + cache.live[place, S:].nonzero()[:, 0]])
    return cache.map(lambda x: x[place : place + 1].index_select(1 if x.ndim == 2 else 2, slots))


@torch.inference_mode(False)
@torch.no_grad()
def apart(x: Tensor) -> Tensor:
    """A copy that a gradient may be asked of."""
    return x.clone()
