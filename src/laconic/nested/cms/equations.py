"""Continuum memory system: MLPs whose weights change while a text is read, each at its own frequency.

Nested Learning arXiv:2512.24695, section 7. Level 0 is the fastest here.

Symbols: K levels l; C_l tokens between two updates of level l, its chunk size; f_l its frequency; theta its weights;
e_t the gradient of token t's inner loss by them; i valid tokens read, from 1; y the output. What is stored of theta is
its change since the trained start, see `low_rank_changes.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.config.nested import DonorLayout, LevelConnection, NewLevelInit, find_chunk_error
from laconic.errors import UsageError
from laconic.nested.cms.low_rank_changes import WeightChange, add, scale

LevelFunction = Callable[[Tensor], Tensor]
Vectors = Float[Tensor, "B T D"]


def chunk_sizes(frequencies: Sequence[int], slowest: int) -> tuple[int, ...]:
    """Eq. 7.1a: C_l = C_max / f_l, with f relative to the slowest level, whose f is 1.

    Raises:
        UsageError: if a frequency does not divide the slowest chunk, or the last is not 1.
    """
    if not frequencies or frequencies[-1] != 1:
        raise UsageError(f"cms: frequencies {list(frequencies)} are relative to the slowest level; the last must be 1")
    invalid = next((f for f in frequencies if f < 1 or slowest % f), None)
    if invalid is not None:
        raise UsageError(f"cms: frequency {invalid} does not divide the slowest chunk size, {slowest}")
    sizes = tuple(slowest // f for f in frequencies)
    check_chunk_sizes(sizes)
    return sizes


def check_chunk_sizes(sizes: Sequence[int]) -> None:
    """Raise `UsageError` unless there is a chunk size, all are positive, and each divides the next."""
    error = find_chunk_error(sizes)
    if error:
        raise UsageError(f"cms: {error}")


def chain(
    x: Vectors,
    levels: Sequence[LevelFunction],
    norms: Sequence[LevelFunction | None],
    connection: LevelConnection = "residual",
) -> Vectors:
    """Eq. 70: y = MLP_{K-1}(... MLP_0(x)), or with residuals: y_l = y_{l-1} + MLP_l(norm_l(x + y_{l-1})).

    `levels` are in the order in which they run. The first has no norm, and alone it is the MLP itself.
    """
    y = levels[0](x)
    for level, norm in zip(levels[1:], norms[1:], strict=True):
        z = y if connection == "plain" else x + y
        z = z if norm is None else norm(z)
        y = level(z) if connection == "plain" else y + level(z)
    return y


def aggregate(outputs: Sequence[Vectors], a: Float[Tensor, " K"]) -> Vectors:
    """Eq. 74: y = sum over l of a_l MLP_l(x), every level reading x."""
    return torch.stack([weight * y for weight, y in zip(a.unbind(), outputs, strict=True)]).sum(0)


def update(change: WeightChange, terms: WeightChange, i: int, C: int) -> WeightChange:
    """Eq. 71: theta_{i+1} = theta_i - sum over t = i-C+1 .. i of step_t e_t if C divides i, else theta_i.

    `terms` is the sum over exactly C tokens, all at the weights with which the chunk began.
    """
    return add(change, scale(terms, -1.0)) if i % C == 0 else change


def restart(change: WeightChange, start: WeightChange, i: int, C: int) -> WeightChange:
    """Eq. 72: a nested level begins again from its start where the chunk C of the next slower level ends."""
    return start if i % C == 0 else change


class LayerPlacement(NamedTuple):
    """Levels of one layer: their chunk sizes, and the layer whose MLP each starts as, None for a level of zeros."""

    chunk_sizes: tuple[int, ...]
    donor_layers: tuple[int | None, ...]


def place_levels(
    num_layers: int,
    chunk_sizes: Sequence[int],
    donor_layout: DonorLayout = "depth",
    donor_map: Sequence[int] | None = None,
    new_level_init: NewLevelInit = "zero",
) -> list[LayerPlacement]:
    """Eq. 7.3a: theta_0 of every level := a pretrained MLP, for each layer of a decoder.

    Args:
        num_layers: layers of the decoder.
        chunk_sizes: chunk size of each level, fastest first.
        donor_layout: "depth" keeps each layer's MLP as its only level, fast in shallow layers and slow in deep ones.
            "grow" keeps it as level 0 and adds slower levels. "chain" follows the paper: the MLPs of as many layers as
            there are levels follow one another in every layer, so that the result is no longer the donor.
        donor_map: for "depth" the chunk index of each layer, for "chain" the donor layer of each level.
        new_level_init: for "grow", whether an added level has a zero down-projection or copies level 0.

    Raises:
        UsageError: if `donor_map` does not fit the layout.
    """
    check_chunk_sizes(chunk_sizes)
    K = len(chunk_sizes)
    if donor_map is None:
        spread = [round(l * (num_layers - 1) / max(K - 1, 1)) for l in range(K)]
        donor_map = [n * K // num_layers for n in range(num_layers)] if donor_layout == "depth" else spread
    length, limit = (num_layers, K) if donor_layout == "depth" else (K, num_layers)
    if donor_layout != "grow" and (len(donor_map) != length or not all(0 <= n < limit for n in donor_map)):
        raise UsageError(
            f"cms: donor_map {list(donor_map)}; layout {donor_layout} needs {length} numbers from 0 to {limit - 1}"
        )
    if donor_layout == "depth":
        return [LayerPlacement((chunk_sizes[donor_map[n]],), (n,)) for n in range(num_layers)]
    if donor_layout == "grow":
        added = (None if new_level_init == "zero" else n for n in range(num_layers))
        return [LayerPlacement(tuple(chunk_sizes), (n, *[new] * (K - 1))) for n, new in enumerate(added)]
    return [LayerPlacement(tuple(chunk_sizes), tuple(donor_map)) for _ in range(num_layers)]
