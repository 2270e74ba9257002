"""Peak memory of a call."""

from __future__ import annotations

import gc

import torch

from tfla.measure.problem import Call


def peak_bytes(call: Call, device: str) -> int | None:
    """What the allocator held at most during the call beyond what it held before: results are counted, inputs not.

    None where the device does not count.
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
