"""Train the stop head of latents on the expected cost of each number of them (PonderNet arXiv:2107.05407).

Symbols: M latents; a row keeps the first N of them; CE(n) the nats of the answer after n of them; beta the price of a
latent in nats. Equation numbers are those of the ledger's page `halting`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laconic.batches import IGNORE_INDEX, ReasoningBatch
from laconic.halting.estimators import ponder_loss
from laconic.interfaces import StepOutput
from laconic.latent.rollout import read_after_latents, read_question
from laconic.latent.stop_head import StopHead, keep_first_latents
from laconic.latent.thoughts import LatentThoughts
from laconic.losses import build_student_targets
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.modes import eval_no_grad


class StopTraining(NamedTuple):
    """When the stop head is trained, and nothing else."""

    first_step: int  # the first update that trains it
    length_cost: float  # beta

    def compute_loss(
        self, decoder: Decoder, latent_thoughts: LatentThoughts, batch: ReasoningBatch, state: KVCache | None
    ) -> StepOutput:
        """Return the loss of the stop head on the latents of a batch after `state`, which get no gradient."""
        head, M = latent_thoughts.stop_head, latent_thoughts.num_latents
        assert head is not None
        with eval_no_grad(decoder, latent_thoughts):
            prefix = latent_thoughts.build_prefix(decoder, read_question(decoder, batch, state).cache)
            rollout = latent_thoughts.compute_latents(decoder, prefix, M)
        trial_losses = compute_trial_losses(decoder, latent_thoughts.end, batch, rollout.cache, M)
        num_rows = (batch.loss_denominators or {"rows": float(batch.B)})["rows"]
        return compute_stop_loss(head, rollout.hidden_states, trial_losses, self.length_cost, num_rows)


def compute_trial_losses(
    decoder: Decoder, end_vector: Float[Tensor, " D"], batch: ReasoningBatch, cache: KVCache, M: int
) -> Float[Tensor, "B M"]:
    """Return the nats of each row's answer after its first 1 to M latents; `end_vector` is eot."""
    losses: list[Tensor] = []
    with eval_no_grad(decoder):
        ids = batch.answer_ids
        mask = batch.answer_mask
        targets = build_student_targets(batch)
        for n in range(1, M + 1):
            first = keep_first_latents(cache, torch.full_like(batch.row_index, n), M)
            logits = decoder.logits(read_after_latents(decoder, end_vector, ids, mask, first).hidden_states)
            nats = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none")
            losses.append(nats.sum(1))
    return torch.stack(losses, 1)


def stop_loss(
    a: Float[Tensor, "B M"], trial_losses: Float[Tensor, "B M"], beta: float, num_rows: float
) -> Float[Tensor, ""]:
    """Eq. VL22: the mean over rows of sum over n of P(n) (CE(n) + beta n), in nats."""
    return ponder_loss(a, trial_losses, tuple(range(1, a.shape[1] + 1)), beta).sum() / num_rows


def compute_stop_loss(
    head: StopHead,
    hidden_states: Float[Tensor, "B M D"],
    trial_losses: Float[Tensor, "B M"],
    beta: float,
    num_rows: float,
) -> StepOutput:
    """Return the loss of the head, and as metrics the means of the lengths it chooses and of the nats after them.

    `trial_losses` are those of `compute_trial_losses`; `num_rows` are the rows of the whole optimizer step.
    """
    loss = stop_loss(head.stop_logits(hidden_states), trial_losses, beta, num_rows)
    N = head.count_latents(hidden_states)
    nats = trial_losses.gather(1, N[:, None] - 1)
    return StepOutput(loss, {"latents": N.to(loss.dtype).sum() / num_rows, "answer_nats": nats.sum() / num_rows})
