"""What is known of a stage that parts from the reference, and the fits by which causes are told apart.

Symbols: B rows, T query slots, P key slots, N heads, E per head, omega frequency of a pair.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.models.decoder import Decoder


@dataclass(frozen=True)
class Evidence:
    """One stage of one piece of a case: what was made of the reference's inputs, and what the reference has.

    `reference` holds the reference's stages of this layer by bare name, `x` what the block reads, `vectors` what the
    model reads. `live` and `positions` are of all P slots, of which the last T are new.
    """

    decoder: Decoder
    stage: str
    layer: int | None
    got: Tensor
    want: Tensor
    reference: Mapping[str, Tensor]
    live: Tensor
    positions: Tensor
    bias: Tensor | None = None

    @property
    def S(self) -> int:
        """Slots held before the piece."""
        return self.live.shape[1] - self.T

    @property
    def T(self) -> int:
        """Slots of the piece."""
        return self.reference["vectors"].shape[1]

    @property
    def new(self) -> Tensor:
        """Live new slots [B, T]."""
        return self.live[:, self.S :]

    def weight(self, role: str, kind: str = "weight") -> Tensor | None:
        """A parameter of the part that plays `role`, None where the family has none."""
        names = self.decoder.weight_names
        path = names.final_norm if self.layer is None else getattr(names, role)
        root = self.decoder if self.layer is None else self.decoder.layers[self.layer]
        found = None if path is None else getattr(root.get_submodule(path), kind, None)
        return None if found is None else found.detach()

    def explains(self, guess: Tensor, share: float = 0.1) -> bool:
        """Whether `guess` leaves less than `share` of the deviation of `got`."""
        return guess.shape == self.got.shape and distance(self.got, guess) <= share * distance(self.got, self.want)

    def mends(self, guess: Tensor) -> bool:
        """Whether `guess` is what the reference has."""
        return guess.shape == self.want.shape and distance(guess, self.want) <= 0.1 * distance(self.got, self.want)


def distance(x: Tensor, y: Tensor) -> float:
    """‖x − y‖ over entries that both have."""
    gap = x.detach().double() - y.detach().double()
    return float(gap[gap.isfinite()].norm())


def constant(x: Tensor, spread: float = 1e-2) -> float | None:
    """The value that all of `x` have within `spread` of it, or None."""
    middle = float(x.median())
    return middle if x.numel() and float((x - middle).abs().max()) <= spread * abs(middle) else None


def fitted(x: Tensor, y: Tensor, dims: tuple[int, ...]) -> Tensor:
    """c of the least ‖c x − y‖ along `dims`, which are kept."""
    x, y = x.double(), y.double()
    return (x * y).sum(dims, keepdim=True) / x.square().sum(dims, keepdim=True).clamp(min=1e-300)


def pairs(x: Tensor) -> Tensor:
    """Heads [B, N, T, E] as complex numbers, (i, i + E/2)."""
    lo, hi = x.double().chunk(2, -1)
    return torch.complex(lo, hi)


def unpaired(z: Tensor) -> Tensor:
    """The inverse of `pairs`."""
    return torch.cat([z.real, z.imag], -1)


def turns(x: Tensor, y: Tensor) -> Tensor:
    """The complex factor [B, T, E/2], equal for all heads, that turns the pairs of x into those of y."""
    u, w = pairs(x), pairs(y)
    return (w * u.conj()).sum(1) / (u.abs().square().sum(1)).clamp(min=1e-300)


def spun(omega: Tensor, p: Tensor) -> Tensor:
    """e^(i p omega) for positions [B, T]."""
    angle = p[..., None].double() * omega
    return torch.polar(torch.ones_like(angle), angle)


def waves(z: Tensor, p: Tensor, live: Tensor) -> Tensor | None:
    """omega [E/2] by which neighbouring positions differ in factors z; None where no two neighbours are live."""
    step = (p[:, 1:] - p[:, :-1] == 1) & live[:, 1:] & live[:, :-1]
    if not bool(step.any()):
        return None
    omega = (z[:, 1:] * z[:, :-1].conj())[step].sum(0).angle()
    apart = step.sum(1).argmax()
    row, at = z[apart], p[apart][live[apart]].double()
    left = row[live[apart]] * torch.polar(torch.ones_like(omega), -at[:, None] * omega)
    drift = unwrapped(left.angle())
    middle = at - at.mean()
    return omega + (middle[:, None] * drift).sum(0) / middle.square().sum().clamp(min=1.0)


def unwrapped(angle: Tensor) -> Tensor:
    """Angles along the first axis without jumps of 2 pi."""
    jump = angle.diff(dim=0)
    jump = (jump + math.pi).remainder(2 * math.pi) - math.pi
    return torch.cat([angle[:1], angle[:1] + jump.cumsum(0)])
