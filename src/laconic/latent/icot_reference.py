"""iCoT's training step written the slow, obvious way: row by row, without padding or batching.

iCoT arXiv:2405.14838. `latent.icot` computes the same loss for whole batches.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.models.decoder import Decoder


def icot_loss(
    decoder: Decoder, batch: ReasoningBatch, num_removed: int, u: Tensor | None = None, smoothing: float = 4.0
) -> Tensor:
    """Return the mean cross-entropy of the rest of the chain and the answer.

    `num_removed` tokens are removed from the left end of each chain, and o more, drawn for each row from
    P(o) ~ e^(-smoothing o) by the uniform numbers `u`.
    """
    losses: list[Tensor] = []
    for b in range(batch.B):
        question = batch.question_ids[b, batch.question_mask[b]]
        chain = batch.chain_ids[b, batch.chain_mask[b]]
        answer = batch.answer_ids[b, batch.answer_mask[b]]
        extra = 0 if u is None else math.floor(math.log(1 - float(u[b])) / -smoothing)
        text = torch.cat([chain[num_removed + min(extra, 99) :], answer])

        hidden = decoder(decoder.embed(torch.cat([question, text])[None])).hidden_states
        logits = decoder.logits(hidden)[0, len(question) - 1 : -1]  # the last question token predicts the first
        losses.append(F.cross_entropy(logits, text, reduction="none"))
    return torch.cat(losses).mean()
