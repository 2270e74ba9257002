"""The memory of a backend beyond inputs, outputs and gradients: stored states and little else."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from cases import Implementation
from torch.utils._python_dispatch import TorchDispatchMode

from tfla.backends import BACKENDS, Inputs
from tfla.backends.base import Spec

H, K, V, CHUNK = 2, 64, 64, 1024


class PeakBytes(TorchDispatchMode):
    """The most bytes that were alive at once on the CPU, beside those of the given tensors."""

    def __init__(self, *given: torch.Tensor | None) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.addresses = {x.untyped_storage().data_ptr() for x in given if x is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if (address := storage.data_ptr()) not in self.addresses and storage.nbytes():
                    self.addresses.add(address)
                    self.alive += storage.nbytes()
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self.free, address, storage.nbytes())
        return out

    def free(self, address: int, size: int) -> None:
        self.addresses.discard(address)
        self.alive -= size


class PeakBytesCUDA:
    """The most bytes that were allocated at once on the GPU beside those before; launches that are replayed count."""

    def __enter__(self) -> PeakBytesCUDA:
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *error: object) -> None:
        self.peak = torch.cuda.max_memory_allocated() - self.before


def extra_bytes(implementation: Implementation, T: int) -> int:
    """Return the peak of a forward and a backward, less h and the gradients."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(1, T, H, *shape, device=implementation.device)

    x = Inputs(draw(K), draw(K), draw(V), draw(), -draw().abs(), None, None, None, None)
    spec = Spec(0.1, True, True, CHUNK, implementation.kernel, True, False)
    backend = BACKENDS[implementation.backend]
    dh = draw(V)

    def both() -> tuple[Any, Any]:
        out = backend.forward(x, spec)
        return out, backend.backward(x, out, dh, None, None, spec)

    if x.q.is_cuda:
        both()  # what is kept between calls is not of a call
    with PeakBytesCUDA() if x.q.is_cuda else PeakBytes(*x, dh) as memory:
        out, grads = both()
    returned = (out.h, grads.q, grads.k, grads.v, grads.log_i, grads.log_f)
    return memory.peak - sum(t.numel() * t.element_size() for t in returned)


def test_extra_memory_is_stored_states(implementation: Implementation) -> None:
    if implementation.small_only:
        pytest.skip("keeps the state of every step")
    short, long = extra_bytes(implementation, 8192), extra_bytes(implementation, 32768)
    states = 4 * H * K * (V + 1) * (32768 - 8192) // CHUNK
    inputs = 4 * H * (2 * K + V) * (32768 - 8192)
    assert long - short < states + inputs // 10
