"""Plans of a backward by channel that computes batch rows, or parts of the steps, one after the other.

They run on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, Gluon kernels in the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import INTERPRETED
from delta_cases import DeltaProblem, delta_problem
from jax_plans import plans_run
from test_channel_activations import drawn
from torch import Tensor

from tfla.backends.gpu.planning import Launch
from tfla.jax import plans
from tfla.jax.delta import kernels

batch_slices = pytest.importorskip("tfla.backends.gpu.batch_slices")
time_parts = pytest.importorskip("tfla.backends.gpu.time_parts")
pytest.importorskip("tfla.backends.hopper.delta_backward", exc_type=ImportError)
pytestmark = [
    pytest.mark.interpreter, pytest.mark.skipif(not INTERPRETED, reason="plans run in Triton's interpreter")
]  # fmt: skip

# By case: the model, sizes, and in how many slices of batch rows and parts of the steps it is computed.
PROBLEMS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "KDA": ("kda", {"H": 2, "Hq": 1, "gates": "short"}, 2, 1),
    "KDA, a smaller last slice": ("kda", {"B": 3, "T": 20, "carried": False}, 2, 1),
    "KDA, slices and parts": ("kda", {"B": 3, "V": 128, "carried": False}, 2, 2),
    "KDA, parts": ("kda", {"H": 2, "V": 128, "gates": "half"}, 1, 2),
    "GLA": ("gla", {"K": 136, "gates": "closed"}, 2, 1),
    "GLA, parts of several tiles": ("gla", {"K": 136, "T": 140}, 2, 2),
    "a read key": ("gdn2", {}, 2, 2),
}


@pytest.fixture(autouse=True)
def _simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from gluon_simulator.hopper import on_cpu
    from interpreted_bfloat16 import use_bfloat16

    use_bfloat16(monkeypatch)
    with on_cpu(), plans_run(monkeypatch, architecture=90):
        yield


def run(spec: kernels.KernelSpec, given: list[Tensor | None], forward: bool) -> tuple[list[Tensor], list[Launch]]:
    """Return the results of a plan and its launches."""
    signature = tuple(None if x is None else (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in given)
    lowered = kernels._plan(spec, None, signature, forward)
    values = {n: x for n, x in enumerate(given) if x is not None}
    before = {n: x.clone() for n, x in values.items()}
    lowered.run(lowered.plan.steps, values)
    assert all(torch.equal(x, values[n]) for n, x in before.items()), "a kernel has written an input"
    return [values[n] for n in lowered.plan.results], [s for s in lowered.plan.steps if isinstance(s, Launch)]


def solve(p: DeltaProblem, gates: torch.dtype, **activations: Any) -> tuple[list[Tensor], list[Launch]]:
    """Return the gradients of a problem and the launches of its backward."""
    x, options = p.x, p.spec("fused")._replace(**activations)
    beta = None if x.beta is None else x.beta.float()
    assert x.log_f is not None
    x = x._replace(beta=beta, log_f=x.log_f.to(gates), C=None if x.C is None else x.C.float())
    inputs = [*x]
    spec = kernels.KernelSpec("hopper", plans.GPU(90, 1, "ieee"), options._replace(save=True, final_state=True), None)
    (_h, C, *saved), _ = run(spec, inputs, True)
    return run(spec, [*inputs, *saved, p.dh, p.dC.to(C)], False)


def divide(p: DeltaProblem, slices: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let later backwards be computed in so many slices of batch rows and parts of the steps."""
    kernels._plan.cache_clear()
    for module in (batch_slices, time_parts):
        monkeypatch.setattr(module, "SMALLEST", 0)
    monkeypatch.setattr(batch_slices, "FEWEST_TOKENS", 1)
    rounds = 1 if slices == 1 else p.x.q.shape[0] - 1
    monkeypatch.setattr(batch_slices, "processors", lambda device: 1000 if slices == 1 else 2 * rounds * p.x.v.shape[2])
    monkeypatch.setattr(time_parts, "FEWEST_TILES", 1 if parts > 1 else 1000)


@pytest.mark.parametrize("gates", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", PROBLEMS)
def test_same_bits_in_parts(case: str, gates: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts need no other kernel than the whole: what is compiled once serves all of them."""
    model, sizes, slices, parts = PROBLEMS[case]
    p = delta_problem(
        model, **{"B": 2, "T": 70, "H": 1, "Hq": 1, "K": 128, "V": 64, **sizes}, dtype=torch.bfloat16
    )  # fmt: skip
    whole, launches = solve(p, gates)
    divide(p, slices, parts, monkeypatch)
    found, of_parts = solve(p, gates)
    for name in ("channel_h_kernel", "channel_dv_kernel"):
        scans = [launch for launch in of_parts if launch.kernel.__name__ == name]
        assert len(scans) == slices * parts > sum(launch.kernel is scans[0].kernel for launch in launches)
        assert all(scan.constants == scans[0].constants for scan in scans)
    assert all(torch.equal(x, y) for x, y in zip(found, whole, strict=True))


def test_sums_of_parameters_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What slices and parts add to the gradients of A_log and dt_bias is summed by batch row."""
    p, activations = drawn(T=70, B=3, V=128), {"normalize_qk": True, "gate_activation": "softplus"}
    whole, _ = solve(p, torch.bfloat16, **activations)
    divide(p, 2, 2, monkeypatch)
    found, launches = solve(p, torch.bfloat16, **activations)
    assert sum(launch.kernel.__name__ == "channel_gradients_kernel" for launch in launches) == 4
    *same, of_rate, of_bias, of_state = zip(found, whole, strict=True)
    assert all(torch.equal(x, y) for x, y in (*same, of_state))
    for x, y in (of_rate, of_bias):
        assert x.shape == (3, 1, 128)
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6 * float(y.abs().max()))
