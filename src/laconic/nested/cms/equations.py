"""A continuum memory system: MLPs whose weights change while a text is read, each at a frequency of its own.

Nested Learning arXiv:2512.24695, section 7. Level 0 is the fastest here.

Symbols: K levels l; C_l tokens between two updates of level l, its chunk; f_l its frequency; theta its weights; e_t the
gradient of token t's inner loss by them; i live tokens read, from 1; z_l what level l gives, y the output. What changes
is theta's change since its start, a value of `core/state.py`; changes are in `changes.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.config.nested import DonorLayout, LevelConnection, NewLevelInit, find_chunk_error
from laconic.errors import UsageError
from laconic.nested.cms.low_rank_updates import WeightChange, add, scale

LevelFunction = Callable[[Tensor], Tensor]
Vectors = Float[Tensor, "B T D"]


def chunk_sizes(frequencies: Sequence[int], slowest: int) -> tuple[int, ...]:
    """Eq. 7.1a: C_l = C_max / f_l, with f relative to the slowest level, whose f is 1.

    Raises `Usage` (2) for frequencies that do not divide the slowest chunk, or do not begin with the fastest.
    """
    if not frequencies or frequencies[-1] != 1:
        raise UsageError(
            f"cms: frequencies {list(frequencies)}; they are relative to the slowest level's, the last, which is 1"
        )
    odd = next((f for f in frequencies if f < 1 or slowest % f), None)
    if odd is not None:
        raise UsageError(f"cms: frequency {odd} does not divide the slowest chunk, {slowest}; choose divisors of it")
    chunks = tuple(slowest // f for f in frequencies)
    check_chunk_sizes(chunks)
    return chunks


def check_chunk_sizes(sizes: Sequence[int]) -> None:
    """Raises `Usage` (2) unless there is one, all hold a token, and each divides the next."""
    fault = find_chunk_error(sizes)
    if fault:
        raise UsageError(f"cms: {fault}")


def chain(
    x: Vectors,
    levels: Sequence[LevelFunction],
    norms: Sequence[LevelFunction | None],
    link: LevelConnection = "residual",
) -> Vectors:
    """Eq. 70: y = MLP_{K-1}(... MLP_0(x)), or with links past each: y_l = y_{l-1} + MLP_l(norm_l(x + y_{l-1})).

    `levels` in the order in which they are run; the first has no norm, and alone it is the MLP itself.
    """
    y = levels[0](x)
    for level, norm in zip(levels[1:], norms[1:], strict=True):
        z = y if link == "plain" else x + y
        z = z if norm is None else norm(z)
        y = level(z) if link == "plain" else y + level(z)
    return y


def aggregate(outputs: Sequence[Vectors], a: Float[Tensor, " K"] | Callable[[Sequence[Tensor]], Tensor]) -> Vectors:
    """Eq. 74: y = sum over l of a_l MLP_l(x), every level reading x; or what a function makes of the outputs."""
    if not isinstance(a, Tensor):
        return a(outputs)
    return torch.stack([share * y for share, y in zip(a.unbind(), outputs, strict=True)]).sum(0)


def update(change: WeightChange, terms: WeightChange, i: int, C: int) -> WeightChange:
    """Eq. 71: theta_{i+1} = theta_i - sum over t = i-C+1 .. i of step_t e_t if C divides i, else theta_i.

    `terms` is the sum, over exactly C tokens, all at the weights with which the chunk began.
    """
    return add(change, scale(terms, -1.0)) if i % C == 0 else change


def restart(change: WeightChange, start: WeightChange, i: int, C: int) -> WeightChange:
    """Eq. 72: a nested level begins again from its start where the chunk C of the next slower level ends."""
    return start if i % C == 0 else change


class LayerPlacement(NamedTuple):
    """What a layer's levels are made of: the chunk of each, and the layer whose MLP it begins as, None for zeros."""

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

    "depth": each layer keeps its own, as one level, the shallow ones fast and the deep ones slow, unless `map` gives
    every layer the index of its chunk. "grow": its own is level 0, and slower levels begin with a zero down-projection,
    or as its copies.
    "chain" is the print: the MLPs of as many layers as there are chunks, spread over the depth unless `map` names them,
    follow one another in every layer; the result is no longer the donor. Raises `Usage` (2) for a `map` that fits none.
    """
    check_chunk_sizes(chunk_sizes)
    K = len(chunk_sizes)
    if donor_map is None:
        chain_of = [round(l * (num_layers - 1) / max(K - 1, 1)) for l in range(K)]
        donor_map = [n * K // num_layers for n in range(num_layers)] if donor_layout == "depth" else chain_of
    many, most = (num_layers, K) if donor_layout == "depth" else (K, num_layers)
    if donor_layout != "grow" and (len(donor_map) != many or not all(0 <= n < most for n in donor_map)):
        raise UsageError(f"cms: map {list(donor_map)}; place {donor_layout} takes {many} numbers from 0 to {most - 1}")
    if donor_layout == "depth":
        return [LayerPlacement((chunk_sizes[donor_map[n]],), (n,)) for n in range(num_layers)]
    if donor_layout == "grow":
        return [
            LayerPlacement(tuple(chunk_sizes), (n, *[None if new_level_init == "zero" else n] * (K - 1)))
            for n in range(num_layers)
        ]
    return [LayerPlacement(tuple(chunk_sizes), tuple(donor_map)) for _ in range(num_layers)]
