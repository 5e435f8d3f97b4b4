"""The models that are measured: the small real one, and random Llamas that both sides read from one folder."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.measure import PEERS, STORIES, Scale
from laconic import Decoder, DecoderConfig


class Pair(NamedTuple):
    """One checkpoint, read by us and, where transformers is installed, by transformers."""

    name: str
    ours: Decoder
    theirs: Any
    size: int


def llama(layers: int, width: int, words: int, *, heads: int, groups: int, feed: int, **more: Any) -> DecoderConfig:
    """A Llama's configuration, untied, with 4,096 positions."""
    source = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": feed,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": words,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return DecoderConfig.from_dict(source | more)


def middling(scale: Scale, words: int) -> DecoderConfig:
    """The random Llama of the targets: 8 layers of width 512, F 1,376, 8 heads in 4 groups."""
    feed = 1_376 if scale.width == 512 else 2 * scale.width
    return llama(scale.layers, scale.width, words, heads=8 if scale.width == 512 else 2, groups=4 if scale.width == 512
                 else 1, feed=feed)  # fmt: skip


def large(scale: Scale) -> DecoderConfig:
    """A random Llama of 134 M parameters: 12 layers of width 768, F 2,048, 12 heads, V 32,000."""
    layers, width = scale.large or (scale.layers, scale.width)
    heads = 12 if width == 768 else 2
    return llama(layers, width, scale.words, heads=heads, groups=heads, feed=width * 8 // 3)


def size(module: nn.Module) -> int:
    """Parameters."""
    return sum(p.numel() for p in module.parameters())


def peer(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    """The same folder by transformers, with SDPA, for evaluation; None where it is not installed."""
    if not PEERS:
        return None
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval().to(device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@contextmanager
def pair(
    name: str,
    config: DecoderConfig | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Iterator[Pair]:
    """Both sides of a random model, or of the checkpoint in a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = config if isinstance(config, Path) else Path(scratch) / "model"
        if isinstance(config, DecoderConfig):
            Decoder(config).save_pretrained(folder)
        ours = Decoder.from_pretrained(folder, dtype=dtype, device=device)
        yield Pair(name, ours, peer(folder, dtype, device), size(ours))


def pairs(scale: Scale, *, real: bool = True) -> Iterator[Pair]:
    """The models of the speed targets, one after the other; the real one first, where it is."""
    if real and STORIES.is_dir():
        with pair("stories260k", STORIES) as models:
            yield models
    for words in dict.fromkeys((scale.words, scale.few_words)):
        with pair(f"random Llama {scale.layers} × {scale.width}, V {words:,}", middling(scale, words)) as models:
            yield models
    if scale.large:
        with pair(f"random Llama {scale.large[0]} × {scale.large[1]}, V {scale.words:,}", large(scale)) as models:
            yield models


def random_ids(config: DecoderConfig, batch: int, length: int) -> Tensor:
    """Ids, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, config.vocab_size, (batch, length), generator=generator)
