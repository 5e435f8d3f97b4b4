"""How like the slots' keys and values are to those of a written chain: cosines, as maps and as two figures.

Shapes: M slots, N columns of the chain or of what is kept of it, G heads of keys, E width of a head, L layers.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from laconic.core.attention import wide
from laconic.evaluation.subject import Left, Slots

SPACES = ("keys", "keys before rotation", "values")
Rows = tuple[tuple[float, ...], ...]


class Map(NamedTuple):
    """Cosines of slots with the columns `against` ("chain", or "kept"), mean over the heads: of each layer, and of
    the layers matched. `contrast` and `ahead` are those of the mean."""

    what: str
    against: str
    mean: Rows
    layers: tuple[Rows, ...]
    contrast: float
    ahead: float


def similarity(student: Sequence[Float[Tensor, "G M E"]], teacher: Sequence[Float[Tensor, "G N E"]]) -> Tensor:
    """Cosine of each slot with each column, mean over heads: [L, M, N]."""
    pairs = zip(map(unit, student), map(unit, teacher), strict=True)
    return torch.stack([(s @ t.transpose(-1, -2)).mean(0) for s, t in pairs])


def unit(x: Float[Tensor, "G N E"]) -> Float[Tensor, "G N E"]:
    """Vectors of norm 1, in float32 at least."""
    return F.normalize(x.to(wide(x.dtype)), dim=-1)


def contrast(map: Float[Tensor, "M N"]) -> float:
    """The mean of the diagonal (slot m, column m) minus the mean of all the rest; 0 where there is no rest."""
    on = torch.eye(*map.shape, dtype=torch.bool, device=map.device)
    return float(map[on].mean() - map[~on].mean()) if bool((~on).any()) else 0.0


def ahead(map: Float[Tensor, "M N"]) -> float:
    """The share of slots whose likest column lies behind their own, among slots that have a column of their own."""
    own = min(map.shape)
    return float((map[:own].argmax(1) > torch.arange(own, device=map.device)).float().mean())


def gathered(x: Float[Tensor, "G Nc E"], index: Int[Tensor, "G n"]) -> Float[Tensor, "G n E"]:
    """The columns that each head kept."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def cosines(slots: Slots, left: Left, row: int, n: int) -> Iterator[tuple[str, str, Float[Tensor, "L M N"]]]:
    """Of one row of a batch, whose chain has `n` tokens: what is compared, against what, and the cosines: with the
    chain, then with what is kept of it by the run's own selector."""
    kept = left.chosen[left.own].kept
    index = [k.index[row][:, k.live[row, 0]] for k in kept]
    for against in ("chain", "kept"):
        for what, own, theirs in zip(SPACES, slots, (left.keys, left.before, left.values), strict=True):
            whole = [x[row][:, :n] for x in theirs]
            columns = whole if against == "chain" else [gathered(x, at) for x, at in zip(whole, index, strict=True)]
            yield what, against, similarity([x[row] for x in own], columns)


def maps(slots: Slots, left: Left, row: int, n: int) -> tuple[Map, ...]:
    """All maps of one row of a batch."""
    return tuple(drawn(*found, left.matched) for found in cosines(slots, left, row, n))


def drawn(what: str, against: str, each: Float[Tensor, "L M N"], matched: Sequence[int]) -> Map:
    """A map of plain numbers."""
    mean = each[list(matched)].mean(0)
    return Map(what, against, plain(mean), tuple(plain(layer) for layer in each), contrast(mean), ahead(mean))


def plain(map: Float[Tensor, "M N"]) -> Rows:
    """A map as numbers."""
    return tuple(tuple(line) for line in map.tolist())
