"""The marks of tests of Hopper's kernels from JAX, and the simulator of these kernels around each module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
from cases import INTERPRETED
from jax_plans import ON_GPU

ON_HOPPER = ON_GPU and jax.devices()[0].compute_capability == "9.0"
pytestmark = (
    [pytest.mark.interpreter]
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="JAX has no Hopper GPU here")]
)
if INTERPRETED:
    pytest.importorskip("tfla.backends.hopper.delta_h", exc_type=ImportError)


@pytest.fixture(scope="module", autouse=True)
def simulation() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    from gluon_simulator.hopper import on_cpu

    with on_cpu():
        yield
