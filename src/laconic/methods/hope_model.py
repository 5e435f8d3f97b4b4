"""Hope and Hope-Attention: language models whose layers learn while they read, made of the decoder's parts.

Nested Learning arXiv:2512.24695, 94 to 97 and section 7.3. Both are called as a decoder is. What they learn is in the
state, a value: `State` of `core/state.py`, with a file of its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.core import fit, state_file, weights
from laconic.core import state as values
from laconic.core.block import Block
from laconic.core.cache import Cache
from laconic.core.decoder import Decoder, Seen
from laconic.core.errors import BadInput, Usage
from laconic.core.state import Layer, State
from laconic.methods import cms_layer, cms_reading, cms_shape, hope_layer, titans_layer
from laconic.methods.cms import stack
from laconic.methods.cms_layer import CMS
from laconic.methods.cms_levels import Way
from laconic.methods.hope_config import HopeConfig
from laconic.methods.hope_layer import SelfTitans
from laconic.methods.hope_reading import kept, read
from laconic.methods.hope_starts import added, check_grown, donated, rebuilt
from laconic.methods.hope_task import interrupted, learn_along, silent, unopened
from laconic.methods.learning_settings import Gradient, Grow, Place
from laconic.methods.titans_layer import Titans

KIND = "hope"


class Hope(Decoder):
    """A memory, self-modifying or of Titans, and a continuum of levels in each layer; no attention, any length.

    With the task's objective the levels learn where `ids` are given beside the vectors, as `advance` does, since a
    vector has no target; all else learns from vectors. A random start is drawn from `seed`; None leaves it undrawn.
    """

    def __init__(self, shape: HopeConfig, seed: int | None = 0) -> None:
        super().__init__(shape.decoder, seed=None)
        self.shape = shape
        for n, part in enumerate(self.parts):
            rebuilt(part, shape, n, seed or 0)
        if seed is None:
            return
        inner = (".mlp.", ".memory.")
        self.initialise([name for name, _ in self.named_parameters() if not any(x in name for x in inner)], seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for n, part in enumerate(self.parts):
                drawn = cms_layer.weights(shape.levels(n), generator, shape.decoder.initializer_range)
                for name, w in drawn.items():
                    part.get_submodule("mlp").get_parameter(name).copy_(w)

    @property
    def parts(self) -> list[Block]:
        """The layers, in order."""
        return [part for part in self.blocks if isinstance(part, Block)]

    @property
    def learns_task(self) -> bool:
        """Whether the levels learn of the next token's loss."""
        return self.shape.cms.inner == "task" and not self.shape.levels(0).still

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, folder_or_hub_name: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> "Hope":
        """What `save_pretrained` wrote. Raises as `Decoder.from_pretrained` does."""
        folder = weights.find(folder_or_hub_name)
        shape = HopeConfig.read(folder)
        if (shape.memory is None) != issubclass(cls, HopeAttention):
            there = "HopeAttention" if shape.memory is None else "Hope"
            raise BadInput(f"{folder_or_hub_name} holds a {there}; load it as that")
        with torch.device("meta"):
            model = cls(shape, seed=None)
        report = weights.load_weights(model, folder, shape.decoder, dtype, device)
        model.config = replace(shape.decoder, dtype=model.words.weight.dtype)
        model.folder, model.name_or_path = folder, str(folder_or_hub_name)
        model._stored = (report.fingerprint, model.version())
        return model.eval()

    def save_pretrained(
        self, folder: str | Path, *, shard_bytes: float = 5e9, dtype: torch.dtype | None = None
    ) -> None:
        """The Hugging Face layout; starts are ordinary weights. Raises `Busy` (73) if `folder` is not empty."""
        weights.save_weights(
            self,
            Path(folder),
            self.config,
            shard_bytes=shard_bytes,
            dtype=dtype,
            source_folder=self.folder,
            more=self.shape.to_source(),
        )

    def start(self, batch: int) -> State:
        """Nothing read: every count 0, every fast weight at its start."""
        words = cast(Tensor, self.words.weight)
        layers: list[Layer] = []
        for part in self.parts:
            made = cms_reading.start(cast(CMS, part.get_submodule("mlp")).params, batch)
            memory = dict(part.named_children()).get("memory")
            if isinstance(memory, SelfTitans):
                made = replace(hope_layer.start(memory.params, batch), cms=made.cms)
            elif isinstance(memory, Titans):
                made = replace(titans_layer.start(memory.params, batch), cms=made.cms)
            else:
                made = replace(made, cache=self.unread(batch, words))
            layers.append(made)
        position, none = torch.zeros(batch, dtype=torch.long), torch.zeros(batch, 0, dtype=torch.long)
        opened = unopened(tuple(layers), none.to(words.device)) if self.learns_task else None
        return State(tuple(layers), position, opened)

    def unread(self, batch: int, like: Tensor) -> Cache:
        """A layer's cache of no slot."""
        nothing = like.detach().new_zeros(batch, self.config.num_key_value_heads, 0, self.config.head_dim)
        places = torch.empty(batch, 0, dtype=torch.long, device=like.device)
        return Cache((nothing,), (nothing,), places, places.bool())

    def advance(
        self,
        ids: Int[Tensor, "B T"],
        state: State | None = None,
        *,
        live: Bool[Tensor, "B T"] | None = None,
        taught: Bool[Tensor, "B T"] | None = None,
        learn: bool = True,
        gradient: Gradient | None = None,
        horizon: int | None = None,
    ) -> Seen:
        """Reads ids, each the target of the one before it; where `taught` is False it is only read."""
        x = self.embed(ids)
        return self(x, state, ids=ids, live=live, taught=taught, learn=learn, gradient=gradient, horizon=horizon)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        vectors: Float[Tensor, "B T D"],
        state: State | None = None,
        *,
        live: Bool[Tensor, "B T"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
        bias: Float[Tensor, "#B #T #P"] | None = None,
        want: tuple[str, ...] = (),
        ids: Int[Tensor, "B T"] | None = None,
        taught: Bool[Tensor, "B T"] | None = None,
        learn: bool = True,
        gradient: Gradient | None = None,
        horizon: int | None = None,
    ) -> Seen:
        """Reads T vectors on a state; None starts anew. `ids` are what the vectors are the words of, if they are.

        With `learn` False memories and levels stand still; convolutions, cache and position move on. `gradient` says
        what of the outer loss flows through the writes, by default "first_order" for the task and "full" otherwise.
        Of ids where `taught` is False nothing is learned as of targets; gradients of the others flow through them. Of
        the stages `want` may name embed, hidden.N and final_norm. Raises `ValueError` as a decoder does, `Usage` (2)
        for a state of another shape, and for positions, bias or stages where levels learn of ids.
        """
        fit.check_call(self.config, self.attention, vectors, None, live, positions, bias)
        state = self.start(len(vectors)) if state is None else state
        self.accept(state, len(vectors))
        way = Way(gradient or ("first_order" if self.learns_task else "full"), horizon)
        if taught is not None and (ids is None or not self.learns_task):
            raise Usage("hope: taught says which ids levels learn of, and none here learns of ids; leave it out")
        asked = None if ids is None else silent(ids, taught)
        if self.learns_task and learn and asked is not None:
            if positions is not None or bias is not None or want:
                raise Usage("hope: levels that learn of ids take no positions, bias or stages; read with learn=False")
            hidden, state = learn_along(self, state, asked, live, way)
            return Seen(hidden, cast(Any, state), {})
        if self.learns_task:
            state = interrupted(self, state, asked, live, way)
        hidden, found = read(
            self, vectors, state.layers, live=live, positions=positions, bias=bias, learn=learn, way=way
        )
        added = torch.full_like(state.position, vectors.shape[1]) if live is None else live.sum(1).cpu()
        words = ids if ids is not None else vectors[..., 0].long()
        opened = unopened(found.layers, words) if self.learns_task else None
        after = State(found.layers, state.position + added, opened)
        return Seen(hidden, cast(Any, after), kept(want, vectors, found, hidden))

    def accept(self, state: State, B: int) -> None:
        """Raises `Usage` (2) for a state of another model or of other rows."""
        if len(state.layers) != len(self.parts):
            raise Usage(f"hope: the state has {len(state.layers)} layers, the model {len(self.parts)}; load its own")
        if len(state.position) != B:
            raise Usage(f"hope: {B} rows of vectors, the state has {len(state.position)}; take or join its rows")

    def grown(self, chunks: Sequence[int], grow: Grow = "zero") -> "Hope":
        """This model with slower levels after its own, which add nothing at first or are copies; tensors are shared.

        Raises `Usage` (2) for `chunks` that do not begin with those of every layer.
        """
        check_grown(self.shape.cms, grow)
        kept = next((kept for kept in self.shape.chunks if tuple(chunks[: len(kept)]) != kept), None)
        if kept is not None:
            raise Usage(f"hope: levels of chunks {list(kept)} cannot grow to {list(chunks)}; keep them, and add slower")
        shape = replace(self.shape, chunks=(tuple(chunks),) * len(self.parts))
        with torch.device("meta"):
            made = type(self)(shape, seed=None)
        tensors: dict[str, Tensor] = dict(self.named_parameters())
        for n in range(len(self.parts)):
            tensors |= added(shape, n, self, len(self.shape.chunks[n]), grow)
        made.load_state_dict({name: tensors[name] for name in made.state_dict()}, assign=True)
        made.folder, made.name_or_path, made.attention = self.folder, self.name_or_path, self.attention
        return made.train(self.training)

    @property
    def slow(self) -> str:
        """The hash of all slow weights, which binds a saved state."""
        return values.fingerprint(dict(self.named_parameters()))

    def save_state(self, state: State, path: str | Path) -> None:
        """One file that only these weights open. Raises `NonFinite` (65)."""
        tokens = int(state.position.max())
        state_file.save(values.detach(state), path, kind=KIND, model=self.slow, tokens=tokens)

    def load_state(self, path: str | Path, *, force: bool = False) -> State:
        """What `save_state` wrote, bit for bit; with `force` that of other weights too. Raises `Damaged` (76)."""
        return state_file.load(path, kind=KIND, model=self.slow, force=force)


class HopeAttention(Hope):
    """A decoder whose MLPs are levels that learn while it reads; all else is the decoder."""

    @classmethod
    def stack(
        cls,
        decoder: Decoder,
        chunks: Sequence[int] = (128, 512, 2048),
        place: Place = "depth",
        map: Sequence[int] | None = None,
        cms: cms_shape.Options | None = None,
        grow: Grow = "zero",
    ) -> "HopeAttention":
        """A decoder's weights, shared, as starts; `place`, `map` and `grow` as in `methods.cms.stack`.

        With steps of 0 ("eta" in the options), "depth" and "grow" of zeros give the decoder's logits bit for bit;
        "chain" and copies are no longer the donor. Raises `Usage` (2) for a chain in which added levels would not leave
        what the donor's makes.
        """
        own = cms or cms_shape.Options(target="start")
        if place == "grow":
            check_grown(own, grow)
        placed = stack(decoder.config.num_hidden_layers, chunks, place, map, grow)
        shape = HopeConfig(decoder.config, tuple(one.chunks for one in placed), own)
        with torch.device("meta"):
            made = cls(shape, seed=None)
        held = dict(decoder.named_parameters())
        tensors = {name: held[name] for name in made.state_dict() if name in held}
        for n, one in enumerate(placed):
            tensors |= donated(shape, n, one, decoder)
        made.load_state_dict(tensors, assign=True)
        made.folder, made.name_or_path, made.attention = decoder.folder, decoder.name_or_path, decoder.attention
        return made.train(decoder.training)
