"""iCoT 1 and Coconut 1 against their oracles and misreadings."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.config.methods import CoconutConfig
from laconic.latent.coconut import Coconut
from laconic.latent.icot import tokens_to_remove
from laconic.latent.rollout import LatentPrefix, run_sequential_rollout
from laconic.latent.thoughts import LatentThoughts
from tests.latent.batches import reasoning_batch
from tests.models.fixtures import noise, small
from tests.oracles import coconut as coconut_oracle
from tests.oracles import icot as icot_oracle
from tests.oracles.coconut import Case
from tests.oracles.compare import agree

V, D = 11, 8
BATCH = reasoning_batch(((4, 5, 3), (3, 4, 4), (5, 2, 2)), V=V, pads=1)


@pytest.mark.equation("icot", "1")
def test_tokens_to_remove_equation() -> None:
    u = torch.tensor([0.0, 0.3, 0.9, 0.97, 0.985, 0.9995, 0.99999, 1 - 1e-12], dtype=torch.float64)
    count = torch.tensor([9, 2, 0, 3, 30, 5, 40, 300])
    for s in (0.0, 2.0, 5.0):
        agree(tokens_to_remove, icot_oracle.ORACLE["1"], icot_oracle.MISREAD["1"] if s == 2 else {}, s, u, count, 0.3)
    agree(tokens_to_remove, icot_oracle.ORACLE["1"], {}, 1.0, u, count, 4.0)
    assert torch.equal(tokens_to_remove(math.inf, u, count, 4.0), count)


def test_tokens_to_remove_distribution() -> None:
    """P(o) of 0.982, 0.018 and 0.0003 at the published smoothing; values beyond 99 count as 99."""
    u = (torch.arange(10**5, dtype=torch.float64) + 0.5) / 10**5
    o = tokens_to_remove(0.0, u, torch.full((10**5,), 200), 4.0)
    assert [round(float((o == n).double().mean()), 4) for n in range(3)] == [0.9817, 0.018, 0.0003]
    assert tokens_to_remove(
        0.0, torch.tensor([1 - 2**-53], dtype=torch.float64), torch.tensor([200]), 0.1
    ).tolist() == [99]


def method(batch_stage: int) -> Coconut:
    """Coconut with two latents per step at a stage, in float64."""
    decoder = small("llama", vocab_size=V).requires_grad_()
    thoughts = LatentThoughts(decoder, num_latents=4, schedule="sequential", projection="none", control_init="normal")
    stages = CoconutConfig(latents_per_step=2, max_stage=2, first_stage=batch_stage)
    return Coconut(decoder, thoughts, stages, steps_per_epoch=5)


def case(coconut: Coconut) -> Case:
    """The same rows for the oracle, with the parameters to differentiate."""
    decoder, last = coconut.decoder, f"resid2.{coconut.decoder.config.num_hidden_layers - 1}"
    rows = []
    for b in range(BATCH.B):
        mask = BATCH.chain_mask[b]
        chain = list(zip(BATCH.chain_ids[b, mask].tolist(), BATCH.chain_step_index[b, mask].tolist(), strict=True))
        steps = [[i for i, step in chain if step == number] for number in range(max(n for _, n in chain) + 1)]
        question_tokens, answer = (x[b][part_mask[b]].tolist() for x, part_mask in (
            (BATCH.question_ids, BATCH.question_mask), (BATCH.answer_ids, BATCH.answer_mask)
        ))  # fmt: skip
        rows.append((question_tokens, steps, answer))

    def seen(vectors: list[Tensor], raw: bool) -> list[Tensor]:
        got = decoder(torch.stack(vectors)[None], capture=(last,))
        return list((got.activations[last] if raw else got.hidden_states)[0])

    bot, end = (coconut.latent_thoughts.vectors[i].detach().clone().requires_grad_() for i in (0, 2))
    head = decoder.get_parameter("lm_head.weight").detach()
    return Case(
        lambda x: seen(x, False), lambda x: seen(x, True), decoder.token_embedding.weight, head, bot, end, rows, 1, 2
    )


@pytest.mark.medium
@pytest.mark.equation("coconut", "1")
def test_coconut_equation() -> None:
    coconut = method(1)

    def ours(_: Case) -> tuple[Tensor, ...]:
        embedding, vectors = coconut.decoder.token_embedding.weight, coconut.latent_thoughts.vectors
        got = coconut(BATCH)
        grads = torch.autograd.grad(got.loss, [embedding, vectors])
        question, mask = coconut.decoder.embed(BATCH.question_ids), BATCH.question_mask
        thoughts = coconut.latent_thoughts.think(coconut.decoder, question=question, attention_mask=mask, num_latents=2)
        return got.loss, thoughts.latents[:, -1], grads[0], grads[1][0], grads[1][2]

    agree(ours, coconut_oracle.ORACLE["1"], coconut_oracle.MISREAD["1"], case(coconut), margin=1e-3)

    decoder = coconut.decoder.requires_grad_(False)

    def latents(question: Tensor, bot: Tensor) -> Tensor:
        prefix = LatentPrefix(torch.cat([question, bot.expand(1, 1, D)], 1))
        return torch.einsum(
            "bmd,d->m", run_sequential_rollout(decoder, prefix, 3, lambda x: x).hidden_states, noise(3, D)
        )

    assert gradcheck(latents, (noise(1, 1, 2, D).requires_grad_(), noise(2, D).requires_grad_()))
