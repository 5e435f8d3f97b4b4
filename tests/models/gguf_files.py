"""Write tiny GGUF files with llama.cpp's package: a decoder's weights in several quantisations, and a vocabulary."""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize

from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from tests.reference.weight_formats import hf_to_gguf

Kind, Value = gguf.GGMLQuantizationType, gguf.GGUFValueType
SPECIAL = ["<|end|>", "<|user|>", "<|pad|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ a", "1 2", "Ċ Ċ", "Ġ Ġ"]
MIXED = {  # part of a tensor's name -> quantisation
    "attn_q.weight": Kind.Q4_1,
    "attn_k.weight": Kind.Q5_0,
    "attn_v.weight": Kind.Q4_0,
    "attn_output.weight": Kind.Q5_1,
    "ffn_gate.weight": Kind.BF16,
    "ffn_up.weight": Kind.F16,
    "ffn_down.weight": Kind.Q8_0,
    "token_embd.weight": Kind.Q8_0,
}
K_QUANTS = {"ffn_gate": Kind.Q4_K, "ffn_up": Kind.Q5_K, "ffn_down": Kind.Q6_K, "attn_q.weight": Kind.Q3_K}
TYPES = {str: Value.STRING, bool: Value.BOOL, int: Value.UINT32, float: Value.FLOAT32}
PRE_TOKENIZERS = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2", "smollm3": "smaug-bpe"}


def byte_alphabet() -> list[str]:
    """Return the characters that stand for the 256 bytes in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def byte_level_tokens() -> list[str]:
    return [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]


def random_decoder(family: str, D: int = 64, **changes: Any) -> Decoder:
    """Return a decoder of two layers whose weights all matter, with rows of D and heads of 16."""
    sizes = {"hidden_size": D, "intermediate_size": D, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {
        "vocab_size": len(byte_level_tokens()),
        "head_dim": 16,
        "tie_word_embeddings": family in ("llama", "smollm3"),
    }
    decoder = Decoder(DecoderConfig.tiny(family, **sizes | changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in decoder.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.2 if p.ndim == 2 else 1 + noise * 0.3)
    return decoder.eval()


def write_gguf(
    path: Path,
    decoder: Decoder,
    quantizations: Mapping[str, gguf.GGMLQuantizationType] = MIXED,
    extra: Mapping[str, Any] | None = None,
    pre: str | None = None,
    rope_factors: torch.Tensor | None = None,
    vocabulary: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a decoder; tensors whose type `gguf` cannot quantise get random blocks."""
    config, family = decoder.config, decoder.config.family
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    if family in ("llama", "smollm3"):
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    assert config.rope is not None
    writer.add_rope_freq_base(config.rope.theta)
    if vocabulary is None:
        add_byte_level(writer, pre or PRE_TOKENIZERS[family])
    else:
        vocabulary(writer)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, TYPES[type(value)])
    tensors = hf_to_gguf(decoder.state_dict(), family, config.num_attention_heads, config.num_key_value_heads)
    for name, tensor in tensors.items():
        kind = next((kind for part, kind in quantizations.items() if part in name), Kind.F32)
        writer.add_tensor(name, *quantized(tensor.numpy(), kind))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    finish(writer)
    return path


def write_sentencepiece(path: Path, pieces: Path) -> Path:
    """Write a tiny Llama with the vocabulary of llama2.c's tok512.bin: scores and texts, with spaces for `▁`."""
    data, tokens, scores = pieces.read_bytes()[4:], list[str](), list[float]()
    while data:
        score, n = struct.unpack("<fi", data[:8])
        tokens.append(data[8 : 8 + n].decode().strip("\n").replace(" ", "▁") or "\n")
        scores.append(score)
        data = data[8 + n :]

    def add_pieces(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    return write_gguf(path, random_decoder("llama", vocab_size=len(tokens)), {}, vocabulary=add_pieces)


def quantized(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> tuple[Any, ...]:
    """Return the arguments of add_tensor after the name."""
    if kind in (Kind.F32, Kind.F16):
        return (values.astype(np.float16 if kind == Kind.F16 else np.float32),)
    try:
        return quantize(values, kind), None, kind
    except NotImplementedError:
        return random_blocks(values.shape, kind), None, kind


def random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return random blocks of a K quantisation, in which the two or one float16 scales are small."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    scale = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    places = (0, 2) if kind in (Kind.Q4_K, Kind.Q5_K) else (size - 2,)
    for start in places:
        blocks[..., start : start + 2] = scale
    return blocks.reshape(*shape[:-1], -1)


def add_byte_level(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens = byte_level_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}")


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
