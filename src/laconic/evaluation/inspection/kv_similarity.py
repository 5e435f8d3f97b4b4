"""How like the slots' keys and values are to those of a written chain: cosines, as maps and as two figures.

Shapes: M slots, N columns of the chain or of what is kept of it, G heads of keys, E width of a head, L layers.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from laconic.evaluation.inspection.subject import LatentKeysValues, TeacherChain
from laconic.models.attention import accumulation_dtype

KV_SPACES = ("keys", "keys before rotation", "values")
MapRows = tuple[tuple[float, ...], ...]


class SimilarityMap(NamedTuple):
    """Cosines of slots with the columns `against` ("chain", or "kept"), mean over the heads: of each layer, and of
    the layers matched. `contrast` and `ahead` are those of the mean."""

    space: str
    baseline: str
    mean: MapRows
    layers: tuple[MapRows, ...]
    diagonal_contrast: float
    look_ahead: float


def cosine_maps(student: Sequence[Float[Tensor, "G M E"]], teacher: Sequence[Float[Tensor, "G N E"]]) -> Tensor:
    """Cosine of each slot with each column, mean over heads: [L, M, N]."""
    pairs = zip(map(unit_vectors, student), map(unit_vectors, teacher), strict=True)
    return torch.stack([(s @ t.transpose(-1, -2)).mean(0) for s, t in pairs])


def unit_vectors(x: Float[Tensor, "G N E"]) -> Float[Tensor, "G N E"]:
    """Vectors of norm 1, in float32 at least."""
    return F.normalize(x.to(accumulation_dtype(x.dtype)), dim=-1)


def diagonal_contrast(map: Float[Tensor, "M N"]) -> float:
    """The mean of the diagonal (slot m, column m) minus the mean of all the rest; 0 where there is no rest."""
    on = torch.eye(*map.shape, dtype=torch.bool, device=map.device)
    return float(map[on].mean() - map[~on].mean()) if bool((~on).any()) else 0.0


def look_ahead_share(map: Float[Tensor, "M N"]) -> float:
    """The share of slots whose likest column lies behind their own, among slots that have a column of their own."""
    own = min(map.shape)
    return float((map[:own].argmax(1) > torch.arange(own, device=map.device)).float().mean())


def gather_columns(x: Float[Tensor, "G Nc E"], index: Int[Tensor, "G n"]) -> Float[Tensor, "G n E"]:
    """The columns that each head kept."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def iter_cosines(
    slots: LatentKeysValues, teacher: TeacherChain, row: int, n: int
) -> Iterator[tuple[str, str, Float[Tensor, "L M N"]]]:
    """Of one row of a batch, whose chain has `n` tokens: what is compared, against what, and the cosines: with the
    chain, then with what is kept of it by the run's own selector."""
    kept = teacher.choices[teacher.policy].tokens
    index = [k.index[row][:, k.valid[row, 0]] for k in kept]
    for against in ("chain", "kept"):
        for what, own, theirs in zip(
            KV_SPACES, slots, (teacher.keys, teacher.keys_before_rope, teacher.values), strict=True
        ):
            whole = [x[row][:, :n] for x in theirs]
            columns = (
                whole if against == "chain" else [gather_columns(x, at) for x, at in zip(whole, index, strict=True)]
            )
            yield what, against, cosine_maps([x[row] for x in own], columns)


def similarity_maps(slots: LatentKeysValues, teacher: TeacherChain, row: int, n: int) -> tuple[SimilarityMap, ...]:
    """All maps of one row of a batch."""
    return tuple(build_map(*found, teacher.matched_layers) for found in iter_cosines(slots, teacher, row, n))


def build_map(space: str, baseline: str, each: Float[Tensor, "L M N"], matched_layers: Sequence[int]) -> SimilarityMap:
    """A map of plain numbers."""
    mean = each[list(matched_layers)].mean(0)
    return SimilarityMap(
        space,
        baseline,
        to_rows(mean),
        tuple(to_rows(layer) for layer in each),
        diagonal_contrast(mean),
        look_ahead_share(mean),
    )


def to_rows(map: Float[Tensor, "M N"]) -> MapRows:
    """A map as numbers."""
    return tuple(tuple(line) for line in map.tolist())
