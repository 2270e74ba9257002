"""The delta rule and gated linear attention on every backend, against the recurrence in float64 and autograd."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import INTERPRETED, TOLERANCE, error
from delta_cases import GATES, MODELS, DeltaProblem, check_beside_rounding, delta_problem, truth
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tfla.backends import DELTA_BACKENDS
from tfla.backends.chunkwise import layout
from tfla.backends.chunkwise.channel_decays import ChannelDecays
from tfla.backends.chunkwise.corrections import corrections
from tfla.backends.delta import DeltaGrads
from tfla.backends.triton.delta_backend import TritonDelta

IMPLEMENTATIONS = [
    (b.name, kernel) for b in DELTA_BACKENDS.values() for kernel in b.kernels if b.name in ("reference", "chunkwise")
]


def solve(p: DeltaProblem, backend: str, kernel: str, chunk_size: int = 1024) -> dict[str, Tensor]:
    """The quantities of `truth` by a backend."""
    chosen, spec = DELTA_BACKENDS[backend], p.spec(kernel, chunk_size)
    out = chosen.forward(p.x, spec)
    grads = chosen.backward(p.x, out, p.dh, p.dC.to(out.C), spec)
    assert isinstance(grads, DeltaGrads)
    found = {"h": out.h, "C": out.C}
    return found | {f"d{name}": g for name in p.leaves if (g := getattr(grads, name)) is not None}


def check(p: DeltaProblem, found: dict[str, Tensor]) -> None:
    """Every quantity is within the tolerance of the dtype of the problem."""
    exact = truth(p)
    assert found.keys() == exact.keys()
    errors = {name: error(x, exact[name]) for name, x in found.items()}
    assert all(e <= TOLERANCE[p.x.q.dtype] for e in errors.values()), {n: f"{e:.1e}" for n, e in errors.items()}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("backend", "kernel"), IMPLEMENTATIONS, ids=[f"{b}-{k}" for b, k in IMPLEMENTATIONS])
def test_every_model(backend: str, kernel: str, model: str, gates: str) -> None:
    if model == "deltanet" and gates != "medium":
        return
    p = delta_problem(model, gates=gates, T=37, B=1, Hq=1, H=2)
    check(p, solve(p, backend, kernel))


SHAPES: dict[str, dict[str, Any]] = {
    "one step": {"T": 1},
    "no initial state": {"T": 65, "carried": False},
    "three heads share keys": {"T": 20, "Hq": 2, "H": 6},
    "head dims of one": {"T": 20, "K": 1, "V": 1},
    "two tiles and a rest": {"T": 150, "B": 1},
    "packed": {"lengths": (0, 30, 1, 99, 0), "Hq": 1},
}


@pytest.mark.parametrize("model", ["gdn", "kda", "gla", "before"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(shape: dict[str, Any], model: str) -> None:
    p = delta_problem(model, **shape)
    check(p, solve(p, "chunkwise", "segmented"))
    if p.x.q.shape[1] < 100:
        check(p, solve(p, "reference", "recurrent"))


@pytest.mark.parametrize("model", ["gdn", "kda"])
@pytest.mark.parametrize(("tiles", "heads", "chunk_size"), [(1, 1, 100), (3, 2, 64), (2, 100, 17)])
def test_cuts(monkeypatch: pytest.MonkeyPatch, model: str, tiles: int, heads: int, chunk_size: int) -> None:
    monkeypatch.setattr(layout, "MAX_TILES", tiles)
    monkeypatch.setattr(layout, "STATE_BYTES", heads * 8 * 6 * 8)
    p = delta_problem(model, T=200, Hq=2, H=4, B=1)
    check(p, solve(p, "chunkwise", "segmented", chunk_size))


@given(
    st.sampled_from(sorted(MODELS)), st.sampled_from(GATES), st.integers(1, 140), st.integers(1, 9), st.integers(1, 9),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]), st.integers(1, 200), st.integers(0, 3),
)  # fmt: skip
def test_any_problem(
    model: str, gates: str, T: int, K: int, V: int, heads: tuple[int, int], chunk_size: int, seed: int
) -> None:
    p = delta_problem(model, gates=gates, B=1, T=T, K=K, V=V, Hq=heads[0], H=heads[1], seed=seed)
    check(p, solve(p, "chunkwise", "segmented", chunk_size))


@pytest.mark.parametrize("value", [0.0, 2.0])
@pytest.mark.parametrize(("backend", "kernel"), IMPLEMENTATIONS, ids=[f"{b}-{k}" for b, k in IMPLEMENTATIONS])
def test_beta_at_its_limits(backend: str, kernel: str, value: float) -> None:
    p = delta_problem("gdn", T=40, B=1)
    assert p.x.beta is not None
    beta = p.x.beta.clone()
    beta[:, ::3] = value
    p = DeltaProblem(p.model, p.x._replace(beta=beta), p.dh, p.dC, p.scale)
    check(p, solve(p, backend, kernel))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("model", ["gdn", "kda", "gla", "comba"])
def test_float32(model: str, gates: str) -> None:
    p = delta_problem(model, gates=gates, B=1, T=200, K=32, V=16, dtype=torch.float32)
    check(p, solve(p, "chunkwise", "segmented"))


@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("model", ["deltanet", "gdn", "kda", "gla", "comba"])
def test_bfloat16_costs_the_rounding_of_inputs_and_outputs(model: str, gates: str, alike: float) -> None:
    """Errors are at most 1.5 times what rounding inputs and outputs costs, 2.5 times for gates with long memory."""
    if (model == "deltanet" and gates != "medium") or (alike and model == "gla"):
        return
    p = delta_problem(model, gates=gates, B=1, T=150, K=32, V=32, alike=alike)
    for backend, kernel in IMPLEMENTATIONS:
        check_beside_rounding(p, gates, functools.partial(solve, backend=backend, kernel=kernel), torch.bfloat16)


@pytest.mark.parametrize("L", [1, 2, 16, 32, 64])
@pytest.mark.parametrize("keys", ["random", "alike", "two in turn"])
def test_corrections(keys: str, L: int) -> None:
    """X = M (I + B M)^-1, also where the powers of B M are far larger than X."""
    torch.manual_seed(0)
    k = F.normalize(torch.randn(3, L, 24, dtype=torch.float64), dim=-1)
    if keys == "alike":
        k = F.normalize(k + 3 * k[:, :1], dim=-1)
    elif keys == "two in turn":
        k = k[:, [0, min(1, L - 1)]].repeat(1, (L + 1) // 2, 1)[:, :L]
    M, beta = (k @ k.mT).tril(-1), torch.full((3, L), 2.0, dtype=torch.float64)
    exact = M @ torch.linalg.inv(torch.eye(L, dtype=torch.float64) + beta[..., None] * M)
    assert error(corrections(M, beta), exact) < 1e-12
    assert error(corrections(M.float(), beta.float()), exact) < 1e-4


@pytest.mark.parametrize("gate", [-0.01, -1.0, -5.0, -12.0, -200.0, -1e5, 0.5])
def test_scores_with_gates_by_channel(gate: float) -> None:
    """Nothing overflows, and closed gates do not disturb their neighbours, in float32."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 64, 12, dtype=torch.float64)
    log_f = torch.full((1, 1, 64, 12), gate, dtype=torch.float64) * torch.rand(1, 1, 64, 12).double()
    exact = torch.zeros(64, 64, dtype=torch.float64)
    for i, j in itertools.product(range(64), range(64)):
        if i >= j:
            exact[i, j] = (q[0, 0, i] * k[0, 0, j] * log_f[0, 0, j + 1 : i + 1].sum(0).exp()).sum()
    decays = ChannelDecays(log_f.float(), k.float())
    found = decays.scores(q.float(), q.float() * decays.start)
    assert torch.isfinite(found).all()
    assert error(found[0, 0], exact) < 2e-6


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter takes other dtypes")
@pytest.mark.parametrize("model", ["gdn", "kda", "gla", "comba"])
def test_kernels_for_gpus_take_bfloat16_alone(model: str) -> None:
    """In float16 and float32 their errors are above the bounds of the dtype."""
    backend = TritonDelta(lambda q: None)
    p = delta_problem(model, T=5)
    assert backend.unsupported(p.to(torch.bfloat16).x) is None
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert backend.unsupported(p.to(dtype).x) == f"it takes bfloat16, the inputs are {dtype}"
