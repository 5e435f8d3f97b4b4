"""`describe_cost`: hand-computed figures, and the number of positions counted in the decoder."""

from typing import Any

import pytest
import torch

from laconic.compression.memory import SummaryMemory
from laconic.experiment.compress import CompressionJob, SummaryLength
from laconic.experiment.from_recipe.cost import describe_cost, format_bytes
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder, DecoderOutput
from tests.compression.compressors import reader

TEXT = "A stitch in time saves nine, so mend it while you may, and do not wait for the tenth of them."


def build_memory(spans: list[int], vectors: list[int], D: int = 4096) -> SummaryMemory:
    memory = SummaryMemory.empty(1, D, torch.float16)
    for n, N in zip(spans, vectors, strict=True):
        memory = memory.append(torch.ones(1, N, D).half(), torch.ones(1, N).bool(), torch.tensor([n]))
    return memory


def test_cost_llama_2_7b_float16() -> None:
    """A vector takes 8 KiB; 2,048 tokens take 1 GiB of cache, their 50 vectors 400 KiB in a file, 25 MiB of cache."""
    sizes = {"num_hidden_layers": 32, "num_key_value_heads": 32, "num_attention_heads": 32, "head_dim": 128}
    config = DecoderConfig.tiny("llama", **sizes)
    assert describe_cost(build_memory([1], [1]), config, torch.float16, 1)[0]["file_bytes"] == 8 * 2**10
    cost, lines = describe_cost(build_memory([2048], [50]), config, torch.float16, 2098)
    assert cost["text_cache_bytes"] == 2**30
    assert cost["file_bytes"] == 400 * 2**10
    assert cost["vector_cache_bytes"] == 25 * 2**20
    assert (cost["positions_saved_per_use"], cost["break_even_uses"], cost["tokens_per_vector"]) == (1998, 2, 40.96)
    assert lines[2] == "bytes      400.0 KiB of vectors; cache 25.0 MiB in place of 1.0 GiB"


def test_cost_without_savings_or_vectors() -> None:
    config = DecoderConfig.tiny("llama")
    assert describe_cost(build_memory([3], [4], 48), config, torch.float32, 7)[0]["break_even_uses"] is None
    assert "reads 1 more; never pays" in describe_cost(build_memory([3], [4], 48), config, torch.float32, 7)[1][3]
    assert "never pays" in describe_cost(build_memory([3], [3], 48), config, torch.float32, 6)[1][3]
    empty = describe_cost(build_memory([3], [0], 48), config, torch.float32, 3)[0]
    dropped = describe_cost(build_memory([3, 3, 3], [0, 0, 4], 48), config, torch.float32, 13)[1][1]
    assert dropped == "vectors    4: 1.33 per segment, 0 to 4, 2.2 tokens per vector; 2 segments left none"
    names = ("tokens_per_vector", "min_vectors", "max_vectors", "break_even_uses")
    assert tuple(empty[name] for name in names) == (None, 0, 0, 2)
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**30)] == ["0 bytes", "1,023 bytes", "1.0 KiB", "3.0 GiB"]


CELLS: list[dict[str, Any]] = [
    {}, {"length_policy": "nested_dropout", "n": 2}, {"bos": "sink"}, {"summary": "autoregressive"},
    {"summary": "autoregressive", "length_policy": "stop_head"},
    {"summary": "autoregressive", "trigger_placement": "replace"}, {"memory_policy": "replace"}, {"summary": "pool"},
    {"memory_policy": "fifo", "max_memory_vectors": 9}, {"memory_policy": "budgeted", "max_memory_vectors": 9},
    {"summary": "select"},
    {"memory_policy": "budgeted", "max_memory_vectors": 9, "summary": "autoregressive"},
]  # fmt: skip


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: " ".join(map(str, cell.values())))
def test_positions_spent_equal_decoder_positions(cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    n = cell.get("n")
    run = reader(dtype=torch.float32, **{key: value for key, value in cell.items() if key != "n"})
    num_positions, forward = 0, Decoder.forward

    def count_positions(self: Decoder, vectors: torch.Tensor, *rest: Any, **named: Any) -> DecoderOutput:
        nonlocal num_positions
        mask = named.get("attention_mask")
        num_positions += vectors.shape[1] if mask is None else int(mask.sum())
        return forward(self, vectors, *rest, **named)

    monkeypatch.setattr(Decoder, "forward", count_positions)
    job = CompressionJob(run.method, SummaryLength(num_vectors=n))
    job.finish([[run.token_stream("a text", [TEXT])]])
    assert job.positions_spent == num_positions
