"""The gated delta rule with momentum, computed one chunk at a time.

Nested Learning arXiv:2512.24695 Eq. 88, Titans arXiv:2501.00663 Eqs. 13 and 14. As in DeltaNet (arXiv:2406.06484), the
erasures of a chunk are found by solving one triangular system. For one token, with erase step e_t (0 without erasure)
and anchor a_t (0 by default):

    r_t = a_t + S_{t-1} k_t
    N_t = momentum_t N_{t-1} + step_t u_t k_tᵀ
    S_t = decay_t S_{t-1} + N_t - e_t r_t k_tᵀ

Symbols: S state [O, I], N its momentum, k keys and q queries [I], u values [O]. Within a chunk G[t, j] is the product
of `decay` over j < s <= t and L that of `momentum`, both lower triangular; c = G L. Tokens that are not valid leave the
state unchanged.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

MIN_GATE = 1e-6  # lower bound of decay and momentum, so that their logarithms are finite
StateMatrices = Float[Tensor, "B H O I"]
PerToken = Float[Tensor, "B H T"]
ReadTime = Literal["after", "before"]
Solve = Callable[..., Tensor]


class Gates(NamedTuple):
    """Gates of each head and token.

    Attributes:
        decay: Factor of the state (1 keeps all of it).
        step_size: Factor of what a token writes.
        momentum: Factor of the previous momentum N; None if there is no momentum.
        erase: Step size e_t of the erasure, None to erase nothing. For keys of length 1, it is the write's step size.
        valid: Tokens that write; None if all do.
    """

    decay: PerToken
    step_size: PerToken
    momentum: PerToken | None = None
    erase: PerToken | None = None
    valid: Bool[Tensor, "B T"] | None = None


class ChunkOutput(NamedTuple):
    """State and momentum after a chunk, and what the queries read."""

    S: StateMatrices
    N: StateMatrices | None
    Y: Float[Tensor, "B H T O"] | None


class DecayProducts(NamedTuple):
    """Products of a gate within a chunk: between two tokens [t, j], and from the start of the chunk to each token."""

    between: Float[Tensor, "B H T T"]
    from_start: Float[Tensor, "B H T 1"]


# e_t, and e_t / decay_t: an erasure reads S_{t-1}, so its products G end at t - 1: G[t - 1] = G[t] / decay_t.
EraseSteps = tuple[Float[Tensor, "B H T 1"], Float[Tensor, "B H T 1"]]
# G of erasures and of the state, and c of writes and of the initial momentum; c is G without momentum.
GateProducts = tuple[DecayProducts, DecayProducts]


def mask_gates(gates: Gates) -> Gates:
    """Set the gates of tokens that are not valid to decay 1, step size 0, momentum 1 and erasure 0."""
    if gates.valid is None:
        return gates
    invalid = ~gates.valid[:, None]
    return gates._replace(
        decay=gates.decay.masked_fill(invalid, 1.0),
        step_size=gates.step_size.masked_fill(invalid, 0.0),
        momentum=None if gates.momentum is None else gates.momentum.masked_fill(invalid, 1.0),
        erase=None if gates.erase is None else gates.erase.masked_fill(invalid, 0.0),
    )


def decay_gate(a: PerToken) -> PerToken:
    """Return sigmoid(a), clamped so that its logarithm is finite."""
    return a.sigmoid().clamp(min=MIN_GATE)


def decay_products(gate: PerToken) -> DecayProducts:
    """Compute the products of a gate as exponentials of differences of summed logarithms.

    The differences are clamped before `exp`: a mask after it would give 0 times infinity in the backward pass.
    """
    log_sum = gate.clamp(min=MIN_GATE).log().cumsum(-1)
    between = (log_sum[..., :, None] - log_sum[..., None, :]).clamp(max=0.0).exp()
    between = between * gate.new_ones(between.shape[-2:]).tril()  # tril() of the batch takes longer
    return DecayProducts(between, log_sum.exp()[..., None])


def shift_right(x: Float[Tensor, "B H T N"], fill: float = 0.0) -> Float[Tensor, "B H T N"]:
    """Shift along T by one token, so that token t gets the row of t - 1; fill the first row."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0), value=fill)


def momentum_products(
    decay: DecayProducts, momentum: PerToken, valid: Bool[Tensor, "B T"] | None
) -> tuple[DecayProducts, DecayProducts]:
    """Return the products c and L, the factors of writes and initial momentum: c in the state, L in the momentum."""
    L = decay_products(momentum)
    between, from_start = L.between, L.from_start
    if valid is not None:  # a token that is not valid does not add its momentum to the state
        between, from_start = (x * valid[:, None, :, None] for x in (between, from_start))
    return DecayProducts(decay.between @ between, decay.between @ from_start), L


def chunk_gated_delta_rule(
    S: StateMatrices,
    k: Float[Tensor, "B H T I"],
    u: Float[Tensor, "B H T O"],
    q: Float[Tensor, "B H T I"] | None,
    gates: Gates,
    *,
    N: StateMatrices | None = None,
    anchor: Float[Tensor, "B H T O"] | None = None,
    read: ReadTime = "after",
) -> ChunkOutput:
    """Run the recurrence over one chunk, from S and N, without storing the state of every token.

    The anchor a_t is added to what S reads at the key, for a state stored as a difference from another one. Queries,
    if there are any, read the state after their own token's update or before it.
    """
    gates = mask_gates(gates)
    G = decay_products(gates.decay)
    c, L = (G, None) if gates.momentum is None else momentum_products(G, gates.momentum, gates.valid)
    initial = None if L is None else N
    write = gates.step_size[..., None] * u
    erased = None
    if gates.erase is not None:
        steps = (gates.erase[..., None], (gates.erase / gates.decay.clamp(min=MIN_GATE))[..., None])
        if L is None:
            write = solve_writes(S, k, write, steps, G, anchor)
        else:
            erased = solve_erasures(S, initial, k, write, steps, (G, c), anchor)
    end = slice(-1, None)
    S_end = torch.addcmul((write * c.between[..., end, :].mT).mT @ k, G.from_start[..., end, :], S)
    if erased is not None:
        S_end = S_end - (erased * G.between[..., end, :].mT).mT @ k
    if initial is not None:
        S_end = S_end + c.from_start[..., end, :] * initial
    Y = None if q is None else read_out(S, initial, k, q, write, erased, (G, c), read)
    N_end = None
    if L is not None and N is not None:
        N_end = L.from_start[..., end, :] * N + (write * L.between[..., end, :].mT).mT @ k
    return ChunkOutput(S_end, N_end, Y)


def solve_writes(
    S: StateMatrices, k: Tensor, write: Tensor, steps: EraseSteps, G: DecayProducts, anchor: Tensor | None
) -> Float[Tensor, "B H T O"]:
    """Solve for W = step_t u_t - e_t r_t of every token, without momentum.

    Writes and erasures then decay alike: (I + e/decay K Kᵀ⊙G) W = step U - e anchor - e/decay G_0 S_0 k.
    """
    e, e_over_decay = steps
    write = write if anchor is None else torch.addcmul(write, e, anchor, value=-1)
    write = torch.addcmul(write, e_over_decay * G.from_start, k @ S.mT, value=-1)
    return solve_unit_lower(e_over_decay * (k @ k.mT) * G.between, write)


def solve_unit_lower(A: Float[Tensor, "B H T T"], rhs: Float[Tensor, "B H T O"]) -> Float[Tensor, "B H T O"]:
    """Solve (I + A) X = rhs for the entries of A below its diagonal; the others are not read."""
    solve = cast(Solve, torch.linalg.solve_triangular)  # pyright: ignore[reportUnknownMemberType]
    # Transposed, since LAPACK takes column-major matrices without a copy.
    return solve(A.mT, rhs.mT, upper=True, left=False, unitriangular=True).mT


def solve_erasures(
    S: StateMatrices,
    N: StateMatrices | None,
    k: Tensor,
    write: Tensor,
    steps: EraseSteps,
    products: GateProducts,
    anchor: Tensor | None,
) -> Float[Tensor, "B H T O"]:
    """Solve for R = e_t r_t of every token, with momentum.

    (I + e/decay K Kᵀ⊙G) R = e (anchor + what the initial state, its momentum and the writes hold at k).
    """
    G, c = products
    e, e_over_decay = steps
    similarity = k @ k.mT
    r = (similarity * shift_right(c.between)) @ write
    if N is not None:
        r = r + shift_right(c.from_start) * (k @ N.mT)
    r = r if anchor is None else r + anchor
    rhs = torch.addcmul(e * r, e_over_decay * G.from_start, k @ S.mT)
    return solve_unit_lower(e_over_decay * similarity * G.between, rhs)


def read_out(
    S: StateMatrices,
    N: StateMatrices | None,
    k: Tensor,
    q: Tensor,
    write: Tensor,
    erased: Tensor | None,
    products: GateProducts,
    read: ReadTime,
) -> Float[Tensor, "B H T O"]:
    """Return S_t q_t of every token, or S_{t-1} q_t."""
    G, c = products
    similarity = q @ k.mT

    def at_read(x: Tensor, fill: float = 0.0) -> Tensor:
        return shift_right(x, fill) if read == "before" else x

    y = (similarity * at_read(c.between)) @ write
    y = torch.addcmul(y, at_read(G.from_start, 1.0), q @ S.mT)
    if erased is not None:
        y = y - (similarity * at_read(G.between)) @ erased
    return y if N is None else y + at_read(c.from_start) * (q @ N.mT)


def limit_step(step_size: PerToken, decay: PerToken) -> PerToken:
    """Clamp the step size to 1 + decay, so that erasing along a unit key never enlarges the state."""
    return torch.minimum(step_size, 1 + decay)


def max_step_within_norm(decay: PerToken, write_norm: PerToken, max_norm: float) -> PerToken:
    """Return the step size at which the norm of a write equals the norm lost to decay by a state of norm `max_norm`."""
    return ((1 - decay) * max_norm / (write_norm + 1e-6) * 0.999).clamp(min=1e-12)


def cap_step(step_size: PerToken, decay: PerToken, write_norm: PerToken, max_norm: float) -> PerToken:
    """Bound the step size smoothly so that the state's spectral norm stays within `max_norm` (VisionHOPE's soft cap).

    The step size is also at most twice the decay. Where the decay is 1, the state never shrinks, so the bound is close
    to 0. `write_norm` is the norm of a write with step size 1.
    """
    bound = max_step_within_norm(decay, write_norm, max_norm)
    return torch.minimum(bound * -torch.expm1(-step_size / bound), 2 * decay)


def vector_norm(x: Float[Tensor, "B H T N"]) -> PerToken:
    """Return the Euclidean norm, with gradient 0 at 0."""
    return x.square().sum(-1).clamp(min=torch.finfo(x.dtype).tiny).sqrt()


def norm_clip_factor(max_norm: float, *states: StateMatrices) -> Float[Tensor, "B H 1 1"]:
    """Return the factor that brings the joint norm of `states` within max_norm √E."""
    bound = max_norm**2 * min(states[0].shape[-2:])
    squared = torch.stack([S.square().sum((-2, -1), keepdim=True) for S in states]).sum(0)
    return (bound / squared.clamp(min=bound)).sqrt()
