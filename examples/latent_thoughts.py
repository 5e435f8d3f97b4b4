"""Train latent thoughts with R-KV targets on a model of your own; it only has to read embeddings and a KV cache."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic import DecoderOutput, KVCache
from laconic.latent.kava import kv_loss
from laconic.latent.rkv import answer_logits, gather_selected, importance, redundancy, score, select_top_m
from laconic.latent.rollout import LatentPrefix, run_latent_rollout


class OneLayerModel(nn.Module):
    """One layer, one head and learned positions, with the interface of `Decoder` but none of its code."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.positions, self.norm = nn.Embedding(99, D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(
        self, inputs_embeds: Tensor, cache: KVCache | None = None, *, attention_mask: Tensor | None = None
    ) -> DecoderOutput:
        mask = torch.ones(inputs_embeds.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask
        S, num_past = (cache.S, cache.valid.sum(1)) if cache else (0, torch.zeros(len(mask), dtype=torch.long))
        position_ids = (num_past[:, None] + mask.cumsum(1) - 1) * mask
        x = inputs_embeds + self.positions(position_ids)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)  # [B, 1, T, D]
        new = KVCache((k,), (v,), position_ids, mask)
        cache = cache.append(new) if cache else new
        visible = cache.valid[:, None] & (torch.arange(cache.S) <= torch.arange(S, cache.S)[:, None])
        attended = F.scaled_dot_product_attention(q, cache.keys[0], cache.values[0], visible[:, None])
        return DecoderOutput(self.norm(x + self.out(attended[:, 0])), cache, {"q": q})


torch.manual_seed(0)
D, M, Nq, Nc = 32, 4, 6, 10
model, question, written = OneLayerModel(D), torch.randn(8, Nq, D), torch.randn(8, Nc + 3, D)  # chain 10, answer 3
chain_mask, answer_mask = torch.ones(8, Nc, dtype=torch.bool), torch.ones(8, 3, dtype=torch.bool)

with torch.no_grad():  # the teacher reads the chain, and R-KV selects M of its tokens
    teacher = model(written, model(question).cache)
    k, v = (x[0][:, :, Nq : Nq + Nc] for x in (teacher.cache.keys, teacher.cache.values))
    I = importance(answer_logits(teacher.activations["q"][:, :, Nc:], k, D**-0.5), chain_mask, answer_mask)
    columns = select_top_m(score(I, redundancy(k, chain_mask), 0.1), chain_mask, M)

project = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D), nn.LayerNorm(D))
begin, placeholder = (nn.Parameter(torch.randn(D)) for _ in range(2))
optimizer = torch.optim.AdamW([begin, placeholder, *project.parameters(), *model.parameters()], lr=3e-3)
for step in range(101):
    prefix = LatentPrefix(begin.expand(8, 1, D), model(question).cache)
    rollout = run_latent_rollout(model, prefix, placeholder, M, 3, project=project)
    k_s, v_s = (x[0][:, :, -M:] for x in (rollout.cache.keys, rollout.cache.values))
    loss = kv_loss([gather_selected(k, columns)], [gather_selected(v, columns)], [k_s], [v_s], columns.valid)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3}: key/value loss {loss.item():.4f} in {rollout.passes[0].total} forward passes")
