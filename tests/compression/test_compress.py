"""Compressing and reading a segment: rows, stops, invalid slots, concatenation, generation from a memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.halting.inference import StopRule
from laconic.compression.memory import SummaryMemory
from laconic.errors import UsageError
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from tests import tolerances
from tests.compression.documents import compressor, documents, some
from tests.models.fixtures import assert_close, noise

BATCH = documents(((5, 4, 5), (4, 5, 2), (3, 0, 0)), pads=1)


def segments_of(rows: slice | int = slice(None)) -> list[tuple[Tensor, Tensor]]:
    """Return ids and mask of each segment, for all rows or one."""
    rows = slice(rows, rows + 1) if isinstance(rows, int) else rows
    return [(BATCH.input_ids[rows, s], BATCH.attention_mask[rows, s]) for s in BATCH.segment_slices]


def compressed(
    method: AutoCompressor, rows: slice | int = slice(None), settings: StopRule | None = None
) -> SummaryMemory:
    memory: SummaryMemory | None = None
    for text, mask in segments_of(rows):
        if not isinstance(rows, int) or mask.any():
            memory = method.compress(text, mask, memory, settings)
    assert memory is not None
    return memory


CELLS: tuple[dict[str, Any], ...] = (
    {"summary": "parallel"},
    {"summary": "parallel", "length_policy": "stop_head"},
    {"summary": "autoregressive", "length_policy": "stop_head", "memory_policy": "replace"},
    {"summary": "autoregressive", "length_policy": "stop_head", "memory_policy": "budgeted", "max_memory_vectors": 6},
    {"summary": "pool", "length_policy": "classifier", "memory_policy": "fifo", "max_memory_vectors": 5},
    {"summary": "select", "length_policy": "classifier"},
    {"summary": "parallel", "length_policy": "classifier"},
)


def make(cell: dict[str, Any], name: str = "llama", **more: Any) -> AutoCompressor:
    learned = cell.get("length_policy") in ("stop_head", "classifier")
    return compressor(name, {"length_cost": 0.1, "initial_mean_fraction": 0.6, **more} if learned else None, **cell)


@pytest.mark.parametrize("name", some(["llama", "opt"], 2))
@pytest.mark.parametrize("cell", some(CELLS, 2), ids=lambda c: " ".join(map(str, c.values())))
def test_compress_batch_equals_its_rows(cell: dict[str, Any], name: str) -> None:
    """Rows with different lengths and stops, one of which has ended, give the same memory and states as alone."""
    method, question = make(cell, name), torch.tensor([[7, 8, 9, 10]])
    together = compressed(method)
    states = method.read_text(question.expand(3, -1), None, together)
    for b in range(3):
        single = compressed(method, b)
        assert_close(together.to_list()[b], single.to_list()[0])
        assert_close(states[b], method.read_text(question, None, single)[0])


@pytest.mark.parametrize("generator", ["parallel", "autoregressive"])
def test_compress_stops_each_row_on_its_own(generator: str) -> None:
    """With lengths 1 and 3, a row that has stopped keeps the vectors it would have alone."""
    method = make({"summary": generator, "length_policy": "stop_head"})
    text = torch.tensor([[4, 5, 6, 7], [8, 9, 10, 11]])
    settings = StopRule("sample", uniforms=torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 1.0]]).double())
    memory = method.compress(text, rule=settings)
    assert memory.num_vectors.tolist() == [1, 3]
    for b, n in ((0, 1), (1, 3)):
        alone = method.compress(text[b : b + 1], rule=StopRule("fixed", num_vectors=n))
        assert_close(memory.to_list()[b], alone.to_list()[0])


def test_compress_loop_ends_when_all_rows_have_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make({"summary": "autoregressive", "length_policy": "stop_head"})
    calls, inner = [], method.decoder.forward

    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return inner(*arguments, **named)

    monkeypatch.setattr(method.decoder, "forward", counting)
    for stops, passes in (([0.0, 0.0], 2), ([1.0, 0.0], 3), ([1.0, 1.0], 4)):
        calls.clear()
        draws = torch.tensor([[stops[0], stops[1], 0.0]]).double().expand(2, -1)
        method.compress(torch.tensor([[4, 5, 6], [7, 8, 9]]), rule=StopRule("sample", uniforms=draws))
        assert len(calls) == passes


@pytest.mark.parametrize("generator", ["parallel", "autoregressive"])
def test_compress_first_vectors_do_not_depend_on_the_rest(generator: str) -> None:
    method, text = make({"summary": generator, "length_policy": "nested_dropout"}), torch.tensor([[4, 5, 6, 7]])
    longest = method.compress(text)
    assert longest.num_vectors.tolist() == [3]
    for n in (1, 2):
        assert_close(method.compress(text, rule=StopRule("fixed", num_vectors=n)).vectors, longest.vectors[:, :n])


@pytest.mark.parametrize("soft", [False, True])
def test_read_text_ignores_invalid_slots(soft: bool) -> None:
    method = compressor()
    D, mask = (
        method.summaries.width,
        torch.tensor([[True, False, True, True, False], [False, True, True, False, False]]),
    )
    log_s = -noise(3, 2, 5).abs().float() if soft else None
    memory = method.segment_model.empty_memory(2).append(noise(1, 2, 5, D), mask, torch.tensor([4, 4]), log_s)
    memory = memory.append(noise(2, 2, 5, D), mask.flip(1), torch.tensor([4, 4]), log_s)
    text = torch.tensor([[4, 5, 6], [7, 8, 9]])
    odd = replace(memory, vectors=memory.vectors.masked_fill(~memory.valid[..., None], 1e6))
    within = tolerances.FLOAT32 if soft else tolerances.ORACLE
    assert_close(method.read_text(text, None, odd), method.read_text(text, None, memory), within)
    assert_close(method.read_text(text, None, memory.compact()), method.read_text(text, None, memory), within)


def test_read_text_gate_of_zero_removes_slots_without_positions() -> None:
    """Survival 1 for the first slots and almost 0 for the others reads like the hard memory."""
    method = compressor("opt")
    D, lengths = method.summaries.width, torch.tensor([[1], [2]])
    vectors, every = noise(1, 2, 3, D), torch.ones(2, 3, dtype=torch.bool)
    first = torch.arange(3) < lengths
    log_s = torch.zeros(2, 3).masked_fill(~first, -200.0)
    tokens, text = torch.tensor([4, 4]), torch.tensor([[4, 5, 6], [7, 8, 9]])
    soft = method.segment_model.empty_memory(2).append(vectors, every, tokens, log_s)
    hard = method.segment_model.empty_memory(2).append(vectors, first, tokens)
    assert_close(method.read_text(text, None, soft), method.read_text(text, None, hard))
    assert torch.equal(soft.truncate_to(lengths).vectors, hard.compact().vectors)
    contiguous = compressor()
    far = contiguous.read_text(text, None, soft) - contiguous.read_text(text, None, hard)
    assert far.abs().max() > 1e-3  # the text follows K slots in one and N in the other


@pytest.mark.parametrize(("name", "bos"), [("llama", "sink"), ("llama", "none"), ("opt", "sink"), ("opt", "none")])
def test_generate_continues_from_a_memory(name: str, bos: str) -> None:
    """Each id generated from the memory's cache is the most likely one after [memory; prompt; ids so far]."""
    method = compressor(name, bos=bos, bos_token_id=1)
    memory = method.compress(
        torch.tensor([[4, 5, 6, 7], [8, 9, 10, 11]]), torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    )
    memory = memory.mask_slots(torch.tensor([[True, True, True], [True, False, True]]))
    before, prompts = method.build_prompt(memory), [[20, 21, 22], [23, 24]]
    with torch.inference_mode():
        state = method.decoder(
            before.inputs_embeds, attention_mask=before.attention_mask, position_ids=before.position_ids
        ).cache
    config = GenerationConfig(max_tokens=4, eos_token_ids=())
    result = generate(method.decoder, input_ids=prompts, state=state, config=config)
    for b, prompt in enumerate(prompts):
        row = list(prompt)
        for got in result[b].token_ids:
            hidden = method.read_text(torch.tensor([row]), None, memory.select_rows([b]))
            assert int(method.decoder.logits(hidden[:, -1]).argmax()) == got
            row.append(got)


def test_nll_equals_the_training_loss() -> None:
    method, batch = compressor(), documents(((5, 4), (4, 5)), windows=(2, 0))
    piece = batch.sequential_parts[0]
    first, second = ((piece.input_ids[:, s], piece.attention_mask[:, s]) for s in piece.segment_slices)
    memory = method.compress(*first)
    whole = method(piece).metrics["nats"] * method.loss_denominators(batch)["scored"]
    scored = torch.ones_like(second[1])
    joint = method.nll(second[0], second[1], scored, memory) + method.nll(first[0], first[1], piece.loss_mask[:, :5])
    hidden = method.read_text(*first)
    last = method.decoder.logits(hidden)[torch.arange(2), first[1].sum(1) - 1].log_softmax(-1)
    at = second[1].long().argmax(1)
    joint = joint - last[torch.arange(2), second[0][torch.arange(2), at]]
    assert_close(joint.sum(), whole)


def test_adapter_scope_write_reads_with_the_base_model() -> None:
    """Text is read by the base model; vectors are written with the adapter."""
    from contextlib import contextmanager

    method = compressor()
    norm = next(p for n, p in method.decoder.named_parameters() if n.endswith("norm.weight") and "layers" not in n)

    @contextmanager
    def base() -> Any:
        norm.data *= 2  # stands for an adapter that is switched off
        try:
            yield
        finally:
            norm.data /= 2

    reading = method.config.model_copy(update={"adapter_scope": "write"})
    method.summaries.config = reading
    other = AutoCompressor(method.decoder, method.summaries, reading, total_steps=1, base_model_context=base)
    text, plain = torch.tensor([[4, 5, 6, 7]]), compressor()
    assert torch.equal(other.compress(text).vectors, plain.compress(text).vectors)
    assert_close(other.read_text(text), 2 * plain.read_text(text))
    batch = documents(((4, 4),), windows=(2, 0))
    assert other(batch).loss.isfinite()
    assert not torch.equal(other(batch).loss, plain(batch).loss)


def test_forward_of_a_frozen_decoder_has_zero_gradients_where_no_segment_reads_a_summary() -> None:
    method = compressor()
    method.decoder.requires_grad_(False)
    method(documents(((4,),), windows=(2, 0))).loss.backward()
    gradients = [p.grad for p in method.parameters() if p.requires_grad]
    assert gradients
    assert all(g is not None and not g.any() for g in gradients)


def test_read_text_needs_no_room_for_summary_positions() -> None:
    method = compressor(sizes={"max_position_embeddings": 10})
    memory = method.compress(torch.tensor([[4, 5, 6, 7]]))
    assert method.read_text(torch.tensor([[4, 5, 6, 7, 8, 9, 10]]), None, memory).shape[1] == 7
    with pytest.raises(UsageError, match="3 memory vectors, 8 text tokens and 0 summary positions"):
        method.read_text(torch.tensor([[4, 5, 6, 7, 8, 9, 10, 11]]), None, memory)


def test_read_text_alone_may_exceed_the_sliding_window() -> None:
    method, text = compressor(sizes={"sliding_windows": (None, 8)}), torch.arange(4, 16)[None]
    assert method.read_text(text).shape[1] == 12
    with pytest.raises(UsageError, match="a sliding window of 8"):
        method.read_text(text, None, method.compress(text[:, :4]))


def test_max_segments() -> None:
    assert compressor(sizes={"max_position_embeddings": 64}).max_segments(40) == 8  # 40 + 3 + 7 * 3 = 64
    assert compressor(sizes={"max_position_embeddings": 64}).max_segments(62) == 0
    assert compressor(sizes={"max_position_embeddings": 64}, memory_policy="replace").max_segments(40) is None
    assert compressor(sizes={"max_position_embeddings": 64}).max_segments(40, 1) == 22  # 40 + 3 + 21 * 1 = 64
    budgeted = compressor(sizes={"max_position_embeddings": 64}, memory_policy="budgeted", max_memory_vectors=22)
    assert budgeted.max_segments(40) is None  # 40 + 3 + 7 * 3 = 64, and no more than 7 * 3 of 22 are kept
    assert compressor(sizes={"max_position_embeddings": 64}).max_segment_tokens == 61
    assert compressor("opt", sizes={"max_position_embeddings": 64}).max_segment_tokens == 64
    assert compressor("opt", sizes={"max_position_embeddings": 64}).max_segments(64) is None
