"""The process's memory allocator, for programs of this package that run on a CPU."""

from __future__ import annotations

import ctypes

# mallopt parameters of glibc.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed, for this process; returns whether it could (glibc).

    glibc gives every large tensor back to the system, and takes it again a page fault at a time: a tenth of an
    operator's time and more. Allocators like tcmalloc and jemalloc keep memory by themselves.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
