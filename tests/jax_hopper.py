"""The marks of tests of Hopper's kernels from JAX, and the simulator of these kernels around each module of tests."""

from __future__ import annotations

import jax
import pytest
from cases import INTERPRETED
from hopper_simulation import simulation
from jax_plans import ON_GPU

__all__ = ["pytestmark", "simulation"]  # what modules of tests take over

ON_HOPPER = ON_GPU and jax.devices()[0].compute_capability == "9.0"
pytestmark = (
    [pytest.mark.interpreter]
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="JAX has no Hopper GPU here")]
)
if INTERPRETED:
    pytest.importorskip("tfla.backends.hopper.delta_h", exc_type=ImportError)
