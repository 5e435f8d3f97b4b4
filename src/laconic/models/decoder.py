"""Decoder for checkpoints of the Llama family: embeddings in, hidden states and a KV cache out.

Llama (arXiv:2302.13971, 2407.21783), Mistral (2310.06825), Qwen (2407.10671, 2505.09388), GPT-2, OPT (2205.01068).

Shapes: B rows, T new positions, S cached positions, P = S + T, D width, V vocabulary.
"""

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from laconic.models.activations import capture_model, list_activation_places
from laconic.models.block import EAGER_ACTIVATIONS, ForwardContext, build_context
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.ops.attention_backends import ATTENTION_BACKENDS
from laconic.models.ops.linear import call_linear, linear_function
from laconic.models.ops.unpadding import find_real_tokens
from laconic.models.output import Activations, DecoderOutput
from laconic.models.pretrained import PretrainedDecoder

TensorFn = Callable[[Tensor], Tensor]
BlockOutput = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]
checkpointed: Callable[..., BlockOutput] = partial(checkpoint, use_reentrant=False)  # pyright: ignore[reportUnknownVariableType]


def position_embedding(look_up: TensorFn, p: Int[Tensor, "B T"], offset: int) -> Float[Tensor, "B T D"]:
    """Eq. C8: row p + offset of the table, and the zero vector where p = -1."""
    return look_up(p.clamp(min=0) + offset).masked_fill((p < 0)[..., None], 0.0)


class Decoder(PretrainedDecoder):
    """Decoder-only transformer that reads embeddings: of tokens, of latent thoughts, or of summary vectors.

    Parameters have the names of the family's Hugging Face checkpoints, and are initialised with
    normal(0, initializer_range); `from_pretrained` loads a checkpoint. `self_attn` and `mlp` only hold weights: their
    forward hooks never run. The argument `capture` of a call returns activations.

    Args:
        config: Architecture.
        seed: Seed of the initialisation; None leaves the parameters uninitialised.

    Attributes:
        attn_implementation: "sdpa", "eager" (the specification) or "flex".
        activation_checkpointing: Recompute every k-th block in the backward pass; 0 turns it off.

    Examples:
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
        self.activation_places = list_activation_places(config)

    @property
    def token_embedding(self) -> Any:
        """The nn.Embedding [V, D] (also the head if tied), or the module that an adapter replaced it with."""
        return self.get_input_embeddings()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding; the name is part of peft's interface."""
        return self.get_submodule(self.weight_names.token_embedding)

    @property
    def device(self) -> torch.device:
        """Device of the token embedding, where inputs must be."""
        return self.token_embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the token embedding, and so of the vectors that `embed` returns."""
        return self.token_embedding.weight.dtype

    @property
    def layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self.get_submodule(self.weight_names.layers))

    def attention_scale(self, layer: int) -> float:
        """Return the factor on a layer's attention scores (Eq. C11)."""
        return self.config.attention_scales[layer]

    def embed(self, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Return token embeddings. Learned positions are added in the forward pass.

        Raises:
            ValueError: An id is outside the vocabulary, or the ids are no tensor of int64 or int32.
        """
        if not torch.compiler.is_compiling():
            dtype = getattr(input_ids, "dtype", type(input_ids).__name__)
            if dtype not in (torch.int64, torch.int32):
                raise ValueError(f"input_ids are of type {dtype}; pass int64 or int32: torch.tensor([[1, 2]])")
            V = self.config.vocab_size
            invalid = (input_ids < 0) | (input_ids >= V)
            if invalid.any():
                b, t = map(int, invalid.nonzero()[0])
                raise ValueError(f"input_ids[{b}, {t}] = {int(input_ids[b, t])} is outside the vocabulary of {V}")
        return self.token_embedding(input_ids)

    def logits(self, hidden_states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """Eq. C20: the logits h W_head^T, in the dtype of h. Select positions before the call: logits are large."""
        if self.config.tie_word_embeddings:
            return linear_function(hidden_states, self.token_embedding.weight)
        return call_linear(self.get_submodule(self.weight_names.head), hidden_states)

    def final_norm(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.get_submodule(self.weight_names.final_norm)(x)

    def add_positions(
        self, inputs_embeds: Float[Tensor, "B T D"], position_ids: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T D"]:
        """Return the input of layer 0: `inputs_embeds`, plus learned positions in GPT-2 and OPT.

        Where `position_ids` is -1, none is added.
        """
        if self.weight_names.position_embedding is None:
            return inputs_embeds
        table = self.get_submodule(self.weight_names.position_embedding)
        x = inputs_embeds + position_embedding(table, position_ids, self.config.position_offset)
        return F.dropout(x, self.config.dropout.embedding, self.training)

    def forward(
        self,
        inputs_embeds: Float[Tensor, "B T D"],
        cache: KVCache | None = None,
        *,
        attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | None = None,
        position_ids: Int[Tensor, "B T"] | None = None,
        attention_bias: Float[Tensor, "#B #T #P"] | None = None,
        capture: str | tuple[str, ...] = (),
        num_outputs: int | None = None,
    ) -> DecoderOutput:
        """Read T embeddings per row on top of a cache.

        Args:
            inputs_embeds: Embeddings [B, T, D], for example from `embed`.
            cache: What was read before; None starts from nothing. It is not modified.
            attention_mask: True or 1 at real tokens among the new positions; None: all are real.
            position_ids: By default they continue after the largest cached position (Eq. C22). -1 adds no position,
                in families with learned positions.
            attention_bias: Added to the scaled scores of every head and layer; not stored in the cache.
            capture: Activations to return: names of `laconic.models.activations` ("k": of every layer; "k.3": of
                layer 3), "hidden" (the inputs of every layer and the last output), "logits", … The same names are keys
                of `DecoderOutput.activations`: "k.3" is a tensor, "k" the tuple of all layers.
            num_outputs: Return the hidden states of so many last positions only, which saves most of the last block.

        Raises:
            ValueError: Shapes, dtypes, positions or cache do not fit.
        """
        check_forward_inputs(
            self.config, self.attn_implementation, inputs_embeds, attention_mask, position_ids, attention_bias, cache
        )
        B, T = inputs_embeds.shape[:2]
        device = inputs_embeds.device
        all_valid = attention_mask is None and cache is None
        mask = torch.ones(B, T, dtype=torch.bool, device=device) if attention_mask is None else attention_mask.bool()
        past = KVCache.empty(self.config, B, inputs_embeds.dtype, device) if cache is None else cache
        has_default_positions = position_ids is None
        shared_positions = all_valid and has_default_positions
        position_ids = past.continue_positions(mask) if position_ids is None else position_ids
        valid = torch.cat([past.valid, mask], 1)
        positions = torch.cat([past.positions, position_ids], 1)
        if not torch.compiler.is_compiling():
            check_dtype(self.layers, inputs_embeds)
            if not has_default_positions or self.config.position_encoding == "table":  # defaults always fit RoPE
                self.config.check_positions(position_ids)
            all_valid = all_valid or bool(valid.all())
        request = self._parse_capture(capture)
        context = build_context(
            self.config,
            positions[:1] if shared_positions else positions,
            valid,
            past.S,
            attention_bias,
            inputs_embeds.dtype,
            backend=self.attn_implementation,
            all_valid=all_valid,
            needs_visible=past.prefix is not None or any(not names.isdisjoint(EAGER_ACTIVATIONS) for names in request),
        )._replace(prefix=past.prefix, num_outputs=num_outputs)
        if self.training and not all_valid and num_outputs is None:
            context = context._replace(real_tokens=find_real_tokens(mask, frozenset[str]().union(*request[:-1])))
        x = self.add_positions(inputs_embeds, position_ids)
        activations = {"embed": x} if "embed" in request[-1] else {}
        x, keys, values = self._run_layers(x, past, context, request, activations)
        hidden_states = self.final_norm(x)
        if "hidden" in request[-1]:
            activations[f"hidden.{len(self.layers)}"] = hidden_states
        names = request[-1] - {"embed", "hidden"}
        activations |= capture_model(self, names, hidden_states, mask) if names else {}
        new_cache = KVCache(keys, values, positions, valid, past.prefix)
        return DecoderOutput(hidden_states, new_cache, Activations(activations))

    def _parse_capture(self, names: str | tuple[str, ...]) -> tuple[frozenset[str], ...]:
        """Return the names of the activations to capture in each layer, and after the last one."""
        layers: list[set[str]] = [set() for _ in range(self.config.num_hidden_layers + 1)]
        for name in (names,) if isinstance(names, str) else names:
            if name not in self.activation_places:
                closest = difflib.get_close_matches(name, self.activation_places, 1, 0.0)[0]
                raise ValueError(f"capture {name}: no such activation; did you mean {closest}?")
            for layer, activation in self.activation_places[name]:
                layers[layer].add(activation)
        return tuple(map(frozenset, layers))

    def _run_layers(
        self,
        x: Float[Tensor, "B T D"],
        past: KVCache,
        context: ForwardContext,
        request: tuple[frozenset[str], ...],
        activations: dict[str, Tensor],
    ) -> tuple[Float[Tensor, "B n D"], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run all blocks; return their output, and keys and values per layer. Captured `activations` are added."""
        pairs: list[tuple[Tensor, Tensor]] = []
        every = self.activation_checkpointing if self.training else 0
        real_tokens = context.real_tokens
        x = real_tokens.gather(x) if real_tokens else x
        for i, block in enumerate(self.layers):
            if "hidden" in request[i]:
                activations[f"hidden.{i}"] = real_tokens.scatter(x) if real_tokens else x
            past_kv = (past.keys[i], past.values[i]) if past.S else None
            run = partial(checkpointed, block) if every and i % every == 0 else block
            x, k, v, captured = cast(BlockOutput, run(x, past_kv, context, request[i]))
            pairs.append((k, v))
            activations |= captured
        x = real_tokens.scatter(x) if real_tokens else x
        return x, tuple(k for k, _ in pairs), tuple(v for _, v in pairs)


def check_forward_inputs(
    config: DecoderConfig,
    backend: str,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    attention_bias: Tensor | None,
    cache: KVCache | None = None,
) -> None:
    check_inputs_embeds(config, inputs_embeds)
    B, T = inputs_embeds.shape[:2]
    if 0 in (B, T):
        raise ValueError(f"inputs_embeds are {list(inputs_embeds.shape)}; B and T must be at least 1")
    for name, x in (("attention_mask", attention_mask), ("position_ids", position_ids)):
        if x is not None and x.shape != (B, T):
            raise ValueError(f"{name}: shape {list(x.shape)} does not match inputs_embeds {[B, T]}")
    if attention_mask is not None and attention_mask.is_floating_point():
        raise ValueError(f"attention_mask is {attention_mask.dtype}; give booleans, or integers 0 and 1")
    if position_ids is not None and (position_ids.is_floating_point() or position_ids.dtype == torch.bool):
        raise ValueError(f"position_ids are {position_ids.dtype}; pass integers")
    if cache is not None:
        if not isinstance(cache, KVCache):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"cache is a {type(cache).__name__}; pass None, or the laconic.KVCache of an output")
        cache.check_fits(config, B)
    if attention_bias is not None:
        shape = attention_bias.shape
        full_shape = (B, T, T + (0 if cache is None else cache.S))
        if len(shape) != 3 or any(b not in (1, n) for b, n in zip(shape, full_shape, strict=True)):
            raise ValueError(f"attention_bias {list(shape)} does not broadcast to {list(full_shape)}")
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(f"attn_implementation={backend!r} is unknown; use one of {', '.join(ATTENTION_BACKENDS)}")


def check_inputs_embeds(config: DecoderConfig, inputs_embeds: object) -> None:
    """Raise ValueError unless these are floats [B, T, D]."""
    if not isinstance(inputs_embeds, Tensor) or not inputs_embeds.is_floating_point():
        kind = getattr(inputs_embeds, "dtype", type(inputs_embeds).__name__)
        raise ValueError(f"inputs_embeds are {kind}; did you mean decoder.embed(input_ids)?")
    if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != config.hidden_size:
        raise ValueError(f"inputs_embeds are {list(inputs_embeds.shape)}; expected [B, T, {config.hidden_size}]")


def check_dtype(layers: nn.Module, inputs_embeds: Tensor) -> None:
    """Raise ValueError for embeddings wider than every weight, or of the other half-precision dtype."""
    dtypes = (p.dtype for p in layers.parameters() if p.is_floating_point())
    first = next(dtypes, inputs_embeds.dtype)
    if inputs_embeds.dtype == first or any(torch.promote_types(inputs_embeds.dtype, d) == d for d in (first, *dtypes)):
        return
    device = inputs_embeds.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        raise ValueError(f"inputs_embeds are {inputs_embeds.dtype}, weights {first}; convert one")
