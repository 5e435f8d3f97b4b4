"""KVPrefix: attention equals loops over heads, batches equal rows, chunks the whole, and every cache operation."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.models import rope
from laconic.models.block import Block
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.kv_prefix import KVPrefix
from laconic.models.ops.rope_scaling import ROPE_SCALINGS
from tests.models.fixtures import EmbedBatch, assert_close, decoder_of, embed_batches, noise, read_in_chunks

LENGTHS = [[[3, 0], [7, 2]], [[1, 4], [0, 4]], [[2, 2], [2, 2]]]  # per row, layer and KV head
NUM_TOKENS = [9, 12, 4]


def row_cache(lengths: list[list[int]], num_tokens: int, seed: int, slots: int = 0) -> KVCache:
    """Return a cache of one row with random keys and values in its prefix, and empty slots that are not valid."""
    keys, values = (
        tuple(noise(97 * seed + 7 * i + half, 1, sum(layer), 16) for i, layer in enumerate(lengths)) for half in (0, 1)
    )
    prefix = KVPrefix(keys, values, (), torch.tensor([num_tokens]), tuple(map(tuple, lengths)))
    nothing, positions = (torch.zeros(1, 2, slots, 16, dtype=torch.float64),) * 2, torch.zeros(1, slots).long()
    return KVCache(nothing, nothing, positions, positions.bool(), prefix)


def batch_cache(rows: int = 3) -> KVCache:
    """Return a batch of ragged prefixes."""
    return KVCache.concat_rows(*(row_cache(LENGTHS[row], NUM_TOKENS[row], row) for row in range(rows)))


def loop_attention(
    decoder: Decoder, layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, prefix: KVPrefix
) -> Tensor:
    """Return softmax over the keys of the row's head and the new keys so far [B, T, H E], by loops over indices."""
    B, H, T, E = q.shape
    window, context = decoder.config.sliding_windows[layer], torch.zeros(B, T, H, E, dtype=q.dtype)
    for b in range(B):
        for h in range(H):
            g = h * k.shape[1] // H
            head = prefix.heads(layer)[g]
            n = LENGTHS[b][layer][g]
            for t in range(T):
                seen = range(0 if window is None else max(0, t - window + 1), t + 1)
                keys = [*head.keys[b, :n], *(k[b, g, j] for j in seen)]
                values = [*head.values[b, :n], *(v[b, g, j] for j in seen)]
                added = [0.0] * n + [float(bias[0, t, j]) for j in seen]
                scale = decoder.attention_scale(layer)
                logits = [scale * float(q[b, h, t] @ key) + a for key, a in zip(keys, added, strict=True)]
                p = torch.tensor(logits, dtype=torch.float64).softmax(0)
                context[b, t, h] = sum(float(w) * value for w, value in zip(p, values, strict=True))
    return context.flatten(2)


def loop_forward(decoder: Decoder, x: Tensor, bias: Tensor, prefix: KVPrefix) -> Tensor:
    """Return the hidden states of T new positions after a prefix."""
    config = decoder.config
    assert config.rope is not None
    positions = torch.tensor(NUM_TOKENS)[: len(x), None] + torch.arange(x.shape[1])
    omega, a = ROPE_SCALINGS[config.rope.kind](config.rope, config.head_dim, positions[:, -1] + 1)
    cos, sin = rope.cos_sin_tables(positions, omega, a, x.dtype)
    for i, block in enumerate(decoder.layers):
        assert isinstance(block, Block)
        q, k, v = block.qkv_heads(block.submodule("norm1")(x))
        q, k = rope.rotate_pairs(q, cos, sin), rope.rotate_pairs(k, cos, sin)
        r = x + block.project_output(loop_attention(decoder, i, q, k, v, bias, prefix))
        x = r + block.mlp_forward(block.submodule("norm2")(r))
    return decoder.final_norm(x)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "T"), [("llama", 3), ("llama", 1), ("qwen3", 3), ("llama, windows", 7)])
def test_kv_prefix_attention_equals_loops(name: str, T: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, cache, x = decoder_of(name), batch_cache(), noise(1, 3, T, 48)
    assert cache.prefix is not None
    bias = noise(2, 1, T, T)
    monkeypatch.setattr(decoder, "attn_implementation", backend)
    output = decoder(x, cache)
    assert_close(output.hidden_states, loop_forward(decoder, x, torch.zeros_like(bias), cache.prefix))
    assert output.cache.positions[:, 0].tolist() == NUM_TOKENS
    biased = decoder(x, cache, attention_bias=bias)
    assert_close(biased.hidden_states, loop_forward(decoder, x, bias, cache.prefix))
    with pytest.raises(ValueError, match="cannot be captured after a KV prefix"):
        decoder(x, cache, capture=("probs.1",))


@pytest.mark.parametrize("name", ["llama", "llama, windows"])
@given(batch=embed_batches(T=8), data=st.data())
@settings(max_examples=5)
def test_kv_prefix_in_chunks_and_alone_equals_the_batch(name: str, batch: EmbedBatch, data: st.DataObject) -> None:
    """Padding of a batch's prefixes, slots and chunks changes nothing."""
    decoder, rows = decoder_of(name), len(batch.attention_mask)
    cache = batch_cache(rows)
    whole = decoder(batch.inputs_embeds, cache, attention_mask=batch.attention_mask)
    chunks = read_in_chunks(decoder, batch, cache=cache)
    real = batch.attention_mask
    assert_close(torch.cat([c.hidden_states for c in chunks], 1)[real], whole.hidden_states[real])
    assert chunks[-1].cache.prefix is cache.prefix
    row = data.draw(st.integers(0, rows - 1))
    alone = decoder(
        batch.inputs_embeds[row : row + 1, real[row]], row_cache(LENGTHS[row], NUM_TOKENS[row], row, slots=2)
    )
    assert_close(alone.hidden_states[0], whole.hidden_states[row, real[row]])
    more = noise(3, rows, 2, 48)
    after = decoder(more, whole.cache).hidden_states[row]
    assert_close(decoder(more[row : row + 1], whole.cache.select_rows([row])).hidden_states[0], after)


def test_kv_prefix_follows_every_cache_operation(tmp_path: Path) -> None:
    decoder, batch, more = decoder_of("llama"), batch_cache(), noise(1, 4, 2, 48)
    row = row_cache(LENGTHS[0], NUM_TOKENS[0], 0)
    assert row.next_position.tolist() == [9]
    assert row.detach().num_bytes == 12 * 2 * 16 * 8 + 8 + 4 * 8  # keys and values, number of tokens, sizes
    read = decoder(more[:1], row).cache
    assert read.next_position.tolist() == [11]
    empty = KVCache.empty(decoder.config, 1, torch.float64)
    for cut in (read.crop(0), read.gather_slots(torch.empty(1, 0).long()), row.append(empty), row.pad_left(0)):
        assert cut.is_equal(row)
    repeated = row.repeat_rows(4)
    assert repeated.prefix is not None
    assert row.prefix is not None
    assert repeated.prefix.keys[0].data_ptr() == row.prefix.keys[0].data_ptr()
    assert_close(decoder(more, repeated).hidden_states, decoder(more, row.select_rows([0] * 4)).hidden_states)
    plain = decoder(noise(2, 1, 5, 48)).cache
    mixed = KVCache.concat_rows(batch, plain)
    output = decoder(more, mixed).hidden_states
    assert_close(output[3:], decoder(more[3:], plain).hidden_states)
    assert_close(output[:3], decoder(more[:3], batch).hidden_states)
    half = mixed.to(dtype=torch.bfloat16)
    assert half.prefix is not None
    assert half.prefix.values[1].dtype == torch.bfloat16
    assert mixed.to("cpu").is_equal(mixed)
    with pytest.raises(ValueError, match="can only come first"):
        plain.append(row)
    for cache in (mixed, row):
        cache.save(tmp_path / "cache.safetensors", decoder)
        assert KVCache.load(tmp_path / "cache.safetensors", decoder).is_equal(cache)
