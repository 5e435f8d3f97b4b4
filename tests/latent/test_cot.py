"""Explicit chain of thought and none: losses, answers, removal of a chain prefix."""

import pytest
import torch
import torch.nn.functional as F

from laconic.batches import IGNORE_INDEX, PassCounts, ReasoningBatch
from laconic.errors import UsageError
from laconic.latent.answering import AnswerDecoding, find_answer_offset
from laconic.latent.cot import Cot, NoCot, drop_chain_prefix
from laconic.losses import build_student_targets, build_teacher_targets
from laconic.models.decoder import Decoder
from tests.latent.batches import EOS, gradients, reasoning_batch
from tests.models.fixtures import assert_all_close, assert_close, fresh

BATCH = reasoning_batch()


def score_rows(decoder: Decoder, batch: ReasoningBatch, chain: bool) -> list[torch.Tensor]:
    """Negative log probabilities of each row's tokens after its question, computed row by row."""
    rows = []
    for b in range(batch.B):
        parts = [batch.question_ids[b, batch.question_mask[b]]]
        parts += [batch.chain_ids[b, batch.chain_mask[b]]] if chain else []
        parts += [batch.answer_ids[b, batch.answer_mask[b]]]
        ids = torch.cat(parts)
        logits = decoder.logits(decoder(decoder.embed(ids[None])).hidden_states)[0, len(parts[0]) - 1 : -1]
        rows.append(F.cross_entropy(logits, ids[len(parts[0]) :], reduction="none"))
    return rows


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_cot_loss_equals_single_rows(name: str, chain: bool) -> None:
    decoder = fresh(name).double()
    method = (Cot if chain else NoCot)(decoder)
    rows = score_rows(decoder, BATCH, chain)
    step, part = method(BATCH), "teacher" if chain else "student"
    assert_close(step.loss, torch.cat(rows).mean())
    assert step.metrics[part] == step.loss
    assert not step.metrics[part].requires_grad
    assert set(step.metrics) == {part, f"{part}_token_accuracy"}
    assert method.loss_denominators(BATCH) == {part: sum(map(len, rows))}


@pytest.mark.parametrize("kind", [Cot, NoCot])
def test_cot_micro_batches_equal_one_batch(kind: type[Cot] | type[NoCot]) -> None:
    method = kind(fresh("llama").double())
    whole = method(BATCH)
    parts = [BATCH.select_rows([0, 1]), BATCH.select_rows([2])]
    totals = {
        name: sum(method.loss_denominators(part)[name] for part in parts) for name in method.loss_denominators(BATCH)
    }
    steps = [method(ReasoningBatch(**{**vars(part), "loss_denominators": totals})) for part in parts]
    loss = torch.stack([step.loss for step in steps]).sum()
    assert_close(loss, whole.loss)
    for name in whole.metrics:
        assert_close(torch.stack([step.metrics[name] for step in steps]).sum(), whole.metrics[name])
    assert_all_close(gradients(method, loss).values(), gradients(method, whole.loss).values())


def test_cot_state_precedes_the_question() -> None:
    decoder = fresh("llama").double()
    before = decoder(decoder.embed(torch.tensor([[5, 6, 7]] * 3)))
    assert Cot(decoder)(BATCH, before.cache).loss != Cot(decoder)(BATCH).loss


def test_drop_chain_prefix() -> None:
    batch = reasoning_batch(pads=2)
    rank = batch.chain_mask.cumsum(1)
    left = drop_chain_prefix(batch, rank > torch.tensor([2, 3, 0])[:, None])
    assert left.chain_ids[0, left.chain_mask[0]].tolist() == batch.chain_ids[0, 2:6].tolist()
    assert left.chain_ids.shape == left.chain_step_index.shape == left.chain_targets.shape == (3, 4)
    first = [batch.chain_ids[0, 2], batch.answer_ids[1, 0], batch.answer_ids[2, 0]]
    assert left.question_target.tolist() == first
    assert (build_teacher_targets(left) != IGNORE_INDEX).sum(1).tolist() == [4 + 4, 3, 5]
    decoder = fresh("llama").double()
    assert_close(Cot(decoder)(left).loss, torch.cat(score_rows(decoder, left, True)).mean())
    gone = drop_chain_prefix(batch, torch.zeros_like(batch.chain_mask))
    assert gone.chain_ids.shape == (3, 0)
    assert torch.equal(build_teacher_targets(gone), build_student_targets(batch))
    whole = drop_chain_prefix(batch, batch.chain_mask)
    assert torch.equal(whole.question_target, batch.question_target)


def test_drop_chain_prefix_keeps_unscored_questions() -> None:
    batch = ReasoningBatch(**{**vars(BATCH), "question_target": torch.tensor([IGNORE_INDEX, 5, 6])})
    left = drop_chain_prefix(batch, batch.chain_mask & (batch.chain_step_index > 0))
    assert left.question_target.tolist()[0] == IGNORE_INDEX


def build_decoding(**changes: object) -> AnswerDecoding:
    settings = {"max_tokens": 12, "eos_token_ids": (EOS,), "decode": lambda ids: " ".join(map(str, ids))}
    return AnswerDecoding(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Cot, NoCot])
def test_cot_answers_equal_single_rows(kind: type[Cot] | type[NoCot]) -> None:
    method, batch = kind(fresh("llama")), reasoning_batch(((5, 0, 3), (2, 0, 3), (7, 0, 3)), pads=2)
    got = method.answer(batch, build_decoding(answer_prompt=(7, 8)))
    num_prompt = 2 if kind is NoCot else 0
    for b in range(3):
        one = method.answer(batch.select_rows([b]), build_decoding(answer_prompt=(7, 8)))
        assert (one.token_ids[0], one.passes[0], one.cache_positions[0], one.texts[0]) == (
            got.token_ids[b], got.passes[b], got.cache_positions[b], got.texts[b]
        )  # fmt: skip
        n, num_question = len(got.token_ids[b]), int(batch.question_mask[b].sum())
        assert got.passes[b] == PassCounts(1, 0, 0, n - 1)
        assert got.cache_positions[b][1] == num_question + num_prompt + n - 1
        assert kind is Cot or got.cache_positions[b][0] == num_question + num_prompt
        assert got.texts[b] == " ".join(str(i) for i in got.token_ids[b] if i != EOS)


def test_nocot_refuses_with_cot() -> None:
    with pytest.raises(UsageError, match="NoCot is not trained"):
        NoCot(fresh("llama")).answer(BATCH, build_decoding(), with_cot=True)


def test_find_answer_offset() -> None:
    assert find_answer_offset((7, 8), [1, 7, 8, 3, 7, 8, 4, 2]) == 6
    assert find_answer_offset((7, 8), [1, 3, 7, 8]) == 4
    assert find_answer_offset((7, 8), [1, 3]) == 2
    assert find_answer_offset((), [1, 3]) == 0


def test_cot_eos_inside_the_answer_prompt_does_not_end_a_row() -> None:
    method, batch = Cot(fresh("llama")), reasoning_batch(((5, 0, 3),))
    (free,) = method.answer(batch, build_decoding(eos_token_ids=())).token_ids
    end = free[3]
    (got,) = method.answer(batch, build_decoding(eos_token_ids=(end,), answer_prompt=(end,))).token_ids
    second = [n for n, i in enumerate(free) if i == end][1:2]
    assert got == (free[: second[0] + 1] if second else free)
    assert method.answer(batch, build_decoding(eos_token_ids=(end,))).token_ids[0] == free[: free.index(end) + 1]
