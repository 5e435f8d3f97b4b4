"""Cosine similarity of keys and values at the latents with those of a written chain.

Shapes: M latents, N columns of the chain or of its selected tokens, G KV heads, E head size, L layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laconic.evaluation.inspection.inspected_run import KeysValues, TeacherChain
from laconic.models.attention import accumulation_dtype

KV_SPACES = ("keys", "keys before rotation", "values")
CHAIN, SELECTED = "chain", "selected"  # what latents are compared with
MapRows = tuple[tuple[float, ...], ...]


class SimilarityMap(NamedTuple):
    """Cosines of latents (rows) with columns, mean over heads; `mean` over the matched layers, and each layer.

    The space is one of `KV_SPACES`; the baseline is `CHAIN`, or `SELECTED` for the tokens that the run's own policy
    selects. The contrast is the mean of the diagonal minus the mean of the rest, look-ahead the share of latents whose
    most similar column is later than their own, both of `mean`.
    """

    space: str
    baseline: str
    mean: MapRows
    layers: tuple[MapRows, ...]
    diagonal_contrast: float
    look_ahead: float


def cosine_maps(student: Sequence[Float[Tensor, "G M E"]], teacher: Sequence[Float[Tensor, "G N E"]]) -> Tensor:
    """Return the cosine of each latent with each column, mean over heads: [L, M, N]."""
    units = [[F.normalize(x.to(accumulation_dtype(x.dtype)), dim=-1) for x in side] for side in (student, teacher)]
    return torch.stack([(s @ t.transpose(-1, -2)).mean(0) for s, t in zip(*units, strict=True)])


def diagonal_contrast(map: Float[Tensor, "M N"]) -> float:
    """Return the mean of the diagonal minus the mean of the rest; 0 where there is no rest."""
    on = torch.eye(*map.shape, dtype=torch.bool, device=map.device)
    return float(map[on].mean() - map[~on].mean()) if bool((~on).any()) else 0.0


def look_ahead_share(map: Float[Tensor, "M N"]) -> float:
    """Return the share of latents whose most similar column is later than their own, among those that have one."""
    n = min(map.shape)
    return float((map[:n].argmax(1) > torch.arange(n, device=map.device)).float().mean())


def similarity_maps(slots: KeysValues, teacher: TeacherChain, n: int) -> tuple[SimilarityMap, ...]:
    """Return all maps of the first row of a batch, whose chain has `n` tokens."""
    indices = [columns.index[0][:, columns.valid[0, 0], None] for columns in teacher.choices[teacher.policy]]
    maps: list[SimilarityMap] = []
    for baseline in (CHAIN, SELECTED):
        for space, latents, teachers in zip(KV_SPACES, slots, teacher.keys_values, strict=True):
            columns = [x[0][:, :n] for x in teachers]
            if baseline == SELECTED:
                pairs = zip(columns, indices, strict=True)
                columns = [x.gather(1, index.expand(-1, -1, x.shape[2])) for x, index in pairs]
            layers = cosine_maps([x[0] for x in latents], columns)
            mean, rows = layers[list(teacher.matched_layers)].mean(0), tuple(map(to_rows, layers))
            statistics = diagonal_contrast(mean), look_ahead_share(mean)
            maps.append(SimilarityMap(space, baseline, to_rows(mean), rows, *statistics))
    return tuple(maps)


def to_rows(map: Float[Tensor, "M N"]) -> MapRows:
    return tuple(tuple(row) for row in map.tolist())
