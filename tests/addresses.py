"""A stand-in for a CUDA graph that finds tensors which were freed."""

from __future__ import annotations

import gc
import weakref

import torch


class Addresses:
    """A stand-in for a CUDA graph: it reads tensors that it does not own, and finds those that were freed."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.read = [weakref.ref(t) for t in tensors]

    def replay(self) -> None:
        """Read the tensors, all of which must still be there."""
        gc.collect()
        freed = sum(t() is None for t in self.read)
        assert not freed, f"{freed} of {len(self.read)} weights and states of the graph were freed"
