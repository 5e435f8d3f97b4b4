"""Chunk sizes of the levels of a continuum memory system, and the pretrained MLP that each starts as.

Nested Learning arXiv:2512.24695, section 7.3. Symbols: K levels l; C_l chunk size of level l.
"""

from collections.abc import Sequence
from typing import NamedTuple, get_args

from laconic.config.nested import DonorLayout, NewLevelInit, find_chunk_error
from laconic.console import pluralize
from laconic.errors import UsageError
from laconic.nested.optim.param_groups import check_choice


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
    num_layers: int,
    chunk_sizes: Sequence[int],
    donor_layout: DonorLayout = "depth",
    donor_map: Sequence[int] | None = None,
    new_level_init: NewLevelInit = "zero",
) -> list[LayerPlacement]:
    """Eq. 7.3a: theta_0 of every level := a pretrained MLP, for each layer of a decoder.

    Args:
        num_layers: Layers of the decoder.
        chunk_sizes: Chunk size of each level, fastest first.
        donor_layout: "depth" keeps each layer's MLP as its only level, fast in shallow layers and slow in deep ones.
            "grow" keeps it as level 0 and adds slower levels. "chain" follows the paper: the MLPs of as many layers as
            there are levels follow one another in every layer, so that the result is no longer the donor.
        donor_map: For "depth" the chunk index of each layer, for "chain" the donor layer of each level.
        new_level_init: For "grow", whether an added level has a zero down-projection or copies level 0.

    Raises:
        UsageError: If `donor_map` does not fit the layout, and for an unknown layout or `new_level_init`.
    """
    check_chunk_sizes(chunk_sizes)
    check_choice("cms", "donor_layout", donor_layout, get_args(DonorLayout))
    check_choice("cms", "new_level_init", new_level_init, get_args(NewLevelInit))
    K, layers = len(chunk_sizes), range(num_layers)
    if donor_layout == "grow":
        if donor_map is not None:
            raise UsageError(f"cms: donor_map {list(donor_map)}: layout grow keeps the MLP of each layer; remove it")
        return [
            LayerPlacement(tuple(chunk_sizes), (n, *[None if new_level_init == "zero" else n] * (K - 1)))
            for n in layers
        ]
    if donor_map is None:
        spread = [round(l * (num_layers - 1) / max(K - 1, 1)) for l in range(K)]
        donor_map = [n * K // num_layers for n in layers] if donor_layout == "depth" else spread
    length, limit = (num_layers, K) if donor_layout == "depth" else (K, num_layers)
    if len(donor_map) != length or not all(0 <= n < limit for n in donor_map):
        raise UsageError(
            f"cms: donor_map {list(donor_map)}; layout {donor_layout} needs {pluralize(length, 'number')} from 0 to "
            f"{limit - 1}"
        )
    if donor_layout == "depth":
        return [LayerPlacement((chunk_sizes[donor_map[n]],), (n,)) for n in layers]
    return [LayerPlacement(tuple(chunk_sizes), tuple(donor_map)) for _ in layers]
