"""The peak memory of a call."""

from __future__ import annotations

import gc

import torch

from tfla.measure.problem import Call


def peak_bytes(call: Call, device: str) -> int | None:
    """Return the peak of the allocated bytes during the call, less those before it: results count, inputs do not.

    It is None on devices other than GPUs, where PyTorch does not count allocations.
    """
    if not device.startswith("cuda"):
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak
