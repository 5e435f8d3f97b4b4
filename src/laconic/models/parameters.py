"""Load and enlarge the parameters of a decoder, as functions of the module and its configuration."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from laconic.errors import UsageError
from laconic.models.checkpoints import weights
from laconic.models.checkpoints.checkpoint_files import StoredTensor, warn_randomly_initialized
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.init import init_parameters
from laconic.models.ops.int8_linear import int8_memory, quantize_head, quantize_layers

ParameterVersion = tuple[tuple[tuple[int, int], ...], tuple[float, ...]]


def load_tensors(
    decoder: nn.Module,
    folder: Path,
    config: DecoderConfig,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    allow_missing: tuple[str, ...],
    tensors: dict[str, StoredTensor],
    quantize: Literal["int8"] | None,
) -> tuple[DecoderConfig, str]:
    """Load the weights of a folder into a decoder on meta; arguments are those of `Decoder.from_pretrained`.

    Return the configuration of what was loaded, and the fingerprint of the weights on disk.
    """
    if quantize not in (None, "int8"):
        raise UsageError(f"quantize={quantize!r} is not supported; pass 'int8' or None")
    on_layer = partial(quantize_layers, memory=int8_memory(decoder)) if quantize else None
    fingerprint, missing = weights.load_weights(
        decoder, folder, config, dtype, device, allow_missing, tensors, on_layer
    )
    if missing:
        warn_randomly_initialized(missing)
        init_parameters({name: decoder.get_parameter(name) for name in missing}, config.initializer_range, seed=0)
    if quantize:
        config = quantize_head(decoder, config)
    embedding = decoder.get_parameter(f"{WEIGHT_NAMES[config.family].token_embedding}.weight")
    return replace(config, dtype=embedding.dtype), fingerprint


def get_parameter_version(decoder: nn.Module) -> ParameterVersion:
    """Return address and in-place change counter of each parameter, and five values of each.

    Edits through `.data` are not counted, and go unnoticed unless they change one of the values. Inference tensors have
    no counter.
    """
    counters = tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in decoder.parameters())
    samples = [p.detach().flatten()[:: max(1, p.numel() // 4)] for p in decoder.parameters()]
    return counters, tuple(torch.cat(samples).double().cpu().numpy().tolist())


def share_parameters(decoder: nn.Module, resized: nn.Module) -> None:
    """Give the parameters of a decoder to one on meta with a larger vocabulary; only the larger matrices are copies.

    New rows are the mean row plus 1% of the rows' standard deviation as noise.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = dict(decoder.named_parameters())
    for name, p in resized.named_parameters():
        rows = parameters[name].detach()
        if num_new := len(p) - len(rows):
            noise = torch.randn((num_new, rows.shape[1]), generator=generator, device="cpu").to(rows)
            new = rows.mean(0) + noise * rows.std(0) * 1e-2
            parameters[name] = nn.Parameter(torch.cat([rows, new]), parameters[name].requires_grad)
        p.requires_grad_(parameters[name].requires_grad)  # load_state_dict(assign=True) takes it from here
    resized.load_state_dict(parameters, assign=True)
