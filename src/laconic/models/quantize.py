"""Quantise a decoder that is in memory; `Decoder.from_pretrained(…, quantize="int8")` does it while reading."""

import torch
from torch import nn

from laconic.errors import UsageError
from laconic.models.block import Block, LayerNorm, RMSNorm
from laconic.models.checkpoints.weights import is_linear_weight
from laconic.models.decoder import Decoder
from laconic.models.init import Namespace
from laconic.models.ops.int8_linear import Int8Linear, int8_memory, named_modules, quantize_head, quantize_layers
from laconic.models.ops.packed_linear import PackedLinear
from laconic.models.parameters import get_parameter_version

PLAIN_MODULES = (nn.ModuleList, Namespace, Block, nn.Linear, PackedLinear, nn.Embedding, RMSNorm, LayerNorm)


def quantize_decoder(decoder: Decoder) -> Decoder:
    """Return a decoder with the weights of all linear layers in int8, one scale per output channel.

    With SmolLM2-135M on one CPU thread, decoding one row was 1.6 times as fast as in float32, and the loss on book text
    changed by less than 0.01 nats per token. The token embedding stays as it is; a tied head becomes an int8 copy of
    it. Caches and memories serve the decoder and its int8 form alike: both have the same fingerprint.

    Args:
        decoder: A decoder without adapters. It is not modified, and can be deleted.

    Returns:
        A decoder in eval mode. Its int8 weights are constants: it passes gradients to embeddings and memories, but
        cannot be fine-tuned, adapted with LoRA, or saved.

    Raises:
        UsageError: The decoder has adapters or other replaced modules, or is quantised already (exit code 2).

    Examples:
        >>> import laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> quantized = laconic.quantize_decoder(decoder)
        >>> quantized.fingerprint == decoder.fingerprint
        True
        >>> config = laconic.GenerationConfig(max_tokens=3, eos_token_ids=())
        >>> len(laconic.generate(quantized, input_ids=[[1, 17]], config=config)[0].token_ids)
        3
    """
    if type(decoder) is not Decoder:
        raise UsageError(f"{type(decoder).__name__} cannot be quantised; pass a Decoder")
    for name, module in named_modules(decoder):
        if isinstance(module, Int8Linear):
            raise UsageError("the decoder is quantised already; pass the float decoder")
        if name and type(module) not in PLAIN_MODULES:
            raise UsageError(f"{name} is a {type(module).__name__}; merge adapters before quantising")
    with torch.device("meta"):
        quantized = Decoder(decoder.config, seed=None)
    # Copies, because a parameter can keep a block with all weights of a checkpoint alive.
    state = {
        name: p.detach() if is_linear_weight(quantized, name) else p.detach().clone()
        for name, p in decoder.named_parameters()
    }
    quantized.load_state_dict(state, assign=True)
    quantize_layers(quantized, state, int8_memory(quantized))
    quantized.config = quantize_head(quantized, decoder.config)
    for name in ("source_folder", "name_or_path", "attn_implementation"):
        setattr(quantized, name, getattr(decoder, name))
    quantized._cached_fingerprint = (decoder.fingerprint, get_parameter_version(quantized))  # pyright: ignore[reportPrivateUsage]
    return quantized.eval()
