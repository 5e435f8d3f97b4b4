"""Memory for weights: one tensor behind another, on huge pages if these help.

Linear layers of one input whose weights are neighbours in memory run as one (`stack_rows`), without a copy. Each weight
has a storage of its own, because safetensors, accelerate and torch.save take tensors of one storage for shared weights.
Decoding from int8 weights is 6 to 10% faster on huge pages; for float weights it makes no difference.
"""

import contextlib
import math
import mmap
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; a tensor whose size is a multiple of it borders on the next one
HUGE_PAGE_BYTES = 2 * 2**20


class WeightMemory:
    """Allocates CPU tensors one behind another, in blocks that are freed when none of their tensors is left.

    What is never written of a block takes no memory. Huge pages take longer to allocate.
    """

    def __init__(self, block_bytes: int, huge_pages: bool = False) -> None:
        self.block_bytes, self.huge_pages = block_bytes, huge_pages
        self.used = 0  # bytes of the block
        self.block = np.empty(0, np.uint8)

    @classmethod
    def for_shapes(
        cls, shapes: Iterable[Sequence[int]], dtype: torch.dtype, huge_pages: bool = False
    ) -> "WeightMemory":
        return cls(sum(math.prod(shape) * dtype.itemsize + ALIGNMENT for shape in shapes), huge_pages)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor with a storage of its own."""
        start = math.ceil(self.used / ALIGNMENT) * ALIGNMENT
        size = math.prod(shape) * dtype.itemsize
        if start + size > len(self.block):
            size_of_block = max(size, self.block_bytes)
            block = allocate_huge_pages(size_of_block) if self.huge_pages else allocate_aligned(size_of_block)
            self.block = block.numpy()
            start = 0
        self.used = start + size
        if not size:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.as_tensor(self.block[start : self.used]).view(dtype).view(tuple(shape))


def allocate_aligned(size: int) -> Tensor:
    block = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    return block[-block.data_ptr() % ALIGNMENT :][:size]


def allocate_huge_pages(size: int) -> Tensor:
    """Return `size` bytes, on huge pages if the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux only
        return allocate_aligned(size)
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    return block[-block.data_ptr() % HUGE_PAGE_BYTES :][:size]


class MemorySpan:
    """The memory of neighbouring tensors as an array of bytes, which keeps them alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]  # a parameter may get another memory
        data = (tensors[0].data_ptr(), False)
        size = sum(tensor.nbytes for tensor in tensors)
        self.__array_interface__ = {"version": 3, "data": data, "shape": (size,), "typestr": "|u1"}


def stack_rows(matrices: Sequence[Tensor]) -> Tensor | None:
    """Return matrices of one width that are neighbours in memory, in this order, as one matrix; else None."""
    first = matrices[0]
    end = matrices[0].data_ptr()
    for matrix in matrices:
        is_neighbour = matrix.data_ptr() == end and matrix.is_contiguous() and matrix.device.type == "cpu"
        if not (is_neighbour and matrix.dtype == first.dtype and matrix.shape[1] == first.shape[1]):
            return None
        end += matrix.nbytes
    if end == first.data_ptr():
        return None
    return torch.as_tensor(np.asarray(MemorySpan(matrices))).view(first.dtype).view(-1, first.shape[1])
