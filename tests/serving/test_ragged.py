"""Rows of different lengths in one pass give what the decoder gives each of them."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from laconic.generation import static_cache
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.quantize import quantize_decoder
from laconic.serving import ragged
from laconic.serving.ragged import CacheRow, RaggedDecoder
from tests.conftest import missing
from tests.models.fixtures import VARIANTS, decoder_of
from tests.models.test_kv_prefix import LENGTHS as LENGTHS_OF_HEADS
from tests.models.test_kv_prefix import batch_cache, row_cache
from tests.tolerances import FLOAT32, error

pytestmark = pytest.mark.usefixtures("unchecked")
LENGTHS = (19, 3, 11)  # of rows that are read at the same time, in chunks of different sizes
CLOSE = 1e-5  # float64 decoders: RoPE tables are float32


def random_ids(seed: int, n: int) -> Tensor:
    return torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(seed))


def read_together(
    decoder: Decoder, texts: list[Tensor], chunks: tuple[int, ...], caches: Sequence[KVCache | None] = (None,) * 3
) -> Tensor:
    """Read the texts in chunks of a size per row; rows leave as they end. Return their hidden states."""
    model, rows = RaggedDecoder(decoder), [CacheRow(decoder, cache, None, 2) for cache in caches]
    hidden, first = [list[Tensor]() for _ in texts], [0] * len(texts)
    while any(f < len(ids) for f, ids in zip(first, texts, strict=True)):
        running = [i for i, ids in enumerate(texts) if first[i] < len(ids)]
        segments = [(rows[i], texts[i][first[i] : first[i] + chunks[i]]) for i in running]
        for i, x in zip(running, model.forward(segments), strict=True):
            hidden[i].append(x)
            first[i] += len(x)
    return torch.cat([torch.cat(x) for x in hidden])


def read_alone(decoder: Decoder, texts: list[Tensor], caches: Sequence[KVCache | None]) -> Tensor:
    outputs = [decoder(decoder.embed(ids[None]), c) for ids, c in zip(texts, caches, strict=True)]
    return torch.cat([output.hidden_states[0] for output in outputs])


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.endswith(("dynamic", "longrope"))])
def test_ragged_decoder_equals_the_decoder(name: str) -> None:
    decoder, texts = decoder_of(name), [random_ids(n, n) for n in LENGTHS]
    with torch.inference_mode():
        actual, expected = read_together(decoder, texts, (4, 1, 11)), read_alone(decoder, texts, [None] * 3)
        assert error(actual, expected) <= CLOSE
        assert error(RaggedDecoder(decoder).logits(actual), decoder.logits(expected)) <= CLOSE


@pytest.mark.parametrize("name", ["llama, dynamic", "llama, longrope"])
def test_ragged_decoder_with_length_dependent_rope(name: str) -> None:
    """Frequencies depend on the length of the row at the end of each pass, as in the decoder."""
    decoder, texts = decoder_of(name), [random_ids(n, n) for n in (124, 60, 3)]
    with torch.inference_mode():
        actual = read_together(decoder, texts, (40, 7, 1))
        expected = list[Tensor]()
        for ids, size in zip(texts, (40, 7, 1), strict=True):
            cache = None
            for chunk in ids.split(size):
                output = decoder(decoder.embed(chunk[None]), cache)
                cache = output.cache
                expected.append(output.hidden_states[0])
        assert error(actual, torch.cat(expected)) <= CLOSE


@pytest.mark.parametrize("name", ["llama", "llama, windows", "opt", "mistral, window of 1"])
def test_ragged_rows_continue_caches(name: str) -> None:
    """Slots that are not valid, and positions with gaps."""
    decoder, texts = decoder_of(name), [random_ids(n, n) for n in LENGTHS]
    generator = torch.Generator().manual_seed(1)
    caches = list[KVCache | None]()
    with torch.inference_mode():
        for n in (6, 1, 9):
            mask = torch.rand(1, n, generator=generator) < 0.7
            mask[:, -1] = True
            embeds, positions = decoder.embed(random_ids(n, n)[None]), torch.arange(n)[None] * 2
            caches.append(decoder(embeds, attention_mask=mask, position_ids=positions * mask).cache)
        actual = read_together(decoder, texts, (4, 1, 11), caches)
        assert error(actual, read_alone(decoder, texts, caches)) <= CLOSE


@pytest.mark.parametrize("name", ["llama", "llama, windows"])
def test_ragged_rows_continue_kv_prefixes(name: str) -> None:
    """Memories whose heads have their own lengths, alone and as rows of a batch, beside a row without one."""
    decoder, texts = decoder_of(name), [random_ids(n, n) for n in LENGTHS]
    batch = batch_cache()
    with torch.inference_mode():
        for caches in (
            [row_cache(LENGTHS_OF_HEADS[1], 12, 1), None, row_cache(LENGTHS_OF_HEADS[0], 9, 0)],
            [batch.select_rows([row]) for row in range(3)],
        ):
            actual = read_together(decoder, texts, (4, 1, 11), caches)
            assert error(actual, read_alone(decoder, texts, caches)) <= CLOSE


def test_ragged_row_grows_and_never_reads_unfilled_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "MIN_FREE_SLOTS", 2)
    decoder, ids = decoder_of("llama"), random_ids(0, 30)
    with torch.inference_mode():
        row, model = CacheRow(decoder, None, None, 1), RaggedDecoder(decoder)
        sizes, hidden = set[int](), list[Tensor]()
        for i in ids.split(1):
            hidden += model.forward([(row, i)])
            row.buffer[:, :, row.num_filled :] = float("nan")
            sizes.add(row.num_bytes)
        assert error(torch.cat(hidden), read_alone(decoder, [ids], [None])) <= CLOSE
        assert len(sizes) > 3


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_ragged_decoder_with_packed_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not static_cache.has_onednn_packing(torch.device("cpu")):
        missing("needs a torch with oneDNN")
    monkeypatch.setattr(static_cache, "MIN_PACKED_NUMEL", 0)
    decoder, texts = decoder_of(name, torch.float32), [random_ids(n, n) for n in LENGTHS]
    with torch.inference_mode():
        actual = read_together(decoder, texts, (4, 2, 5))
        assert error(actual, read_alone(decoder, texts, [None] * 3)) <= FLOAT32


def test_ragged_decoder_in_int8() -> None:
    decoder = quantize_decoder(decoder_of("llama", torch.float32))
    texts = [random_ids(n, n) for n in LENGTHS]
    with torch.inference_mode():
        actual = read_together(decoder, texts, (4, 2, 5))
        assert error(actual, read_alone(decoder, texts, [None] * 3)) <= 0.05
