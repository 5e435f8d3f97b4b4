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

from laconic.config.nested import DonorLayout, NewLevelInit, OuterGradient
from laconic.errors import InputError, UsageError
from laconic.models import input_checks, weights
from laconic.models.block import Block
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput
from laconic.nested import state as values
from laconic.nested import state_file
from laconic.nested.cms import config as cms_config
from laconic.nested.cms import forward as cms_forward
from laconic.nested.cms import layer as cms_layer
from laconic.nested.cms.equations import place_levels
from laconic.nested.cms.layer import CMS
from laconic.nested.cms.level import GradientMode
from laconic.nested.hope import layer as hope_layer
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.forward import collect_activations, forward_pass
from laconic.nested.hope.init import check_growth, copy_donor_weights, init_added_levels, replace_sublayers
from laconic.nested.hope.layer import SelfTitans
from laconic.nested.hope.task_updates import empty_open_chunk, flush_open_chunk, mask_untaught, read_and_learn
from laconic.nested.nan_check import check_finite
from laconic.nested.state import FastWeightState, LayerState
from laconic.nested.titans import layer as titans_layer
from laconic.nested.titans.layer import Titans

STATE_KIND = "hope"


class Hope(Decoder):
    """A memory, self-modifying or of Titans, and a continuum of levels in each layer; no attention, any length.

    With the task's objective the levels learn where `ids` are given beside the vectors, as `advance` does, since a
    vector has no target; all else learns from vectors. A random start is drawn from `seed`; None leaves it undrawn.
    """

    def __init__(self, config: HopeConfig, seed: int | None = 0) -> None:
        super().__init__(config.decoder, seed=None)
        self.hope_config = config
        for n, part in enumerate(self.blocks):
            replace_sublayers(part, config, n, seed or 0)
        if seed is None:
            return
        inner = (".mlp.", ".memory.")
        self.init_parameters([name for name, _ in self.named_parameters() if not any(x in name for x in inner)], seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for n, part in enumerate(self.blocks):
                drawn = cms_layer.init_weights(config.cms_shape(n), generator, config.decoder.initializer_range)
                for name, w in drawn.items():
                    part.get_submodule("mlp").get_parameter(name).copy_(w)

    @property
    def blocks(self) -> list[Block]:
        """The layers, in order."""
        return [part for part in self.layers if isinstance(part, Block)]

    @property
    def has_task_objective(self) -> bool:
        """Whether the levels learn of the next token's loss."""
        return self.hope_config.cms.inner_objective == "task" and not self.hope_config.cms_shape(0).is_frozen

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, folder_or_hub_name: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> "Hope":
        """What `save_pretrained` wrote. Raises as `Decoder.from_pretrained` does."""
        folder = weights.find_checkpoint(folder_or_hub_name)
        shape = HopeConfig.from_folder(folder)
        if (shape.memory is None) != issubclass(cls, HopeAttention):
            there = "HopeAttention" if shape.memory is None else "Hope"
            raise InputError(f"{folder_or_hub_name} holds a {there}; load it as that")
        with torch.device("meta"):
            model = cls(shape, seed=None)
        report = weights.load_weights(model, folder, shape.decoder, dtype, device)
        model.config = replace(shape.decoder, dtype=model.token_embedding.weight.dtype)
        model.source_folder, model.name_or_path = folder, str(folder_or_hub_name)
        model._cached_fingerprint = (report.fingerprint, model.parameter_version())
        return model.eval()

    def save_pretrained(
        self, folder: str | Path, *, max_shard_bytes: float = 5e9, dtype: torch.dtype | None = None
    ) -> None:
        """The Hugging Face layout; starts are ordinary weights. Raises `Busy` (73) if `folder` is not empty."""
        weights.save_weights(
            self,
            Path(folder),
            self.config,
            max_shard_bytes=max_shard_bytes,
            dtype=dtype,
            source_folder=self.source_folder,
            extra_fields=self.hope_config.to_config_json(),
        )

    def initial_state(self, batch_size: int) -> FastWeightState:
        """Nothing read: every count 0, every fast weight at its start."""
        words = cast(Tensor, self.token_embedding.weight)
        layers: list[LayerState] = []
        for part in self.blocks:
            made = cms_forward.initial_state(cast(CMS, part.get_submodule("mlp")).params, batch_size)
            memory = dict(part.named_children()).get("memory")
            if isinstance(memory, SelfTitans):
                made = replace(hope_layer.initial_state(memory.params, batch_size), cms=made.cms)
            elif isinstance(memory, Titans):
                made = replace(titans_layer.initial_state(memory.params, batch_size), cms=made.cms)
            else:
                made = replace(made, cache=self.empty_cache(batch_size, words))
            layers.append(made)
        position, none = torch.zeros(batch_size, dtype=torch.long), torch.zeros(batch_size, 0, dtype=torch.long)
        opened = empty_open_chunk(tuple(layers), none.to(words.device)) if self.has_task_objective else None
        return FastWeightState(tuple(layers), position, opened)

    def empty_cache(self, batch_size: int, like: Tensor) -> KVCache:
        """A layer's cache of no slot."""
        nothing = like.detach().new_zeros(batch_size, self.config.num_key_value_heads, 0, self.config.head_dim)
        places = torch.empty(batch_size, 0, dtype=torch.long, device=like.device)
        return KVCache((nothing,), (nothing,), places, places.bool())

    def read_tokens(
        self,
        input_ids: Int[Tensor, "B T"],
        state: FastWeightState | None = None,
        *,
        attention_mask: Bool[Tensor, "B T"] | None = None,
        target_mask: Bool[Tensor, "B T"] | None = None,
        update_weights: bool = True,
        outer_gradient: OuterGradient | None = None,
        truncate_after: int | None = None,
    ) -> DecoderOutput:
        """Reads ids, each the target of the one before it; where `taught` is False it is only read."""
        x = self.embed(input_ids)
        return self(
            x,
            state,
            ids=input_ids,
            live=attention_mask,
            taught=target_mask,
            learn=update_weights,
            gradient=outer_gradient,
            horizon=truncate_after,
        )

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs_embeds: Float[Tensor, "B T D"],
        state: FastWeightState | None = None,
        *,
        attention_mask: Bool[Tensor, "B T"] | None = None,
        position_ids: Int[Tensor, "B T"] | None = None,
        attention_bias: Float[Tensor, "#B #T #P"] | None = None,
        capture: tuple[str, ...] = (),
        input_ids: Int[Tensor, "B T"] | None = None,
        target_mask: Bool[Tensor, "B T"] | None = None,
        update_weights: bool = True,
        outer_gradient: OuterGradient | None = None,
        truncate_after: int | None = None,
    ) -> DecoderOutput:
        """Reads T vectors on a state; None starts anew. `ids` are what the vectors are the words of, if they are.

        With `learn` False memories and levels stand still; convolutions, cache and position move on. `gradient` says
        what of the outer loss flows through the writes, by default "first_order" for the task and "full" otherwise.
        Of ids where `taught` is False nothing is learned as of targets; gradients of the others flow through them. Of
        the stages `want` may name embed, hidden.N and final_norm. Raises `ValueError` as a decoder does, `Usage` (2)
        for a state of another shape, and for positions, bias or stages where levels learn of ids.
        """
        input_checks.check_forward_inputs(
            self.config, self.attn_implementation, inputs_embeds, None, attention_mask, position_ids, attention_bias
        )
        state = self.initial_state(len(inputs_embeds)) if state is None else state
        self.check_state(state, len(inputs_embeds))
        way = GradientMode(outer_gradient or ("first_order" if self.has_task_objective else "full"), truncate_after)
        if target_mask is not None and (input_ids is None or not self.has_task_objective):
            raise UsageError("hope: taught says which ids levels learn of, and none here learns of ids; leave it out")
        asked = None if input_ids is None else mask_untaught(input_ids, target_mask)
        if self.has_task_objective and update_weights and asked is not None:
            if position_ids is not None or attention_bias is not None or capture:
                raise UsageError(
                    "hope: levels that learn of ids take no positions, bias or stages; read with learn=False"
                )
            hidden, state = read_and_learn(self, state, asked, attention_mask, way)
            return DecoderOutput(hidden, cast(Any, state), {})
        if self.has_task_objective:
            state = flush_open_chunk(self, state, asked, attention_mask, way)
        hidden, found = forward_pass(
            self,
            inputs_embeds,
            state.layers,
            attention_mask=attention_mask,
            position_ids=position_ids,
            attention_bias=attention_bias,
            update_weights=update_weights,
            gradient_mode=way,
        )
        added = (
            torch.full_like(state.position, inputs_embeds.shape[1])
            if attention_mask is None
            else attention_mask.sum(1).cpu()
        )
        words = input_ids if input_ids is not None else inputs_embeds[..., 0].long()
        opened = empty_open_chunk(found.layers, words) if self.has_task_objective else None
        after = FastWeightState(found.layers, state.position + added, opened)
        return DecoderOutput(hidden, cast(Any, after), collect_activations(capture, inputs_embeds, found, hidden))

    def check_finite_state(self, state: FastWeightState, row_names: Sequence[str] = ()) -> None:
        """Raise NonFiniteError naming the layer, memory and row of the first non-finite tensor."""
        check_finite(state, row_names)

    def check_state(self, state: FastWeightState, B: int) -> None:
        """Raises `Usage` (2) for a state of another model or of other rows."""
        if len(state.layers) != len(self.blocks):
            raise UsageError(
                f"hope: the state has {len(state.layers)} layers, the model {len(self.blocks)}; load its own"
            )
        if len(state.position) != B:
            raise UsageError(f"hope: {B} rows of vectors, the state has {len(state.position)}; take or join its rows")

    def add_levels(self, chunk_sizes: Sequence[int], new_level_init: NewLevelInit = "zero") -> "Hope":
        """This model with slower levels after its own, which add nothing at first or are copies; tensors are shared.

        Raises `Usage` (2) for `chunks` that do not begin with those of every layer.
        """
        check_growth(self.hope_config.cms, new_level_init)
        kept = next((kept for kept in self.hope_config.chunk_sizes if tuple(chunk_sizes[: len(kept)]) != kept), None)
        if kept is not None:
            raise UsageError(
                f"hope: levels of chunks {list(kept)} cannot grow to {list(chunk_sizes)}; keep them, and add slower"
            )
        shape = replace(self.hope_config, chunk_sizes=(tuple(chunk_sizes),) * len(self.blocks))
        with torch.device("meta"):
            made = type(self)(shape, seed=None)
        tensors: dict[str, Tensor] = dict(self.named_parameters())
        for n in range(len(self.blocks)):
            tensors |= init_added_levels(shape, n, self, len(self.hope_config.chunk_sizes[n]), new_level_init)
        made.load_state_dict({name: tensors[name] for name in made.state_dict()}, assign=True)
        made.source_folder, made.name_or_path, made.attn_implementation = (
            self.source_folder,
            self.name_or_path,
            self.attn_implementation,
        )
        return made.train(self.training)

    @property
    def weights_fingerprint(self) -> str:
        """The hash of all slow weights, which binds a saved state."""
        return values.fingerprint_tensors(dict(self.named_parameters()))

    def save_state(self, state: FastWeightState, path: str | Path) -> None:
        """One file that only these weights open. Raises `NonFinite` (65)."""
        tokens = int(state.position.max())
        state_file.save_state(
            values.detach(state),
            path,
            memory_kind=STATE_KIND,
            model_fingerprint=self.weights_fingerprint,
            num_tokens=tokens,
        )

    def load_state(self, path: str | Path, *, force: bool = False) -> FastWeightState:
        """What `save_state` wrote, bit for bit; with `force` that of other weights too. Raises `Damaged` (76)."""
        return state_file.load_state(
            path, memory_kind=STATE_KIND, model_fingerprint=self.weights_fingerprint, force=force
        )


class HopeAttention(Hope):
    """A decoder whose MLPs are levels that learn while it reads; all else is the decoder."""

    @classmethod
    def from_decoder(
        cls,
        decoder: Decoder,
        chunk_sizes: Sequence[int] = (128, 512, 2048),
        donor_layout: DonorLayout = "depth",
        donor_map: Sequence[int] | None = None,
        options: cms_config.Options | None = None,
        new_level_init: NewLevelInit = "zero",
    ) -> "HopeAttention":
        """A decoder's weights, shared, as starts; `place`, `map` and `grow` as in `methods.cms.stack`.

        With steps of 0 ("eta" in the options), "depth" and "grow" of zeros give the decoder's logits bit for bit;
        "chain" and copies are no longer the donor. Raises `Usage` (2) for a chain in which added levels would not leave
        what the donor's makes.
        """
        own = options or cms_config.Options(associative_target="start")
        if donor_layout == "grow":
            check_growth(own, new_level_init)
        placed = place_levels(decoder.config.num_hidden_layers, chunk_sizes, donor_layout, donor_map, new_level_init)
        shape = HopeConfig(decoder.config, tuple(one.chunk_sizes for one in placed), own)
        with torch.device("meta"):
            made = cls(shape, seed=None)
        held = dict(decoder.named_parameters())
        tensors = {name: held[name] for name in made.state_dict() if name in held}
        for n, one in enumerate(placed):
            tensors |= copy_donor_weights(shape, n, one, decoder)
        made.load_state_dict(tensors, assign=True)
        made.source_folder, made.name_or_path, made.attn_implementation = (
            decoder.source_folder,
            decoder.name_or_path,
            decoder.attn_implementation,
        )
        return made.train(decoder.training)
