"""`tfla.explain` says what `tfla.mlstm` does with the same arguments, and why it takes no other backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Implementation, leaves_on, problem

import tfla
from tfla.backends import BACKENDS, Inputs
from tfla.backends.base import Outputs
from tfla.ops import api
from tfla.ops.dispatch import Plan

CALLS: dict[str, dict[str, Any]] = {
    "long": {"T": 300},
    "packed": {"lengths": (20, 0, 17)},
    "fewer heads of q and k": {"Hq": 1},
}


@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("shape", CALLS.values(), ids=CALLS.keys())
def test_says_what_runs(
    implementation: Implementation, shape: dict[str, Any], chunk_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(dtype=implementation.widest, carried=False, **shape)
    cu_seqlens = None if p.cu_seqlens is None else p.cu_seqlens.to(implementation.device)
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "chunk_size": chunk_size, **implementation.options}
    calls = []

    def attend(x: Inputs, plan: Plan) -> Outputs:
        with torch.no_grad():
            out: Outputs = plan.backend.forward(x, plan.spec)
        calls.append((plan.spec.chunk_size, plan.backend.name, plan.spec.kernel, out.chunk_C.shape[0]))
        return out

    monkeypatch.setattr(api, "attend", attend)
    leaves = leaves_on(implementation, p).values()
    tfla.mlstm(*leaves, **options)
    said = tfla.explain(*leaves, **options)
    assert (said.chunk_size, said.backend, said.kernel, said.stored_states) == calls[0]
    assert (said.backend, said.kernel) == (implementation.backend, implementation.kernel)
    assert chunk_size is None or said.chunk_size == chunk_size


def test_every_other_backend_has_a_reason(implementation: Implementation) -> None:
    leaves = leaves_on(implementation, problem(dtype=implementation.widest, carried=False)).values()
    said = tfla.explain(*leaves, **implementation.options)
    assert set(said.not_taken) == set(BACKENDS) - {implementation.backend}
    for name, why in said.not_taken.items():
        other = f"{implementation.backend!r} was asked for"
        assert other in why or why.startswith(("it needs", "it takes", "it computes"))
        assert any(line.startswith(f"not {name} ") and line.endswith(why) for line in str(said).splitlines())


def test_picks_the_first_that_can_run() -> None:
    leaves = problem(carried=False).leaves.values()
    said = tfla.explain(*leaves)
    assert said.backend == "chunkwise"
    assert said.not_taken["reference"] == "it could, but 'chunkwise' comes before it"
    assert said.not_taken["triton"] == BACKENDS["triton"].unsupported(Inputs(*leaves, None, None, None, None))


def test_prints_a_line_for_everything() -> None:
    said = tfla.Explanation("mine", "scan", 64, 3, {"tile": 16}, {"yours": "it is slow"})
    assert str(said).splitlines() == [
        "backend     mine",
        "kernel      scan",
        "chunk_size  64 (3 stored states)",
        "tile        16",
        "not yours   it is slow",
    ]


def test_refuses_what_mlstm_refuses() -> None:
    leaves = problem(carried=False).leaves
    with pytest.raises(ValueError, match="backend: got 'your'"):
        tfla.explain(**leaves, backend="your")
    with pytest.raises(ValueError, match="kernel: got 'scan', backend 'chunkwise' has"):
        tfla.explain(**leaves, backend="chunkwise", kernel="scan")
    with pytest.raises(ValueError, match="chunk_size: got 0"):
        tfla.explain(**leaves, chunk_size=0)
    with pytest.raises(ValueError, match="k: got shape"):
        tfla.explain(**{**leaves, "k": leaves["k"][:, :5]})


def by_older_name(value: str) -> None:
    torch.set_float32_matmul_precision(value)


def by_newer_name(value: str) -> None:
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this PyTorch has none")
    torch.backends.cuda.matmul.fp32_precision = value


@pytest.mark.parametrize(
    ("set_to", "value", "products"),
    [
        (by_older_name, "highest", "ieee"), (by_older_name, "high", "tf32x3"), (by_older_name, "medium", "tf32"),
        (by_newer_name, "ieee", "ieee"), (by_newer_name, "tf32", "tf32x3"),
    ],
)  # fmt: skip
def test_how_float32_is_multiplied(
    set_to: Callable[[str], None], value: str, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 is multiplied as PyTorch is set."""
    config = pytest.importorskip("tfla.backends.gpu.config", reason="Triton is not installed")
    monkeypatch.setattr(config, "architecture", lambda device: 80)  # there may be no GPU
    x = Inputs(*(torch.zeros(1, 5, 1, *d) for d in ((16,), (16,), (16,), (), ())), None, None, None, None)
    before = torch.get_float32_matmul_precision()
    set_to(value)
    try:
        for kernel in BACKENDS["triton"].kernels:
            assert BACKENDS["triton"].details(x, 64, kernel)["float32"] == products
    finally:
        torch.set_float32_matmul_precision(before)
