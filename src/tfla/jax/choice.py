"""The choice of a backend, a kernel and a chunk size on JAX, by name or by default."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jax import Array

from tfla.jax import kernels, reference
from tfla.jax.chunkwise import CHUNK

KERNELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(kernels.BACKENDS, ("fused",)),
    "chunkwise": ("segmented",),
    "reference": reference.KERNELS,
}
DELTA_KERNELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(kernels.BACKENDS, ("fused", "segmented")),
    "chunkwise": ("segmented",),
    "reference": ("recurrent", "parallel"),
}
Offsets = Array | np.ndarray | tuple[int, ...]


def choose(
    backend: object, kernel: object, chunk_size: int | None, kernels: Mapping[str, tuple[str, ...]] = KERNELS
) -> tuple[str, str, int]:
    """Return the backend, the kernel and the chunk size of a call.

    Args:
        backend, kernel, chunk_size: what the caller asks for; None leaves the choice open.
        kernels: the kernels of the operator by backend.

    Raises:
        ValueError: no backend or kernel has that name.
    """
    if backend is not None and not (isinstance(backend, str) and backend in kernels):
        raise ValueError(f"backend: got {backend!r}, allowed are None and {', '.join(map(repr, kernels))}")
    chosen = "chunkwise" if backend is None else backend
    names = kernels[chosen]
    if kernel is not None and not (isinstance(kernel, str) and kernel in names):
        raise ValueError(f"kernel: got {kernel!r}, backend {chosen!r} has {', '.join(map(repr, names))}")
    default = CHUNK if chosen == "chunkwise" else 64
    return chosen, names[0] if kernel is None else kernel, default if chunk_size is None else chunk_size
