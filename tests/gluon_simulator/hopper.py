"""The Hopper backend with its kernels in the simulator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import tfla.backends.hopper
from gluon_simulator import simulated

HOPPER = "tfla.backends.hopper"
KERNELS = ("columns", "rows", "states", "both", "whole")
SHARED = ("order", "parts", "vectors", "carrier", "marks")


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """It takes tensors of the CPU. Triton's kernels beside its own need Triton's interpreter, which has no bfloat16:
    heads that share q and k, wide ones with a normaliser, and stored states may not be in it."""
    from tfla.backends.hopper import launch, narrow

    modules = simulated(["tfla.backends.triton.gates", *(f"{HOPPER}.{name}" for name in (*SHARED, *KERNELS))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfla.backends.hopper, "_is_hopper", lambda device: True)
        patch.setattr(type(tfla.backends.hopper.TRITON), "_unsupported", lambda backend, q: None)
        for name in KERNELS:
            kernel = getattr(modules[f"{HOPPER}.{name}"], name)
            patch.setattr(narrow if name == "whole" else launch, name, kernel)
        yield
