"""The benchmark models: stories260k, and random Llamas that both libraries load from the same folder."""

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
    """One checkpoint, loaded by laconic and, if installed, by transformers."""

    name: str
    ours: Decoder
    theirs: Any
    num_parameters: int


def llama(layers: int, width: int, vocab: int, *, heads: int, groups: int, mlp_size: int, **more: Any) -> DecoderConfig:
    """Return the configuration of a Llama with untied embeddings and 4,096 positions."""
    source = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": mlp_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return DecoderConfig.from_dict(source | more)


def medium_llama(scale: Scale, vocab: int) -> DecoderConfig:
    """Return the random Llama that most targets refer to: 8 layers of width 512, F 1,376, 8 heads in 4 groups."""
    mlp_size = 1_376 if scale.width == 512 else 2 * scale.width
    return llama(scale.layers, scale.width, vocab, heads=8 if scale.width == 512 else 2, groups=4 if scale.width == 512
                 else 1, mlp_size=mlp_size)  # fmt: skip


def large_llama(scale: Scale) -> DecoderConfig:
    """Return a random Llama with 134 M parameters: 12 layers of width 768, F 2,048, 12 heads, V 32,000."""
    layers, width = scale.large or (scale.layers, scale.width)
    heads = 12 if width == 768 else 2
    return llama(layers, width, scale.vocab, heads=heads, groups=heads, mlp_size=width * 8 // 3)


def num_parameters(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in module.parameters())


def load_with_transformers(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    """Load a folder with transformers, with SDPA in eval mode; None if it is not installed."""
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
def model_pair(
    name: str,
    config: DecoderConfig | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Iterator[Pair]:
    """Load a random model or the checkpoint of a folder with both libraries."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = config if isinstance(config, Path) else Path(scratch) / "model"
        if isinstance(config, DecoderConfig):
            Decoder(config).save_pretrained(folder)
        ours = Decoder.from_pretrained(folder, dtype=dtype, device=device)
        yield Pair(name, ours, load_with_transformers(folder, dtype, device), num_parameters(ours))


def model_pairs(scale: Scale, *, real: bool = True) -> Iterator[Pair]:
    """Yield the models of the speed targets, first the real one if it is available."""
    if real and STORIES.is_dir():
        with model_pair("stories260k", STORIES) as pair:
            yield pair
    for vocab in dict.fromkeys((scale.vocab, scale.small_vocab)):
        with model_pair(
            f"random Llama {scale.layers} × {scale.width}, V {vocab:,}", medium_llama(scale, vocab)
        ) as pair:
            yield pair
    if scale.large:
        with model_pair(
            f"random Llama {scale.large[0]} × {scale.large[1]}, V {scale.vocab:,}", large_llama(scale)
        ) as pair:
            yield pair


def random_ids(config: DecoderConfig, batch: int, length: int) -> Tensor:
    """Return random ids, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, config.vocab_size, (batch, length), generator=generator)
