"""Laws of reading with a memory: padding, rows, empty segments, windows, checkpointing, and where gradients go."""

from typing import Any

import pytest

from laconic.core.contract import Method
from tests.methods.documents import compressor, documents, whole

CELLS: tuple[dict[str, Any], ...] = tuple(
    {"generator": generator, "length": length, "memory": memory}
    for generator in ("parallel", "self", "pool")
    for length in ("fixed", "nested")
    for memory in ("accumulate", "replace")
)


def test_it_is_a_method() -> None:
    method = compressor()
    assert isinstance(method, Method)
    assert not method.restarts(documents())


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell.values()))
def test_every_cell_learns(cell: dict[str, Any]) -> None:
    """The loss is finite, and whatever is learned beside the decoder gets a gradient."""
    method = compressor(**cell)
    loss, found, _ = whole(method, documents(pads=1))
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in found.values())
    assert all(g.any() for name, g in found.items() if name.startswith("summaries"))
