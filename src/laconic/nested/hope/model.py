"""Hope and Hope-Attention: language models whose layers learn while they read, built from the decoder's parts.

Nested Learning arXiv:2512.24695, Eqs. 94 to 97 and section 7.3. Both are called like a decoder. What they learn is in
their state, an immutable `FastWeightState`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.config.nested import CMSOptions, DonorLayout, OuterGradient
from laconic.errors import InputError, UsageError
from laconic.generation.config import check_type
from laconic.models.block import Block
from laconic.models.cache import KVCache
from laconic.models.checkpoints import weights
from laconic.models.decoder import Decoder, DecoderOutput, check_forward_inputs
from laconic.models.init import init_parameters
from laconic.nested import state_file
from laconic.nested.cms import layer as cms_layer
from laconic.nested.cms.init import init_weights
from laconic.nested.cms.layer import CMS
from laconic.nested.cms.level import GradientMode
from laconic.nested.hope import init as hope_init
from laconic.nested.hope import layer as hope_layer
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.forward import ForwardOptions, collect_activations, forward_pass
from laconic.nested.hope.layer import SelfTitans
from laconic.nested.hope.task_updates import complement_non_targets, empty_open_chunk, flush_open_chunk, read_and_learn
from laconic.nested.nan_check import check_state_finite
from laconic.nested.recurrence.chunked_scan import check_gradient_mode
from laconic.nested.state import FastWeightState, LayerState, check_reader, detach, fingerprint_tensors
from laconic.nested.state_check import check_fits_model
from laconic.nested.titans import layer as titans_layer
from laconic.nested.titans.layer import Titans
from laconic.storage.export_record import check_weights_while_reading


class HopeOutput(DecoderOutput):
    """Result of a forward pass of Hope: a `DecoderOutput` whose `cache` is the new state of the fast weights."""

    cache: FastWeightState  # pyright: ignore[reportIncompatibleVariableOverride]


class Hope(Decoder):
    """A language model with a memory (self-modifying or Titans) and a continuum memory system in each layer.

    It has no attention and reads texts of any length. With the objective "task" the levels learn only where
    `input_ids` are given, as `read_tokens` does, since a vector has no target; everything else learns from vectors.
    What it needs under `DistributedDataParallel` is in docs/distributed.md.

    Args:
        config: Sizes and options.
        seed: Seed of the initial weights; None leaves them uninitialized.

    Examples:
        >>> import torch, laconic
        >>> model = laconic.Hope(laconic.HopeConfig.attention_free(257, 32, 2, chunk_sizes=(4, 8)))
        >>> output = model.read_tokens(torch.tensor([[1, 2, 3]]))
        >>> output.hidden_states.shape, output.cache.position.tolist()
        (torch.Size([1, 3, 32]), [3])
    """

    calls_blocks = False  # fast weights begin at the weights of all blocks, and layers call the parts of a block

    def __init__(self, config: HopeConfig, seed: int | None = 0) -> None:
        check_type("config", config, HopeConfig, "a laconic.HopeConfig; from_pretrained loads a checkpoint")
        super().__init__(config.decoder, seed=None)
        self.hope_config = config
        self.has_task_objective = config.cms.inner_objective == "task" and config.cms.initial_inner_lr > 0
        for n, block in enumerate(self.blocks):
            hope_init.replace_sublayers(block, config, n, seed or 0)
        if seed is None:
            return
        nested = (".mlp.", ".memory.")
        plain = {name: p for name, p in self.named_parameters() if not any(x in name for x in nested)}
        init_parameters(plain, config.decoder.initializer_range, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for n, block in enumerate(self.blocks):
                initial = init_weights(config.cms_shape(n), generator, config.decoder.initializer_range)
                for name, w in initial.items():
                    block.get_submodule("mlp").get_parameter(name).copy_(w)

    @property
    def blocks(self) -> list[Block]:
        return [block for block in self.layers if isinstance(block, Block)]

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        folder_or_hub_name: str | Path,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> "Hope":
        """Load a checkpoint that `save_pretrained` wrote; see `Decoder.from_pretrained`."""
        folder = weights.find_checkpoint(folder_or_hub_name)
        config = HopeConfig.from_folder(folder)
        dtype = weights.resolve_dtype(dtype, folder)
        if (config.memory is None) != issubclass(cls, HopeAttention):
            name = "HopeAttention" if config.memory is None else "Hope"
            raise InputError(f"{folder_or_hub_name} is a {name} checkpoint; load it with {name}.from_pretrained")
        with torch.device("meta"):
            model = cls(config, seed=None)
        with check_weights_while_reading(folder):
            weights.load_weights(model, folder, config.decoder, dtype, device)
        model.config = replace(config.decoder, dtype=model.dtype)
        model.source_folder = folder
        model.name_or_path = str(folder_or_hub_name)
        return model.eval()

    @property
    def extra_config_fields(self) -> dict[str, Any]:
        return self.hope_config.to_config_json()

    def initial_state(self, batch_size: int) -> FastWeightState:
        """Return the state of a model that has read nothing."""
        layers: list[LayerState] = []
        for block in self.blocks:
            levels = cms_layer.initial_state(cast(CMS, block.get_submodule("mlp")).params, batch_size)
            memory = dict(block.named_children()).get("memory")
            if isinstance(memory, SelfTitans):
                layer = hope_layer.initial_state(memory.params, batch_size)
            elif isinstance(memory, Titans):
                layer = titans_layer.initial_state(memory.params, batch_size)
            else:
                layer = LayerState(cache=self.empty_cache(batch_size))
            layers.append(replace(layer, cms=levels.cms, readers=layer.readers + levels.readers))
        no_ids = torch.zeros(batch_size, 0, dtype=torch.long, device=self.device)
        open_chunk = empty_open_chunk(tuple(layers), no_ids) if self.has_task_objective else None
        return FastWeightState(tuple(layers), torch.zeros(batch_size, dtype=torch.long), open_chunk)

    def empty_cache(self, batch_size: int) -> KVCache:
        """Return a cache of one layer with `batch_size` rows and no slots."""
        cache = KVCache.empty(self.config, batch_size, self.dtype, self.device)
        return replace(cache, keys=cache.keys[:1], values=cache.values[:1])

    def read_tokens(
        self,
        input_ids: Int[Tensor, "B T"],
        state: FastWeightState | None = None,
        *,
        attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | None = None,
        target_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | None = None,
        update_weights: bool = True,
        outer_gradient: OuterGradient = "full",
        truncate_after: int | None = None,
    ) -> HopeOutput:
        """Read token ids, each the target of the one before it; see `forward` for the arguments."""
        output = self(
            self.embed(input_ids),
            state,
            input_ids=input_ids,
            attention_mask=attention_mask,
            target_mask=target_mask,
            update_weights=update_weights,
            outer_gradient=outer_gradient,
            truncate_after=truncate_after,
        )
        return cast(HopeOutput, output)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs_embeds: Float[Tensor, "B T D"],
        state: FastWeightState | None = None,
        *,
        attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | None = None,
        position_ids: Int[Tensor, "B T"] | None = None,
        attention_bias: Float[Tensor, "#B #T #P"] | None = None,
        capture: tuple[str, ...] = (),
        input_ids: Int[Tensor, "B T"] | None = None,
        target_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | None = None,
        update_weights: bool = True,
        outer_gradient: OuterGradient = "full",
        truncate_after: int | None = None,
    ) -> HopeOutput:
        """Read vectors on a state and learn from them.

        Args:
            inputs_embeds: Input vectors.
            state: State before them, by default that of a model that has read nothing.
            attention_mask: True or 1 for real tokens; the others give zeros and change nothing.
            position_ids: Positions for attention.
            attention_bias: Added to attention scores.
            capture: Activations to return: "embed", "hidden.N" or "final_norm".
            input_ids: Ids of the vectors, the targets of levels with the objective "task".
            target_mask: False or 0 for ids that are read but are not targets.
            update_weights: If False, memories and levels stay; convolutions, cache and position move on.
            outer_gradient: Part of the outer gradient that flows through writes and updates; values do not change.
            truncate_after: Chunks after which states are detached, for "truncated".

        Returns:
            Hidden states after the final norm, the new state (as `cache`), and activations.

        Raises:
            ValueError: For inputs that do not fit the model, as in `Decoder.forward`.
            UsageError: For the state of another model, and for arguments that levels learning from ids do not support.
        """
        check_forward_inputs(
            self.config, self.attn_implementation, inputs_embeds, attention_mask, position_ids, attention_bias
        )
        check_gradient_mode("hope", outer_gradient, truncate_after)
        gradient_mode = GradientMode(outer_gradient, truncate_after)
        attention_mask = None if attention_mask is None else attention_mask.bool()
        state = self.initial_state(len(inputs_embeds)) if state is None else state
        self._check_state(state, len(inputs_embeds))
        if target_mask is not None and (input_ids is None or not self.has_task_objective):
            raise UsageError("hope: target_mask needs input_ids and levels with inner_objective 'task'")
        ids = None if input_ids is None else complement_non_targets(input_ids.long(), target_mask)
        if self.has_task_objective and update_weights and ids is not None:
            if position_ids is not None or attention_bias is not None or capture:
                raise UsageError(
                    "hope: levels that learn from input_ids do not support position_ids, attention_bias or capture; "
                    "set update_weights=False"
                )
            hidden, state = read_and_learn(self, state, ids, attention_mask, gradient_mode)
            return HopeOutput(hidden, cast(Any, state), {})
        if self.has_task_objective:
            state = flush_open_chunk(self, state, ids, attention_mask, gradient_mode)
        options = ForwardOptions(attention_mask, update_weights, gradient_mode)
        hidden, outputs = forward_pass(self, inputs_embeds, state.layers, options, position_ids, attention_bias)
        position = state.position + (inputs_embeds.shape[1] if attention_mask is None else attention_mask.sum(1).cpu())
        like = ids if ids is not None else inputs_embeds[..., 0].long()
        open_chunk = empty_open_chunk(outputs.layers, like) if self.has_task_objective else None
        new_state = replace(state, layers=tuple(outputs.layers), position=position, open_chunk=open_chunk)
        activations = collect_activations(capture, inputs_embeds, outputs, hidden)
        return HopeOutput(hidden, cast(Any, new_state), activations)

    def _check_state(self, state: FastWeightState, B: int) -> None:
        """Raise `UsageError` for a state of another model or of another batch size."""
        if len(state.layers) != len(self.blocks):
            raise UsageError(f"hope: the state has {len(state.layers)} layers, the model {len(self.blocks)}")
        for block, layer in zip(self.blocks, state.layers, strict=True):
            check_reader(cast(CMS, block.get_submodule("mlp")).shape.label, layer)
        rows = len(state.position)
        if rows != B:
            raise UsageError(f"hope: the batch has {B} rows, the state {rows}; see laconic.nested.state.select_rows")

    def check_finite_state(self, state: FastWeightState, row_names: Sequence[str] = ()) -> None:
        """Raise `NonFiniteError` naming the layer, the level or memory and the row, if a state is not finite."""
        check_state_finite(state, row_names)

    def add_levels(self, chunk_sizes: Sequence[int]) -> "Hope":
        """Return this model with slower levels, which add nothing at first, in every layer; its tensors are shared.

        Raises:
            UsageError: If `chunk_sizes`, those of all levels, does not begin with those of every layer of the model.
        """
        hope_init.check_growth(self.hope_config.cms)
        for sizes in self.hope_config.chunk_sizes:
            if tuple(chunk_sizes[: len(sizes)]) != sizes:
                raise UsageError(f"hope: chunk_sizes {list(chunk_sizes)} must begin with the model's, {list(sizes)}")
        config = replace(self.hope_config, chunk_sizes=(tuple(chunk_sizes),) * len(self.blocks))
        tensors: dict[str, Tensor] = dict(self.named_parameters())
        for n, sizes in enumerate(self.hope_config.chunk_sizes):
            tensors |= hope_init.init_added_levels(config, n, self, len(sizes))
        return build_from_tensors(type(self), config, tensors, self)

    @property
    def weights_fingerprint(self) -> str:
        """Hash of all trained weights, which a saved state is bound to."""
        return fingerprint_tensors(dict(self.named_parameters()))

    def save_state(self, state: FastWeightState, path: str | Path) -> None:
        """Save a `state` to a file at `path` that only these weights load; it must be finite (`NonFiniteError`)."""
        state_file.save_state(detach(state), path, model_fingerprint=self.weights_fingerprint)

    def load_state(self, path: str | Path) -> FastWeightState:
        """Load a state that `save_state` wrote, bit for bit.

        Raises:
            CorruptArtifactError: If the file is damaged, of another kind, or of other weights.
        """
        state = state_file.load_state(path, model_fingerprint=self.weights_fingerprint)
        check_fits_model(state, self.initial_state(1), self.config.vocab_size, path)
        return state


class HopeAttention(Hope):
    """A decoder whose MLPs are levels that learn while it reads; everything else is the decoder.

    `from_decoder` builds one on a pretrained decoder.

    Examples:
        >>> import torch, laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> model = laconic.HopeAttention.from_decoder(decoder, chunk_sizes=(4, 8))
        >>> model.read_tokens(torch.tensor([[1, 2, 3]])).cache.position.tolist()
        [3]
    """

    @classmethod
    def from_decoder(
        cls,
        decoder: Decoder,
        chunk_sizes: Sequence[int] = (128, 512, 2048),
        donor_layout: DonorLayout = "depth",
        options: CMSOptions | None = None,
    ) -> "HopeAttention":
        """Build a model on a pretrained decoder, whose tensors it shares.

        With a learning rate of 0, the layouts "depth" and "grow" give the decoder's logits bit for bit; "chain" does
        not.

        Args:
            decoder: A pretrained decoder.
            chunk_sizes: Chunk sizes of the levels, fastest first.
            donor_layout: Which MLP each level starts as, see `place_levels`.
            options: Options of the levels.

        Raises:
            UsageError: For an unknown layout, and if added levels would change the output of the donor's MLP.
        """
        options = options or CMSOptions(associative_target="start")
        if donor_layout == "grow":
            hope_init.check_growth(options)
        placements = hope_init.place_levels(decoder.config.num_hidden_layers, chunk_sizes, donor_layout)
        config = HopeConfig(decoder.config, tuple(placement.chunk_sizes for placement in placements), options)
        tensors: dict[str, Tensor] = dict(decoder.named_parameters())
        for n, placement in enumerate(placements):
            tensors |= hope_init.copy_donor_weights(config, n, placement, decoder)
        return cast(HopeAttention, build_from_tensors(cls, config, tensors, decoder))


def build_from_tensors(cls: type[Hope], config: HopeConfig, tensors: dict[str, Tensor], source: Decoder) -> Hope:
    """Build a model that shares the given tensors by name; names that it does not have are ignored."""
    with torch.device("meta"):
        model = cls(config, seed=None)
    model.load_state_dict({name: tensors[name] for name in model.state_dict()}, assign=True)
    model.source_folder, model.name_or_path = source.source_folder, source.name_or_path
    model.attn_implementation = source.attn_implementation
    return model.train(source.training)
