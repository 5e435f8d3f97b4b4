"""The likely cause of a divergence, read from what the wrong stage looks like beside the reference's.

Every rule makes a guess from the reference's own tensors and speaks only if it accounts for the deviation.

Symbols: B rows, T query slots, P key slots, S slots held, N heads, E per head, a scores, W window, eps of a norm.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.models.attention import repeat_heads
from laconic.models.block import ACTIVATIONS
from laconic.verification.evidence import Evidence, distance, pairs, turns, unpaired
from laconic.verification.maps import linear, norm, row
from laconic.verification.parity import StageResult
from laconic.verification.rotations import rotation
from laconic.verification.sights import probs, scores, scores_seen

Rule = Callable[[Evidence], str | None]

MEANS = {
    "embed": "wrong file, prefix, or offset of places",
    "norm1": "epsilon, centring, wrong weight, or order of casts",
    "q": "orientation, bias, number of heads, or order of the split",
    "q_rot": "pairing, base, sign, start, scaling, or precision of the angles",
    "k_cache": "order of joining, stale slots, or keys not rotated",
    "scores": "scale, or which key head a query head reads",
    "scores_seen": "mask, window, or bias",
    "probs": "precision of the softmax, or who is seen",
    "context": "how heads are merged, or the values",
    "mid": "gate and up swapped, or another activation",
    "resid1": "a residual dropped, or norms in another order",
    "logits": "final norm, or the head's matrix",
    "last_logits": "index of the last live column",
}
ALIKE = {
    "norm2": "norm1", "final_norm": "norm1", "k": "q", "v": "q", "q_raw": "q", "k_raw": "q", "attn_out": "q",
    "gate": "q", "up": "q", "mlp_out": "q", "k_rot": "q_rot", "v_cache": "k_cache", "resid2": "resid1",
    "token": "last_logits", "next_probs": "last_logits",
}  # fmt: skip


def likely(e: Evidence) -> str:
    """One sentence: what the signature says, or what a first wrong number at this stage usually means."""
    e = cleaned(e)
    if e.got.shape != e.want.shape and "cache" not in e.stage:
        return f"shape: {list(e.got.shape)}, the reference's {list(e.want.shape)}"
    for rule in RULES.get(e.stage, ()):
        try:
            found = rule(e)
        except KeyError:  # a stage that this reference does not have
            continue
        if found:
            return found
    return f"no signature known; at {e.stage} look at: {MEANS[ALIKE.get(e.stage, e.stage)]}"


def bisection(findings: list[StageResult]) -> str:
    """Where halving would have looked: resid2 of the middle layer, then of the half that holds the first divergence."""
    far = [f.exceeds_noise for f in findings if (f.kind, f.stage) == ("propagated", "resid2")]
    if not far or not far[-1]:
        return "bisection: the last layer agrees"
    low, high, way = -1, len(far) - 1, []
    while high - low > 1:
        middle = (low + high) // 2
        way.append(f"resid2.{middle} {'parts' if far[middle] else 'agrees'}")
        low, high = (low, middle) if far[middle] else (middle, high)
    return f"bisection: {', '.join([*way, f'so layer {high}'])}"


def cleaned(e: Evidence) -> Evidence:
    """The same with 0 at dead query slots, where nothing is defined."""
    axis = {"embed": 1, "logits": 1, "last_logits": None, "token": None, "next_probs": None}.get(
        e.stage, e.got.ndim - 2
    )
    if e.got.shape != e.want.shape or axis is None or e.got.shape[axis] != e.T:
        return e
    view = [1] * e.got.ndim
    view[0], view[axis] = e.new.shape
    alive = e.new.reshape(view)
    return Evidence(**{**vars(e), "got": e.got.masked_fill(~alive, 0), "want": e.want.masked_fill(~alive, 0)})


def places(e: Evidence) -> str | None:
    """Rows of the learned table, another constant number of rows away."""
    names = e.decoder.weight_names
    if names.position_embedding is None:
        return None
    table = e.decoder.get_submodule(names.position_embedding).weight
    assert isinstance(table, Tensor)
    p, mine = e.positions[:, e.S :], e.decoder.config.position_offset
    for c in range(-4, 5):
        rows = p + mine + c
        if (
            c
            and 0 <= int(rows.min()) <= int(rows.max()) < len(table)
            and e.explains((e.reference["vectors"] + table[rows]).masked_fill(~e.new[..., None], 0))
        ):
            return f"places: row p {mine + c:+d} of the table is added, the reference adds row p {mine:+d}"
    return None


def words(e: Evidence) -> str | None:
    """One row of a table of vectors: only where one word, or one place, is read do we part."""
    vectors, names, apart = e.reference["vectors"], e.decoder.weight_names, (e.got != e.want).any(-1)
    read, p = vectors[apart], e.positions[:, e.S :]
    if len(read) and bool((read == read[0]).all()) and bool(apart[(vectors == read[0]).all(-1) & e.new].all()):
        found = (e.decoder.token_embedding.weight == read[0]).all(-1).nonzero().flatten().tolist()
        if found:
            return f"weights: row {found[0]} of {names.token_embedding.rpartition('.')[2]} differs"
    there = p[apart]
    if (
        names.position_embedding
        and len(there)
        and bool((there == there[0]).all())
        and bool(apart[(p == there[0]) & e.new].all())
    ):
        at = int(there[0]) + e.decoder.config.position_offset
        return f"weights: row {at} of {names.position_embedding.rpartition('.')[2]} differs"
    return None


def rotated(e: Evidence) -> str | None:
    """Queries and keys after rotation."""
    return rotation(e, e.reference["q" if e.stage == "q_rot" else "k"].masked_fill(~e.new[:, None, :, None], 0))


def cache(e: Evidence) -> str | None:
    """What the cache holds, slot by slot."""
    if e.got.shape != e.want.shape:
        return f"cache: {e.got.shape[2]} slots are held, the reference holds {e.want.shape[2]}; stale or lost slots"
    slots = [t.double().transpose(1, 2).flatten(2) for t in (e.got, e.want)]
    order = torch.cdist(slots[0], slots[1])[0].argmin(1)
    if len(set(order.tolist())) == len(order) and e.explains(e.want[:, :, order], 1e-3):
        return f"cache order: slot {int(order[0])} stands first" + ("; new slots before the old" if order[0] else "")
    if e.stage == "k_cache" and e.explains(torch.cat([e.want[:, :, : e.S], e.reference["k"]], 2)):
        return "keys are not rotated"
    sizes = [t.unflatten(-1, (2, -1)).norm(dim=-2) for t in (e.got, e.want)]
    if distance(*sizes) < 1e-3 * distance(e.got, e.want):
        return "values are rotated" if e.stage == "v_cache" else "keys are rotated twice or not at all"
    wrong = (e.got != e.want).any(-1).any(1).any(0)
    return f"stale slots: {[int(j) for j in wrong.nonzero().flatten()]} hold something else"


def context(e: Evidence) -> str | None:
    """Heads side by side, and what they gather."""
    H, E = e.decoder.config.num_attention_heads, e.decoder.config.head_dim
    heads, alive = e.want.unflatten(-1, (H, E)), e.new[..., None]
    if e.explains(heads.transpose(1, 2).reshape(e.want.shape) * alive, 0.3):
        return "merge of heads: laid side by side without transposing"
    slot = torch.arange(e.live.shape[1])
    corner = e.reference["scores"].masked_fill(slot > slot[: e.T, None], -torch.inf).double().softmax(-1)
    if e.S and e.explains(
        (corner @ repeat_heads(e.reference["v_cache"], H).double()).transpose(1, 2).flatten(2) * alive
    ):
        return f"causality aligned upper-left: with {e.S} slots held, query t sees slots up to t"
    q, turned = e.reference["q"], e.reference["q_rot"]
    if torch.equal(q, turned):
        return None
    v = e.reference["v_cache"].double()
    v = torch.cat([v[:, :, : e.S], unpaired(pairs(v[:, :, e.S :]) * turns(q, turned)[:, None])], 2)
    made = e.reference["probs"].double() @ repeat_heads(v, H)
    return "values are rotated" if e.explains(made.transpose(1, 2).flatten(2) * alive) else None


def mid(e: Evidence) -> str | None:
    """Gate and up, and the function between them."""
    up, gate, act = e.reference["up"], e.reference.get("gate"), e.decoder.config.activation
    alive = e.new[..., None]
    if gate is not None and e.explains(ACTIVATIONS[act](up) * gate * alive):
        return "gate and up swapped: exchanging them mends it"
    factor = alive if gate is None else up * alive
    found = [
        next(
            (n for n, f in ACTIVATIONS.items() if distance(f(up if gate is None else gate) * factor, y) <= share), None
        )
        for y, share in ((e.got, 0.05 * distance(e.got, e.want)), (e.want, 0.05 * distance(e.got, e.want)))
    ]
    return f"activation: {found[0]}, the reference's {found[1] or 'another'}" if found[0] else None


def residual(e: Evidence) -> str | None:
    """What is added to what."""
    before, out = ("x", "attn_out") if e.stage == "resid1" else ("resid1", "mlp_out")
    alive = e.new[..., None]
    if e.explains(e.reference[out] * alive):
        return "residual dropped: the difference is what the block reads"
    return "branch dropped: nothing is added" if e.explains(e.reference[before] * alive) else None


def head(e: Evidence) -> str | None:
    """The matrix of the head."""
    tied = F.linear(e.reference["final_norm"], e.decoder.token_embedding.weight) * e.new[..., None]
    if said := row(e):
        return said
    if e.mends(tied):
        return "tie: the reference's head is the words' matrix, ours is another"
    return "tie: our head is the words' matrix, the reference's is another" if e.explains(tied) else None


def column(e: Evidence) -> str | None:
    """Which slot is the last."""
    if e.stage == "last_logits" and e.explains(e.reference["logits"][:, -1]):
        return "last column: read where the row is padding, not at the last live slot"
    return None


RULES: Mapping[str, tuple[Rule, ...]] = {
    "embed": (places, words),
    "norm1": (norm,), "norm2": (norm,), "final_norm": (norm,),
    "q_raw": (linear,), "k_raw": (linear,), "v": (linear,), "attn_out": (linear,), "gate": (linear,), "up": (linear,),
    "q": (lambda e: norm(e) if "q_raw" in e.reference else linear(e),),
    "k": (lambda e: norm(e) if "k_raw" in e.reference else linear(e),),
    "q_rot": (rotated,), "k_rot": (rotated,),
    "k_cache": (cache,), "v_cache": (cache,),
    "scores": (scores,), "scores_seen": (scores_seen,), "probs": (probs,), "context": (context,),
    "mlp_out": (linear,), "mid": (mid,), "resid1": (residual,), "resid2": (residual,),
    "logits": (head,), "last_logits": (column,),
}  # fmt: skip
