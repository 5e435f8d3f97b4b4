"""Decoder for checkpoints of the Llama family: embeddings in, hidden states and a KV cache out.

Llama (arXiv:2302.13971, 2407.21783), Mistral (2310.06825), Qwen (2407.10671, 2505.09388), GPT-2, OPT (2205.01068).

Shapes: B rows, T new positions, S cached positions, P = S + T, D width, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from laconic.models import attention, rope
from laconic.models.activations import (
    MODEL_ACTIVATION_NAMES,
    capture_model,
    layer_activations,
    unknown_activation_message,
)
from laconic.models.attention_backends import ATTENTION_BACKENDS
from laconic.models.block import EAGER_ACTIVATIONS, ForwardContext
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder_weights import DecoderWeights
from laconic.models.kv_prefix import KVPrefix
from laconic.models.output import Activations, DecoderOutput
from laconic.models.rope_scaling import ROPE_SCALINGS
from laconic.models.unpadding import find_real_tokens

BlockOutput = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]
checkpointed: Callable[..., BlockOutput] = partial(checkpoint, use_reentrant=False)  # pyright: ignore[reportUnknownVariableType]


def position_embedding(table: Float[Tensor, "N D"], p: Int[Tensor, "B T"], offset: int) -> Float[Tensor, "B T D"]:
    """Eq. C8: row p + offset of the table, and the zero vector where p = -1."""
    return F.embedding(p.clamp(min=0) + offset, table).masked_fill((p < 0)[..., None], 0.0)


class CaptureRequest(NamedTuple):
    """Parsed `capture`: activations per layer, of the model, and layers whose input `hidden.l` is captured."""

    layers: tuple[frozenset[str], ...]
    model: frozenset[str]
    hidden: frozenset[int]


class Decoder(DecoderWeights):
    """Decoder-only transformer that reads embeddings: of tokens, of latent thoughts, or of summary vectors.

    Parameters have the names of the family's Hugging Face checkpoints. Parameters are initialised with
    normal(0, initializer_range); `from_pretrained` loads a checkpoint.

    Args:
        config: Architecture.
        seed: Seed of the initialisation; None leaves the parameters uninitialised.

    Attributes:
        attn_implementation: "sdpa", "eager" (the specification) or "flex".
        activation_checkpointing: Recompute every k-th block in the backward pass; 0 turns it off.

    Example:
        >>> import torch, laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> output = decoder(decoder.embed(torch.tensor([[1, 17, 42]])))
        >>> decoder.logits(output.hidden_states[:, -1]).shape, output.cache.S
        (torch.Size([1, 97]), 3)
    """

    calls_blocks = True  # FSDP2 gathers the weights of a block when it is called
    is_gradient_checkpointing = False  # read by peft, which otherwise adds a hook to the embedding that we do not need
    __call__: Callable[..., DecoderOutput]

    def __init__(self, config: DecoderConfig, seed: int | None = 0) -> None:
        super().__init__(config, seed)
        self.attn_implementation, self.activation_checkpointing = "sdpa", 0
        self.layer_activation_names = frozenset(row.name for row in layer_activations(config))
        self.no_capture = CaptureRequest((frozenset(),) * config.num_hidden_layers, frozenset(), frozenset())

    @property
    def token_embedding(self) -> Any:
        """The nn.Embedding [V, D] (also the head if tied), or the module that an adapter replaced it with."""
        return self.get_input_embeddings()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding; the name is part of peft's interface."""
        return self.get_submodule(self.weight_names.token_embedding)

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, in order."""
        module = self.get_submodule(self.weight_names.layers)
        assert isinstance(module, nn.ModuleList)
        return module

    def attention_scale(self, layer: int) -> float:
        """Return the factor on a layer's attention scores (Eq. C11)."""
        return self.config.attention_scales[layer]

    def embed(self, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Return token embeddings. Learned positions are added in the forward pass.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        if not torch.compiler.is_compiling():
            invalid = (input_ids < 0) | (input_ids >= self.config.vocab_size)
            if invalid.any():
                b, t = map(int, invalid.nonzero()[0])
                V = self.config.vocab_size
                raise ValueError(f"input_ids[{b}, {t}] = {int(input_ids[b, t])} is outside the vocabulary of {V}")
        return self.token_embedding(input_ids)

    def logits(self, hidden_states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """Eq. C20: h W_head^T in h's dtype. Select the positions you need first: logits are large."""
        if self.config.tie_word_embeddings:
            return F.linear(hidden_states, self.token_embedding.weight)
        return self.get_submodule(self.weight_names.head)(hidden_states)

    def final_norm(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Apply the final norm."""
        return self.get_submodule(self.weight_names.final_norm)(x)

    def add_positions(
        self, inputs_embeds: Float[Tensor, "B T D"], position_ids: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T D"]:
        """Return the input of layer 0: the embeddings, plus learned positions in GPT-2 and OPT."""
        if self.weight_names.position_embedding is None:
            return inputs_embeds
        table = self.get_submodule(self.weight_names.position_embedding).weight
        assert isinstance(table, Tensor)
        x = inputs_embeds + position_embedding(table, position_ids, self.config.position_offset)
        return F.dropout(x, self.config.dropout.embedding, self.training)

    def build_context(
        self,
        position_ids: Int[Tensor, "#B P"],
        valid: Bool[Tensor, "B P"],
        S: int,
        attention_bias: Tensor | None,
        dtype: torch.dtype,
        *,
        all_valid: bool,
        needs_scores: bool,
        prefix: KVPrefix | None = None,
    ) -> ForwardContext:
        """Compute the RoPE tables of the new positions and each layer's mask, once per pass.

        `position_ids` has one row if all rows have the same positions, so that their tables are computed once.
        """
        cos = sin = None
        config = self.config
        if config.rope is not None:
            longest = 1 + position_ids.masked_fill(~valid[: len(position_ids)], -1).amax(1)
            omega, a = ROPE_SCALINGS[config.rope.kind](config.rope, config.head_dim, longest)
            cos, sin = rope.cos_sin_tables(position_ids[:, S:], omega, a, dtype)
        sdpa_only = self.attn_implementation == "sdpa" and not needs_scores and prefix is None
        masks = {
            window: attention.build_attention_mask(
                valid, S, all_valid=all_valid, window=window, bias=attention_bias, sdpa_only=sdpa_only, dtype=dtype
            )
            for window in dict.fromkeys(config.sliding_windows)
        }
        layer_masks = tuple(masks[window] for window in config.sliding_windows)
        return ForwardContext(cos, sin, layer_masks, self.attn_implementation, prefix)

    def forward(
        self,
        inputs_embeds: Float[Tensor, "B T D"],
        cache: KVCache | None = None,
        *,
        attention_mask: Bool[Tensor, "B T"] | None = None,
        position_ids: Int[Tensor, "B T"] | None = None,
        attention_bias: Float[Tensor, "#B #T #P"] | None = None,
        capture: tuple[str, ...] = (),
        last_only: bool = False,
    ) -> DecoderOutput:
        """Read T embeddings per row on top of a cache.

        Args:
            inputs_embeds: Embeddings [B, T, D], for example from `embed`.
            cache: What was read before; None starts from nothing. It is not modified.
            attention_mask: True at real tokens among the new positions; None: all are real.
            position_ids: By default they continue after the largest cached position (Eq. C22). -1 adds no position,
                in families with learned positions.
            attention_bias: Added to the scaled scores of every head and layer; not stored in the cache.
            capture: Activations to return: a name of `laconic.models.activations` ("k": of every layer; "k.3": of
                layer 3), "hidden" (the inputs of every layer and the last output), "logits", … The same names are keys
                of `DecoderOutput.activations`: "k.3" is a tensor, "k" the tuple of all layers.
            last_only: Return the hidden states of the last position only, which saves most of the last block.

        Raises:
            ValueError: Shapes, dtypes, positions or cache do not fit.
        """
        check_forward_inputs(
            self.config, self.attn_implementation, inputs_embeds, cache, attention_mask, position_ids, attention_bias
        )
        (B, T), device = inputs_embeds.shape[:2], inputs_embeds.device
        all_valid = attention_mask is None and cache is None
        mask = torch.ones(B, T, dtype=torch.bool, device=device) if attention_mask is None else attention_mask
        past = KVCache.empty(self.config, B, inputs_embeds.dtype, device) if cache is None else cache
        has_default_positions = position_ids is None
        shared_positions = all_valid and has_default_positions
        if position_ids is None:
            position_ids = past.continue_positions(mask)
        valid, positions = torch.cat([past.valid, mask], 1), torch.cat([past.positions, position_ids], 1)
        if not torch.compiler.is_compiling():
            check_dtype(self.layers, inputs_embeds)
            if not has_default_positions or self.config.position_encoding == "table":  # defaults always fit RoPE
                check_positions(self.config, position_ids)
            all_valid = all_valid or bool(valid.all())
        request = self.parse_capture(capture) if capture else self.no_capture
        context = self.build_context(
            positions[:1] if shared_positions else positions,
            valid,
            past.S,
            attention_bias,
            inputs_embeds.dtype,
            all_valid=all_valid,
            needs_scores=any(not names.isdisjoint(EAGER_ACTIVATIONS) for names in request.layers),
            prefix=past.prefix,
        )
        if last_only:
            context = context._replace(last_only=True)
        elif self.training and not all_valid:
            context = context._replace(real_tokens=find_real_tokens(mask, frozenset[str]().union(*request.layers)))
        x = self.add_positions(inputs_embeds, position_ids)
        activations = {"embed": x} if "embed" in request.model else {}
        x, keys, values = self.run_layers(x, past, context, request, activations)
        hidden_states = self.final_norm(x)
        if len(self.layers) in request.hidden:
            activations[f"hidden.{len(self.layers)}"] = hidden_states
        activations |= capture_model(self, request.model, hidden_states, mask) if request.model else {}
        return DecoderOutput(hidden_states, past.extend(keys, values, positions, valid), Activations(activations))

    def parse_capture(self, names: tuple[str, ...]) -> CaptureRequest:
        """Parse names: `k` of every layer, `k.3` of layer 3, `hidden` for hidden.0 … hidden.L.

        Raises:
            ValueError: A name or layer does not exist.
        """
        L, layer_names = self.config.num_hidden_layers, self.layer_activation_names
        layers: list[set[str]] = [set() for _ in range(L)]
        model: set[str] = set()
        hidden: set[int] = set()
        for name in names:
            stem, _, index = name.partition(".")
            in_range = not index or (index.isdecimal() and int(index) < L + (stem == "hidden"))
            if stem in layer_names and in_range:
                for layer in layers if not index else [layers[int(index)]]:
                    layer.add(stem)
            elif stem == "hidden" and in_range:
                hidden |= set(range(L + 1)) if not index else {int(index)}
            elif name in MODEL_ACTIVATION_NAMES:
                model.add(name)
            else:
                known = sorted(layer_names | MODEL_ACTIVATION_NAMES | {"hidden"})
                raise ValueError(unknown_activation_message(name, known, L))
        return CaptureRequest(tuple(map(frozenset, layers)), frozenset(model), frozenset(hidden))

    def run_layers(
        self,
        x: Float[Tensor, "B T D"],
        past: KVCache,
        context: ForwardContext,
        request: CaptureRequest,
        activations: dict[str, Tensor],
    ) -> tuple[Float[Tensor, "B #T D"], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run all blocks; return their output, and keys and values per layer. Captured `activations` are added."""
        pairs: list[tuple[Tensor, Tensor]] = []
        every = self.activation_checkpointing if self.training else 0
        real_tokens = context.real_tokens
        x = real_tokens.gather(x) if real_tokens else x
        for i, block in enumerate(self.layers):
            if i in request.hidden:
                activations[f"hidden.{i}"] = real_tokens.scatter(x) if real_tokens else x
            past_kv = (past.keys[i], past.values[i]) if past.S else None
            inputs = (x, past_kv, context, request.layers[i])
            run = checkpointed if every and i % every == 0 else None
            x, k, v, captured = run(block, *inputs) if run else cast(BlockOutput, block(*inputs))
            pairs.append((k, v))
            activations |= captured
        x = real_tokens.scatter(x) if real_tokens else x
        return x, tuple(k for k, _ in pairs), tuple(v for _, v in pairs)


def check_forward_inputs(
    config: DecoderConfig,
    backend: str,
    inputs_embeds: Tensor,
    cache: KVCache | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    attention_bias: Tensor | None,
) -> None:
    """Raise ValueError for arguments whose dtypes or shapes do not fit the decoder."""
    check_inputs_embeds(config, inputs_embeds)
    B, T = inputs_embeds.shape[:2]
    if 0 in (B, T):
        raise ValueError(f"inputs_embeds are {list(inputs_embeds.shape)}; B and T must be at least 1")
    for name, x in (("attention_mask", attention_mask), ("position_ids", position_ids)):
        if x is not None and x.shape != (B, T):
            raise ValueError(f"{name}: shape {list(x.shape)} does not match inputs_embeds {[B, T]}")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(f"attention_mask is {dtype_name(attention_mask)}; did you mean attention_mask.bool()?")
    if position_ids is not None and (position_ids.is_floating_point() or position_ids.dtype == torch.bool):
        raise ValueError(f"position_ids are {dtype_name(position_ids)}; pass integers")
    if cache is not None:
        cache.check_fits(config, B)
    full_shape = (B, T, T + (cache.S if cache is not None else 0))
    if attention_bias is not None:
        shape = attention_bias.shape
        if len(shape) != 3 or any(b not in (1, n) for b, n in zip(shape, full_shape, strict=True)):
            raise ValueError(f"attention_bias {list(shape)} does not broadcast to {list(full_shape)}")
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(f"attn_implementation={backend!r} is unknown; use one of {', '.join(ATTENTION_BACKENDS)}")


def check_inputs_embeds(config: DecoderConfig, inputs_embeds: Tensor) -> None:
    """Raise ValueError unless these are floats [B, T, D]."""
    if not inputs_embeds.is_floating_point():
        raise ValueError(f"inputs_embeds are {dtype_name(inputs_embeds)}; did you mean decoder.embed(input_ids)?")
    if inputs_embeds.ndim != 3:
        raise ValueError(f"inputs_embeds are {list(inputs_embeds.shape)}; expected [B, T, D]")
    if inputs_embeds.shape[-1] != config.hidden_size:
        raise ValueError(f"inputs_embeds have width {inputs_embeds.shape[-1]}, the decoder {config.hidden_size}")


def check_dtype(layers: nn.Module, inputs_embeds: Tensor) -> None:
    """Raise ValueError for embeddings wider than every weight, or of the other half-precision dtype."""
    dtypes = (p.dtype for p in layers.parameters() if p.is_floating_point())
    first = next(dtypes, inputs_embeds.dtype)
    if inputs_embeds.dtype == first:
        return
    if any(torch.promote_types(inputs_embeds.dtype, dtype) == dtype for dtype in (first, *dtypes)):
        return
    device = inputs_embeds.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        raise ValueError(f"inputs_embeds are {dtype_name(inputs_embeds)}, weights {dtype_name(first)}; convert one")


def dtype_name(x: Tensor | torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(x.dtype if isinstance(x, Tensor) else x).removeprefix("torch.")


def check_positions(config: DecoderConfig, position_ids: Tensor) -> None:
    """Raise ValueError for a position outside a learned table, or a missing one (-1) with RoPE."""
    low, high = (int(end) for end in position_ids.aminmax())
    if low < -1:
        raise ValueError(f"position {low}: positions must be ≥ -1 (-1 = no position)")
    if low < 0 and config.position_encoding == "rope":
        raise ValueError(f"position -1 (none) needs learned positions; {config.family} uses RoPE")
    if config.position_encoding == "table" and high >= config.max_position_embeddings:
        raise ValueError(f"position {high} exceeds the {config.max_position_embeddings} positions of {config.family}")
