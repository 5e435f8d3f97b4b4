"""Load and save a decoder as a checkpoint, enlarge its vocabulary, and identify its weights."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from laconic.errors import UsageError, check_known
from laconic.models.checkpoints import llama2c, weights
from laconic.models.checkpoints.checkpoint_files import list_names, resolve_tensors
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.init import init_parameters
from laconic.models.ops.activation_functions import ACTIVATIONS
from laconic.models.ops.int8_linear import int8_memory, quantize_head, quantize_layers
from laconic.models.ops.rope_scaling import ROPE_SCALINGS
from laconic.models.parameters import ParameterVersion, add_parameters, get_parameter_version
from laconic.storage.export_record import check_weights_while_reading

DecoderT = TypeVar("DecoderT", bound="PretrainedDecoder")


class PretrainedDecoder(nn.Module):
    """The parameters of a `Decoder`, under the names of its family's checkpoints; see there for the arguments."""

    def __init__(self, config: DecoderConfig, seed: int | None) -> None:
        super().__init__()
        if not isinstance(config, DecoderConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            name = type(config).__name__
            raise UsageError(f"config: give a laconic.DecoderConfig, not {name}; from_pretrained loads a checkpoint")
        check_known("family", config.family, WEIGHT_NAMES)
        check_known("activation", config.activation, ACTIVATIONS)
        check_known("norm_type", config.norm_type, ("rms", "layer"))
        check_known("position_encoding", config.position_encoding, ("rope", "table"))
        if config.rope is not None:
            check_known("rope.kind", config.rope.kind, ROPE_SCALINGS)
        self.config = config
        self.weight_names = WEIGHT_NAMES[config.family]
        self.name_or_path = config.family
        self.source_folder: Path | None = None
        self._cached_fingerprint: tuple[str, ParameterVersion] | None = None
        self.attn_implementation, self.activation_checkpointing = "sdpa", 0
        add_parameters(self, config, seed)

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

        On a CPU, matrices with the same input (q, k, v) are copied side by side, and decoding multiplies them as one.

        Args:
            folder_or_hub_name: A Hugging Face folder, a GGUF file, a short name (`smollm2`) or a model on the hub.
            dtype: Also by name; "auto": the stored one. None: that too on CUDA; on a CPU float32, or bfloat16 if fast.
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
            UsageError: The device, dtype or quantisation does not exist (2).
        """
        for name, value in (("allow_missing", allow_missing), ("ignore_tensors", ignore_tensors)):
            if isinstance(value, str):
                raise UsageError(f"{name}={value!r}: give several names, such as ({value!r},)")
        if quantize not in (None, "int8"):
            raise UsageError(f"quantize={quantize!r} is not supported; pass 'int8' or None")
        folder = weights.find_checkpoint(folder_or_hub_name, weights.check_revision(folder_or_hub_name, revision))
        dtype = weights.resolve_dtype(dtype, folder)
        device = weights.resolve_device_map(device, device_map)
        config = DecoderConfig.from_folder(folder)
        with check_weights_while_reading(folder):
            config, tensors = resolve_tensors(folder, config, ignore_tensors)
            with torch.device("meta"):
                decoder = cls(config, seed=None)
            on_layer = partial(quantize_layers, memory=int8_memory(decoder)) if quantize else None
            fingerprint, missing = weights.load_weights(
                decoder, folder, config, dtype, device, allow_missing=allow_missing, tensors=tensors, on_layer=on_layer
            )
            if missing:
                warnings.warn(f"{list_names(missing)}: not in the checkpoint, randomly initialised", stacklevel=2)
                parameters = {name: decoder.get_parameter(name) for name in missing}
                init_parameters(parameters, config.initializer_range, seed=0)
            if quantize:
                config = quantize_head(decoder, config)
        embedding = decoder.get_parameter(f"{decoder.weight_names.token_embedding}.weight")
        decoder.config = replace(config, dtype=embedding.dtype)
        decoder.source_folder = folder
        decoder.name_or_path = str(folder_or_hub_name)
        decoder._cached_fingerprint = (fingerprint, get_parameter_version(decoder))
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
        weights.save_weights(
            self, Path(folder), self.config, max_shard_bytes, dtype, self.source_folder, self.extra_config_fields
        )

    @property
    def extra_config_fields(self) -> Mapping[str, object]:
        """Keys of config.json beside those of the family, or in place of them."""
        return {}

    @property
    def fingerprint(self) -> str:
        """SHA-256 of a sample of the weights in checkpoint layout; recomputed when `get_parameter_version` changes."""
        version = get_parameter_version(self)
        if self._cached_fingerprint is None or self._cached_fingerprint[1] != version:
            tensors = weights.checkpoint_tensors(self, self.config)
            self._cached_fingerprint = (weights.weights_fingerprint(tensors), version)
        return self._cached_fingerprint[0]

    def resize_vocabulary(self: DecoderT, num_new_tokens: int) -> DecoderT:
        """Return a decoder with more tokens; only the larger matrices are copies, the rest is shared with this one.

        New embeddings are the mean embedding plus 1% of the embeddings' standard deviation as noise.
        """
        with torch.device("meta"):
            resized = type(self)(replace(self.config, vocab_size=self.config.vocab_size + num_new_tokens), seed=None)
        generator = torch.Generator().manual_seed(0)
        parameters = dict(self.named_parameters())
        for name, p in resized.named_parameters():
            rows = parameters[name].detach()
            num_new = len(p) - len(rows)
            if num_new:
                noise = torch.randn((num_new, rows.shape[1]), generator=generator, device="cpu").to(rows)
                new = rows.mean(0) + noise * rows.std(0) * 1e-2
                parameters[name] = nn.Parameter(torch.cat([rows, new]), parameters[name].requires_grad)
            p.requires_grad_(parameters[name].requires_grad)  # load_state_dict(assign=True) takes it from here
        resized.load_state_dict(parameters, assign=True)
        for name in ("source_folder", "name_or_path", "attn_implementation", "activation_checkpointing"):
            setattr(resized, name, getattr(self, name))
        return resized.train(self.training)
