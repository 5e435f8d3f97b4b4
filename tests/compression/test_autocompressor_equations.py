"""AC1 to AC6 and AC8 to AC11 against their oracles: reading with a memory, and retrieval of passages."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.batches import DocumentBatch
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_policy import max_memory_vectors
from laconic.compression.segment_model import SegmentModel
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig
from laconic.models.decoder import Decoder
from tests.compression.documents import compressor, documents
from tests.models.fixtures import fresh, noise, small
from tests.oracles import autocompressor as oracle
from tests.oracles.autocompressor import MISREAD, ORACLE
from tests.oracles.compare import agree
from tests.reference.retrieval import choose_answer, fuse_summaries, order_passages, replug

# Misreadings of AC2 that differ only for models with a learned position table.
POSITION_TABLE_MISREADINGS = (
    "text shifted by the memory where that has no positions",
    "memory on row 0 of the table",
    "everything counted",
)
MEMORY_MASK = torch.tensor([[True, False, True, True], [False, True, True, False], [False] * 4])
TEXT_MASK = torch.tensor([[False, True, True, False, True], [True] * 5, [True, True, False, False, False]])


def segment_model(decoder: Decoder, num_vectors: int) -> SegmentModel:
    config = CompressionConfig(max_vectors=num_vectors, summary_init="normal")
    return SegmentModel(decoder, SummaryParameters(decoder, config, eos_token_id=None))


def memory_of(vectors: Tensor, mask: Tensor) -> SummaryMemory:
    """Build a memory of one segment with these slots."""
    return SummaryMemory.empty(len(vectors), vectors.shape[2], vectors.dtype).append(vectors, mask, mask.sum(1))


@pytest.mark.equation("autocompressor", "AC1")
@pytest.mark.parametrize(("generator", "trigger"), [("parallel", False), ("autoregressive", True)])
def test_max_memory_vectors(generator: Any, trigger: bool) -> None:
    reading = CompressionConfig(summary=generator, max_vectors=5)

    def compute(positions: int, window: int | None, zero: bool, bos: int, segment: int, K: int, trigger: bool) -> float:
        name = "opt" if zero else "llama"
        config = fresh(name, max_position_embeddings=positions, sliding_windows=(None, window)).config
        result = max_memory_vectors(config, reading, bos, segment)
        return float(10_000 if result is None else max(result, -1))

    misreadings = {name: wrong for name, wrong in MISREAD["AC1"].items() if trigger or "trigger" not in name}
    counts_memory = misreadings.pop("memory counted where it has no positions")
    agree(compute, ORACLE["AC1"], misreadings, 64, None, False, 1, 40, 5, trigger)
    agree(compute, ORACLE["AC1"], misreadings, 64, 50, False, 0, 30, 5, trigger)
    agree(compute, ORACLE["AC1"], {"counted": counts_memory}, 64, None, True, 1, 40, 5, trigger)
    for arguments in ((64, None, True, 1, 64, 5, trigger), (64, None, False, 0, 62, 5, trigger)):
        assert compute(*arguments) == ORACLE["AC1"](*arguments) == -1


@pytest.mark.equation("autocompressor", "AC2")
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_forward_segment(name: str) -> None:
    """Rows with padding in memory and text, one of them without any memory."""
    decoder, zero = fresh(name).double(), name == "opt"

    def compute(
        decoder: Any, memory: Tensor, memory_mask: Tensor, embeds: Tensor, mask: Tensor, e: Tensor, zero: bool
    ) -> Any:
        before = memory_of(memory, memory_mask)
        states = segment_model(decoder, 3).forward_segment(before, embeds, mask, e)
        return states.summary_states, states.text_states.masked_fill(~mask[..., None], 0.0)

    misreadings = {n: wrong for n, wrong in MISREAD["AC2"].items() if zero or n not in POSITION_TABLE_MISREADINGS}
    D = decoder.config.hidden_size
    arguments = decoder, noise(1, 3, 4, D), MEMORY_MASK, noise(2, 3, 5, D), TEXT_MASK, noise(3, 3, D), zero
    agree(oracle.differentiated(compute), ORACLE["AC2"], misreadings, *arguments)


@pytest.mark.equation("autocompressor", "AC2")
@pytest.mark.slow
def test_forward_segment_by_finite_differences() -> None:
    decoder, memory_mask, mask = small("opt"), MEMORY_MASK[:1, :3], TEXT_MASK[:1, :3]
    leaves = [noise(i, *shape).requires_grad_() for i, shape in enumerate(((1, 3, 8), (1, 3, 8), (2, 8)))]

    def compute(memory: Tensor, embeds: Tensor, e: Tensor) -> Tensor:
        before = memory_of(memory, memory_mask)
        return segment_model(decoder, 2).forward_segment(before, embeds, mask, e).summary_states

    assert gradcheck(compute, leaves)


def ragged(x: Tensor, mask: Tensor) -> list[Tensor]:
    return [row[exists] for row, exists in zip(x, mask, strict=True)]


@pytest.mark.equation("autocompressor", "AC3")
@pytest.mark.equation("autocompressor", "AC4")
@pytest.mark.parametrize("id", ["AC3", "AC4"])
def test_memory_append_and_overwrite(id: str) -> None:
    old, new, exists = noise(1, 3, 4, 5), noise(2, 3, 5, 5), TEXT_MASK.clone()
    exists[1] = False  # a document that has ended

    def after(x: Tensor, y: Tensor) -> SummaryMemory:
        memory = memory_of(x, MEMORY_MASK)
        return (memory.append if id == "AC3" else memory.overwrite)(y, exists, exists.sum(1))

    def compute(memory: list[Tensor], sigma: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(after(old, new).to_list())

    cases = {"AC3": (ORACLE["AC3"], MISREAD["AC3"]), "AC4": (ORACLE["AC4"], MISREAD["AC4"])}  # the ledger reads these
    agree(compute, *cases[id], ragged(old, MEMORY_MASK), ragged(new, exists))
    assert gradcheck(lambda x, y: after(x, y).to_ragged()[0], (old.requires_grad_(), new.requires_grad_()))


def rows_of(batch: DocumentBatch) -> list[Any]:
    """Return the ids of each segment, the segments of each window, and how many of them are read again."""
    pieces = batch.sequential_parts
    windows = [[piece.first_segment + i for i in range(len(piece.segment_ends))] for piece in pieces]
    again = [batch.windows[1] if piece.first_segment else 0 for piece in pieces]
    ids = [
        [batch.input_ids[b, s][batch.attention_mask[b, s]].tolist() for s in batch.segment_slices]
        for b in range(batch.B)
    ]
    return [(text, windows, again) for text in ids]


@pytest.mark.medium
@pytest.mark.equation("autocompressor", "AC5")
@pytest.mark.parametrize("memory", ["accumulate", "replace"])
@pytest.mark.parametrize(("name", "windows"), [("llama", (3, 1)), ("opt", (2, 0))])
def test_autocompressor_loss(name: str, windows: tuple[int, int], memory: Any) -> None:
    """Value and gradients with several windows, padding anywhere, and rows that end."""
    batch = documents(pads=1, windows=windows)
    method = compressor(name, memory_policy=memory)
    method.decoder.requires_grad_(True)
    e = method.summaries.tokens
    batch = replace(batch, loss_denominators=method.loss_denominators(batch))

    def compute(*_: Any) -> Tensor:
        total, state = torch.zeros((), dtype=torch.float64), None
        for piece in batch.sequential_parts:
            step = method(piece, state)
            total, state = total + step.loss, None if step.state is None else step.state.detach()
        return total

    indistinguishable = {"what is read again scored again"} if windows[1] == 0 else set[str]()
    indistinguishable |= {"newest block first"} if memory == "replace" else set[str]()
    misreadings = {n: wrong for n, wrong in MISREAD["AC5"].items() if n not in indistinguishable}
    arguments = method.decoder, rows_of(batch), e, name == "opt", memory == "replace"
    agree(oracle.with_gradient(compute), ORACLE["AC5"], misreadings, *arguments, margin=1e-5)


@pytest.mark.equation("autocompressor", "AC5")
def test_segment_loss_by_finite_differences() -> None:
    decoder = small("llama", vocab_size=7)
    model = SegmentModel(decoder, compressor(sizes={"vocab_size": 7}).summaries)
    targets = torch.tensor([[3, -100, 5, 1], [-100, 2, -100, 4]])
    hidden = noise(1, 2, 4, 8).requires_grad_()
    assert gradcheck(lambda h: model.segment_loss(h, targets).nll, hidden)


@pytest.mark.equation("autocompressor", "AC6")
def test_memory_detach_between_windows() -> None:
    def compute(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        memory = memory_of(x, torch.ones(x.shape[:2], dtype=torch.bool))
        value = (memory.detach().vectors * y).sum() + memory.vectors.square().sum()
        return value.detach(), torch.autograd.grad(value, x)[0]

    agree(compute, ORACLE["AC6"], MISREAD["AC6"], noise(1, 2, 3, 4), noise(2, 2, 3, 4))


@pytest.mark.equation("autocompressor", "AC8")
def test_fuse_summaries() -> None:
    agree(fuse_summaries, ORACLE["AC8"], MISREAD["AC8"], -3 * noise(1, 9).abs(), -3 * noise(2, 9).abs())


@pytest.mark.equation("autocompressor", "AC9")
def test_replug() -> None:
    agree(replug, ORACLE["AC9"], MISREAD["AC9"], -3 * noise(1, 4, 6).abs(), 2 * noise(2, 4))


@pytest.mark.equation("autocompressor", "AC10")
def test_order_passages() -> None:
    passages, query = noise(1, 6, 3, 4) * torch.arange(1, 7)[:, None, None], noise(2, 3, 4)
    passages[4] = passages[1]
    agree(lambda p, q: order_passages(p, q).double(), ORACLE["AC10"], MISREAD["AC10"], passages, query)


@pytest.mark.equation("autocompressor", "AC11")
@pytest.mark.parametrize("calibrated", [True, False])
def test_choose_answer(calibrated: bool) -> None:
    nats, tokens = 9 * noise(1, 40, 3).abs(), torch.tensor([[1, 2, 5]]).expand(40, 3)
    without = 9 * noise(2, 40, 3).abs() if calibrated else None
    misreadings = {n: wrong for n, wrong in MISREAD["AC11"].items() if calibrated or n != "calibration added"}
    agree(lambda *x: choose_answer(*x).double(), ORACLE["AC11"], misreadings, nats, tokens, without)
