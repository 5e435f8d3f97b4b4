"""Memory for weights: one tensor behind another, on huge pages where the system has them.

Decoding reads every weight once per token, which is faster from huge pages. Linear layers of one input whose weights
are neighbours in memory run as one (`stack_rows`), without a copy.
"""

import contextlib
import math
import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; a tensor whose size is a multiple of it borders on the next one
HUGE_PAGE_BYTES = 2 * 2**20


class WeightMemory:
    """Allocates CPU tensors one behind another, in blocks that are freed when none of their tensors is left.

    Args:
        block_bytes: Size of a block; what is never written takes no memory.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes, self.used = block_bytes, 0
        self.block = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def for_shapes(cls, shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> "WeightMemory":
        """Return memory for tensors of these shapes in one block."""
        return cls(sum(math.prod(shape) * dtype.itemsize + ALIGNMENT for shape in shapes))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor."""
        start = math.ceil(self.used / ALIGNMENT) * ALIGNMENT
        size = math.prod(shape) * dtype.itemsize
        if start + size > len(self.block):
            self.block, start = allocate_block(max(size, self.block_bytes)), 0
        self.used = start + size
        return self.block[start : self.used].view(dtype).view(*shape)


def allocate_block(size: int) -> Tensor:
    """Return `size` bytes, on huge pages if the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux only
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    return block[-block.data_ptr() % HUGE_PAGE_BYTES :][:size]


def stack_rows(matrices: Sequence[Tensor]) -> Tensor | None:
    """Return matrices of one width that are neighbours in memory, in this order, as one matrix; else None."""
    first, end = matrices[0].detach(), matrices[0].data_ptr()
    for matrix in matrices:
        is_neighbour = matrix.data_ptr() == end and matrix.is_contiguous() and matrix.device.type == "cpu"
        shares_block = matrix.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (is_neighbour and shares_block and matrix.dtype == first.dtype and matrix.shape[1] == first.shape[1]):
            return None
        end += matrix.nbytes
    return first.as_strided((sum(len(matrix) for matrix in matrices), first.shape[1]), first.stride())
