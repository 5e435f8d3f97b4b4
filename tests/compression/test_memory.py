"""A memory as a value: every operation against lists of blocks, and the old value as it was."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_file import MemoryMetadata, SourceDocument
from laconic.errors import CorruptArtifactError, UsageError
from tests.core.readings import noise

D = 5
ABOUT = MemoryMetadata(
    laconic="0.1.0", reader="a" * 64, writer="b" * 64, family="llama", layers=2, width=D, vocab=90,
    method={"compression": {"summary": "parallel", "memory_policy": "accumulate"}, "head": None},
    positions="contiguous", bos="none", recurrent=True, dtype="float32", tokenizer="c" * 64, created="2026-11-21",
)  # fmt: skip

Lengths = list[list[int]]  # of each block of each row


def made(
    lengths: Lengths, seed: int = 0, *, gap: bool = False, soft: bool = False, known: bool = False
) -> SummaryMemory:
    """A memory whose blocks have these lengths; `gap` puts dead slots that hold rubbish before and behind them."""
    B, N = len(lengths), len(lengths[0])
    memory = SummaryMemory.empty(B, D)
    for i in range(N):
        n = max(row[i] for row in lengths) + 2 * gap
        at = torch.arange(n) - int(gap)
        live = (at >= 0) & (at < torch.tensor([row[i] for row in lengths])[:, None])
        vectors = noise(100 * seed + i, B, n, D, dtype=torch.float32).masked_fill(~live[..., None], 1e6)
        tokens = torch.tensor([7 * (i + 1) if any(row[i:]) else 0 for row in lengths])
        log_s = -noise(seed, B, n, dtype=torch.float32).abs().cumsum(1) if soft else None
        memory = memory.append(vectors, live, tokens, log_s)
    return replace(memory, metadata=described(memory, str(seed))) if known else memory


def described(memory: SummaryMemory, name: str) -> MemoryMetadata:
    """Provenance of one document a row."""
    spans = [[n for n in row if n] for row in memory.segment_tokens.tolist()]
    rows = [
        (SourceDocument(f"{name}.{b}", "d" * 64, sum(row), tuple(row)),) if row else () for b, row in enumerate(spans)
    ]
    return replace(ABOUT, documents=tuple(rows))


def blocks(memory: SummaryMemory) -> list[list[Tensor]]:
    """The live vectors of each block of each row."""
    rows = zip(memory.vectors, memory.valid, memory.segment_ids, strict=True)
    return [[v[live & (block == k)] for k in range(memory.num_segments)] for v, live, block in rows]


def same_blocks(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(torch.equal(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True))


@st.composite
def lengths(draw: st.DrawFn, B: int | None = None) -> Lengths:
    rows, N = draw(st.integers(1, 4)) if B is None else B, draw(st.integers(1, 4))
    return draw(st.lists(st.lists(st.integers(0, 3), min_size=N, max_size=N), min_size=rows, max_size=rows))


def test_a_memory_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        made([[1]]).valid = torch.ones(1, 1).bool()  # type: ignore[misc]


@given(asked=lengths(), gap=st.booleans(), soft=st.booleans())
def test_what_is_appended_is_there_in_order(asked: Lengths, gap: bool, soft: bool) -> None:
    memory = made(asked, gap=gap, soft=soft)
    assert memory.vectors_per_segment.tolist() == asked
    assert memory.num_vectors.tolist() == [sum(row) for row in asked]
    assert (memory.vectors[~memory.valid] == 0).all()
    assert (memory.segment_ids[~memory.valid] == -1).all()
    assert (memory.log_s is not None) == soft
    for row, ranks, live in zip(asked, memory.ranks_in_segment, memory.valid, strict=True):
        assert ranks[live].tolist() == [t for n in row for t in range(n)]
    assert memory.num_tokens.tolist() == memory.segment_tokens.sum(1).tolist()
    assert memory.num_bytes == sum(map(sum, asked)) * D * 4


@given(asked=lengths(), soft=st.booleans())
def test_packing_keeps_what_is_live(asked: Lengths, soft: bool) -> None:
    memory = made(asked, gap=True, soft=soft)
    packed = memory.compact()
    assert same_blocks(blocks(packed), blocks(memory))
    assert max(map(sum, asked)) == packed.M
    assert packed.compact().is_equal(packed)
    if soft:
        assert packed.log_s is not None
        assert memory.log_s is not None
        assert torch.equal(packed.log_s[packed.valid], memory.log_s[memory.valid])


@given(asked=lengths(), data=st.data())
def test_rows_blocks_and_first_vectors(asked: Lengths, data: st.DataObject) -> None:
    memory, N = made(asked, gap=True, known=True), len(asked[0])
    before = memory.map_tensors(torch.clone)
    rows = data.draw(st.lists(st.integers(0, len(asked) - 1), min_size=1, max_size=4))
    start = data.draw(st.integers(0, N))
    stop, n = data.draw(st.integers(start, N)), data.draw(st.integers(0, 3))
    parts = blocks(memory)
    assert same_blocks(blocks(memory.select_rows(rows)), [parts[row] for row in rows])
    assert same_blocks(blocks(memory.slice_segments(start, stop)), [row[start:stop] for row in parts])
    assert same_blocks(blocks(memory.truncate_segments(n)), [[block[:n] for block in row] for row in parts])
    assert memory.slice_segments(0, N).is_equal(memory.compact())
    assert memory.is_equal(before)


@given(rows=st.integers(1, 3), data=st.data())
def test_joining_is_associative_and_slices_are_the_parts(rows: int, data: st.DataObject) -> None:
    parts = [made(data.draw(lengths(rows)), seed, known=True).compact() for seed in range(3)]
    whole = SummaryMemory.concat_segments(*parts)
    assert whole.is_equal(SummaryMemory.concat_segments(SummaryMemory.concat_segments(parts[0], parts[1]), parts[2]))
    assert whole.is_equal(SummaryMemory.concat_segments(parts[0], SummaryMemory.concat_segments(parts[1], parts[2])))
    ends = [0, *torch.tensor([part.num_segments for part in parts]).cumsum(0).tolist()]
    for part, start, stop in zip(parts, ends, ends[1:], strict=False):
        assert whole.slice_segments(start, stop).is_equal(part)
    for b, row in enumerate(whole.to_list()):
        assert torch.equal(row, torch.cat([part.to_list()[b] for part in parts]))


@given(a=lengths(), b=lengths(), soft=st.booleans())
def test_rows_of_several_memories_are_one_batch(a: Lengths, b: Lengths, soft: bool) -> None:
    one, two = made(a, 0, known=True, soft=soft), made(b, 1, known=True, soft=soft)
    both = SummaryMemory.concat_rows(one, two)
    ragged = [*one.to_list(), *two.to_list()]
    assert all(torch.equal(x, y) for x, y in zip(both.to_list(), ragged, strict=True))
    assert both.num_tokens.tolist() == [*one.num_tokens.tolist(), *two.num_tokens.tolist()]
    assert both.metadata is not None
    assert one.metadata is not None
    assert two.metadata is not None
    assert both.metadata.documents == one.metadata.documents + two.metadata.documents


@given(asked=lengths())
def test_flat_and_back(asked: Lengths) -> None:
    memory = made(asked, gap=True, known=True)
    vectors, offsets = memory.to_ragged()
    ragged = memory.to_list()
    assert torch.equal(vectors, torch.cat(ragged))
    assert offsets.tolist() == [0, *torch.tensor([len(row) for row in ragged]).cumsum(0).tolist()]
    back = SummaryMemory.from_ragged(
        vectors, offsets, memory.segment_ids[memory.valid], memory.segment_tokens, memory.metadata
    )
    assert back.is_equal(memory.compact())


@given(asked=lengths(), budget=st.integers(0, 12))
def test_a_budget_keeps_prefixes_and_exactly_so_many(asked: Lengths, budget: int) -> None:
    memory = made(asked, gap=True, soft=True)
    assert memory.log_s is not None
    kept = memory.keep_top_vectors(budget)
    assert kept.num_vectors.tolist() == [min(budget, sum(row)) for row in asked]
    for row, (had, has) in enumerate(zip(blocks(memory), blocks(kept), strict=True)):
        assert all(torch.equal(block[: len(part)], part) for block, part in zip(had, has, strict=True))
        out = memory.valid[row] & ~torch.isin(memory.vectors[row, :, 0], kept.vectors[row, kept.valid[row], 0])
        if out.any() and kept.valid[row].any():
            assert kept.log_s is not None
            assert kept.log_s[row][kept.valid[row]].min() >= memory.log_s[row][out].max()


@pytest.mark.parametrize(
    ("budget", "left"), [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (4, [2, 1, 1]), (5, [2, 1, 2]), (9, [3, 1, 2])]
)
def test_ties_of_a_budget_go_to_the_earlier_vector_then_to_the_earlier_block(budget: int, left: list[int]) -> None:
    assert made([[3, 1, 2]], gap=True).keep_top_vectors(budget).vectors_per_segment.tolist() == [left]


@given(asked=lengths(), data=st.data())
def test_hardening_keeps_the_first_of_each_block(asked: Lengths, data: st.DataObject) -> None:
    memory = made(asked, gap=True, soft=True)
    n = torch.tensor([[data.draw(st.integers(0, 3)) for _ in row] for row in asked])
    hard = memory.truncate_to(n)
    assert hard.log_s is None
    assert torch.equal(hard.vectors_per_segment, torch.minimum(n, torch.tensor(asked)))


def test_replacing_leaves_rows_that_have_ended_and_may_write_nothing() -> None:
    old, new = made([[2], [1], [3]], 1), noise(3, 3, 2, D, dtype=torch.float32)
    live = torch.tensor([[True, True], [False, False], [False, False]])
    got = old.overwrite(new, live, torch.tensor([4, 4, 0]))
    assert got.vectors_per_segment.tolist() == [[0, 2], [0, 0], [3, 0]]
    assert torch.equal(got.to_list()[0], new[0])
    assert torch.equal(got.to_list()[2], old.to_list()[2])
    assert got.num_tokens.tolist() == [11, 11, 7]
    assert old.overwrite(new, live, torch.tensor([4, 4, 4])).M == 2


def test_condensing_is_the_last_block_and_no_segment_more() -> None:
    old, new = made([[2, 3], [1, 1]], 1), noise(3, 2, 2, D, dtype=torch.float32)
    got = old.overwrite_rows(new, torch.ones(2, 2).bool(), torch.tensor([True, False]))
    assert got.vectors_per_segment.tolist() == [[0, 2], [1, 1]]
    assert torch.equal(got.segment_tokens, old.segment_tokens)
    assert torch.equal(got.to_list()[0], new[0])
    assert torch.equal(got.to_list()[1], old.to_list()[1])


def test_soft_beside_hard_has_survival_one_where_it_was_written_later() -> None:
    hard, log_s = made([[2]]), torch.tensor([[-0.5]])
    got = hard.append(torch.ones(1, 1, D), torch.ones(1, 1).bool(), torch.tensor([3]), log_s)
    assert got.log_s is not None
    assert got.log_s.tolist() == [[0.0, 0.0, -0.5]]


def test_gradients_reach_what_was_written_and_end_at_detach() -> None:
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


def test_types_and_names() -> None:
    soft = made([[1, 2]], soft=True).to(dtype=torch.float64)
    assert soft.vectors.dtype == torch.float64
    assert soft.log_s is not None
    assert soft.log_s.dtype == torch.float32
    assert soft.tensors().keys() == {"vectors", "live", "block", "log_s", "spans"}
    assert made([[1]]).tensors().keys() == {"vectors", "live", "block", "spans"}


@pytest.mark.parametrize(
    ("do", "error", "says"),
    [
        (lambda m: m.take([2]), UsageError, "take: memory has 2 rows, asked was row 2; rows count from 0"),
        (lambda m: m.slice(1, 4), UsageError, r"slice\(1, 4\): memory has 2 blocks, counted from 0"),
        (lambda m: m.crop(-1), UsageError, r"crop\(-1\): give 0 or more"),
        (lambda m: m.fit(-1), UsageError, r"fit\(-1\): give 0 or more"),
        (lambda m: SummaryMemory.concat_segments(), UsageError, "join: no memory is given"),
        (lambda m: SummaryMemory.concat_segments(m, m.take([0])), UsageError, "of 1 rows to one of 2; take the rows that belong together"),
        (lambda m: SummaryMemory.concat_segments(m, made([[1], [1]], soft=True)), UsageError, "a soft memory with a hard one; harden it"),
        (lambda m: SummaryMemory.concat_rows(m, SummaryMemory.empty(1, 3)), UsageError, "width 3 to vectors of 5; take memories of one model"),
        (lambda m: SummaryMemory.concat_segments(m, made([[1], [1]], known=True)), CorruptArtifactError, "join: one memory has no provenance; give"),
        (
            lambda m: replace(m, provenance=replace(ABOUT, method={"compression": {"memory_policy": "replace"}})).slice(1, 2),
            UsageError,
            r"slice\(1, 2\): the last block of this memory took the others' place; take it whole",
        ),
        (
            lambda m: replace(m, provenance=replace(ABOUT, method={"compression": {"summary": "pool"}})).crop(2),
            UsageError,
            r"crop\(2\): vectors of generator pool stand each for a part of the text; compress with --vectors 2",
        ),
        (
            lambda m: SummaryMemory.concat_segments(
                replace(m, provenance=ABOUT), replace(m, provenance=replace(ABOUT, reader="e" * 64))
            ),
            CorruptArtifactError,
            "join: memories of another reader, eeee…ee beside aaaa…aa; compress both with one run",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(do: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        do(made([[1, 2], [2, 0]]))  # type: ignore[operator]
