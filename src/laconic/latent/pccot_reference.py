"""Training step of CODI and PCCoT written the slow, obvious way; `latent.codi` computes the same loss with a cache.

CODI arXiv:2502.21074 (latents one after the other), PCCoT arXiv:2506.18582 (Jacobi iteration), with default options.
Every pass reads the question again, on an empty cache, and logits are computed at every position. The parts that KaVa
shares are in `latent.kava_reference`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.latent.kava_reference import Part, cross_entropy, hidden_loss, read_parts, run_jacobi
from laconic.latent.thoughts import LatentThoughts
from laconic.models.decoder import Decoder


def run_sequential(decoder: Decoder, latent_thoughts: LatentThoughts, prefix: Sequence[Part], M: int) -> Part:
    """Compute M latents after `prefix`, whose last vector is bot, each from the hidden state of the one before it."""
    z = prefix[0][0][:, :0]
    for m in range(M):
        mask = torch.ones(len(z), m, dtype=torch.bool, device=z.device)
        hidden = read_parts(decoder, (*prefix, (z, mask))).hidden_states[:, -1:]
        z = torch.cat([z, latent_thoughts.project(hidden)], 1)
    return z, torch.ones(z.shape[:2], dtype=torch.bool, device=z.device)


def distillation_loss(
    decoder: Decoder, latent_thoughts: LatentThoughts, batch: ReasoningBatch, gamma: float = 1.0
) -> Tensor:
    """CODI Eq. 3, PCCoT Eq. 4: L = CE_s + CE_t + gamma L_KD; the schedule of the latents decides which."""
    L, M, Nq = decoder.config.num_hidden_layers, latent_thoughts.num_latents, batch.question_ids.shape[1]
    question = (decoder.embed(batch.question_ids), batch.question_mask)
    chain = (decoder.embed(batch.chain_ids), batch.chain_mask)
    answer = (decoder.embed(batch.answer_ids), batch.answer_mask)
    one = batch.question_mask.new_ones(batch.B, 1)
    bot, eot = ((x.to(question[0].dtype).expand(batch.B, 1, -1), one) for x in latent_thoughts.vectors[[0, 2]])

    teacher = read_parts(decoder, (question, chain, answer), ("hidden",))
    targets = batch.question_target[:, None], batch.chain_targets, batch.answer_targets
    loss = cross_entropy(decoder, teacher.hidden_states, Nq - 1, *targets)

    if latent_thoughts.schedule == "sequential":
        latents = run_sequential(decoder, latent_thoughts, (question, bot), M)
    else:
        latents = run_jacobi(decoder, latent_thoughts, (question, bot), M)
    at_eot = Nq + 1 + M  # after question, bot and latents; its output predicts the answer's first token
    student = read_parts(decoder, (question, bot, latents, eot, answer), ("hidden",))
    targets = batch.answer_ids[:, :1], batch.answer_targets
    loss = loss + cross_entropy(decoder, student.hidden_states, at_eot, *targets)
    return loss + gamma * hidden_loss(teacher, student, batch, at_eot + 1, L)
