"""Decode backends: map the ids just chosen to the next logits, by static cache, KV cache or fast weights.

A backend holds the state of all running rows; each row that ends gets a state of its own.
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.generation.state import DecodeState
from laconic.generation.static_cache import StaticCacheDecoder, copy_budget, fuse_weights, is_stock_decoder
from laconic.interfaces import ChecksFiniteState, RecurrentState, StatefulLM
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder


class CacheBackend:
    """Decode with the decoder itself, one token per call, on an immutable KV cache."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder, self.kv_cache = decoder, cache

    def step(self, ids: Int[Tensor, " B"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]]:
        """Read one id per row; return the hidden states after the final norm, and their logits."""
        output = self.decoder(self.decoder.embed(ids[:, None]), self.kv_cache)
        self.kv_cache = output.cache
        hidden = output.hidden_states[:, 0]
        return hidden, self.decoder.logits(hidden)

    def to_cache(self) -> KVCache:
        return self.kv_cache

    def select_rows(self, rows: list[int]) -> None:
        self.kv_cache = self.kv_cache.select_rows(rows)


class StatefulBackend:
    """Decode with a model that has fast weights; `update_weights` says whether the output updates them."""

    def __init__(self, model: StatefulLM, state: RecurrentState, update_weights: bool) -> None:
        self.model, self.state, self.update_weights = model, state, update_weights
        self.row_names = [f"prompt {row}" for row in range(len(state.position))]

    def step(self, ids: Int[Tensor, " B"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]]:
        """Read one id per row; return the hidden states after the final norm, and their logits."""
        output = self.model.read_tokens(ids[:, None], self.state, update_weights=self.update_weights)
        self.state = as_recurrent(output.cache)
        hidden = output.hidden_states[:, 0]
        return hidden, self.model.logits(hidden)

    def select_rows(self, rows: list[int]) -> None:
        self.state = self.state.select_rows(rows)
        self.row_names = [self.row_names[row] for row in rows]

    def check_finite(self, row: int, state: RecurrentState | None = None) -> None:
        """Raise NonFiniteError if the state of a row (by default the current one) is not finite."""
        if isinstance(self.model, ChecksFiniteState):
            state = self.state.select_rows([row]) if state is None else state
            self.model.check_finite_state(state, [self.row_names[row]])

    @torch.inference_mode(False)
    @torch.no_grad()
    def final_state(self, row: int, last_id: int) -> RecurrentState:
        """Read a row's last id too and return its state, outside inference mode so that it can be trained on."""
        tensors = self.state.tensors().values()
        device = next((x.device for x in tensors if x.is_floating_point()), torch.device("cpu"))
        ids = torch.tensor([[last_id]], device=device)
        output = self.model.read_tokens(ids, self.state.select_rows([row]), update_weights=self.update_weights)
        state = as_recurrent(output.cache)
        self.check_finite(row, state)
        return state


DecodeBackend = StaticCacheDecoder | CacheBackend | StatefulBackend


def as_recurrent(state: object) -> RecurrentState:
    """Narrow the type of a StatefulLM's state."""
    assert isinstance(state, RecurrentState)
    return state


def choose_backend(
    decoder: Decoder, state: KVCache | RecurrentState, steps: int, update_weights: bool
) -> DecodeBackend:
    """Choose the static cache if the decoder is unmodified; copy its weights only if that pays off in `steps`."""
    if isinstance(decoder, StatefulLM):
        return StatefulBackend(decoder, as_recurrent(state), update_weights)
    assert isinstance(state, KVCache)
    if steps == 0 or not is_stock_decoder(decoder) or state.keys[0].dtype != decoder.dtype:
        return CacheBackend(decoder, state)
    return StaticCacheDecoder(fuse_weights(decoder, copy_budget(decoder, state.B, steps), state.B), state, steps)


def final_state(backend: DecodeBackend, row: int, last_id: int, S: int) -> DecodeState | RecurrentState:
    """Return the state of a row that ended: its cache and last id (S slots came in), or its fast weights."""
    if isinstance(backend, StatefulBackend):
        return backend.final_state(row, last_id)
    cache = copy_row(backend.to_cache(), row, S)
    with torch.inference_mode(False):
        return DecodeState(cache, torch.tensor([[last_id]], device=cache.valid.device))


@torch.inference_mode(False)
@torch.no_grad()
def copy_row(cache: KVCache, row: int, S: int) -> KVCache:
    """Copy one row of a cache: the first S slots, and the valid ones of the others. One row shares its prefix."""
    slots = torch.cat([torch.arange(S, device=cache.valid.device), S + cache.valid[row, S:].nonzero()[:, 0]])
    copied = replace(cache, prefix=None).map_tensors(
        lambda x: x[row : row + 1].index_select(1 if x.ndim == 2 else 2, slots)
    )
    if cache.prefix is None:
        return copied
    is_shared = cache.B == 1 and not cache.prefix.num_tokens.is_inference()
    return replace(copied, prefix=cache.prefix if is_shared else cache.prefix.map_tensors(lambda x: x[[row]]))


@torch.inference_mode(False)
@torch.no_grad()
def clone_outside_inference(x: Tensor) -> Tensor:
    """Copy an inference tensor so that autograd can use it."""
    return x.clone()
