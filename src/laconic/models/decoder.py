"""Decoder for checkpoints of the Llama family: embeddings in, hidden states and a KV cache out.

Llama (arXiv:2302.13971, 2407.21783), Mistral (2310.06825), Qwen (2407.10671, 2505.09388), GPT-2, OPT (2205.01068).

Shapes: B rows, T new positions, S cached positions, P = S + T, D width, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from laconic.models import attention, input_checks, llama2c, rope, weights
from laconic.models import positions as positions_
from laconic.models.activations import CaptureRequest, capture_model, parse_capture
from laconic.models.block import EAGER_ACTIVATIONS, Block, ForwardContext, add_submodule, build_norm, empty_embedding
from laconic.models.cache import KVCache
from laconic.models.checkpoint_files import warn_randomly_initialized
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.init import init_parameters
from laconic.models.int8_linear import Int8Linear, int8_memory, quantize_layers
from laconic.models.kv_prefix import KVPrefix
from laconic.models.output import Activations, DecoderOutput
from laconic.models.rope_scaling import ROPE_SCALINGS
from laconic.models.unpadding import find_real_tokens

BlockOutput = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]
ParameterVersion = tuple[tuple[int, int], ...]
checkpointed: Callable[..., BlockOutput] = partial(checkpoint, use_reentrant=False)  # pyright: ignore[reportUnknownVariableType]


class Decoder(nn.Module):
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
        super().__init__()
        names = WEIGHT_NAMES[config.family]
        self.config, self.weight_names = config, names
        self.name_or_path = config.family
        self.source_folder: Path | None = None
        self.attn_implementation, self.activation_checkpointing = "sdpa", 0
        self._cached_fingerprint: tuple[str, ParameterVersion] | None = None
        self.no_capture = CaptureRequest((frozenset(),) * config.num_hidden_layers, frozenset(), frozenset())
        D, num_positions = config.hidden_size, config.max_position_embeddings + config.position_offset
        add_submodule(self, names.token_embedding, empty_embedding(config.vocab_size, D))
        if names.position_embedding:
            add_submodule(self, names.position_embedding, empty_embedding(num_positions, D))
        add_submodule(self, names.layers, nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers)))
        add_submodule(self, names.final_norm, build_norm(config))
        if not config.tie_word_embeddings:
            add_submodule(self, names.head, nn.Linear(D, config.vocab_size, bias=False))
        if seed is not None:
            self.init_parameters([name for name, _ in self.named_parameters()], seed)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_name: str | Path,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        *,
        allow_missing: tuple[str, ...] = (),
        ignore_tensors: tuple[str, ...] = (),
        revision: str | None = None,
        device_map: str | Mapping[str, Any] | None = None,
        quantize: Literal["int8"] | None = None,
    ) -> "Decoder":
        """Load a checkpoint: llama, mistral, qwen2, qwen3, smollm3, gpt2 or opt.

        On a CPU, the weights of one input are copied side by side, so that decoding reads them as one matrix.

        Args:
            folder_or_hub_name: A Hugging Face folder, a GGUF file, a short name (`smollm2`) or a model on the hub.
            dtype: Also by name. "auto" is the stored one. None: also on CUDA; on a CPU float32, or bfloat16 if fast.
            device: The CPU by default.
            allow_missing: Tensors that may be absent; they are initialised randomly, with a warning.
            ignore_tensors: Tensors in the checkpoint that do not belong to the decoder.
            revision: Revision on the hub.
            device_map: In place of `device`, as in transformers: "auto", or a single device.
            quantize: "int8" rounds the linear layers while reading, as `quantize_decoder` does, without a float copy.

        Raises:
            CorruptArtifactError: laconic exported the folder, and a file was changed since (76).
            InputError: The folder is not a complete checkpoint of a supported family (exit code 66).
            NonFiniteError: A weight is NaN or infinite (65).
            UnsafeFileError: The weights are pickled (77).
            UsageError: The device does not exist, or the dtype (2).
        """
        folder = weights.find_checkpoint(folder_or_hub_name, revision)
        dtype, device = weights.resolve_dtype(dtype, folder), weights.resolve_device_map(device, device_map)
        config = DecoderConfig.from_folder(folder)
        with torch.device("meta"):
            decoder = cls(config, seed=None)
        on_layer = partial(quantize_layers, memory=int8_memory(decoder)) if quantize else None
        report = weights.load_weights(decoder, folder, config, dtype, device, allow_missing, ignore_tensors, on_layer)
        decoder.init_parameters(warn_randomly_initialized(report.missing), seed=0)
        if quantize:
            config = decoder.quantize_head(config)
        decoder.config = replace(config, dtype=decoder.token_embedding.weight.dtype)
        decoder.source_folder, decoder.name_or_path = folder, str(folder_or_hub_name)
        decoder._cached_fingerprint = (report.fingerprint, decoder.parameter_version())
        return decoder.eval()

    @classmethod
    def from_llama2c(cls, path: str | Path) -> "Decoder":
        """Load a llama2.c file (`stories260K.bin`), with q and k permuted to Hugging Face's RoPE layout.

        Raises:
            InputError: Header and file size do not match (exit code 66).
            NonFiniteError: A weight is NaN or infinite (65).
            UnsafeFileError: The file is a pickle (77).
        """
        source, tensors = llama2c.read_llama2c(Path(path))
        with torch.device("meta"):
            decoder = cls(DecoderConfig.from_dict(source), seed=None)
        decoder.load_state_dict(tensors, assign=True)
        decoder.name_or_path = str(path)
        return decoder.eval()

    def quantize_head(self, config: DecoderConfig) -> DecoderConfig:
        """Quantise the head; a tied one becomes an int8 copy of the embedding, which the returned config says."""
        if config.tie_word_embeddings:
            add_submodule(self, self.weight_names.head, Int8Linear.from_float(self.token_embedding.weight))
        quantize_layers(self, [name for name, _ in self.named_parameters()])  # those that were initialised
        self.requires_grad_(False)
        return replace(config, tie_word_embeddings=False)

    def save_pretrained(
        self, folder: str | Path, *, max_shard_bytes: float = 5e9, dtype: torch.dtype | None = None
    ) -> None:
        """Save a Hugging Face folder that transformers can load.

        Args:
            folder: Must not exist, or be empty.
            max_shard_bytes: Size limit of a safetensors file.
            dtype: Convert the weights to this dtype.

        Raises:
            BusyError: The folder is not empty (exit code 73).
        """
        options: dict[str, Any] = {"max_shard_bytes": max_shard_bytes, "dtype": dtype}
        weights.save_weights(self, Path(folder), self.config, source_folder=self.source_folder, **options)

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

    @property
    def fingerprint(self) -> str:
        """SHA-256 of a sample of the weights in checkpoint layout; recomputed when a parameter has changed."""
        version = self.parameter_version()
        if self._cached_fingerprint is None or self._cached_fingerprint[1] != version:
            value = weights.weights_fingerprint(weights.checkpoint_tensors(self, self.config))
            self._cached_fingerprint = (value, version)
        return self._cached_fingerprint[0]

    def parameter_version(self) -> ParameterVersion:
        """Return address and in-place change counter of each parameter (inference tensors have no counter)."""
        return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.parameters())

    def attention_scale(self, layer: int) -> float:
        """Return the factor on a layer's attention scores (Eq. C11)."""
        return self.config.attention_scales[layer]

    def init_parameters(self, names: list[str], seed: int) -> None:
        """Initialise the named parameters: weights normal(0, initializer_range), norms 1, biases 0."""
        init_parameters({name: self.get_parameter(name) for name in names}, self.config.initializer_range, seed)

    def resize_vocabulary(self, num_new_tokens: int, seed: int = 0) -> "Decoder":
        """Return a decoder with more tokens; all other parameters are shared with this one.

        New embeddings are the mean embedding plus 1% of the embeddings' standard deviation as noise.
        """
        with torch.device("meta"):
            resized = Decoder(replace(self.config, vocab_size=self.config.vocab_size + num_new_tokens), seed=None)
        generator = torch.Generator().manual_seed(seed)
        parameters = dict(self.named_parameters())
        for name in (f"{self.weight_names.token_embedding}.weight", f"{self.weight_names.head}.weight"):
            if name in parameters:
                rows = parameters[name].detach()
                noise = torch.randn((num_new_tokens, rows.shape[1]), generator=generator, device="cpu").to(rows)
                new = rows.mean(0) + noise * rows.std(0) * 1e-2
                parameters[name] = nn.Parameter(torch.cat([rows, new]), parameters[name].requires_grad)
        for name, p in resized.named_parameters():  # load_state_dict(assign=True) sets requires_grad from these
            p.requires_grad_(parameters[name].requires_grad)
        resized.load_state_dict(parameters, assign=True)
        for name in ("source_folder", "name_or_path", "attn_implementation", "activation_checkpointing"):
            setattr(resized, name, getattr(self, name))
        return resized.train(self.training)

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
        x = inputs_embeds + positions_.position_embedding(table, position_ids, self.config.position_offset)
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
        input_checks.check_forward_inputs(
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
            input_checks.check_dtype(self.layers, inputs_embeds)
            if not has_default_positions or self.config.position_encoding == "table":  # defaults always fit RoPE
                input_checks.check_positions(self.config, position_ids)
            all_valid = all_valid or bool(valid.all())
        request = parse_capture(capture, self.config) if capture else self.no_capture
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
