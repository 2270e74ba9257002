"""The buffers for the intermediate results of blocks."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_BYTES = 4 << 20


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return torch.empty in huge pages, where Linux has them.

    Touching a large new tensor of small pages for the first time takes about a tenth of the time of a forward.
    """
    x = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and x.nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (x.data_ptr() + x.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError, AttributeError):  # only a hint to the kernel
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return x


class Workspace:
    """The buffers of one call by name, shared by all blocks: touching new memory can cost more than the arithmetic."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the uninitialized buffer of that name in the given shape."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = self.like.new_empty(size, dtype=dtype or self.dtype)
        return self.buffers[name][:size].view(shape)

    def mul(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Return a * b in the named buffer; the last dimension is that of a, the others are broadcast."""
        return torch.mul(a, b, out=self(name, *b.shape[:3], a.shape[3]) if a.shape[2] == 1 else self(name, *a.shape))

    def bmm(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Return a @ b in the named buffer."""
        out = self(name, *a.shape[:3], b.shape[3])
        torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=out.flatten(0, 1))
        return out

    def each_bmm(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Return a @ b in the named buffer, one batched product for each tile, so that strided heads need no copy."""
        out = self(name, *a.shape[:3], b.shape[3])
        for each in zip(a, b, out, strict=True):
            torch.bmm(*each[:2], out=each[2])
        return out
