"""Nested lengths and the stop head of latents: against runs with fewer latents, loops, and a planted signal."""

import math

import pytest
import torch

from laconic.batches import IGNORE_INDEX, PassCounts
from laconic.config.methods import DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.errors import UsageError
from laconic.latent.kava import Kava
from laconic.latent.pccot import Pccot
from laconic.latent.rollout import read_after_latents, read_question
from laconic.latent.stepwise_rollout import read_latents, run_reads
from laconic.latent.stop_head import StopHead, count_valid_latents, draw_lengths, keep_first_latents
from laconic.latent.stop_training import StopTraining, compute_stop_loss, compute_trial_losses
from laconic.latent.thoughts import LatentThoughts
from laconic.losses import build_student_targets
from laconic.models.decoder import Decoder
from tests.latent.batches import build_latent_model, gradients, reasoning_batch
from tests.models.fixtures import assert_close, valid_slots

pytestmark = pytest.mark.usefixtures("unchecked")
M, BATCH = 4, reasoning_batch(pads=1)


def with_stop_head(num_iterations: int = M) -> tuple[Decoder, LatentThoughts, StopHead]:
    """A model whose stop head keeps different numbers of latents for the rows of a batch."""
    decoder, latents = build_latent_model("llama", num_iterations=num_iterations, length_policy="stop_head")
    head = latents.stop_head
    assert head is not None
    torch.nn.init.normal_(head.u, std=0.3, generator=torch.Generator().manual_seed(0))
    return decoder, latents, head


def with_fewer_latents(decoder: Decoder, latents: LatentThoughts, n: int) -> LatentThoughts:
    """The same vectors and projection with n latents and no head."""
    fewer = LatentThoughts(decoder, num_latents=n, num_iterations=latents.num_iterations).double()
    fewer.load_state_dict({k: v for k, v in latents.state_dict().items() if not k.startswith("stop_head")})
    return fewer


@torch.no_grad()
def test_keep_first_latents_equals_a_rollout_of_fewer() -> None:
    decoder, latents, _ = with_stop_head(2)
    answer = (BATCH.answer_ids, BATCH.answer_mask)
    question = read_question(decoder, BATCH).cache
    cache = latents.compute_latents(decoder, latents.build_prefix(decoder, question), M).cache
    for n in range(1, M + 1):
        fewer = with_fewer_latents(decoder, latents, n)
        apart = read_after_latents(decoder, fewer.end, *answer, fewer.think(decoder, question).cache)
        first = keep_first_latents(cache, torch.full((BATCH.B,), n), M)
        ours = read_after_latents(decoder, latents.end, *answer, first)
        assert_close(ours.hidden_states, apart.hidden_states)
        assert [int(p) for p in first.next_position] == [
            int(p) for p in ours.cache.positions[:, -BATCH.answer_ids.shape[1] - 1]
        ]


@torch.no_grad()
@pytest.mark.parametrize("num_iterations", [2, M, M + 2])
def test_latents_with_a_stop_head_end_when_the_kept_ones_are_final(num_iterations: int) -> None:
    decoder, latents, head = with_stop_head(num_iterations)
    question, mask = decoder.embed(BATCH.question_ids), BATCH.question_mask
    got = latents.think(decoder, question=question, attention_mask=mask)
    prefix = latents.build_prefix(decoder, None, question, mask)
    reads = read_latents(latents, prefix.embeds, M, question[:1, :0])
    counts = run_reads(decoder, reads, None, prefix.attention_mask).counts
    for row in range(BATCH.B):
        one, its_mask = question[row : row + 1], mask[row : row + 1]
        whole = latents.compute_latents(decoder, latents.build_prefix(decoder, None, one, its_mask), M)
        cumulative, survival, n = 0.0, 1.0, M
        for m, h in enumerate(whole.hidden_states[0].tolist(), 1):
            logit = head.lr_multiplier * (sum(x * y for x, y in zip(h, head.u.tolist(), strict=True)) + float(head.b))
            stop = 1 / (1 + math.exp(-logit - head.initial_bias))
            cumulative, survival = cumulative + survival * stop, survival * (1 - stop)
            if cumulative >= 0.5:
                n = m
                break
        assert counts[row] == (PassCounts(0, 1, min(n, num_iterations), 0), n)
        assert count_valid_latents(got.cache, M)[row] == n
        assert_close(got.latents[row, :n], whole.latents[0, :n])
        apart = keep_first_latents(whole.cache, torch.tensor([n]), M)
        for x, y in zip(valid_slots(got.cache, row), valid_slots(apart, 0), strict=True):
            assert_close(x, y)
    assert len(set(count_valid_latents(got.cache, M))) > 1
    inspected = latents.think(decoder, question=question, attention_mask=mask, record_passes=True)
    assert count_valid_latents(inspected.cache, M) == count_valid_latents(got.cache, M)


def test_untrained_stop_head_keeps_all_latents() -> None:
    _, latents = build_latent_model("llama", length_policy="stop_head")
    assert latents.stop_head is not None
    assert latents.stop_head.count_latents(torch.randn(3, M, 48).double()).tolist() == [M] * 3


@torch.no_grad()
def test_compute_trial_losses_equals_loops() -> None:
    decoder, latents, _ = with_stop_head()
    prefix = latents.build_prefix(decoder, read_question(decoder, BATCH).cache)
    cache = latents.compute_latents(decoder, prefix, M).cache
    losses, targets = compute_trial_losses(decoder, latents.end, BATCH, cache, M), build_student_targets(BATCH)
    for n in range(1, M + 1):
        fewer = with_fewer_latents(decoder, latents, n)
        for row in range(BATCH.B):
            alone = BATCH.select_rows([row])
            first = fewer.think(decoder, read_question(decoder, alone).cache).cache
            output = read_after_latents(decoder, fewer.end, alone.answer_ids, alone.answer_mask, first)
            log_p = decoder.logits(output.hidden_states).log_softmax(-1)[0]
            nats = -sum(float(log_p[t, i]) for t, i in enumerate(targets[row].tolist()) if i != IGNORE_INDEX)
            assert float(losses[row, n - 1]) == pytest.approx(nats, rel=1e-9)


def build_method(name: str) -> Pccot | Kava:
    """A method with a stop head that is trained from update 3 on."""
    decoder, latents, _ = with_stop_head(2)
    training, config = StopTraining(3, 0.1), DistillationConfig.model_validate({})
    if name == "pccot":
        return Pccot(decoder, latents, config, training)
    selection, kv = KVSelectionConfig.model_validate({}), KVDistillationConfig.model_validate({})
    return Kava(decoder, latents, config, selection, kv, stop_training=training)


@pytest.mark.parametrize("name", ["pccot", "kava"])
def test_latent_methods_train_the_model_and_then_the_stop_head(name: str) -> None:
    method = build_method(name)
    for step, trains_head in ((2, False), (3, True), (4, True)):
        batch = BATCH.map_tensors(lambda x: x)
        object.__setattr__(batch, "step", step)
        output = method(batch)
        moved = {name for name, grad in gradients(method, output.loss).items() if grad.any()}
        heads = {"latent_thoughts.stop_head.u", "latent_thoughts.stop_head.b"}
        assert moved == heads if trains_head else moved and not moved & heads
        assert ("latents" in output.metrics) == trains_head
        assert method.resets_optimizer_state(batch) == (step == 3)


def test_latent_methods_read_the_drawn_lengths() -> None:
    """The student's cross-entropy is that of each row after its own number of latents."""
    method = build_method("pccot")
    lengths = draw_lengths(BATCH, M, 0)
    assert draw_lengths(BATCH.select_rows([2]), M, 0).tolist() == lengths[2:].tolist()
    assert sorted(set(draw_lengths(reasoning_batch([(1, 1, 1)] * 40), M, 0).tolist())) == [1, 2, 3, 4]
    with torch.no_grad():
        decoder, latents = method.decoder, method.latent_thoughts
        prefix = latents.build_prefix(decoder, read_question(decoder, BATCH).cache)
        cache = latents.compute_latents(decoder, prefix, M).cache
        trials = compute_trial_losses(method.decoder, method.latent_thoughts.end, BATCH, cache, M)
        expected = trials.gather(1, lengths[:, None] - 1).sum() / (build_student_targets(BATCH) != IGNORE_INDEX).sum()
        assert_close(method(BATCH).metrics["student"], expected)


def test_stop_head_learns_a_planted_length() -> None:
    generator = torch.Generator().manual_seed(0)
    needed = torch.randint(1, M + 1, (256,), generator=generator)
    hidden = torch.randn(256, M, 8, generator=generator)
    hidden[..., 0] = (torch.arange(1, M + 1) >= needed[:, None]).float()  # what the head has to find
    trials = 2.3 * (torch.arange(1, M + 1) < needed[:, None]).float()
    head = StopHead(8, M, 1.0, torch.float32, torch.device("cpu"))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
    for _ in range(150):
        loss, metrics, _ = compute_stop_loss(head, hidden, trials, 0.05, 256.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (head.count_latents(hidden) == needed).float().mean() > 0.98
    assert float(metrics["latents"]) == pytest.approx(float(needed.float().mean()), abs=0.1)


def test_latent_methods_refuse_to_train_a_missing_stop_head() -> None:
    with pytest.raises(UsageError, match="stop_training: these latents have no stop head"):
        Pccot(*build_latent_model("llama"), DistillationConfig.model_validate({}), StopTraining(3, 0.1))
