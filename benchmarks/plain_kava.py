"""A KaVa step the plain way: what `methods/kava.py` is measured beside, and held to in the tests.

Teacher and student are read apart, the question anew in every pass, with no cache; attention is eager, R-KV takes its
block out of the whole matrix of logits, and logits are made of every position. Defaults of KaVa, arXiv:2510.02312:
R-KV, smooth L1, over the teacher's spread for hidden states, slots without a target masked.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.latent.thoughts import LatentThoughts
from laconic.models.decoder import Decoder, DecoderOutput

UNSCORED = -100


class Weights(NamedTuple):
    """Weights of the terms and of importance."""

    alpha1: float = 1.0
    alpha2: float = 1.0
    lam: float = 0.1


def whole(decoder: Decoder, parts: Sequence[tuple[Tensor, Tensor]], want: tuple[str, ...] = ()) -> DecoderOutput:
    """One pass over parts (vectors, live) side by side, from nothing."""
    vectors, live = (torch.cat([part[i] for part in parts], 1) for i in (0, 1))
    return decoder(vectors, live=live, want=want)


def cross_entropy(decoder: Decoder, hidden: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens scored, of logits at every position."""
    logits = decoder.logits(hidden)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=UNSCORED)


def kept_columns(
    decoder: Decoder, teacher: DecoderOutput, layer: int, batch: ReasoningBatch, M: int, lam: float
) -> Tensor:
    """Chain columns [B, G, M] in time; slots without one hold column 0."""
    Nq, Nc = batch.question_ids.shape[1], batch.chain_ids.shape[1]
    q, k = teacher.activations[f"q_rot.{layer}"], teacher.activations[f"k_rot.{layer}"]
    B, H, G = len(q), q.shape[1], k.shape[1]
    logits = decoder.attention_scale(layer) * (q @ k.repeat_interleave(H // G, 1).mT)
    block = logits[:, :, Nq + Nc :, Nq : Nq + Nc].unflatten(1, (G, H // G)).amax(2)
    unit = k[:, :, Nq : Nq + Nc] / (k[:, :, Nq : Nq + Nc].norm(dim=-1, keepdim=True) + 1e-8)
    similar = (unit @ unit.mT) * (1 - torch.eye(Nc, dtype=k.dtype, device=k.device))
    index = torch.zeros(B, G, M, dtype=torch.long, device=k.device)
    for b in range(B):
        n, rows = int(batch.chain_mask[b].sum()), int(batch.answer_mask[b].sum())
        importance = block[b, :, :rows, :n].softmax(-1).mean(1)
        redundancy = (-similar[b, :, :n, :n].sum(-1) / max(n, 1)).softmax(-1)
        score = lam * importance + (1 - lam) * redundancy
        best = score.sort(dim=-1, descending=True, stable=True).indices[:, :M]
        index[b, :, : min(n, M)] = best.sort(-1).values
    return index


def kv_loss(
    teacher: DecoderOutput, student: DecoderOutput, kept: list[Tensor], batch: ReasoningBatch, M: int
) -> Tensor:
    """Half of keys and half of values, over slots that have a target."""
    Nq, Nc = batch.question_ids.shape[1], batch.chain_ids.shape[1]
    taught = torch.arange(M, device=kept[0].device) < batch.chain_mask.sum(1, keepdim=True)
    terms: list[Tensor] = []
    for name in ("keys", "values"):
        targets, slots = list[Tensor](), list[Tensor]()
        for t, s, index in zip(getattr(teacher.cache, name), getattr(student.cache, name), kept, strict=True):
            G, E = t.shape[1], t.shape[3]
            if Nc:
                targets.append(t[:, :, Nq : Nq + Nc].gather(2, index[..., None].expand(-1, -1, -1, E)))
            else:
                targets.append(t.new_zeros(len(t), G, M, E))
            slots.append(s[:, :, Nq + 1 : Nq + 1 + M])
        each = F.smooth_l1_loss(torch.stack(slots), torch.stack(targets).detach(), reduction="none")
        each = each.permute(1, 3, 0, 2, 4)[taught]
        terms.append(each.mean() if len(each) else each.sum())
    return (terms[0] + terms[1]) / 2


def hidden_loss(
    teacher: DecoderOutput, student: DecoderOutput, at_t: Tensor, at_s: Tensor, has: Tensor, L: int
) -> Tensor:
    """Smooth L1 over blocks, each divided by the teacher's spread."""
    rows, terms = has.nonzero()[:, 0], list[Tensor]()
    for l in range(1, L + 1):
        h_t = teacher.activations[f"hidden.{l}"][rows, at_t[rows]].detach()
        h_s = student.activations[f"hidden.{l}"][rows, at_s[rows]]
        terms.append(F.smooth_l1_loss(h_s, h_t) / h_t.std().clamp(min=1e-6))
    return torch.stack(terms).mean()


def plain_kava(
    decoder: Decoder, thoughts: LatentThoughts, batch: ReasoningBatch, weights: Weights | None = None
) -> Tensor:
    """The loss of a step; `decoder.attention` says how attention is computed, eager in the plain way."""
    weights, L, M, B = weights or Weights(), decoder.config.num_hidden_layers, thoughts.num_latents, batch.B
    Nq, Nc = batch.question_ids.shape[1], batch.chain_ids.shape[1]
    question = (decoder.embed(batch.question_ids), batch.question_mask)
    chain = (decoder.embed(batch.chain_ids), batch.chain_mask)
    answer = (decoder.embed(batch.answer_ids), batch.answer_mask)
    alive = batch.question_mask.new_ones(B, 1)

    teacher = whole(decoder, (question, chain, answer), ("q_rot", "k_rot", "hidden"))
    blank = batch.question_ids.new_full((B, Nq - 1), UNSCORED)
    targets = torch.cat([blank, batch.question_target[:, None], batch.chain_targets, batch.answer_targets], 1)
    loss = cross_entropy(decoder, teacher.hidden_states, targets)

    bot, slot, eot = (
        x.to(question[0].dtype).expand(B, 1, -1) for x in (thoughts.begin, thoughts.placeholder, thoughts.end)
    )
    z = slot.expand(-1, M, -1)
    for t in range((thoughts.num_iterations or 0) + 1):
        if t:
            seen = whole(decoder, (question, (bot, alive), (z, alive.expand(-1, M))))
            moved = thoughts.project(seen.hidden_states[:, Nq : Nq + M])
            z = moved if t == 1 else torch.cat([z[:, :1], moved[:, 1:]], 1)
    thought = (z, alive.expand(-1, M))
    student = whole(decoder, (question, (bot, alive), thought, (eot, alive), answer), ("hidden",))
    blank = batch.question_ids.new_full((B, Nq + 1 + M), UNSCORED)
    targets = torch.cat([blank, batch.answer_ids[:, :1], batch.answer_targets], 1)
    loss = loss + cross_entropy(decoder, student.hidden_states, targets)

    with torch.no_grad():
        kept = [kept_columns(decoder, teacher, l, batch, M, weights.lam) for l in range(L)]
    column, has = batch.distill_column.clamp(min=0), batch.distill_column >= 0
    codi = hidden_loss(teacher, student, Nq + Nc + column, Nq + 1 + M + 1 + column, has, L)
    return loss + weights.alpha1 * codi + weights.alpha2 * kv_loss(teacher, student, kept, batch, M)
