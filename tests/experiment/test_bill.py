"""What a compression costs: figures known from elsewhere, and positions counted where they are spent."""

from typing import Any

import pytest
import torch

from laconic.compression.memory import SummaryMemory
from laconic.experiment.compress import CompressionJob, resolve_length_rule
from laconic.experiment.cost import compute_cost, format_bytes
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder, DecoderOutput
from tests.compression.compressors import reader

TEXT = "A stitch in time saves nine, so mend it while you may, and do not wait for the tenth of them."


def written(spans: list[int], vectors: list[int], D: int = 4096) -> SummaryMemory:
    memory = SummaryMemory.empty(1, D, torch.float16)
    for n, N in zip(spans, vectors, strict=True):
        memory = memory.append(torch.ones(1, N, D).half(), torch.ones(1, N).bool(), torch.tensor([n]))
    return memory


def test_llama_2_7b_in_16_bits() -> None:
    """One vector 8 KiB; 2,048 tokens hold 1 GiB of cache, their 50 vectors 400 KiB in a file and 25 MiB of cache."""
    sizes = {"num_hidden_layers": 32, "num_key_value_heads": 32, "num_attention_heads": 32, "head_dim": 128}
    config = DecoderConfig.tiny("llama", **sizes)
    assert compute_cost(written([1], [1]), config, 2, 1).file_bytes == 8 * 2**10
    found = compute_cost(written([2048], [50]), config, 2, 2098)
    assert found.text_cache_bytes == 2**30
    assert found.file_bytes == 400 * 2**10
    assert found.vector_cache_bytes == 25 * 2**20
    assert (found.positions_saved_per_use, found.break_even_uses, found.tokens_per_vector) == (1998, 2, 40.96)
    assert found.to_lines()[2] == "bytes      400.0 KiB of vectors; cache 25.0 MiB in place of 1.0 GiB"


def test_what_never_pays_and_what_is_nothing() -> None:
    config = DecoderConfig.tiny("llama")
    assert compute_cost(written([3], [4], 48), config, 4, 7).break_even_uses is None
    assert "never pays" in compute_cost(written([3], [3], 48), config, 4, 6).to_lines()[3]
    none = compute_cost(written([3], [0], 48), config, 4, 3)
    assert (none.tokens_per_vector, none.min_vectors, none.max_vectors, none.break_even_uses) == (None, 0, 0, 2)
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**30)] == ["0 bytes", "1,023 bytes", "1.0 KiB", "3.0 GiB"]


CELLS: list[dict[str, Any]] = [
    {}, {"length": "nested", "n": 2}, {"bos": "sink"}, {"generator": "self"}, {"generator": "self", "length": "stop"},
    {"generator": "self", "trigger": "replace"}, {"memory": "replace"}, {"generator": "pool"}, {"recurrent": False},
    {"memory": "fifo", "budget": 9}, {"memory": "budgeted", "budget": 9}, {"generator": "select"},
    {"memory": "budgeted", "budget": 9, "generator": "self"}, {"bos": "first"},
]  # fmt: skip


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: " ".join(map(str, cell.values())))
def test_positions_are_counted_as_they_are_spent(cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    n = cell.get("n")
    run = reader(dtype=torch.float32, **{key: value for key, value in cell.items() if key != "n"})
    passed, forward = 0, Decoder.forward

    def counted(self: Decoder, vectors: torch.Tensor, *rest: Any, **named: Any) -> DecoderOutput:
        nonlocal passed
        live = named.get("live")
        passed += vectors.shape[1] if live is None else int(live.sum())
        return forward(self, vectors, *rest, **named)

    monkeypatch.setattr(Decoder, "forward", counted)
    work = CompressionJob(run.method, resolve_length_rule(run.method, num_vectors=n))
    run.run_to_end(work, [[run.token_stream("a text", [TEXT])]])
    assert work.positions_spent == passed
