"""SummaryMemory: every operation against lists of vectors per segment, and the old value unchanged."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_file import MemoryMetadata, SourceDocument
from laconic.errors import CorruptArtifactError, UsageError
from tests.models.fixtures import noise

D = 5
METADATA = MemoryMetadata(
    laconic="0.1.0",
    reader="a" * 64,
    writer="b" * 64,
    family="llama",
    layers=2,
    width=D,
    vocab=90,
    method={"compression": {"summary": "parallel", "memory_policy": "accumulate"}, "stop_head": None},
    positions="contiguous",
    bos="none",
    dtype="float32",
    tokenizer="c" * 64,
    created="2026-11-21",
)

Lengths = list[list[int]]  # vectors of each segment of each row


def make_memory(
    lengths: Lengths, seed: int = 0, *, gap: bool = False, soft: bool = False, with_metadata: bool = False
) -> SummaryMemory:
    """A memory with these lengths; `gap` puts invalid slots that hold large values around every segment."""
    B, N = len(lengths), len(lengths[0])
    memory = SummaryMemory.empty(B, D)
    for i in range(N):
        n = max(row[i] for row in lengths) + 2 * gap
        rank = torch.arange(n) - int(gap)
        valid = (rank >= 0) & (rank < torch.tensor([row[i] for row in lengths])[:, None])
        vectors = noise(100 * seed + i, B, n, D, dtype=torch.float32).masked_fill(~valid[..., None], 1e6)
        tokens = torch.tensor([7 * (i + 1) if any(row[i:]) else 0 for row in lengths])
        log_s = -noise(seed, B, n, dtype=torch.float32).abs().cumsum(1) if soft else None
        memory = memory.append(vectors, valid, tokens, log_s)
    return replace(memory, metadata=make_metadata(memory, str(seed))) if with_metadata else memory


def make_metadata(memory: SummaryMemory, name: str) -> MemoryMetadata:
    """Metadata with one document per row."""
    segments = [tuple(n for n in row if n) for row in memory.segment_tokens.tolist()]
    documents = [
        (SourceDocument(f"{name}.{b}", "d" * 64, sum(row), row),) if row else () for b, row in enumerate(segments)
    ]
    return replace(METADATA, documents=tuple(documents))


def vectors_by_segment(memory: SummaryMemory) -> list[list[Tensor]]:
    """The valid vectors of each segment of each row."""
    rows = zip(memory.vectors, memory.valid, memory.segment_ids, strict=True)
    return [[v[valid & (ids == k)] for k in range(memory.num_segments)] for v, valid, ids in rows]


def are_equal(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(torch.equal(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True))


@st.composite
def memory_lengths(draw: st.DrawFn, B: int | None = None) -> Lengths:
    rows, N = draw(st.integers(1, 4)) if B is None else B, draw(st.integers(1, 4))
    return draw(st.lists(st.lists(st.integers(0, 3), min_size=N, max_size=N), min_size=rows, max_size=rows))


def test_memory_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        make_memory([[1]]).valid = torch.ones(1, 1).bool()  # type: ignore[misc]


@given(lengths=memory_lengths(), gap=st.booleans(), soft=st.booleans())
def test_memory_append_keeps_order_and_counts(lengths: Lengths, gap: bool, soft: bool) -> None:
    memory = make_memory(lengths, gap=gap, soft=soft)
    assert memory.vectors_per_segment.tolist() == lengths
    assert memory.num_vectors.tolist() == [sum(row) for row in lengths]
    assert (memory.vectors[~memory.valid] == 0).all()
    assert (memory.segment_ids[~memory.valid] == -1).all()
    assert (memory.log_s is not None) == soft
    for row, ranks, valid in zip(lengths, memory.ranks_in_segment, memory.valid, strict=True):
        assert ranks[valid].tolist() == [t for n in row for t in range(n)]
    assert memory.num_tokens.tolist() == memory.segment_tokens.sum(1).tolist()
    assert memory.num_bytes == sum(map(sum, lengths)) * D * 4


@given(lengths=memory_lengths(), soft=st.booleans())
def test_memory_compact_keeps_valid_slots(lengths: Lengths, soft: bool) -> None:
    memory = make_memory(lengths, gap=True, soft=soft)
    compact = memory.compact()
    assert are_equal(vectors_by_segment(compact), vectors_by_segment(memory))
    assert max(map(sum, lengths)) == compact.M
    assert compact.compact().is_equal(compact)
    if soft:
        assert compact.log_s is not None
        assert memory.log_s is not None
        assert torch.equal(compact.log_s[compact.valid], memory.log_s[memory.valid])


@given(lengths=memory_lengths(), data=st.data())
def test_memory_select_rows_and_slice(lengths: Lengths, data: st.DataObject) -> None:
    memory, N = make_memory(lengths, gap=True, with_metadata=True), len(lengths[0])
    before = memory.map_tensors(torch.clone)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=4))
    start = data.draw(st.integers(0, N))
    stop = data.draw(st.integers(start, N))
    parts = vectors_by_segment(memory)
    assert are_equal(vectors_by_segment(memory.select_rows(rows)), [parts[row] for row in rows])
    assert are_equal(vectors_by_segment(memory.slice_segments(start, stop)), [row[start:stop] for row in parts])
    assert memory.slice_segments(0, N).is_equal(memory.compact())
    assert memory.is_equal(before)


@given(rows=st.integers(1, 3), data=st.data())
def test_memory_concat_segments_is_associative_and_inverse_to_slice(rows: int, data: st.DataObject) -> None:
    parts = [make_memory(data.draw(memory_lengths(rows)), seed, with_metadata=True).compact() for seed in range(3)]
    concat = SummaryMemory.concat_segments
    whole = concat(*parts)
    assert whole.is_equal(concat(concat(parts[0], parts[1]), parts[2]))
    assert whole.is_equal(concat(parts[0], concat(parts[1], parts[2])))
    ends = [0, *torch.tensor([part.num_segments for part in parts]).cumsum(0).tolist()]
    for part, start, stop in zip(parts, ends, ends[1:], strict=False):
        assert whole.slice_segments(start, stop).is_equal(part)
    for b, row in enumerate(whole.to_list()):
        assert torch.equal(row, torch.cat([part.to_list()[b] for part in parts]))


@given(a=memory_lengths(), b=memory_lengths(), soft=st.booleans())
def test_memory_concat_rows(a: Lengths, b: Lengths, soft: bool) -> None:
    one, two = make_memory(a, 0, with_metadata=True, soft=soft), make_memory(b, 1, with_metadata=True, soft=soft)
    both = SummaryMemory.concat_rows(one, two)
    assert all(torch.equal(x, y) for x, y in zip(both.to_list(), [*one.to_list(), *two.to_list()], strict=True))
    assert both.num_tokens.tolist() == [*one.num_tokens.tolist(), *two.num_tokens.tolist()]
    assert both.metadata is not None
    assert one.metadata is not None
    assert two.metadata is not None
    assert both.metadata.documents == one.metadata.documents + two.metadata.documents


@given(lengths=memory_lengths())
def test_memory_from_tensors_inverts_to_ragged(lengths: Lengths) -> None:
    memory = make_memory(lengths, gap=True, with_metadata=True)
    vectors, offsets = memory.to_ragged()
    rows = memory.to_list()
    assert torch.equal(vectors, torch.cat(rows))
    assert offsets.tolist() == [0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()]
    tensors = {"vectors": vectors, "offsets": offsets, "segment_ids": memory.segment_ids[memory.valid]}
    back = SummaryMemory.from_tensors(tensors | {"segment_tokens": memory.segment_tokens}, memory.metadata)
    assert back.is_equal(memory.compact())


@given(lengths=memory_lengths(), budget=st.integers(0, 12))
def test_memory_keep_top_vectors_keeps_prefixes_and_fills_the_budget(lengths: Lengths, budget: int) -> None:
    memory = make_memory(lengths, gap=True, soft=True)
    assert memory.log_s is not None
    top = memory.keep_top_vectors(budget)
    assert top.num_vectors.tolist() == [min(budget, sum(row)) for row in lengths]
    for row, (old, new) in enumerate(zip(vectors_by_segment(memory), vectors_by_segment(top), strict=True)):
        assert all(torch.equal(segment[: len(part)], part) for segment, part in zip(old, new, strict=True))
        dropped = memory.valid[row] & ~torch.isin(memory.vectors[row, :, 0], top.vectors[row, top.valid[row], 0])
        if dropped.any() and top.valid[row].any():
            assert top.log_s is not None
            assert top.log_s[row][top.valid[row]].min() >= memory.log_s[row][dropped].max()


@pytest.mark.parametrize(
    ("budget", "left"), [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (4, [2, 1, 1]), (5, [2, 1, 2]), (9, [3, 1, 2])]
)
def test_memory_keep_top_vectors_breaks_ties_by_rank_then_segment(budget: int, left: list[int]) -> None:
    assert make_memory([[3, 1, 2]], gap=True).keep_top_vectors(budget).vectors_per_segment.tolist() == [left]


@given(lengths=memory_lengths(), data=st.data())
def test_memory_truncate_to_keeps_the_first_of_each_segment(lengths: Lengths, data: st.DataObject) -> None:
    memory = make_memory(lengths, gap=True, soft=True)
    n = torch.tensor([[data.draw(st.integers(0, 3)) for _ in row] for row in lengths])
    hard = memory.truncate_to(n)
    assert hard.log_s is None
    assert torch.equal(hard.vectors_per_segment, torch.minimum(n, torch.tensor(lengths)))


def test_memory_overwrite_leaves_rows_that_have_ended() -> None:
    old, new = make_memory([[2], [1], [3]], 1), noise(3, 3, 2, D, dtype=torch.float32)
    valid = torch.tensor([[True, True], [False, False], [False, False]])
    memory = old.overwrite(new, valid, torch.tensor([4, 4, 0]))
    assert memory.vectors_per_segment.tolist() == [[0, 2], [0, 0], [3, 0]]
    assert torch.equal(memory.to_list()[0], new[0])
    assert torch.equal(memory.to_list()[2], old.to_list()[2])
    assert memory.num_tokens.tolist() == [11, 11, 7]
    assert old.overwrite(new, valid, torch.tensor([4, 4, 4])).M == 2


def test_memory_overwrite_rows_uses_the_last_segment() -> None:
    old, new = make_memory([[2, 3], [1, 1]], 1), noise(3, 2, 2, D, dtype=torch.float32)
    memory = old.overwrite_rows(new, torch.ones(2, 2).bool(), torch.tensor([True, False]))
    assert memory.vectors_per_segment.tolist() == [[0, 2], [1, 1]]
    assert torch.equal(memory.segment_tokens, old.segment_tokens)
    assert torch.equal(memory.to_list()[0], new[0])
    assert torch.equal(memory.to_list()[1], old.to_list()[1])


def test_memory_append_gives_hard_vectors_survival_one_beside_soft_ones() -> None:
    hard, log_s = make_memory([[2]]), torch.tensor([[-0.5]])
    memory = hard.append(torch.ones(1, 1, D), torch.ones(1, 1).bool(), torch.tensor([3]), log_s)
    assert memory.log_s is not None
    assert memory.log_s.tolist() == [[0.0, 0.0, -0.5]]


def test_memory_gradients_flow_until_detach() -> None:
    vectors, log_s = torch.ones(1, 2, D, requires_grad=True), torch.zeros(1, 2, requires_grad=True)
    memory = SummaryMemory.empty(1, D).append(vectors, torch.tensor([[True, False]]), torch.tensor([3]), log_s)
    joined = SummaryMemory.concat_segments(memory, memory).keep_top_vectors(1)
    assert joined.log_s is not None
    (joined.vectors.sum() + joined.log_s.sum()).backward()
    assert vectors.grad is not None
    assert log_s.grad is not None
    assert vectors.grad[0, 0].tolist() == [1.0] * D
    assert (vectors.grad[0, 1] == 0).all()
    assert log_s.grad.tolist() == [[1.0, 0.0]]
    assert not memory.detach().vectors.requires_grad


def test_memory_to_keeps_log_survival_in_float32() -> None:
    soft = make_memory([[1, 2]], soft=True).to(dtype=torch.float64)
    assert soft.vectors.dtype == torch.float64
    assert soft.log_s is not None
    assert soft.log_s.dtype == torch.float32
    assert soft.tensors().keys() == {"vectors", "valid", "segment_ids", "log_s", "segment_tokens"}
    assert make_memory([[1]]).tensors().keys() == {"vectors", "valid", "segment_ids", "segment_tokens"}


def with_method(memory: SummaryMemory, **settings: str) -> SummaryMemory:
    return replace(memory, metadata=replace(METADATA, method={"compression": settings}))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.select_rows([2]), UsageError, "row 2 is out of range"),
        (lambda m: m.slice_segments(1, 4), UsageError, "segments 1 to 4 are out of range"),
        (lambda m: with_method(m, memory_policy="replace").slice_segments(1, 2), UsageError, "overwrites"),
        (lambda m: m.keep_top_vectors(-1), UsageError, "-1 vectors"),
        (lambda m: SummaryMemory.concat_segments(), UsageError, "at least one"),
        (lambda m: SummaryMemory.concat_segments(m, m.select_rows([0])), UsageError, "2 and 1 texts"),
        (lambda m: SummaryMemory.concat_segments(m, make_memory([[1], [1]], soft=True)), UsageError, "soft"),
        (lambda m: SummaryMemory.concat_rows(m, SummaryMemory.empty(1, 3)), UsageError, "width 5 and .* width 3"),
        (
            lambda m: SummaryMemory.concat_segments(m, make_memory([[1], [1]], with_metadata=True)),
            UsageError,
            "has none",
        ),
        (
            lambda m: SummaryMemory.concat_segments(
                replace(m, metadata=METADATA), replace(m, metadata=replace(METADATA, reader="e" * 64))
            ),
            CorruptArtifactError,
            "differ in reader",
        ),
    ],
)
def test_memory_rejects_invalid_arguments(
    call: Callable[[SummaryMemory], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(make_memory([[1, 2], [2, 0]]))
