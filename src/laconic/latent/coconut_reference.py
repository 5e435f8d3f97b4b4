"""Coconut's training step written the slow, obvious way: row by row, without padding, batching or a cache.

Coconut arXiv:2412.06769. `latent.coconut` computes the same loss for whole batches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.latent.thoughts import LatentThoughts
from laconic.models.decoder import Decoder


def coconut_loss(
    decoder: Decoder,
    latent_thoughts: LatentThoughts,
    batch: ReasoningBatch,
    stage: int,
    latents_per_step: int,
    max_stage: int,
) -> Tensor:
    """Return the mean cross-entropy of everything after eot at a stage of the curriculum.

    The first `stage` steps of each chain are replaced by `latents_per_step` latents each; beyond `max_stage` all steps
    are removed and the number of latents stays.
    """
    losses: list[Tensor] = []
    for b in range(batch.B):
        question = batch.question_ids[b, batch.question_mask[b]]
        steps = batch.chain_step_index[b, batch.chain_mask[b]]
        remaining = batch.chain_ids[b, batch.chain_mask[b]]
        if stage > max_stage:
            remaining = remaining[:0]
        else:
            remaining = remaining[steps >= stage]
        answer = batch.answer_ids[b, batch.answer_mask[b]]

        sequence = torch.cat([decoder.embed(question[None]), latent_thoughts.begin[None, None]], 1)
        for _ in range(min(stage, max_stage) * latents_per_step):
            latent = decoder(sequence).hidden_states[:, -1:]  # the hidden state itself is the next input
            sequence = torch.cat([sequence, latent], 1)

        text = torch.cat([remaining, answer])
        sequence = torch.cat([sequence, latent_thoughts.end[None, None], decoder.embed(text[None])], 1)
        logits = decoder.logits(decoder(sequence).hidden_states)[0]
        logits = logits[len(logits) - len(text) - 1 : -1]  # eot predicts the first token of the text
        losses.append(F.cross_entropy(logits, text, reduction="none"))
    return torch.cat(losses).mean()
