"""KaVa: PCCoT, and the student's keys and values at its slots drawn to those that the teacher's chain leaves behind.

KaVa arXiv:2510.02312. Equations 1 to 3 are `methods.rkv`, 5a and 5b `methods.cot.nll`.

Symbols: K_t, V_t the teacher's keys and values on the chain, K~, V~ those kept; K_s, V_s the student's at the slots of
its last round; d a distance; alpha2 the weight of L_KV. G heads of keys, M slots, E width of a head, L layers.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.core.answering import Writing, quiet
from laconic.core.attention import wide
from laconic.core.cache import Cache
from laconic.core.contract import Answers, Reasoning, Step
from laconic.core.decoder import Decoder, Seen
from laconic.core.errors import Usage
from laconic.core.rollout import Edit, Mode, Reader, Rollout
from laconic.core.thoughts import Thoughts
from laconic.methods import codi, pccot, rkv
from laconic.methods.rkv import Chosen, Kept
from laconic.methods.settings import Distance, Distilling, Keeping, Matching

Layers = Sequence[Float[Tensor, "B G M E"]]
Reduction = Literal["mean", "row_mean", "paper_sum"]
KvNorm = Literal["layer", "global", "own", "none"]


def filled(kept: Kept, how: Literal["mask", "zero", "repeat"]) -> tuple[Kept, Bool[Tensor, "B G M"]]:
    """What slots beyond a short chain are taught: nothing, zeros, or the kept tokens spread; and which are taught."""
    if how == "mask":
        return kept, kept.live
    if how == "zero":
        return kept, torch.ones_like(kept.live)
    M, n = kept.live.shape[2], kept.live.sum(2, keepdim=True)
    index = kept.index.gather(2, torch.arange(M, device=n.device) * n // M)
    live = (n > 0).expand_as(kept.live)
    return Kept(index, live), live


def row_weights(
    taught: Bool[Tensor, "B G M"], L: int, E: int, how: Reduction, total: float | None
) -> Float[Tensor, " B"]:
    """What the sum of a row over l, g, m and e is multiplied by; `total` is of tokens taught, or else of rows."""
    (B, G, M), own = taught.shape, taught.sum((1, 2), dtype=torch.float64)
    if how == "mean":
        tokens = float(own.sum()) / G if total is None else total
        return torch.ones_like(own) / ((tokens or 1.0) * L * G * E)
    rows = float(B) if total is None else total
    return 1 / ((rows or 1.0) * (own.clamp(min=1) * L * E if how == "row_mean" else torch.full_like(own, M)))


def side(
    target: Layers,
    student: Layers,
    taught: Bool[Tensor, "B G M"],
    weights: Float[Tensor, " B"],
    loss: Distance,
    norm: KvNorm,
    power: int,
) -> Float[Tensor, ""]:
    """Keys or values alone: the weighted sum over rows of d between a detached target and the student."""
    live = taught[..., None]
    target = [x.detach().to(wide(x.dtype)) for x in target]
    student = [x.to(wide(x.dtype)) for x in student]
    if norm == "own":
        target, student = ([x / codi.sigma(x, live) ** power for x in layers] for layers in (target, student))
    sigma = codi.spreads(target, live, "none" if norm == "own" else norm) ** power
    each = [(codi.DISTANCES[loss](s, t) * live).sum((1, 2, 3)) for s, t in zip(student, target, strict=True)]
    return (torch.stack(each) * weights.to(sigma.dtype) / sigma[:, None]).sum()


def kv_loss(
    k_kept: Layers,
    v_kept: Layers,
    k_s: Layers,
    v_s: Layers,
    taught: Bool[Tensor, "B G M"],
    *,
    loss: Distance = "smooth_l1",
    reduction: Reduction = "mean",
    norm: KvNorm = "none",
    power: int = 1,
    terms: Literal["both", "k", "v"] = "both",
    total: float | None = None,
) -> Float[Tensor, ""]:
    """Eq. 4: L_KV = 1/2 [mean d(sg K~ - K_s) + mean d(sg V~ - V_s)], means over taught (b, l, g, m) and E."""
    weights = row_weights(taught, len(k_s), k_s[0].shape[3], reduction, total)
    sides = {"k": (k_kept, k_s), "v": (v_kept, v_s)}
    chosen = [sides[name] for name in ("k", "v") if terms in (name, "both")]
    each = [side(target, student, taught, weights, loss, norm, power) for target, student in chosen]
    return torch.stack(each).sum() / 2


def total(
    student: Tensor, teacher: Tensor, kd: Tensor, kv: Tensor, how: Distilling, alpha2: float
) -> Float[Tensor, ""]:
    """Eq. 5: L = CE_s + CE_t + alpha1 L_CODI + alpha2 L_KV."""
    return pccot.total(student, teacher, kd, how) + alpha2 * kv


class Taught(NamedTuple):
    """What the teacher leaves in every layer: keys and values on the chain, those kept, and the scores behind it.

    `matched` are the layers whose slots are drawn to what is kept there.
    """

    k_t: tuple[Float[Tensor, "B G Nc E"], ...]
    v_t: tuple[Float[Tensor, "B G Nc E"], ...]
    kept: tuple[Kept, ...]
    I: tuple[Float[Tensor, "B G Nc"], ...]
    R: tuple[Float[Tensor, "B G Nc"], ...]
    S: tuple[Float[Tensor, "B G Nc"], ...]
    matched: tuple[int, ...]


def noting(decoder: Decoder, want: tuple[str, ...]) -> tuple[Reader, list[Seen]]:
    """The decoder as a reader that leaves behind what each of its passes saw."""
    passes: list[Seen] = []

    def read(vectors: Tensor, state: Cache | None = None, *, live: Tensor | None = None) -> Seen:
        passes.append(decoder(vectors, state, live=live, want=want))
        return passes[-1]

    return read, passes


def rounds_of(passes: list[Seen], mode: Mode, which: Literal["last", "all"]) -> list[list[Seen]]:
    """The passes that wrote the slots, round by round; thoughts made one after the other are one round of many."""
    rounds = [passes] if mode == "sequential" else [[seen] for seen in passes[1:] or passes]
    return rounds if which == "all" else rounds[-1:]


class Kava(nn.Module):
    """KaVa whole: `keeping` says which tokens of the chain are kept, `matching` how the slots are drawn to them."""

    def __init__(
        self,
        decoder: Decoder,
        thoughts: Thoughts,
        how: Distilling,
        keeping: Keeping,
        matching: Matching,
        seed: int = 0,
    ) -> None:
        super().__init__()
        L = decoder.config.num_hidden_layers
        self.layers = tuple(range(L)) if matching.kv_layers is None else matching.kv_layers
        if not self.layers or max(self.layers) >= L:
            raise Usage(f"kv_layers {list(self.layers)}: the decoder has layers 0 to {L - 1}; name some of them")
        self.decoder, self.thoughts = decoder, thoughts
        self.how, self.keeping, self.matching, self.seed = how, keeping, matching, seed

    def totals(self, batch: Reasoning) -> dict[str, float]:
        """What the sums of the loss are divided by."""
        length, M = batch.chain_live.sum(1), self.thoughts.count
        short = {"mask": length.clamp(max=M), "zero": torch.full_like(length, M), "repeat": (length > 0) * M}
        return codi.totals(batch, self.how) | {"kv": float(short[self.matching.short_chain].sum())}

    def forward(self, batch: Reasoning, state: Cache | None = None) -> Step:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        pre = tuple(f"k.{l}" for l in self.layers if self.matching.key_space == "pre_rope")
        asked = self.matching.alpha2 and rkv.asks(self.keeping)[0]
        queries = tuple(f"q_rot.{l}" for l in self.layers if asked)
        reader, passes = noting(self.decoder, pre if self.matching.alpha2 else ())
        want = (*queries, *pre) if self.matching.alpha2 else ()
        both = codi.read_both(
            self.decoder,
            self.thoughts,
            batch,
            self.how,
            state,
            want=want,
            chosen=bool(self.matching.alpha2),
            reader=reader,
        )
        found = codi.parts(self.decoder, self.thoughts, batch, both, self.how)
        if self.matching.alpha2 and both.teacher:
            found |= self.kv(batch, both.teacher, passes)
        student, teacher, kd, kv = codi.terms(found, "student", "teacher", "codi", "kv")
        return codi.step(total(student, teacher, kd, kv, self.how, self.matching.alpha2), found)

    def kv(self, batch: Reasoning, teacher: Seen, passes: list[Seen]) -> codi.Parts:
        """L_KV, and the mean share of slots that hold a kept token."""
        how, M = self.matching, self.thoughts.count
        sums = batch.totals or self.totals(batch)
        chosen = [self.choose(batch, teacher, l) for l in self.layers]
        targets = [filled(c.kept, how.short_chain) for c in chosen]
        k_kept = [rkv.take(c.k_t, kept) for c, (kept, _) in zip(chosen, targets, strict=True)]
        v_kept = [rkv.take(c.v_t, kept) for c, (kept, _) in zip(chosen, targets, strict=True)]
        losses = [
            kv_loss(
                k_kept,
                v_kept,
                *self.slots(round),
                targets[0][1],
                loss=how.kv_loss,
                reduction=how.kv_reduction,
                norm=how.kv_norm,
                power=how.kv_norm_power,
                terms=how.kv_terms,
                total=sums["kv" if how.kv_reduction == "mean" else "rows"],
            )
            for round in rounds_of(passes, self.thoughts.mode, how.kv_rounds)
        ]
        share = chosen[0].kept.live[:, 0].sum() / (M * (sums["rows"] or 1.0))
        return {"kv": torch.stack(losses).mean(), "kept": share}

    def choose(self, batch: Reasoning, teacher: Seen, layer: int, everything: bool = False) -> Chosen:
        """What a layer keeps of the chain."""
        M, space = self.thoughts.count, self.matching.key_space
        return rkv.choose(self.decoder, batch, teacher, layer, self.keeping, M, self.seed, space, everything)

    def slots(self, round: list[Seen]) -> tuple[list[Tensor], list[Tensor]]:
        """The student's keys and values at its slots, the last columns that a round wrote."""
        M, state = self.thoughts.count, round[-1].state
        keys = [state.keys[l] for l in self.layers]
        if self.matching.key_space == "pre_rope":
            keys = [torch.cat([seen.stages[f"k.{l}"] for seen in round], 2) for l in self.layers]
        return [k[:, :, -M:] for k in keys], [state.values[l][:, :, -M:] for l in self.layers]

    def restarts(self, batch: Reasoning) -> bool:
        """Never: one phase."""
        return False

    def think(self, questions: Reasoning, edit: Edit | None = None, trace: bool = False) -> Rollout:
        """The thoughts on questions."""
        return codi.think(self.decoder, self.thoughts, questions, edit, trace)

    def answer(self, questions: Reasoning, writing: Writing, *, teacher: bool = False) -> Answers:
        """The answer after the thoughts; of the teacher, after a chain."""
        return codi.answer(self.decoder, self.thoughts, questions, writing, teacher)

    def teach(self, batch: Reasoning) -> Taught:
        """What the teacher's pass on a batch leaves to be matched, in every layer, with all scores."""
        with quiet(self.decoder):
            question = codi.read_question(self.decoder, batch).state
            teacher = codi.read_chain(self.decoder, batch, question, ("q_rot", "k"))
            layers = range(self.decoder.config.num_hidden_layers)
            every = zip(*(self.choose(batch, teacher, l, everything=True) for l in layers), strict=True)
            return Taught(*every, matched=self.layers)
