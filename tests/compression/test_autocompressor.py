"""Training of AutoCompressors: padding, rows, windows, checkpointing, and where gradients flow."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.batches import DocumentBatch, next_token_targets
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.halting.losses import mark_priced_segments
from laconic.compression.training_window import WindowRun
from laconic.interfaces import Method
from tests import tolerances
from tests.compression.documents import compressor, documents, gradients, run_step, some
from tests.models.fixtures import assert_all_close, assert_close

CELLS: tuple[dict[str, Any], ...] = (
    *(
        {"summary": g, "length_policy": length}
        for g in ("parallel", "autoregressive", "pool")
        for length in ("fixed", "nested_dropout")
    ),
    {"summary": "select"},
    {"summary": "autoregressive", "memory_policy": "replace", "length_policy": "nested_dropout"},
    {"memory_policy": "replace"},
    {"memory_policy": "budgeted", "max_memory_vectors": 6},
    {"memory_policy": "fifo", "max_memory_vectors": 5, "length_policy": "nested_dropout"},
    {"bos": "sink"},
    {"summary_init": "last_tokens", "distillation_weight": 0.5},
)
HEADS: tuple[dict[str, Any], ...] = (
    {"estimator": "ponder"},
    {"estimator": "soft", "hard_window_fraction": 0.5},
    {"estimator": "soft", "stop_position": "before", "cost_kind": "ratio", "ratio_memory_weight": 1.0},
    {"estimator": "soft", "soft_gate": "scale_vectors"},
)


def cell_id(cell: dict[str, Any]) -> str:
    return " ".join(map(str, cell.values()))


def make(cell: dict[str, Any], head: dict[str, Any] | None = None, name: str = "llama") -> AutoCompressor:
    bos_token_id = 1 if "bos" in cell else None
    return compressor(name, None if head is None else {"length_cost": 0.2, **head}, bos_token_id=bos_token_id, **cell)


def test_autocompressor_is_a_method() -> None:
    method = compressor()
    assert isinstance(method, Method)
    assert not method.resets_optimizer_state(documents())


def test_next_token_targets_skip_padding_and_unscored_tokens() -> None:
    mask = torch.tensor([[False, True, False, True, True, False]])
    scored = torch.tensor([[True, True, True, False, True, True]])
    assert next_token_targets(torch.arange(6)[None], mask, scored).tolist() == [[-100, -100, -100, 4, -100, -100]]


@pytest.mark.parametrize("cell", some(CELLS, 2), ids=cell_id)
def test_padding_changes_nothing(cell: dict[str, Any]) -> None:
    """Padding left, inside and right, and segments that a row does not have, leave loss and gradients the same."""
    method = make(cell)
    loss, result, selected = run_step(method, documents())
    padded, again, other = run_step(method, documents(pads=2))
    assert_close(padded, loss)
    if cell.get("summary") == "select":  # its bias is float32
        for name in result:
            assert_close(again[name], result[name], tolerances.FLOAT32)
    else:
        assert_all_close(again.values(), result.values())
    assert selected is not None
    assert other is not None
    assert torch.equal(selected.num_vectors, other.num_vectors)
    for a, b in zip(selected.to_list(), other.to_list(), strict=True):
        assert_close(a, b)
    assert all(g.any() for n, g in result.items() if n.startswith("summaries") and n != "summaries.c")


@pytest.mark.parametrize("name", some(["opt", "gpt2", "qwen2", "qwen3"], 4))
def test_padding_changes_nothing_in_any_family(name: str) -> None:
    for cell in ({"length_policy": "nested_dropout"}, {"summary": "autoregressive"}):
        method = make(cell, name=name)
        (loss, result, _), (padded, again, _) = run_step(method, documents()), run_step(method, documents(pads=1))
        assert_close(padded, loss)
        assert_all_close(again.values(), result.values())


@pytest.mark.parametrize("head", some(HEADS, 2), ids=cell_id)
@pytest.mark.parametrize("generator", some(["parallel", "autoregressive"], 2))
def test_padding_changes_nothing_with_learned_lengths(head: dict[str, Any], generator: str) -> None:
    method = make({"summary": generator, "length_policy": "stop_head"}, head)
    tight, wide = documents(step=9), documents(step=9, pads=1)
    (loss, result, _), (padded, again, _) = run_step(method, tight), run_step(method, wide)
    assert_close(padded, loss, tolerances.FLOAT32 if method.has_soft_lengths else tolerances.ORACLE)
    assert all(g.isfinite().all() for g in again.values())
    assert result["summaries.u"].any()


def run_rows_separately(
    method: AutoCompressor, batch: DocumentBatch, totals: dict[str, float]
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Run the rows one by one, with the denominators of all."""
    total, result = torch.zeros((), dtype=torch.float64), []
    for b in range(batch.B):
        state = None
        for piece in replace(batch.select_rows([b]), loss_denominators=totals).sequential_parts:
            step = method(piece, state)
            total = total + step.loss.detach()
            result.append(gradients(method, step.loss))
            state = None if step.state is None else step.state.detach()
    return total, result


@pytest.mark.parametrize("cell", some(CELLS, 4), ids=cell_id)
def test_rows_are_independent(cell: dict[str, Any]) -> None:
    method, batch = make(cell), documents()
    loss, result, _ = run_step(method, batch)
    total, parts = run_rows_separately(method, batch, method.loss_denominators(batch))
    assert_close(total, loss)
    assert_all_close([sum(p[n] for p in parts) for n in result], result.values())


@pytest.mark.parametrize("head", some(HEADS, 3), ids=cell_id)
def test_rows_are_independent_with_learned_lengths(head: dict[str, Any]) -> None:
    """Random lengths are keyed by the document, not by its position in the batch."""
    method, batch = make({"length_policy": "stop_head"}, head), documents(step=9)
    loss, result, _ = run_step(method, batch)
    total, parts = run_rows_separately(method, batch, method.loss_denominators(batch))
    within = tolerances.FLOAT32 if method.has_soft_lengths else tolerances.ORACLE
    assert_close(total, loss, within)
    u = sum(p["summaries.u"] for p in parts)
    assert isinstance(u, Tensor)
    assert_close(u, result["summaries.u"], within)


@pytest.mark.parametrize(
    "settings",
    [{"summary": "parallel"}, {"summary": "autoregressive"}, {"summary": "pool"}, {"summary_init": "last_tokens"}],
    ids=cell_id,
)
def test_checkpointed_segments_are_equal_bit_for_bit(settings: dict[str, Any]) -> None:
    plain, again = (
        compressor(length_policy="nested_dropout", checkpoint_segments=on, **settings).train() for on in (False, True)
    )
    batch = documents()
    (x, first, _), (y, second, _) = run_step(plain, batch), run_step(again, batch)
    assert torch.equal(x, y)
    assert all(torch.equal(first[name], second[name]) for name in first)


def segment_losses(method: AutoCompressor, batch: DocumentBatch) -> list[Tensor]:
    """Return the nats of each segment of a window."""
    course = WindowRun(
        method.segment_model,
        batch,
        method.segment_model.empty_memory(batch.B),
        method.training_phase(batch.step),
        0,
    ).run()
    return [n.sum() for n in course.segment_losses]


@pytest.mark.parametrize("generator", ["parallel", "autoregressive"])
def test_gradients_reach_every_compression_of_a_window(generator: str) -> None:
    """The loss of segment i + 1 reaches the text of segment i through its vectors; that of i does not reach them."""
    method = compressor(summary=generator)
    text = torch.tensor([[3, 4, 5, 10, 11, 12, 20, 21, 22]])
    mask = torch.ones_like(text, dtype=torch.bool)
    batch = DocumentBatch(text, mask, mask, (3, 6, 9), torch.zeros(1).long(), windows=(3, 1))
    nats = segment_losses(method, batch.sequential_parts[0])
    table = method.decoder.token_embedding.weight
    learned = method.summaries.tokens if generator == "parallel" else method.summaries.steps
    embeds = [torch.autograd.grad(n, table, retain_graph=True)[0] for n in nats]
    assert not method.decoder.config.tie_word_embeddings
    assert [bool(embeds[2][ids].any()) for ids in ([3, 4, 5], [10, 11, 12], [20, 21])] == [True] * 3
    assert not embeds[0][[10, 11, 12]].any()
    assert not embeds[1][[20, 21, 22]].any()
    reached = [torch.autograd.grad(n, learned, retain_graph=True, allow_unused=True)[0] for n in nats]
    assert reached[0] is None or not reached[0].any()
    assert all(r is not None and bool(r.any(1).all()) for r in reached[1:])


def test_gradients_do_not_cross_windows() -> None:
    """The text of the first window gets no gradient from the second; with an overlap, what is read again does."""
    for windows, learns in (((2, 0), False), ((2, 1), True)):
        method = compressor()
        text = torch.tensor([[3, 4, 5, 10, 11, 12, 20, 21, 22, 30, 31, 32]])
        mask = torch.ones_like(text, dtype=torch.bool)
        batch = DocumentBatch(text, mask, mask, (3, 6, 9, 12), torch.zeros(1).long(), windows=windows)
        pieces = batch.sequential_parts
        state = method(pieces[0]).state
        assert state is not None
        step = method(pieces[1], state.detach())
        result = torch.autograd.grad(step.loss, method.decoder.token_embedding.weight)[0]
        assert not result[[3, 4, 5]].any()
        assert bool(result[[10, 11, 12]].any()) == learns


def test_last_compression_of_a_window_has_no_graph() -> None:
    method, batch = compressor(), documents(windows=(2, 0)).sequential_parts[0]
    state = method(batch).state
    assert state is not None
    assert state.num_segments == 2
    first, last = state.vectors[:, :3], state.vectors[:, 3:]
    assert not state.vectors.requires_grad
    assert first.any()
    assert last.any()


def test_priced_segments_are_those_that_are_read() -> None:
    """Compressions before the last segment of a window are priced if later segments of the row are scored."""
    result = {}
    for penalise in ("read", "all"):
        method = make(
            {"length_policy": "stop_head"}, {"estimator": "soft", "hard_window_fraction": 0.0, "cost_on": penalise}
        )
        batch = documents(((5, 4, 5), (4, 5, 0), (3, 0, 0)), step=9)
        result[penalise] = mark_priced_segments(
            WindowRun(method.segment_model, batch, method.segment_model.empty_memory(3), "joint", 0)
        )
        assert method.loss_denominators(batch)["compressions"] == result[penalise].sum()
    assert result["read"].tolist() == [[True, True, False], [True, False, False], [False] * 3]
    assert result["all"].tolist() == [[True] * 3, [True, True, False], [True, False, False]]
