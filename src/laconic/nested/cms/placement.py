"""Chunk sizes of the levels of a continuum memory system, and the pretrained MLP that each starts as.

Nested Learning arXiv:2512.24695, section 7.3. Symbols: K levels l; C_l chunk size of level l.
"""

from collections.abc import Sequence
from typing import NamedTuple

from laconic.config.nested import DonorLayout, find_chunk_error
from laconic.errors import UsageError
from laconic.generation.config import check_choices


def check_chunk_sizes(sizes: Sequence[int]) -> None:
    """Raise `UsageError` unless there is a chunk size, all are positive, and each divides the next."""
    error = find_chunk_error(sizes)
    if error:
        raise UsageError(f"cms: {error}")


class LayerPlacement(NamedTuple):
    """Levels of one layer: their chunk sizes, and the layer whose MLP each starts as, None for a level of zeros."""

    chunk_sizes: tuple[int, ...]
    donor_layers: tuple[int | None, ...]


def place_levels(
    num_layers: int, chunk_sizes: Sequence[int], donor_layout: DonorLayout = "depth"
) -> list[LayerPlacement]:
    """Eq. 7.3a: theta_0 of every level := a pretrained MLP, for each layer of a decoder.

    "depth" keeps each layer's MLP as its only level, fast in shallow layers and slow in deep ones. "grow" keeps it as
    level 0 and adds slower levels with a zero down-projection. "chain" follows the paper: the MLPs of as many layers as
    there are levels follow one another in every layer, so that the result is no longer the donor.
    """
    check_chunk_sizes(chunk_sizes)
    check_choices(donor_layout=(donor_layout, DonorLayout))
    K, layers, sizes = len(chunk_sizes), range(num_layers), tuple(chunk_sizes)
    if donor_layout == "grow":
        return [LayerPlacement(sizes, (n, *[None] * (K - 1))) for n in layers]
    if donor_layout == "depth":
        return [LayerPlacement((sizes[n * K // num_layers],), (n,)) for n in layers]
    donors = tuple(round(l * (num_layers - 1) / max(K - 1, 1)) for l in range(K))
    return [LayerPlacement(sizes, donors) for _ in layers]
