"""KaVa's training step written the slow, obvious way; `latent.kava` computes the same loss with a shared KV cache.

KaVa arXiv:2510.02312 with default options: R-KV, smooth L1, hidden states divided by the teacher's standard deviation,
no target for latents beyond a short chain, Jacobi iterations (`pccot_reference` has sequential latents). Every pass
reads the question again, on an empty cache; R-KV takes its block out of the whole matrix of attention logits.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.batches import IGNORE_INDEX, ReasoningBatch
from laconic.latent.thoughts import LatentThoughts
from laconic.models.decoder import Decoder, DecoderOutput

Part = tuple[Tensor, Tensor]  # vectors [B, T, D] and their mask [B, T]


def read_parts(decoder: Decoder, parts: Sequence[Part], capture: tuple[str, ...] = ()) -> DecoderOutput:
    """Read parts side by side in one pass, on an empty cache."""
    vectors, mask = (torch.cat([part[i] for part in parts], 1) for i in (0, 1))
    return decoder(vectors, attention_mask=mask, capture=capture)


def cross_entropy(decoder: Decoder, hidden: Tensor, ignored: int, *targets: Tensor) -> Tensor:
    """Equations 5a and 5b: mean over scored tokens; the first `ignored` positions have no target."""
    logits = decoder.logits(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    blank = targets[0].new_full((len(hidden), ignored), IGNORE_INDEX)
    return F.cross_entropy(logits.flatten(0, 1), torch.cat([blank, *targets], 1).flatten(), ignore_index=IGNORE_INDEX)


def run_jacobi(decoder: Decoder, latent_thoughts: LatentThoughts, prefix: Sequence[Part], M: int) -> Part:
    """Compute M latents after `prefix`, whose last vector is bot, by T Jacobi iterations from placeholders."""
    T, Np, B = latent_thoughts.num_iterations, sum(part[0].shape[1] for part in prefix), len(prefix[0][0])
    assert T is not None, "sequential latents have no iterations"
    z = latent_thoughts.placeholder.to(prefix[0][0].dtype).expand(B, M, -1)
    mask = torch.ones(B, M, dtype=torch.bool, device=z.device)
    for t in range(1, T + 1):
        hidden = read_parts(decoder, (*prefix, (z, mask))).hidden_states
        new = latent_thoughts.project(hidden[:, Np - 1 : Np - 1 + M])  # of bot and latents 1 … M-1
        z = new if t == 1 else torch.cat([z[:, :1], new[:, 1:]], 1)
    return z, mask


def select_columns(teacher: DecoderOutput, l: int, scale: float, batch: ReasoningBatch, M: int, lam: float) -> Tensor:
    """Equations 1 to 3: the chain columns [B, G, M] that R-KV selects in layer l, in order; 0 beyond a short chain."""
    Nq, Nc = batch.question_ids.shape[1], batch.chain_ids.shape[1]
    q, k = teacher.activations[f"q_rot.{l}"], teacher.activations[f"k_rot.{l}"]
    B, H, G = len(q), q.shape[1], k.shape[1]
    logits = scale * (q @ k.repeat_interleave(H // G, 1).mT)
    block: Tensor = logits[:, :, Nq + Nc :, Nq : Nq + Nc].reshape(B, G, H // G, batch.answer_ids.shape[1], Nc).amax(2)
    k = k[:, :, Nq : Nq + Nc]
    unit = k / (k.square().sum(-1, keepdim=True).sqrt() + 1e-8)
    similarity = (unit @ unit.mT) * (1 - torch.eye(Nc, dtype=k.dtype, device=k.device))
    index = torch.zeros(B, G, M, dtype=torch.long, device=k.device)
    for b in range(B):
        n, rows = int(batch.chain_mask[b].sum()), int(batch.answer_mask[b].sum())
        importance = block[b, :, :rows, :n].softmax(-1).mean(1)
        redundancy = (-similarity[b, :, :n, :n].sum(-1) / max(n, 1)).softmax(-1)
        best = (lam * importance + (1 - lam) * redundancy).sort(dim=-1, descending=True, stable=True).indices[:, :M]
        index[b, :, : min(n, M)] = best.sort(-1).values
    return index


def kv_loss(teacher: DecoderOutput, student: DecoderOutput, columns: list[Tensor], batch: ReasoningBatch) -> Tensor:
    """Eq. 4: half of the loss on keys and half of that on values of both passes, over latents that have a target."""
    Nq, Nc, M = batch.question_ids.shape[1], batch.chain_ids.shape[1], columns[0].shape[2]
    has_target = torch.arange(M, device=columns[0].device) < batch.chain_mask.sum(1, keepdim=True)
    losses: list[Tensor] = []
    for name in ("keys", "values"):
        distances: list[Tensor] = []
        for t, s, index in zip(getattr(teacher.cache, name), getattr(student.cache, name), columns, strict=True):
            chain = t[:, :, Nq : Nq + Nc] if Nc else torch.zeros_like(t[:, :, :1])
            target = chain.gather(2, index[..., None].expand(-1, -1, -1, t.shape[3])).detach()
            distances.append(F.smooth_l1_loss(s[:, :, Nq + 1 : Nq + 1 + M], target, reduction="none"))
        scored = torch.stack(distances).permute(1, 3, 0, 2, 4)[has_target]  # [targets, L, G, E]
        losses.append(scored.mean() if len(scored) else scored.sum())
    return (losses[0] + losses[1]) / 2


def hidden_loss(teacher: DecoderOutput, student: DecoderOutput, batch: ReasoningBatch, answer: int, L: int) -> Tensor:
    """CODI's L_CODI: smooth L1 at the distillation token over blocks; `answer` is the student's first answer column."""
    rows, column = (batch.distill_column >= 0).nonzero()[:, 0], batch.distill_column.clamp(min=0)
    at_t, at_s = batch.question_ids.shape[1] + batch.chain_ids.shape[1] + column, answer + column
    losses: list[Tensor] = []
    for l in range(1, L + 1):
        h_t = teacher.activations[f"hidden.{l}"][rows, at_t[rows]].detach()
        h_s = student.activations[f"hidden.{l}"][rows, at_s[rows]]
        losses.append(F.smooth_l1_loss(h_s, h_t) / h_t.std().clamp(min=1e-6))
    return torch.stack(losses).mean()


def kava_loss(
    decoder: Decoder, latent_thoughts: LatentThoughts, batch: ReasoningBatch,
    alpha1: float = 1.0, alpha2: float = 1.0, lam: float = 0.1,
) -> Tensor:  # fmt: skip
    """Eq. 5: L = CE_s + CE_t + alpha1 L_CODI + alpha2 L_KV; call `backward` on it."""
    L, M, Nq = decoder.config.num_hidden_layers, latent_thoughts.num_latents, batch.question_ids.shape[1]
    question = (decoder.embed(batch.question_ids), batch.question_mask)
    chain = (decoder.embed(batch.chain_ids), batch.chain_mask)
    answer = (decoder.embed(batch.answer_ids), batch.answer_mask)
    one = batch.question_mask.new_ones(batch.B, 1)
    bot, eot = ((x.to(question[0].dtype).expand(batch.B, 1, -1), one) for x in latent_thoughts.vectors[[0, 2]])

    teacher = read_parts(decoder, (question, chain, answer), ("q_rot", "k_rot", "hidden"))
    targets = batch.question_target[:, None], batch.chain_targets, batch.answer_targets
    loss = cross_entropy(decoder, teacher.hidden_states, Nq - 1, *targets)

    latents = run_jacobi(decoder, latent_thoughts, (question, bot), M)
    at_eot = Nq + 1 + M  # after question, bot and latents; its output predicts the answer's first token
    student = read_parts(decoder, (question, bot, latents, eot, answer), ("hidden",))
    loss = loss + cross_entropy(decoder, student.hidden_states, at_eot, batch.answer_ids[:, :1], batch.answer_targets)

    with torch.no_grad():
        columns = [select_columns(teacher, l, decoder.attention_scale(l), batch, M, lam) for l in range(L)]
    loss = loss + alpha1 * hidden_loss(teacher, student, batch, at_eot + 1, L)
    return loss + alpha2 * kv_loss(teacher, student, columns, batch)
