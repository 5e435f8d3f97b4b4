"""VL1, VL2, VL25 to VL29 and CP1 against their oracles: summary vectors and memory policies."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_policy import SegmentVectors, drop_oldest_segments, exceeds_budget
from laconic.compression.segment import replace_last_with_trigger
from laconic.compression.segment_model import SegmentModel, mask_trigger_targets
from laconic.compression.summary_tokens import SummaryParameters, last_token_embeds, pool_spans, select_top_columns
from laconic.config.methods import CompressionConfig
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from tests.compression.documents import compressor
from tests.models.fixtures import noise, small
from tests.oracles import summaries as oracle
from tests.oracles.compare import agree
from tests.oracles.summaries import MISREAD, ORACLE

MEMORY_MASK = torch.tensor([[True, False, True], [False] * 3])
TEXT_MASK = torch.tensor([[False, True, True, False, True], [True, True, True, False, False]])


def memory_of(vectors: Tensor, mask: Tensor) -> SummaryMemory:
    """Build a memory of one segment with these slots."""
    return SummaryMemory.empty(len(vectors), vectors.shape[2], vectors.dtype).append(vectors, mask, mask.sum(1))


@pytest.mark.equation("halting", "VL1")
def test_map_to_vectors() -> None:
    summaries = SummaryParameters(small("llama"), CompressionConfig(max_vectors=2, summary_map="scale"), eos_token_id=2)
    c, r = torch.tensor([1.3]).double(), float(summaries.r)

    def compute(z: Tensor, c: Tensor, r: float) -> Tensor:
        return torch.func.functional_call(Mapped(summaries), {"inside.scale": c}, (z,))

    z = noise(1, 4, summaries.width)
    agree(compute, ORACLE["VL1"], MISREAD["VL1"], z, c, r)
    assert gradcheck(lambda z, c: compute(z, c, r), (z[:1].clone().requires_grad_(), c.requires_grad_()))


class Mapped(torch.nn.Module):
    """Wrap the map of a compressor as a module."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, z: Tensor, last_embeds: Tensor | None = None) -> Tensor:
        return self.inside.map_to_vectors(z, last_embeds)


def test_map_to_vectors_at_initialization() -> None:
    """None is the identity; scale begins with the norm of token embeddings."""
    decoder, z = small("llama"), noise(1, 3, 8)
    kinds = {
        kind: SummaryParameters(decoder, CompressionConfig(max_vectors=2, summary_map=kind), eos_token_id=2)
        for kind in ("none", "scale")
    }
    assert torch.equal(kinds["none"].map_to_vectors(z), z)
    rms = kinds["scale"].map_to_vectors(z).square().mean(1).sqrt()
    torch.testing.assert_close(rms, decoder.token_embedding.weight.square().mean(1).sqrt().mean().expand(3))


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.num_bytes = max(self.num_bytes, output.nbytes)
        return output


def test_norm_of_embeddings_needs_no_float32_copy_of_a_large_table() -> None:
    decoder = Decoder(replace(DecoderConfig.tiny("llama"), vocab_size=20_000)).to(torch.bfloat16)
    table = decoder.token_embedding.weight.detach()
    with LargestTensor() as largest:
        summaries = SummaryParameters(decoder, CompressionConfig(max_vectors=2), eos_token_id=2)
    assert float(summaries.r) == float(table.float().square().mean(1).sqrt().mean())
    assert largest.num_bytes <= table.nbytes


@pytest.mark.equation("halting", "VL2")
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_generate_summaries(name: str) -> None:
    """The loop on the cache equals reading the whole sequence at each step."""
    K, summaries = 3, compressor(name, summary="autoregressive").summaries
    decoder = compressor(name, summary="autoregressive").decoder

    def compute(
        decoder: Any,
        memory: Tensor,
        memory_mask: Tensor,
        embeds: Tensor,
        mask: Tensor,
        trigger: Tensor,
        steps: Tensor,
        c: Tensor,
        r: float,
        K: int,
        zero: bool,
    ) -> Tensor:
        changed = {"inside.start": trigger, "inside.steps": steps, "inside.scale": c}
        arguments = decoder, memory_of(memory, memory_mask), embeds, mask, K
        return torch.func.functional_call(Written(summaries), changed, arguments)

    D = summaries.width
    arguments = decoder, noise(1, 2, 3, D), MEMORY_MASK, noise(2, 2, 5, D), TEXT_MASK, noise(3, D), noise(4, K, D)
    r = float(summaries.r)
    zero = name == "opt"
    agree(
        oracle.with_gradient(compute), ORACLE["VL2"], MISREAD["VL2"], *arguments, torch.tensor(1.3).double(), r, K, zero
    )


class Written(torch.nn.Module):
    """Wrap the compression of a segment as a module."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, decoder: Any, memory: SummaryMemory, embeds: Tensor, mask: Tensor, n: int) -> Tensor:
        with patch.object(decoder, "embed", lambda _: embeds):
            return SegmentModel(decoder, self.inside).compress_segment(memory, mask.long(), mask, n).summary_states


@pytest.mark.equation("halting", "VL2")
@pytest.mark.slow
def test_generate_summaries_by_finite_differences() -> None:
    decoder = small("llama")
    summaries = SummaryParameters(
        decoder, CompressionConfig(max_vectors=2, summary="autoregressive"), eos_token_id=2
    ).requires_grad_(False)
    mask, empty = TEXT_MASK[:1, :3], SummaryMemory.empty(1, 8, torch.float64)
    embeds, start, steps = noise(1, 1, 3, 8), noise(2, 8), noise(3, 2, 8)

    def compute(embeds: Tensor, start: Tensor, steps: Tensor) -> Tensor:
        arguments = decoder, empty, embeds, mask, 2
        return torch.func.functional_call(Written(summaries), {"inside.start": start, "inside.steps": steps}, arguments)

    assert gradcheck(compute, [x.requires_grad_() for x in (embeds, start, steps)], fast_mode=True)


@pytest.mark.equation("halting", "VL25")
def test_pool_spans() -> None:
    h, N = noise(1, 2, 5, 4), torch.tensor([2, 4])
    agree(oracle.pooled_with_gradient(pool_spans), ORACLE["VL25"], MISREAD["VL25"], h, TEXT_MASK, N, 4)
    assert gradcheck(lambda h: pool_spans(h, TEXT_MASK, N, 4)[0], h.requires_grad_())


@pytest.mark.equation("halting", "VL26")
def test_select_top_columns() -> None:
    r = noise(1, 2, 5)
    r[:, 3] = 9.0  # a pad in both rows
    r[0, 1] = r[0, 4]

    def compute(r: Tensor, mask: Tensor, N: Tensor, K: int) -> tuple[Tensor, Tensor]:
        columns, exists = select_top_columns(r, mask, N, K)
        return columns.masked_fill(~exists, -1).double(), exists.sum(1).double()

    agree(compute, ORACLE["VL26"], MISREAD["VL26"], r, TEXT_MASK, torch.tensor([2, 2]), 4)
    agree(compute, ORACLE["VL26"], {}, r, TEXT_MASK, torch.tensor([7, 1]), 7)


@pytest.mark.equation("halting", "VL27")
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_recompress_within_a_budget(name: str) -> None:
    method = compressor(name, memory_policy="budgeted", max_memory_vectors=6)
    vectors, exists = (
        noise(1, 3, 5, method.summaries.width),
        torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [False] * 5]),
    )
    memory = memory_of(vectors, exists)
    selected = SegmentVectors(vectors[:, :3], torch.tensor([[True] * 2 + [False], [True] * 3, [True] * 3]))
    rows = exceeds_budget(memory, selected, 6)
    assert rows.tolist() == oracle.over([5, 3, 0], [2, 3, 3], 6) == [True, False, False]
    assert rows.tolist() != oracle.over([5, 3, 0], [2, 3, 3], 6, late=True)
    assert rows.tolist() != oracle.over([5, 3, 0], [2, 3, 3], 6, slots=5)

    def compute(decoder: Any, memory_: list[Tensor], e: Tensor, rows: list[bool], zero: bool) -> tuple[Tensor, ...]:
        return tuple(method.segment_model.recompress(memory, torch.tensor(rows)).to_list())

    arguments = method.decoder, memory.to_list(), method.summaries.tokens, rows.tolist(), name == "opt"
    tuples = {n: (lambda *g, w=wrong: tuple(w(*g))) for n, wrong in MISREAD["VL27"].items()}
    agree(compute, lambda *g: tuple(ORACLE["VL27"](*g)), tuples, *arguments)
    after = method.segment_model.update_memory(memory, selected, torch.tensor([4, 4, 4]))
    assert after.num_vectors.tolist() == [5, 6, 3]
    assert after.segment_ids[0].tolist() == [0, 0, 0, 1, 1, -1]


@pytest.mark.equation("halting", "VL28")
@pytest.mark.parametrize("budget", [3, 4, 6])
def test_drop_oldest_segments(budget: int) -> None:
    rows = [[2, 1, 3], [1, 3, 2], [3, 0, 0]]  # live vectors of each block
    memory = SummaryMemory.empty(3, 2, torch.float64)
    for i in range(3):
        mask = torch.arange(3) < torch.tensor([[row[i]] for row in rows])
        memory = memory.append(noise(i, 3, 3, 2), mask, torch.tensor([5, 5, 5 * (i == 0)]))
    blocks = [[i for i in range(3) for _ in range(row[i])] for row in rows]

    def compute(blocks: list[list[int]], budget: int) -> tuple[Tensor, ...]:
        left = drop_oldest_segments(memory, budget)
        return tuple(b[alive].double() for b, alive in zip(left.segment_ids, left.valid, strict=True))

    def tupled(function: Any) -> Any:
        return lambda *arguments: tuple(torch.tensor(row).double() for row in function(*arguments))

    misreadings = {n: tupled(wrong) for n, wrong in MISREAD["VL28"].items() if budget < 6}
    agree(compute, tupled(ORACLE["VL28"]), misreadings if budget == 4 else {}, blocks, budget)


@pytest.mark.equation("halting", "VL29")
def test_add_mapped_states() -> None:
    summaries, K = compressor(summary_init="last_tokens").summaries, 3
    mask = torch.tensor([[False, True, True, True, True], [True] * 5, [False, True, False, True, False]])
    D = summaries.width
    x, z, W = noise(1, 3, 5, D), noise(2, 3, K, D), noise(3, D, D)

    def compute(x: Tensor, mask: Tensor, z: Tensor, W: Tensor, r: float, K: int) -> Tensor:
        arguments = z, last_token_embeds(x, mask, K)
        return torch.func.functional_call(Mapped(summaries), {"inside.residual": W}, arguments)

    agree(compute, ORACLE["VL29"], MISREAD["VL29"], x, mask, z, W, float(summaries.r), K)
    leaves = [x.requires_grad_(), z.requires_grad_(), W.requires_grad_()]
    assert gradcheck(lambda x, z, W: compute(x, mask, z, W, 1.0, K), leaves, fast_mode=True)


@pytest.mark.equation("halting", "CP1")
def test_replace_last_with_trigger() -> None:
    mask = torch.cat([TEXT_MASK, TEXT_MASK[:1] & False])
    targets = torch.arange(15).reshape(3, 5).masked_fill(~mask, -100)

    def compute(trigger: Tensor, embeds: Tensor, mask: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return replace_last_with_trigger(trigger, embeds, mask), mask_trigger_targets(targets, mask).double()

    agree(compute, ORACLE["CP1"], MISREAD["CP1"], noise(1, 4), noise(2, 3, 5, 4), mask, targets)
