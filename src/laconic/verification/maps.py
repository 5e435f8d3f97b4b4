"""What is wrong with a norm or a linear map, told from what enters it and what comes out.

Symbols: x what is read, u the part of it that is scaled; eps of a norm; H query heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.verification.evidence import Evidence, distance, fitted

BIAS = "bias: a constant vector per channel is missing or too much"


def norm(e: Evidence) -> str | None:
    """epsilon, centring, weights, of the norm that reads x (or queries and keys, in Qwen3)."""
    x, role = {
        "norm1": ("x", "norm1"), "norm2": ("resid1", "norm2"), "final_norm": ("x", "final_norm"),
        "q": ("q_raw", "q_norm"), "k": ("k_raw", "k_norm"),
    }[e.stage]  # fmt: skip
    alive = e.new[..., None] if e.want.ndim == 3 else e.new[:, None, :, None]
    read = e.reference[x].double() * alive
    centred = read - read.mean(-1, keepdim=True)
    layered = e.decoder.config.norm_type == "layer"
    u = centred if layered else read
    sized = u_of(u, e.decoder.config.norm_eps)
    own, bias = e.weight(role), e.weight(role, "bias")
    shift = 0.0 if bias is None else bias.double()
    if bias is not None and (said := biased(e)):
        return said
    if e.explains(read, 1e-3):
        return "norm missing: what enters comes out"
    if not layered and own is not None and e.explains(u_of(centred, e.decoder.config.norm_eps) * own.double() * alive):
        return "centring: rows have their mean taken off first"
    lead = tuple(range(read.ndim - 1))
    shrunk = (e.want - shift) * fitted(e.want - shift, e.got - shift, (-1,)) + shift
    if own is not None and e.explains(shrunk * alive, 0.2):
        weighted = u * own.double()
        ours, theirs = (implied(weighted, y - shift, u) for y in (e.got, e.want))
        return f"epsilon: {ours:.3g}, the reference's {theirs:.3g}"
    return weights_of(e, fitted(sized, e.got - shift, lead), fitted(sized, e.want - shift, lead), role)


def u_of(u: Tensor, eps: float) -> Tensor:
    """u over its root mean square."""
    return u * (u.square().mean(-1, keepdim=True) + eps).rsqrt()


def implied(weighted: Tensor, y: Tensor, u: Tensor) -> float:
    """eps of y = weighted / sqrt(mean(u^2) + eps), the median over rows."""
    size = fitted(weighted, y, (-1,))
    return max(float((size.clamp(min=1e-12) ** -2 - u.square().mean(-1, keepdim=True))[size > 0].median()), 0.0)


def weights_of(e: Evidence, ours: Tensor, theirs: Tensor, role: str) -> str | None:
    """Which other norm's weight stands here."""
    if not e.explains(e.want * (ours / torch.where(theirs == 0, 1.0, theirs)), 0.2):
        return None
    ours, theirs = ours.flatten(), theirs.flatten()
    if (c := alone(ours - theirs)) is not None:
        return f"norm weight: entry {part(e, c)} is {float(ours[c]):.4g}, the reference's {float(theirs[c]):.4g}"
    if (ours - 1).abs().max() < 1e-3:
        return "norm weight missing: as if it were 1"
    for name, p in e.decoder.named_parameters():
        for side, w in (("used", ours), ("meant by the reference", theirs)):
            mine = e.weight(role)
            itself = mine is not None and p.data_ptr() == mine.data_ptr()
            if not itself and p.shape == w.shape and (p - w).abs().max() < 1e-3 and (ours - theirs).abs().max() > 1e-2:
                return f"norm weights exchanged: {name} is {side}"
    return "norm weight: another one than the reference's"


def linear(e: Evidence) -> str | None:
    """Orientation, bias, order of the split and of the rows, of a map."""
    alive = e.new[..., None] if e.want.ndim == 3 else e.new[:, None, :, None]
    for other in ("q", "k", "v", "q_raw", "k_raw", "gate", "up"):
        there = e.reference.get(other)
        if other == e.stage or there is None or there.ndim != e.want.ndim:
            continue
        if e.explains(there.masked_fill(~alive, 0), 1e-2):
            return f"order of the split: {e.stage} is the reference's {other}"
    return biased(e) or row(e) or transposed(e) or reordered(e)


def alone(gap: Tensor) -> int | None:
    """The channel, last axis, that has nearly all of a deviation; None if several share it."""
    size = gap.double().flatten(0, -2).square().sum(0) if gap.ndim > 1 else gap.double().square()
    c = int(size.argmax())
    return c if len(size) > 1 and float(size.sum() - size[c]) < 0.01 * float(size[c]) else None


def channel(e: Evidence) -> int | None:
    """The only output channel, heads laid side by side, that parts from the reference's."""
    gap = e.got.double() - e.want.double()
    return alone(gap if gap.ndim == 3 else gap.transpose(1, 2).flatten(2))


def part(e: Evidence, c: int) -> str:
    """`3 of up_proj in layer 2`: a channel of a stage as the row of its module's weight."""
    names, config, stage = e.decoder.weight_names, e.decoder.config, e.stage
    role = {"attn_out": "o", "mlp_out": "down", "logits": "head"}.get(stage, stage.removesuffix("_raw"))
    if stage in ("q", "k") and config.qk_norm:
        role += "_norm"
    path = names.token_embedding if role == "head" and config.tie_word_embeddings else getattr(names, role)
    if path is None:
        path, E = names.qkv or "", config.head_dim
        before = {"k": config.num_attention_heads, "v": config.num_attention_heads + config.num_key_value_heads}
        c += before.get(role, 0) * E
    return f"{c} of {path.rpartition('.')[2]}" + ("" if e.layer is None else f" in layer {e.layer}")


def row(e: Evidence) -> str | None:
    """One row of a weight, which is one output channel; GPT-2's files have it as a column."""
    c = channel(e)
    if c is None:
        return None
    turned = any(path.endswith(part(e, c).split()[2]) for path in e.decoder.weight_names.transposed)
    return f"weights: {'column' if turned else 'row'} {part(e, c)} differs"


def biased(e: Evidence) -> str | None:
    """The same vector at every slot."""
    lead = (0, 1) if e.want.ndim == 3 else (0, 2)
    alive = (e.new[..., None] if e.want.ndim == 3 else e.new[:, None, :, None]).expand(e.want.shape)
    step = ((e.got - e.want) * alive).sum(lead, keepdim=True) / alive.sum(lead, keepdim=True)
    if not e.explains(e.want + step * alive, 1e-2):
        return None
    c = channel(e)
    return f"bias: entry {part(e, c)} differs" if c is not None else BIAS


def transposed(e: Evidence) -> str | None:
    """A square map read as [in, out]."""
    role, x = {"attn_out": ("o", "context"), "gate": ("gate", "norm2"), "up": ("up", "norm2")}.get(e.stage, ("", ""))
    w, b = (e.weight(role), e.weight(role, "bias")) if role else (None, None)
    if w is None or w.shape[0] != w.shape[1] or not e.mends(F.linear(e.reference[x], w.T, b) * e.new[..., None]):
        return None
    return "orientation: the map is read as [out, in] where it lies as [in, out], transposing mends it"


def reordered(e: Evidence) -> str | None:
    """Channels of queries or keys in the order of another conversion of pairs."""
    if e.want.ndim != 4:
        return None
    got, want = (t.double().transpose(1, 2).flatten(2).flatten(0, 1).T for t in (e.got, e.want))
    near = torch.cdist(got, want)
    order = near.argmin(1)
    if sorted(order.tolist()) != list(range(len(order))) or float(near.amin(1).norm()) > 1e-2 * distance(got, want):
        return None
    heads, config = e.want.shape[1], e.decoder.config
    for n in {config.num_attention_heads, config.num_key_value_heads}:
        for back, forth in ((n, heads), (heads, n)):
            there = halved(torch.arange(len(order)), back).argsort()
            if n != heads and torch.equal(order, there[halved(torch.arange(len(order)), forth)]):
                return f"conversion: rows of {e.stage} are paired as if there were {n} heads, not {heads}"
    return "order of rows: the channels are the reference's in another order"


def halved(rows: Tensor, heads: int) -> Tensor:
    """Neighbours as pairs become halves as pairs, head by head."""
    return rows.reshape(heads, -1, 2).transpose(1, 2).flatten()
