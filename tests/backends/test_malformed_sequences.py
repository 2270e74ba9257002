"""Malformed offsets of packed sequences, which no host reads, are bounded; steps of no sequence get zeros.

The backends are called directly, since on a CPU, where Triton's interpreter runs, the operator refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import INTERPRETED, PER_STEP, TOLERANCE, Implementation, Problem, error, problem
from torch import Tensor

from tfla.backends import BACKENDS, Inputs
from tfla.backends.base import Spec

pytest.importorskip("triton")

T = 80
MALFORMED = {  # offsets, and those that they are taken for
    "begins late": ([25, 40, 80], [25, 40, 80]),
    "ends early": ([0, 20, 60], [0, 20, 60]),
    "too far": ([0, 200, 80], [0, 80, 80]),
    "negative": ([-7, 20, 2**40], [0, 20, 80]),
    "falling": ([0, 50, 30, 70], [0, 50, 50, 70]),
    "all outside": ([90, 100], [80, 80]),
    "inside out": ([60, 10], [60, 60]),
}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Has torch.empty fill what it allocates with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def run(p: Problem, implementation: Implementation, offsets: list[int], chunk_size: int) -> dict[str, Tensor]:
    """All quantities as the backend returns them; of p no offsets are used."""
    assert p.state is not None
    leaves = {name: x.to(implementation.device) for name, x in p.leaves.items()}
    cu = torch.tensor(offsets, device=implementation.device)
    x = Inputs(*(leaves.get(name) for name in ("q", "k", "v", "i", "f", "C0", "n0", "m0")), cu)  # type: ignore[arg-type]
    spec = Spec(p.q.shape[3] ** -0.5, p.normalize, True, chunk_size, implementation.kernel, True, True)
    backend = BACKENDS[implementation.backend]
    out = backend.forward(x, spec)
    dC, dn = (None if t is None else t.to(implementation.device) for t in p.dstate[:2])
    grads = backend.backward(x, out, p.dh.to(implementation.device), dC, dn, spec)
    found = {"h": out.h, "C": out.C, "n": out.n, "m": out.m}
    found |= {f"d{name}": g for name, g in zip(("q", "k", "v", "i", "f", "C0", "n0"), grads, strict=True)}
    return {name: t.cpu() for name, t in found.items()}


def expected(p: Problem, implementation: Implementation, offsets: list[int], chunk_size: int) -> dict[str, Tensor]:
    """Return the results of the sequences alone, with zeros at the steps around them."""
    first, last = offsets[0], offsets[-1]
    inner = p.but(**{name: getattr(p, name)[:, first:last] for name in ("q", "k", "v", "i", "f", "dh")})
    if first < last:
        found = run(inner, implementation, [a - first for a in offsets], chunk_size)
    else:  # no step: final states are the initial ones, and so are their cotangents
        assert p.state is not None
        found = {"C": p.state.C, "n": p.state.n, "m": p.state.m, "dC0": p.dstate.C, "dn0": p.dstate.n}
        found |= {f"d{name}": getattr(p, name)[:, :0] for name in "qkvif"} | {"h": p.v[:, :0]}
    around = {name: (x[:, :0], x) for name, x in found.items() if name in PER_STEP and x is not None}
    for name, (_, x) in around.items():
        padded = x.new_zeros(1, p.v.shape[1], *x.shape[2:])
        padded[:, first:last] = x
        found[name] = padded
    return found


def same(found: dict[str, Tensor], right: dict[str, Tensor], p: Problem, bounds: list[int]) -> None:
    outside = torch.ones(p.v.shape[1], dtype=torch.bool)
    outside[bounds[0] : bounds[-1]] = False
    for name, x in found.items():
        if name in PER_STEP:
            assert not x[:, outside].any(), name
        if x.numel() and right[name] is not None:
            assert error(x, right[name]) <= TOLERANCE[p.dtype], name


def check(
    form: str, implementation: Implementation, offsets: list[int], bounds: list[int], chunk_size: int, **sizes: Any
) -> None:
    p = problem(form, lengths=(T, *[0] * (len(bounds) - 2)), **{"Hq": 1, "H": 2, **sizes})
    right = expected(p, implementation, bounds, chunk_size)
    for _ in range(2):  # noted, then replayed
        same(run(p, implementation, offsets, chunk_size), right, p, bounds)


def skip_if_it_reads_them(implementation: Implementation) -> None:
    if implementation.backend not in ("triton", "hopper"):
        pytest.skip("reads the offsets")


@pytest.mark.parametrize(
    ("form", "chunk_size"),
    [
        ("normalized", 1000),
        pytest.param("normalized", 32, marks=pytest.mark.interpreter),
        ("plain", 1000),
        ("plain", 32),
    ],
    ids=["normalized-whole", "normalized-segments", "plain-whole", "plain-segments"],
)
@pytest.mark.parametrize(("offsets", "bounds"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed(
    implementation: Implementation, form: str, offsets: list[int], bounds: list[int], chunk_size: int
) -> None:
    skip_if_it_reads_them(implementation)
    check(form, implementation, offsets, bounds, chunk_size, dtype=implementation.widest)


ON_HOPPER = [pytest.mark.interpreter] if INTERPRETED else [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]  # fmt: skip


@pytest.fixture(
    params=[pytest.param(Implementation("hopper", "fused", "cpu" if INTERPRETED else "cuda"), marks=ON_HOPPER)]
)
def on_hopper(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    """The Hopper kernels, under Triton's interpreter in the simulator."""
    pytest.importorskip("tfla.backends.hopper.fused", exc_type=ImportError)
    if not INTERPRETED:
        yield request.param
        return
    from gluon_simulator.hopper import on_cpu

    with on_cpu():
        yield request.param


@pytest.mark.parametrize("malformed", ["begins late", "falling", "inside out"])
@pytest.mark.parametrize(
    ("form", "K", "V", "chunk_size"),
    [("normalized", 128, 256, 1000), ("plain", 128, 128, 64), ("normalized", 64, 64, 64), ("plain", 1024, 128, 1000)],
)
def test_hopper(on_hopper: Implementation, form: str, K: int, V: int, chunk_size: int, malformed: str) -> None:
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    heads = 1 if K == 1024 else 2
    check(form, on_hopper, *MALFORMED[malformed], chunk_size, K=K, V=V, H=heads, Hq=heads, dtype=dtype)
