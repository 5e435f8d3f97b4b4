"""Latent thoughts and R-KV under a model of one's own: whatever reads vectors on a cache can think, and be taught."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic import DecoderOutput, KVCache
from laconic.latent.kava import kv_loss
from laconic.latent.rkv import answer_logits, gather_selected, importance, redundancy, score, select_top_m
from laconic.latent.rollout import run_latent_rollout


class Own(nn.Module):
    """One layer, one head, learned places: called like a `Decoder`, and sharing no code with it."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.places, self.norm = nn.Embedding(99, D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, vectors: Tensor, state: KVCache | None = None, *, live: Tensor | None = None) -> DecoderOutput:
        live = torch.ones(vectors.shape[:2], dtype=torch.bool) if live is None else live
        S, before = (state.S, state.valid.sum(1)) if state else (0, torch.zeros(len(live), dtype=torch.long))
        positions = (before[:, None] + live.cumsum(1) - 1) * live
        x = vectors + self.places(positions)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)  # [B, 1, T, D]
        new = KVCache((k,), (v,), positions, live)
        held = state.append(new) if state else new
        seen = held.valid[:, None] & (torch.arange(held.S) <= torch.arange(S, held.S)[:, None])
        c = F.scaled_dot_product_attention(q, held.keys[0], held.values[0], seen[:, None])
        return DecoderOutput(self.norm(x + self.out(c[:, 0])), held, {"q": q})


torch.manual_seed(0)
torch.set_num_threads(1)  # all of it is small
D, M, Nq, Nc = 32, 4, 6, 10
own, question, written = Own(D), torch.randn(8, Nq, D), torch.randn(8, Nc + 3, D)  # a chain of 10, an answer of 3
live, answer = torch.ones(8, Nc, dtype=torch.bool), torch.ones(8, 3, dtype=torch.bool)

with torch.no_grad():  # what the teacher's chain leaves behind, thinned out to M
    teacher = own(written, own(question).state)
    k, v = (x[0][:, :, Nq : Nq + Nc] for x in (teacher.state.keys, teacher.state.values))
    I = importance(answer_logits(teacher.activations["q"][:, :, Nc:], k, D**-0.5), live, answer)
    kept = select_top_m(score(I, redundancy(k, live), 0.1), live, M)
print("kept of the first chain:", kept.index[0, 0].tolist())

project = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D), nn.LayerNorm(D))
bot, slot = (nn.Parameter(torch.randn(D)) for _ in range(2))
optimizer = torch.optim.AdamW([bot, slot, *project.parameters(), *own.parameters()], lr=3e-3)
for step in range(101):
    state = own(question).state
    thoughts = run_latent_rollout(own, bot.expand(8, 1, D), slot, M, 3, project=project, cache=state)
    k_s, v_s = (x[0][:, :, -M:] for x in (thoughts.cache.keys, thoughts.cache.values))
    loss = kv_loss([gather_selected(k, kept)], [gather_selected(v, kept)], [k_s], [v_s], kept.valid)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3}: keys and values are {loss.item():.4f} from what was kept ({thoughts.passes})")
