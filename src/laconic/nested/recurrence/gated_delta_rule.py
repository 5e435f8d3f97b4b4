"""The recurrence that all matrix memories obey, a chunk at a time and token by token.

Nested Learning arXiv:2512.24695 (88), Titans arXiv:2501.00663 (13, 14), DeltaNet's form of a product as one triangular
system arXiv:2406.06484. One token, with erase e_t (0 where nothing is erased) and anchor a_t (0 unless given):

    r_t = a_t + S_{t-1} k_t     N_t = momentum_t N_{t-1} + step_t u_t k_tᵀ     S_t = keep_t S_{t-1} + N_t - e_t r_t k_tᵀ

Symbols: S [O, I] state, N its momentum, k keys, q queries [I], u values [O]. In a chunk G[t, j] = prod of keep over
j < s <= t, L likewise of momentum, both lower triangular; c = G L; small letters for the products from the chunk's
start; `earlier` is row t - 1. What is not live keeps all and writes nothing.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.nested.recurrence.kernel import KERNEL, by_kernel, fits

MIN_GATE = 1e-6  # of keep and momentum, whose logarithms are summed
StateMatrices = Float[Tensor, "B H O I"]
Solve = Callable[..., Tensor]
PerToken = Float[Tensor, "B H T"]


class Gates(NamedTuple):
    """Per head and token: the share of the state that stays, the size of a write, the share of momentum that stays."""

    decay: PerToken
    step_size: PerToken
    momentum: PerToken | None = None


class ChunkOutput(NamedTuple):
    """What a chunk leaves: the state, its momentum if there is one, and what the queries read."""

    S: StateMatrices
    N: StateMatrices | None
    Y: Float[Tensor, "B H T O"] | None


class DecayProducts(NamedTuple):
    """Products of a gate inside a chunk: between any two tokens [T, T], and from the start [T, 1]."""

    between: Float[Tensor, "B H T T"]
    from_start: Float[Tensor, "B H T 1"]


def mask_gates(gates: Gates, valid: Bool[Tensor, "B T"] | None) -> Gates:
    """The gates where tokens are live; elsewhere keep 1, step 0, momentum 1."""
    if valid is None:
        return gates
    dead = ~valid[:, None]
    momentum = None if gates.momentum is None else gates.momentum.masked_fill(dead, 1.0)
    return Gates(gates.decay.masked_fill(dead, 1.0), gates.step_size.masked_fill(dead, 0.0), momentum)


def decay_gate(a: PerToken) -> PerToken:
    """σ(a), the share of a state or a write that stays after a token; no smaller than its logarithm bears."""
    return a.sigmoid().clamp(min=MIN_GATE)


def decay_products(gate: PerToken) -> DecayProducts:
    """Differences of summed logs, clamped before exp: a mask after it would make 0 times infinity in the backward."""
    a = gate.clamp(min=MIN_GATE).log().cumsum(-1)
    between = (a[..., :, None] - a[..., None, :]).clamp(max=0.0).exp().tril()
    return DecayProducts(between, a.exp()[..., None])


def shift_right(x: Float[Tensor, "B H T N"], fill: float = 0.0) -> Float[Tensor, "B H T N"]:
    """Row t - 1 in the place of row t."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0), value=fill)


def momentum_products(
    decay: DecayProducts, momentum: PerToken, valid: Bool[Tensor, "B T"] | None
) -> tuple[DecayProducts, DecayProducts]:
    """(c, L): what of each write, and of the momentum at the start, is in the state; and in the momentum."""
    L = decay_products(momentum)
    between, start = L.between, L.from_start
    if valid is not None:
        between, start = (x * valid[:, None, :, None] for x in (between, start))
    return DecayProducts(decay.between @ between, decay.between @ start), L


def chunk_gated_delta_rule(
    S: StateMatrices,
    k: Float[Tensor, "B H T I"],
    u: Float[Tensor, "B H T O"],
    q: Float[Tensor, "B H T I"] | None,
    gates: Gates,
    *,
    erase: PerToken | None = None,
    N: StateMatrices | None = None,
    anchor: Float[Tensor, "B H T O"] | None = None,
    valid: Bool[Tensor, "B T"] | None = None,
    read: Literal["after", "before"] = "after",
) -> ChunkOutput:
    """One chunk of the recurrence above: one triangular system if anything is erased, and no matrix per token.

    `erase` is the step of the erase, which is the step of the write unless a key is not of length 1.
    """
    same, gates = erase is gates.step_size and N is None and (q is None or read == "after"), mask_gates(gates, valid)
    if KERNEL is not None and same and fits(S, k, u, q, gates.decay, gates.step_size, anchor):
        after, told = by_kernel(KERNEL, S, k, u, q, gates.decay.clamp(min=MIN_GATE), gates.step_size, anchor)
        return ChunkOutput(after, None, told)
    G = decay_products(gates.decay)
    c, L = (G, None) if gates.momentum is None else momentum_products(G, gates.momentum, valid)
    write = gates.step_size[..., None] * u
    if erase is not None:
        erase = erase if valid is None else erase.masked_fill(~valid[:, None], 0.0)
    from_momentum = (N, c.from_start) if L is not None and N is not None else None
    erased = None
    if erase is not None and L is None:
        write = solve_writes(S, k, write, erase, G, anchor)
    elif erase is not None:
        erased = solve_erasures(S, k, write, erase, G, c, anchor, from_momentum)
    end = slice(-1, None)
    S_end = G.from_start[..., end, :] * S + (write * c.between[..., end, :].mT).mT @ k
    if erased is not None:
        S_end = S_end - (erased * G.between[..., end, :].mT).mT @ k
    if from_momentum is not None:
        S_end = S_end + c.from_start[..., end, :] * from_momentum[0]
    Y = None if q is None else read_out(S, k, q, write, erased, G, c, from_momentum, read)
    N_end = None
    if L is not None and N is not None:
        N_end = L.from_start[..., end, :] * N + (write * L.between[..., end, :].mT).mT @ k
    return ChunkOutput(S_end, N_end, Y)


def solve_writes(
    S: StateMatrices, k: Tensor, write: Tensor, erase: PerToken, G: DecayProducts, anchor: Tensor | None
) -> Float[Tensor, "B H T O"]:
    """step_t u_t - e_t r_t of every token, where nothing has momentum: both are kept by the same gates.

    (I + e K Kᵀ⊙G earlier) W = step U - e (anchor + what the start has at k).
    """
    e = erase[..., None]
    r = shift_right(G.from_start, 1.0) * (k @ S.mT)
    r = r if anchor is None else r + anchor
    return solve_unit_lower(e * (k @ k.mT) * shift_right(G.between), write - e * r)


def solve_unit_lower(A: Float[Tensor, "B H T T"], rhs: Float[Tensor, "B H T O"]) -> Float[Tensor, "B H T O"]:
    """X of (I + A) X = right, A strictly below the diagonal; transposed, as LAPACK takes them without a copy."""
    solve = cast(Solve, torch.linalg.solve_triangular)  # pyright: ignore[reportUnknownMemberType]
    return solve(A.mT, rhs.mT, upper=True, left=False, unitriangular=True).mT


def solve_erasures(
    S: StateMatrices,
    k: Tensor,
    write: Tensor,
    erase: PerToken,
    G: DecayProducts,
    c: DecayProducts,
    anchor: Tensor | None,
    from_momentum: tuple[Tensor, Tensor] | None,
) -> Float[Tensor, "B H T O"]:
    """e_t r_t of every token: (I + e K Kᵀ⊙G earlier) R = e (anchor + what the start and the writes have at k)."""
    alike = k @ k.mT
    r = shift_right(G.from_start, 1.0) * (k @ S.mT) + (alike * shift_right(c.between)) @ write
    if from_momentum is not None:
        r = r + shift_right(from_momentum[1]) * (k @ from_momentum[0].mT)
    r = r if anchor is None else r + anchor
    return solve_unit_lower(erase[..., None] * alike * shift_right(G.between), erase[..., None] * r)


def read_out(
    S: StateMatrices,
    k: Tensor,
    q: Tensor,
    write: Tensor,
    erased: Tensor | None,
    G: DecayProducts,
    c: DecayProducts,
    from_momentum: tuple[Tensor, Tensor] | None,
    read: Literal["after", "before"],
) -> Float[Tensor, "B H T O"]:
    """S_t q_t, or S_{t-1} q_t."""
    before, alike = read == "before", q @ k.mT
    y = (shift_right(G.from_start, 1.0) if before else G.from_start) * (q @ S.mT)
    y = y + (alike * (shift_right(c.between) if before else c.between)) @ write
    if erased is not None:
        y = y - (alike * (shift_right(G.between) if before else G.between)) @ erased
    if from_momentum is None:
        return y
    share = shift_right(from_momentum[1]) if before else from_momentum[1]
    return y + share * (q @ from_momentum[0].mT)


def recurrent_gated_delta_rule(
    S: StateMatrices,
    k: Float[Tensor, "B H T I"],
    u: Float[Tensor, "B H T O"],
    q: Float[Tensor, "B H T I"] | None,
    gates: Gates,
    *,
    erase: PerToken | None = None,
    N: StateMatrices | None = None,
    anchor: Float[Tensor, "B H T O"] | None = None,
    valid: Bool[Tensor, "B T"] | None = None,
    read: Literal["after", "before"] = "after",
) -> ChunkOutput:
    """The definition of `delta`: the same recurrence token by token."""
    alive = torch.ones_like(gates.decay) if valid is None else valid[:, None].expand_as(gates.decay).to(S.dtype)
    found: list[Tensor] = []
    state, kept = S, N
    for t in range(k.shape[2]):
        on, keep, step = (x[:, :, t, None, None] for x in (alive, gates.decay, gates.step_size))
        key, value, before = k[:, :, t, :, None], u[:, :, t, :, None], state
        state = on * keep * before + (1 - on) * before
        if gates.momentum is None:
            state = state + on * step * value @ key.mT
        elif kept is not None:
            momentum = gates.momentum[:, :, t, None, None]
            kept = on * (momentum * kept + step * value @ key.mT) + (1 - on) * kept
            state = state + on * kept
        if erase is not None:
            r = before @ key if anchor is None else anchor[:, :, t, :, None] + before @ key
            state = state - on * erase[:, :, t, None, None] * r @ key.mT
        if q is not None:
            found.append(((before if read == "before" else state) @ q[:, :, t, :, None])[..., 0])
    return ChunkOutput(state, kept if gates.momentum is not None else None, torch.stack(found, 2) if found else None)


def limit_step(step_size: PerToken, decay: PerToken) -> PerToken:
    """The step at which keep - step is -1 where it is beyond: a state erased along a unit key never grows."""
    return torch.minimum(step_size, 1 + decay)


def max_step_within_norm(decay: PerToken, write_norm: PerToken, max_norm: float) -> PerToken:
    """The step of a write of that size that the decay makes room for, within `radius`: what a cap comes to."""
    return ((1 - decay) * max_norm / (write_norm + 1e-6) * 0.999).clamp(min=1e-12)


def cap_step(step_size: PerToken, decay: PerToken, write_norm: PerToken, max_norm: float) -> PerToken:
    """VisionHOPE's soft cap for any write of norm step times `size`: the state stays within `radius`, spectrally.

    It smoothly bounds a write by what the decay lets go of, (1 - keep) radius, so it asks for keep below 1.
    """
    most = max_step_within_norm(decay, write_norm, max_norm)
    return torch.minimum(most * -torch.expm1(-step_size / most), 2 * decay)


def vector_norm(x: Float[Tensor, "B H T N"]) -> PerToken:
    """‖x‖, with a gradient of 0 at 0."""
    return x.square().sum(-1).clamp(min=torch.finfo(x.dtype).tiny).sqrt()


def clip_state_norm(S: StateMatrices, max_norm: float) -> StateMatrices:
    """S min(1, radius √E / ‖S‖_F), E the smaller side; differentiable at S = 0."""
    return S * norm_clip_factor(max_norm, S)


def norm_clip_factor(max_norm: float, *states: StateMatrices) -> Float[Tensor, "B H 1 1"]:
    """The factor that brings states, taken together, within radius √E."""
    most = max_norm**2 * min(states[0].shape[-2:])
    size = torch.stack([S.square().sum((-2, -1), keepdim=True) for S in states]).sum(0)
    return (most / size.clamp(min=most)).sqrt()
