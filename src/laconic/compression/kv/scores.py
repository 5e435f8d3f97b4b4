"""Scores of KV cache selection: how important a document's keys and values are, per KV head.

KVzip (arXiv:2505.23416), SnapKV (2404.14469), R-KV (2505.24133), H2O (2306.14048), expected attention (2510.00636).

Symbols: q, k, v rotated queries, keys and values; s attention scale; p probabilities; H query heads in G groups of R;
N keys; T queries; E head size. Scores are at least float32. Attention is computed for blocks of queries, so that memory
does not grow with T; R-KV, which uses a few queries, takes them at once. Equation numbers are the papers', or the
ledger's (SK1, HH1, ...) where a paper has none.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.models.attention import accumulation_dtype
from laconic.models.rope import rotate_pairs

Scores = Float[Tensor, "B G N"]
BLOCK_LOGITS = 2**19  # attention logits computed at once: 2 MiB in float32, which fit into the CPU's cache
SNAPKV_KERNEL = 5  # width of SnapKV's average pool
RKV_KERNEL, RKV_LAMBDA, RKV_THRESHOLD = 7, 0.07, 0.5  # width of R-KV's max pool, weight of importance, similar keys


def grouped_logits(
    q: Float[Tensor, "B H T E"], k: Float[Tensor, "B G N E"], scale: float
) -> Float[Tensor, "B G R T N"]:
    """Return s q[t] . k[i] for the R query heads of each KV head, in accumulation precision."""
    (B, H, T, E), (G, N) = q.shape, k.shape[1:3]
    dtype = accumulation_dtype(q.dtype)
    a = (scale * q.to(dtype)).reshape(B, G, -1, E) @ k.to(dtype).transpose(-1, -2)
    return a.view(B, G, H // G, T, N)


def iter_causal_probs(
    q: Float[Tensor, "B H T E"], k: Float[Tensor, "B G N E"], scale: float
) -> Iterator[Float[Tensor, "B G R n m"]]:
    """Yield causal attention probabilities of T queries, whose own keys are the last T of N, in blocks of n queries.

    A block has probabilities for the m keys up to its last query.
    """
    (B, H, T, _), N = q.shape, k.shape[2]
    size = max(1, BLOCK_LOGITS // (B * H * N))
    k = k.to(accumulation_dtype(k.dtype)).mT.contiguous().mT  # transposed in memory, as the matrix products read it
    index = torch.arange(T, device=q.device)
    for start in range(0, T, size):
        block = index[start : start + size]
        a = grouped_logits(q[:, :, start : start + size], k[:, :, : N - T + start + len(block)], scale)
        a[..., -len(block) :].masked_fill_(block > block[:, None], -torch.inf)
        yield a.softmax(-1)


def snapkv_scores(q: Float[Tensor, "B H T E"], k: Float[Tensor, "B G N E"], scale: float) -> Scores:
    """Eq. SK1: mean attention of the last T queries, average-pooled over 5 keys and averaged over the query heads.

    The keys of the T queries themselves get 0; the selection keeps them without a score.
    """
    past = k.shape[2] - q.shape[2]
    p = torch.stack([block[..., :past].sum(3) for block in iter_causal_probs(q, k, scale)]).sum(0) / q.shape[2]
    pooled = F.avg_pool1d(p.flatten(0, 2), SNAPKV_KERNEL, 1, SNAPKV_KERNEL // 2)
    return F.pad(pooled.view(*p.shape[:3], past).mean(2), (0, q.shape[2]))


def key_redundancy(k: Float[Tensor, "B G N E"]) -> Scores:
    """Eq. 2: r[i] = 1/N sum_j cos(k[j], k[i]) over j != i.

    For each j, the newest key similar to it is left out of the sum, so that one of several similar keys stays.
    """
    B, G, N, _ = k.shape
    k = k.to(accumulation_dtype(k.dtype))
    unit = k / (k.square().sum(-1, keepdim=True).sqrt() + 1e-8)
    total = torch.zeros_like(unit[..., 0])
    index = torch.arange(N, device=k.device)
    rows = max(1, BLOCK_LOGITS // (B * G * N))
    for start in range(0, N, rows):
        similarity = unit[:, :, start : start + rows] @ unit.transpose(-1, -2)
        is_other = index != index[start : start + rows, None]
        similarity = similarity * is_other
        newest = (index * (similarity > RKV_THRESHOLD)).amax(-1, keepdim=True)
        is_newest = (index == newest) & (similarity > RKV_THRESHOLD)
        total += similarity.masked_fill(is_newest, 0.0).sum(2)
    return total / N


def rkv_scores(q: Float[Tensor, "B H T E"], k: Float[Tensor, "B G N E"], scale: float) -> Scores:
    """Eq. 1: S = lambda maxpool(I) - (1 - lambda) softmax(r), with I the attention of the last T queries.

    I is the mean over the T queries of a softmax over the keys before them; its logits are the maximum over the query
    heads of a group. The keys of the T queries themselves get 0; the selection keeps them without a score.
    """
    past = k.shape[2] - q.shape[2]
    importance = grouped_logits(q, k[:, :, :past], scale).amax(2).softmax(-1).mean(2)
    pooled = F.max_pool1d(importance, RKV_KERNEL, 1, RKV_KERNEL // 2)
    redundancy = key_redundancy(k).softmax(-1)[..., :past]
    return F.pad(RKV_LAMBDA * pooled - (1 - RKV_LAMBDA) * redundancy, (0, q.shape[2]))


def accumulated_attention(q: Float[Tensor, "B H T E"], k: Float[Tensor, "B G N E"], scale: float) -> Scores:
    """Eq. HH1: the attention of T queries, the last of N positions, to each key, averaged over the query heads.

    The caller sums it over the pieces of a document and divides by the number of queries that see the key.
    """
    total = torch.zeros(q.shape[0], *k.shape[1:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    for p in iter_causal_probs(q, k, scale):
        total[..., : p.shape[-1]] += p.sum(3).mean(2)
    return total


def average_rotation(
    mean: Float[Tensor, "B H E"],
    covariance: Float[Tensor, "B H E E"],
    cos: Float[Tensor, "T E"],
    sin: Float[Tensor, "T E"],
) -> tuple[Float[Tensor, "B H E"], Float[Tensor, "B H E E"]]:
    """Eq. EA1: mu <- R mu and Sigma <- R Sigma R^T, with R the mean of RoPE's rotations at T future positions."""
    E = mean.shape[-1]
    c, s = (x.mean(0).expand(1, 1, E, E) for x in (cos, sin))
    rotated = rotate_pairs(rotate_pairs(covariance, c, s).transpose(-1, -2), c, s).transpose(-1, -2)
    return rotate_pairs(mean[:, :, None], c[:, :, :1], s[:, :, :1])[:, :, 0], rotated


def expected_attention_scores(
    mean: Float[Tensor, "B H E"],
    covariance: Float[Tensor, "B H E E"],
    k: Float[Tensor, "B G N E"],
    v: Float[Tensor, "B G N E"],
    scale: float,
) -> Scores:
    """Eq. EA2: mean over the query heads of softmax_i(s mu . k[i] + s^2/2 k[i]^T Sigma k[i]), times |v[i]|.

    The exponential of the logit is the expected exp(s q . k[i]) of a normally distributed query.
    """
    (B, H, E), G = mean.shape, k.shape[1]
    k, v = k.to(mean.dtype), v.to(mean.dtype)
    linear = grouped_logits(mean[:, :, None], k, scale)[..., 0, :]
    products = k[:, :, None] @ covariance.view(B, G, H // G, E, E)
    quadratic = (products * k[:, :, None]).sum(-1)
    return (linear + scale**2 / 2 * quadratic).softmax(-1).mean(2) * v.square().sum(-1).sqrt()


def attend_and_score(
    q: Float[Tensor, "B R T E"],
    k: Float[Tensor, "B 1 P E"],
    v: Float[Tensor, "B 1 P E"],
    scale: float,
    piece: slice,
    others: Bool[Tensor, " P"] | None,
) -> tuple[Float[Tensor, "B T RE"], Float[Tensor, "B n"]]:
    """Eq. KZ1: attend with the query heads of a KV head, and return the largest probability of each key of a piece.

    The largest is over the T queries, which repeat the piece, and over the query heads. The scores come from the
    probabilities that the attention needs anyway, so that they cost little time. The keys `k` are those of a document
    and of its repetition so far, the last T of them the queries' own; `others` are left out of the softmax of the
    scores, not of the attention.
    """
    values = v.to(accumulation_dtype(v.dtype))
    contexts = list[Tensor]()
    best = torch.zeros_like(values[:, 0, piece, 0])
    for p in iter_causal_probs(q, k, scale):
        contexts.append((p @ values[:, :, None, : p.shape[-1]])[:, 0])
        if others is not None:
            total = p @ (~others[: p.shape[-1]]).to(p.dtype)
            p = p / total.clamp(min=torch.finfo(p.dtype).tiny)[..., None]  # the sum can underflow to 0
        best = torch.maximum(best, p[..., piece].amax((1, 2, 3)))
    return torch.cat(contexts, 2).transpose(1, 2).flatten(2).to(q.dtype), best


def key_norm_scores(k: Float[Tensor, "B G N E"]) -> Scores:
    """Eq. KN1: the negative norm of the key (arXiv:2406.11430)."""
    return -k.to(accumulation_dtype(k.dtype)).square().sum(-1).sqrt()


def rank_slots(
    scores: Float[Tensor, "L B G N"], num_sinks: int, recent: Bool[Tensor, " N"], equal_heads: bool
) -> Int[Tensor, "L B G N"]:
    """Rank keys so that, for every m, those with ranks below m are a memory of m keys per head, on average over heads.

    The first `num_sinks` keys come first, in every head. Then the `recent` keys, newest first, alternate with the other
    keys in the order of their scores, so that a memory of any size has a share of both. Ties go to the earlier key.

    With `equal_heads`, keys of the same head are compared only, so that all heads keep the same number; otherwise all
    heads of all layers share the slots.
    """
    L, B, G, N = scores.shape
    index = torch.arange(N, device=scores.device)
    is_sink = index < num_sinks
    is_recent = recent & ~is_sink
    num_recent = int(is_recent.sum())
    num_scored = int((~recent & ~is_sink).sum())
    scores = scores.masked_fill(is_sink | is_recent, -torch.inf)
    groups = scores if equal_heads else scores.transpose(0, 1).reshape(B, -1)
    place = groups.argsort(dim=-1, descending=True, stable=True).argsort(-1)  # of each key in the order of scores
    if not equal_heads:
        place = place.view(B, L, G, N).transpose(0, 1) // (L * G)
    # recent and scored keys take turns, a recent one first: before a key come those of its own kind and of the other
    by_score = num_sinks + place + (place + 1).clamp(max=num_recent)
    age = is_recent.flip(0).cumsum(0).flip(0) - 1
    by_age = num_sinks + age + age.clamp(max=num_scored)
    return torch.where(is_sink, index, torch.where(is_recent, by_age, by_score))


def merge_ranks(ranks: Int[Tensor, " N"], sizes: Sequence[Int[Tensor, " N"]], document: int) -> Int[Tensor, " N"]:
    """Return the ranks of one document's slots in a joint memory, in which each document has its share at every size.

    `sizes` are the numbers of ranks of each document in the layer and head of each slot.
    """
    merged = ranks.clone()
    # before rank r of size n come the slots of other documents with smaller r / n, of earlier ones also with equal
    for other, size in enumerate(sizes):
        scaled = ranks * size
        if other < document:
            merged += (scaled // sizes[document] + 1).minimum(size)
        elif other > document:
            merged += (-(-scaled // sizes[document])).minimum(size)
    return merged


def concat_parts(memories: Sequence[Sequence[Tensor]]) -> Tensor:
    """Concatenate the first parts of several memories, then the second ones, and so on."""
    return torch.cat([part for parts in zip(*memories, strict=True) for part in parts])
