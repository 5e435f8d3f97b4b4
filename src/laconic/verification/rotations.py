"""What is wrong with a rotation, told from queries or keys before and after it.

Symbols: x before rotation; c the reference's turn of a pair, g ours, complex [B, T, E/2]; omega frequencies;
p positions.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from laconic.verification.evidence import Evidence, constant, distance, pairs, spun, turns, unpaired, waves


def rotation(e: Evidence, x: Tensor) -> str | None:
    """The cause of wrong queries or keys after rotation; `x` is what enters it."""
    c, g = turns(x, e.want), turns(x, e.got)
    if distance(unpaired(pairs(x) * g[:, None]), e.got) > 0.02 * distance(e.got, e.want):
        return other_map(e, x, c)
    for rule in (precision, length, quarter, absent, direction, offset, frequency):
        found = rule(e, c, g)
        if found:
            return found
    return None


def rows(z: Tensor, e: Evidence) -> Tensor:
    """The entries of live new slots [N, E/2]."""
    return z[e.new]


def other_map(e: Evidence, x: Tensor, c: Tensor) -> str | None:
    """A map of pairs that is no rotation of halves."""
    for guess, text in OTHER_MAPS:
        if e.explains(guess(x.double(), c.real[:, None], c.imag[:, None])):
            return text
    return None


def neighbours(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1)."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)


def halves(
    sign_lo: float, sign_hi: float, reuse: bool = False, flip: float = 1.0
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The map of halves with other signs, or with the half just made in place of the one read."""

    def made(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        lo, hi = x.chunk(2, -1)
        first = lo * c + sign_lo * hi * s
        return torch.cat([first, flip * (hi * c + sign_hi * (first if reuse else lo) * s)], -1)

    return made


OTHER_MAPS = (
    (neighbours, "pairing: neighbours (2i, 2i+1) are turned together, the reference turns halves (i, i + E/2)"),
    (halves(-1, -1), "reflection: one sign of the rotation is wrong"),
    (halves(1, 1), "reflection: one sign of the rotation is wrong"),
    (halves(-1, 1, flip=-1), "reflection: the second half has its sign turned"),
    (halves(-1, 1, True), "shear: the second half is made from the first one already turned"),
)


def precision(e: Evidence, c: Tensor, g: Tensor) -> str | None:
    """The table, or the angles, as bfloat16 or float16 hold them."""
    for dtype in (torch.bfloat16, torch.float16):
        rounded = torch.complex(c.real.to(dtype).double(), c.imag.to(dtype).double())
        if distance_of(rounded, g, e) < 0.1 * distance_of(g, c, e):
            return f"table precision: cos and sin are {str(dtype)[6:]} numbers"
        omega = waves(c, e.positions[:, e.S :], e.new)
        if omega is None:
            continue
        angle = (e.positions[:, e.S :, None] * omega).to(dtype).double()
        size = c.abs()
        if distance_of(torch.polar(size, angle), g, e) < 0.3 * distance_of(g, c, e):
            return f"table precision: angles are taken in {str(dtype)[6:]}"
    return None


def distance_of(x: Tensor, y: Tensor, e: Evidence) -> float:
    """‖x − y‖ over live new slots."""
    return float((rows(x, e) - rows(y, e)).abs().square().sum().sqrt())


def length(e: Evidence, c: Tensor, g: Tensor) -> str | None:
    """Rotations that lengthen: a."""
    ratio = constant(rows(g.abs() / c.abs().clamp(min=1e-12), e))
    if ratio is None or abs(ratio - 1) < 1e-3 or distance_of(g, c * ratio, e) > 0.1 * distance_of(g, c, e):
        return None
    size = float(rows(c.abs(), e).median())
    return f"attention factor: cos and sin are times {ratio * size:.6g}, the reference's {size:.6g}"


def quarter(e: Evidence, c: Tensor, g: Tensor) -> str | None:
    """Angles taken from pi / 2."""
    if distance_of(g, 1j * c.conj(), e) > 0.1 * distance_of(g, c, e):
        return None
    return "sin and cos swapped: position 0 is turned by a quarter"


def absent(e: Evidence, c: Tensor, g: Tensor) -> str | None:
    """No rotation of all, or of some pairs."""
    still = ((g - 1).abs() * e.new[..., None]).amax((0, 1)) < 1e-4
    turned = ((c - 1).abs() * e.new[..., None]).amax((0, 1)) > 1e-3
    flat = still & turned
    if bool(still.all()) and e.T == 1:
        return f"start of the positions: a slot read alone is not turned, or rotation missing in layer {e.layer}"
    if bool(still.all()):
        return f"rotation missing in layer {e.layer}"
    if bool(flat.any()) and distance_of(torch.where(flat, 1.0, c), g, e) < 0.5 * distance_of(g, c, e):
        return f"part of the dims: {int(flat.sum())} of {len(flat)} pairs are not turned"
    return None


def direction(e: Evidence, c: Tensor, g: Tensor) -> str | None:
    """sin for minus sin."""
    if distance_of(g, c.conj(), e) > 0.1 * distance_of(g, c, e):
        return None
    return "direction: equal after sin is negated"


def offset(e: Evidence, c: Tensor, g: Tensor) -> str | None:
    """Positions moved by a number that is one row's own."""
    p = e.positions[:, e.S :]
    omega = waves(c, p, e.new)
    if omega is None:
        omega = waves_of(e)
    slow = int(omega.argmin())
    shift = ((g / c)[..., slow].angle() / omega[slow]).round().nan_to_num().masked_fill(~e.new, 0)
    if not bool(shift.any()) or distance_of(c * spun(omega, shift), g, e) > 0.1 * distance_of(g, c, e):
        return None
    return shifted(e, shift.long())


def waves_of(e: Evidence) -> Tensor:
    """The decoder's own frequencies, for pieces too short to show the reference's."""
    how = e.decoder.config.rope
    assert how is not None
    E = e.want.shape[-1]
    return how.theta ** (-torch.arange(0, E, 2, dtype=torch.double) / E)


def shifted(e: Evidence, shift: Tensor) -> str | None:
    """What it means that slots stand `shift` [B, T] too far."""
    p = e.positions[:, e.S :]
    dead = (~e.live).cumsum(1)[:, e.S :]
    if bool((shift == dead)[e.new].all()):
        return f"padding: positions count dead slots, the last one of the pass stands {int(shift.max())} too far"
    first = torch.stack([row[alive.long().argmax()] for row, alive in zip(p, e.new, strict=True)])
    if bool(first.any()) and bool((shift == -first[:, None])[e.new].all()):
        return f"start of the positions: rows begin at 0 for {int(first.max())}"
    by = shift[e.new].unique()
    if len(by) > 1:
        return None
    if e.stage == "k_rot":
        return f"start of the keys: they stand {int(by):+d} from the queries"
    return f"common offset: positions are {int(by):+d} from the reference's, scores within a pass cannot tell"


def frequency(e: Evidence, c: Tensor, g: Tensor) -> str | None:
    """Other frequencies: their order, their law, or a scaling."""
    p = e.positions[:, e.S :]
    ours, theirs = waves(g, p, e.new), waves(c, p, e.new)
    if ours is None or theirs is None:
        return "angle: other frequencies; a piece of one position cannot tell which"
    if distance_of(spun(ours, p) * c.abs(), g, e) > 0.2 * distance_of(g, c, e):
        return None
    if (ours.flip(0) - theirs).norm() < 1e-2 * theirs.norm():
        return "order of frequencies: reversed"
    how, E = e.decoder.config.rope, 2 * len(ours)
    ratio = ours / theirs
    even = constant(ratio)
    if even is not None:
        return f"scaling: every frequency is {even:.4g} times the reference's"
    power = constant((ours[1:].log() / theirs[1:].log()), 2e-2)
    if power is not None and abs(ours[0] - theirs[0]) < 1e-3:
        for k, law in ((0.5, "-i/E"), (2.0, "-4i/E")):
            if abs(power - k) < 0.02:
                return f"exponent: frequencies fall with {law}, the reference's with -2i/E"
        base, asked = (
            math.exp(float((w[1:].log() * (-E / 2) / torch.arange(1, E // 2)).median())) for w in (ours, theirs)
        )
        return f"base: {base:.6g}, the reference's {asked:.6g}"
    other = ((ratio - 1).abs() > 1e-3).nonzero().flatten().tolist()
    low, high = float(ratio[other].min()), float(ratio[other].max())
    return (
        f"scaling {how.kind if how else ''}: frequencies {other[0]} to {other[-1]} of {len(ratio)} are "
        f"{low:.4g} to {high:.4g} times the reference's"
    )
