"""A case to be read, and the stages a decoder makes of it, handed over layer by layer so that none has to be kept.

Symbols: B rows, T new slots, S slots held, P = S + T, D width, L layers.
"""

import copy
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from laconic.models import activations as models_activations
from laconic.models import positions as models_positions
from laconic.models.block import ForwardContext
from laconic.models.decoder import Decoder
from laconic.verification.float64_copy import Float64Decoder, compute_dtype


@dataclass(frozen=True)
class ParityCase:
    """One input: `ids` or `vectors`, who is live, where it stands, and in which pieces it is read.

    `positions` are what the input means; `given` says whether our decoder is told them or must find them itself (C22).
    `cuts` are the sizes of pieces read one after another on the cache; () reads all at once. `peak` multiplies the
    queries' weights while the case runs. `before` slots of something else are read first, and forgotten; `stray` slots
    are read after each piece and cropped off again. `covers` names the required inputs this is one of.
    """

    name: str
    ids: Tensor | None = None
    vectors: Tensor | None = None
    valid: Tensor | None = None
    positions: Tensor | None = None
    pass_positions: bool = False
    bias: Tensor | None = None
    piece_sizes: tuple[int, ...] = ()
    query_scale: float = 1.0
    warmup_tokens: int = 0
    extra_tokens: int = 0
    covered_inputs: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if not self.covered_inputs:
            object.__setattr__(self, "covers", (self.name,))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and slots."""
        x = self.ids if self.ids is not None else self.vectors
        assert x is not None
        return x.shape[0], x.shape[1]

    @property
    def valid_mask(self) -> Tensor:
        """`live`, spelled out."""
        return torch.ones(self.shape, dtype=torch.bool) if self.valid is None else self.valid

    @property
    def position_ids(self) -> Tensor:
        """`positions`, or the number of live slots before, spelled out."""
        if self.positions is not None:
            return self.positions
        count = torch.zeros(self.shape, dtype=torch.long)
        for b, row in enumerate(self.valid_mask.tolist()):
            seen = 0
            for t, alive in enumerate(row):
                count[b, t] = seen if alive else 0
                seen += alive
        return count

    def pieces(self) -> list[tuple[int, int]]:
        """(S, T) of every piece."""
        sizes = self.piece_sizes or (self.shape[1],)
        return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]

    def embed(self, decoder: Decoder) -> Tensor:
        """The vectors in the decoder's type, by its own words where the case is made of ids."""
        source = decoder.source[0] if isinstance(decoder, Float64Decoder) else decoder
        words = source.token_embedding.weight
        if self.ids is not None:
            return source.embed(self.ids.to(words.device)).detach().to(compute_dtype(decoder))
        assert self.vectors is not None
        return self.vectors.to(words.device, words.dtype).to(compute_dtype(decoder))


@dataclass
class LayerActivations:
    """Stages of one layer of one piece, by bare name; layer -1 is before the layers, L after them."""

    piece: int
    layer: int
    activations: dict[str, Tensor] = field(default_factory=dict)


def stage_key(name: str, layer: int | None = None, piece: int = 0, pieces: int = 1) -> str:
    """`q_rot.3`; of several pieces `q_rot.3/1`; without a layer `logits`."""
    return name + ("" if layer is None else f".{layer}") + (f"/{piece}" if pieces > 1 else "")


class StreamCancelledError(Exception):
    """Nobody asks for the next layer."""


def threaded_generator(run: Callable[[Callable[[LayerActivations], None]], None]) -> Iterator[LayerActivations]:
    """What `run` hands over, one by one; it rests in a thread of its own until the next is asked for."""
    box: queue.Queue[LayerActivations | BaseException | None] = queue.Queue()
    turn = threading.Semaphore(0)
    left = threading.Event()

    def give(made: LayerActivations) -> None:
        box.put(made)
        turn.acquire()
        if left.is_set():
            raise StreamCancelledError

    def work() -> None:
        turn.acquire()
        try:
            with torch.no_grad():
                run(give)
            box.put(None)
        except BaseException as error:
            box.put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            turn.release()
            made = box.get()
            if isinstance(made, BaseException):
                raise made
            if made is None:
                return
            yield made
    finally:
        left.set()
        turn.release()
        thread.join()


def with_eager_attention(decoder: Decoder) -> Decoder:
    """The same modules, read by the eager back end."""
    same = copy.copy(decoder)
    same.attn_implementation = "eager"
    return same


def layer_activation_names(decoder: Decoder) -> tuple[str, ...]:
    """Every stage there is of this family."""
    return tuple(stage.name for stage in models_activations.layer_activations(decoder.config)) + FINAL_STAGES


FINAL_STAGES = ("final_norm", "logits", "last_logits", "token", "next_probs")


def iterate_stages(decoder: Decoder, case: ParityCase) -> Iterator[LayerActivations]:
    """Our own run of a case, eager, every stage of a layer at a time; the cache keeps what a cache keeps."""
    vectors, L = case.embed(decoder), len(decoder.layers)
    return threaded_generator(lambda give: run_case(with_eager_attention(decoder), case, vectors, give, L))


def run_case(
    decoder: Decoder, case: ParityCase, embeddings: Tensor, emit: Callable[[LayerActivations], None], num_layers: int
) -> None:
    """Reads the pieces of a case, handing each layer's stages over as soon as they are made."""
    want, pieces, state = layer_activation_names(decoder), case.pieces(), None
    at = {"piece": 0, "quiet": False}
    last: dict[str, Tensor] = {}

    def tap(l: int) -> Callable[..., Any]:
        def hook(block: nn.Module, given: tuple[Any, ...], made: tuple[Any, ...]) -> tuple[Any, ...]:
            if at["quiet"]:
                return made
            if l == 0:
                emit(LayerActivations(at["piece"], -1, {"embed": given[0]}))
            emit(
                LayerActivations(
                    at["piece"], l, {"x": given[0]} | {name.rpartition(".")[0]: t for name, t in made[3].items()}
                )
            )
            last["x"] = made[0]
            return (*made[:3], {})

        return hook

    if case.warmup_tokens:
        decoder(embeddings.flip(1)[:, : case.warmup_tokens] * 0.5)
    handles = [block.register_forward_hook(tap(l)) for l, block in enumerate(decoder.layers)]
    try:
        for at["piece"], (S, T) in enumerate(pieces):
            seen = decoder(embeddings[:, S : S + T], state, **forward_arguments(case, S, T), want=want)
            state = seen.state
            emit(
                LayerActivations(
                    at["piece"], num_layers, dict(last) | {name: seen.stages[name] for name in FINAL_STAGES}
                )
            )
            if case.extra_tokens:
                at["quiet"] = True
                state = decoder(embeddings.flip(1)[:, : case.extra_tokens], state).state.crop(S + T)
                at["quiet"] = False
    finally:
        for handle in handles:
            handle.remove()


def forward_arguments(case: ParityCase, S: int, T: int) -> dict[str, Tensor | None]:
    """What a decoder is told about a piece beside its vectors."""
    return {
        "live": None if case.valid is None else case.valid[:, S : S + T],
        "positions": case.position_ids[:, S : S + T] if case.pass_positions else None,
        "bias": None if case.bias is None else case.bias[:, S : S + T, : S + T],
    }


def build_block_context(decoder: Decoder, case: ParityCase, S: int, T: int, dtype: torch.dtype) -> ForwardContext:
    """What our decoder's blocks share when it reads a piece, positions found as it finds them."""
    positions = case.position_ids[:, : S + T] if case.pass_positions else default_position_ids(case, S)
    bias = forward_arguments(case, S, T)["bias"]
    return decoder.build_context(
        positions, case.valid_mask[:, : S + T], S, bias, dtype, all_valid=False, needs_scores=True
    )


def default_position_ids(case: ParityCase, S: int) -> Tensor:
    """Positions up to the piece that starts at `S`, found piece after piece as the decoder finds them (C22)."""
    made = torch.zeros(case.shape[0], 0, dtype=torch.long)
    for start, size in case.pieces():
        if start <= S:
            alive = case.valid_mask[:, start : start + size]
            made = torch.cat([made, models_positions.default_position_ids(alive, made, case.valid_mask[:, :start])], 1)
    return made


@contextmanager
def sharpened_queries(decoder: Decoder, factor: float) -> Iterator[None]:
    """Queries times a power of two, by their weights, which come back to the same bits."""
    config, names = decoder.config, decoder.weight_names
    rows = config.num_attention_heads * config.head_dim
    role = names.q_norm if config.qk_norm else names.qkv or names.q
    assert role
    parts = [block.get_submodule(role) for block in decoder.layers] if factor != 1.0 else []

    def times(by: float) -> None:
        with torch.no_grad():
            for part in parts:
                for p in part.parameters():
                    p[:rows].mul_(by)

    times(factor)
    try:
        yield
    finally:
        times(1 / factor)
