"""Parameters of a decoder: creating, initialising, loading and saving them, and a larger vocabulary."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from laconic.models import llama2c, weights
from laconic.models.block import Block, build_norm
from laconic.models.checkpoint_files import resolve_tied_head, warn_randomly_initialized
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.init import add_submodule, empty_embedding, init_parameters
from laconic.models.int8_linear import Int8Linear, int8_memory, quantize_layers
from laconic.storage.export_record import check_weights_while_reading

DecoderT = TypeVar("DecoderT", bound="DecoderWeights")
ParameterVersion = tuple[tuple[int, int], ...]


class DecoderWeights(nn.Module):
    """The parameters of `Decoder`, which adds the forward pass; arguments are described there."""

    def __init__(self, config: DecoderConfig, seed: int | None = 0) -> None:
        super().__init__()
        names = WEIGHT_NAMES[config.family]
        self.config, self.weight_names = config, names
        self.name_or_path = config.family
        self.source_folder: Path | None = None
        self._cached_fingerprint: tuple[str, ParameterVersion] | None = None
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

    def init_parameters(self, names: list[str], seed: int) -> None:
        """Initialise the named parameters: weights normal(0, initializer_range), norms 1, biases 0."""
        init_parameters({name: self.get_parameter(name) for name in names}, self.config.initializer_range, seed)

    @classmethod
    def from_pretrained(
        cls: type[DecoderT],
        folder_or_hub_name: str | Path,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        *,
        allow_missing: tuple[str, ...] = (),
        ignore_tensors: tuple[str, ...] = (),
        revision: str | None = None,
        device_map: str | Mapping[str, Any] | None = None,
        quantize: Literal["int8"] | None = None,
    ) -> DecoderT:
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
        with check_weights_while_reading(folder):
            config, tensors = resolve_tied_head(folder, config, ignore_tensors)
            with torch.device("meta"):
                decoder = cls(config, seed=None)
            on_layer = partial(quantize_layers, memory=int8_memory(decoder)) if quantize else None
            report = weights.load_weights(decoder, folder, config, dtype, device, allow_missing, tensors, on_layer)
        decoder.init_parameters(warn_randomly_initialized(report.missing), seed=0)
        if quantize:
            config = decoder.quantize_head(config)
        decoder.config = replace(config, dtype=decoder.embedding_weight.dtype)
        decoder.source_folder, decoder.name_or_path = folder, str(folder_or_hub_name)
        decoder._cached_fingerprint = (report.fingerprint, decoder.parameter_version())
        return decoder.eval()

    @classmethod
    def from_llama2c(cls: type[DecoderT], path: str | Path) -> DecoderT:
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
            add_submodule(self, self.weight_names.head, Int8Linear.from_float(self.embedding_weight))
        quantize_layers(self, [name for name, _ in self.named_parameters()])  # those that were initialised
        self.requires_grad_(False)
        return replace(config, tie_word_embeddings=False)

    def untie_head(self) -> None:
        """Give a head that is tied to the token embedding a matrix of its own, with the same numbers."""
        if not self.config.tie_word_embeddings:
            return
        weight = self.embedding_weight
        with torch.device("meta"):
            head = nn.Linear(*reversed(weight.shape), bias=False)
        head.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
        add_submodule(self, self.weight_names.head, head)
        self.config = replace(self.config, tie_word_embeddings=False)

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
    def embedding_weight(self) -> Tensor:
        """The matrix of token embeddings [V, D]."""
        return self.get_parameter(f"{self.weight_names.token_embedding}.weight")

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

    def resize_vocabulary(self: DecoderT, num_new_tokens: int, seed: int = 0) -> DecoderT:
        """Return a decoder with more tokens; all other parameters are shared with this one.

        New embeddings are the mean embedding plus 1% of the embeddings' standard deviation as noise.
        """
        with torch.device("meta"):
            resized = type(self)(replace(self.config, vocab_size=self.config.vocab_size + num_new_tokens), seed=None)
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
