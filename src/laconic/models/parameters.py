"""Add the parameters of a decoder to a module, and tell whether they have changed."""

import torch
from torch import nn

from laconic.models.block import Block, build_norm
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.init import add_submodule, init_parameters
from laconic.models.ops.packed_linear import get_version

ParameterVersion = tuple[tuple[tuple[int, int], ...], tuple[float, ...]]


def add_parameters(decoder: nn.Module, config: DecoderConfig, seed: int | None) -> None:
    """Add embeddings, blocks, final norm and head under the family's names; `seed` None leaves them uninitialised."""
    names = WEIGHT_NAMES[config.family]
    D = config.hidden_size
    add_submodule(decoder, names.token_embedding, empty_embedding(config.vocab_size, D))
    if names.position_embedding:
        num_positions = config.max_position_embeddings + config.position_offset
        add_submodule(decoder, names.position_embedding, empty_embedding(num_positions, D))
    add_submodule(decoder, names.layers, nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers)))
    add_submodule(decoder, names.final_norm, build_norm(config))
    if not config.tie_word_embeddings:
        add_submodule(decoder, names.head, nn.Linear(D, config.vocab_size, bias=False))
    if seed is not None:
        init_parameters(dict(decoder.named_parameters()), config.initializer_range, seed)


def empty_embedding(n: int, width: int) -> nn.Embedding:
    """Return an uninitialised embedding (initialising one on meta imports modules that take torch a second)."""
    return nn.Embedding(n, width, _weight=torch.empty(n, width))


def get_parameter_version(decoder: nn.Module) -> ParameterVersion:
    """Return address and in-place change counter of each parameter, and five values of each.

    Edits through `.data` are not counted, and go unnoticed unless they change one of the values. Inference tensors have
    no counter.
    """
    counters = tuple(map(get_version, decoder.parameters()))
    samples = [p.detach().flatten()[:: max(1, p.numel() // 4)] for p in decoder.parameters()]
    return counters, tuple(torch.cat(samples).double().cpu().numpy().tolist())
