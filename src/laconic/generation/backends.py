"""The paths of generation, from the ids just chosen to the next logits: the slab, the decoder itself, a learner.

A path is at what has been read so far; rows that have come to their end leave it, each with a state of its own.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.generation.static_cache import MAX_COPY_BYTES, StaticCacheDecoder, fuse_weights, is_stock_decoder
from laconic.interfaces import StatefulLM
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.nested import nan_check
from laconic.nested import state as values
from laconic.nested.state import FastWeightState

MIN_STEPS_FOR_COPIES = 16  # steps that are over before copies of the weights have paid for themselves


class CacheBackend:
    """The first path: the decoder itself, one token a call, on a cache that is a value."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder, self.kv_cache = decoder, cache

    def step(self, ids: Int[Tensor, " B"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]]:
        """Reads one id a row: the hidden states after the final norm, and their logits."""
        seen = self.decoder(self.decoder.embed(ids[:, None]), self.kv_cache)
        self.kv_cache, hidden = seen.state, seen.hidden[:, 0]
        return hidden, self.decoder.logits(hidden)

    def to_cache(self) -> KVCache:
        """What is held now."""
        return self.kv_cache

    def select_rows(self, rows: list[int]) -> None:
        """Goes on with these rows only."""
        self.kv_cache = self.kv_cache.select_rows(rows)


class StatefulBackend:
    """The path of a model that learns while it reads, on a state; `learn` says whether what it writes teaches it."""

    def __init__(self, model: StatefulLM, state: FastWeightState, update_weights: bool) -> None:
        self.model, self.state, self.update_weights = model, state, update_weights
        self.row_names = [f"prompt {row}" for row in range(len(state.position))]

    def step(self, ids: Int[Tensor, " B"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]]:
        """Reads one id a row."""
        seen = self.model.read_tokens(ids[:, None], self.state, update_weights=self.update_weights)
        self.state, hidden = as_fast_weights(seen.cache), seen.hidden_states[:, 0]
        return hidden, self.model.logits(hidden)

    def select_rows(self, rows: list[int]) -> None:
        """Goes on with these rows only."""
        self.state, self.row_names = values.select_rows(self.state, rows), [self.row_names[place] for place in rows]

    def check_finite(self, row: int) -> None:
        """Raises `NonFinite` (65) where what a row has learned is not finite."""
        nan_check.check_finite(values.select_rows(self.state, [row]), [self.row_names[row]])

    @torch.inference_mode(False)
    @torch.no_grad()
    def final_state(self, row: int, last: int) -> FastWeightState:
        """The state of a row that ends with an id, which is read too: a gradient may be asked of what follows."""
        ids = torch.tensor([[last]], device=self.device)
        after = as_fast_weights(
            self.model.read_tokens(ids, values.select_rows(self.state, [row]), update_weights=self.update_weights).cache
        )
        nan_check.check_finite(after, [self.row_names[row]])
        return after

    @property
    def device(self) -> torch.device:
        """Where ids are to be: beside the floating tensors of the state."""
        return next(
            (x.device for _, x in values.named_tensors(self.state) if x.is_floating_point()), torch.device("cpu")
        )


DecodeBackend = StaticCacheDecoder | CacheBackend | StatefulBackend


def as_fast_weights(state: object) -> FastWeightState:
    """A learner's state."""
    assert isinstance(state, FastWeightState)
    return state


def choose_backend(
    decoder: Decoder, state: KVCache | FastWeightState, steps: int, update_weights: bool
) -> DecodeBackend:
    """The fast path where the decoder's weights say all it does; copies of them only where they pay."""
    if isinstance(decoder, StatefulLM):
        return StatefulBackend(decoder, as_fast_weights(state), update_weights)
    assert isinstance(state, KVCache)
    if steps == 0 or not is_stock_decoder(decoder) or state.keys[0].dtype != decoder.token_embedding.weight.dtype:
        return CacheBackend(decoder, state)
    return StaticCacheDecoder(
        fuse_weights(decoder, MAX_COPY_BYTES if steps > MIN_STEPS_FOR_COPIES else 0), state, steps
    )


def final_state(backend: DecodeBackend, row: int, last: int, S: int) -> KVCache | FastWeightState:
    """What a row that ends leaves: the cache of all but its last id, of which S slots came in; or a learner's state."""
    return (
        backend.final_state(row, last) if isinstance(backend, StatefulBackend) else copy_row(backend.to_cache(), row, S)
    )


def empty_state(decoder: Decoder, like: Tensor) -> KVCache | FastWeightState:
    """A state of one row in which nothing was read."""
    if isinstance(decoder, StatefulLM):
        return decoder.initial_state(1)
    return KVCache.empty(decoder.config, 1, like.dtype, like.device)


def has_no_attention(state: FastWeightState) -> bool:
    """Whether a model sees what it reads only by what it learns of it: it has no attention."""
    return all(layer.cache is None for layer in state.layers)


@torch.inference_mode(False)
@torch.no_grad()
def copy_row(cache: KVCache, row: int, S: int) -> KVCache:
    """One row of a cache, as a copy: the first S slots and, of the others, those that are live."""
    slots = torch.cat([torch.arange(S, device=cache.valid.device), S + cache.valid[row, S:].nonzero()[:, 0]])
    return cache.map_tensors(lambda x: x[row : row + 1].index_select(1 if x.ndim == 2 else 2, slots))


@torch.inference_mode(False)
@torch.no_grad()
def clone_outside_inference(x: Tensor) -> Tensor:
    """A copy that a gradient may be asked of."""
    return x.clone()
