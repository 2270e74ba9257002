"""What a call takes where it leaves the choice open: backend, kernel, distance between stored states."""

from __future__ import annotations

from collections.abc import Callable

from tfla.backends import Backend, Inputs, select
from tfla.ops import tuned

Find = Callable[[Inputs, str, str | None, bool], tuned.Entry | None]


def choose(
    x: Inputs, normalize: bool, backend: str | None, kernel: str | None, chunk_size: int | None, find: Find = tuned.find
) -> tuple[Backend, str, int]:
    """Backend, kernel and chunk size, None being what is left to choose: what `tfla tune` found, else the backend's.

    ``find`` looks a shape up among what was found.

    Raises:
        ValueError: no backend or kernel has that name, or it cannot run these inputs (the message says why).
    """
    chosen = select(backend, x)
    if kernel is not None and (not isinstance(kernel, str) or kernel not in chosen.kernels):
        allowed = ", ".join(map(repr, chosen.kernels))
        raise ValueError(f"kernel: got {kernel!r}, backend {chosen.name!r} has {allowed}")
    if kernel is not None and (why := chosen.kernel_unsupported(x, kernel)) is not None:
        raise ValueError(f"kernel: {kernel!r} of backend {chosen.name!r} cannot run these inputs: {why}")
    found = find(x, chosen.name, kernel, normalize) if chunk_size is None else None
    if found is not None:
        return chosen, found.kernel, found.chunk_size
    kernel = chosen.default_kernel(x, chunk_size) if kernel is None else kernel
    return chosen, kernel, chunk_size or chosen.default_chunk_size(x, kernel)
