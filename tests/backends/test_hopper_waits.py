"""Tests that Hopper kernels need each wait, arrival, invalidation, fence and barrier: the simulator fails without."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import INTERPRETED, TOLERANCE, Implementation, check_beside_terms, error, problem, solve
from channel_scans import check_scans
from delta_cases import MODELS as DELTA_MODELS
from delta_cases import DeltaProblem, delta_problem, with_short_gates
from torch.nn import functional

from tfla.backends import DELTA_BACKENDS, hopper
from tfla.backends.delta import DeltaGrads, DeltaOutputs

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter for the Triton kernels of the backend"),
]
FOLDER = Path(hopper.__file__).parent
SYNCHRONIZES = (
    "mbarrier.wait",
    "mbarrier.arrive",
    "mbarrier.expect",
    "mbarrier.invalidate",
    "barrier",
    "pipeline.barrier",
    "fence_async_shared",
    "tma.store_wait",
)
Case = tuple[str, dict[str, Any], int | None]  # form, sizes, chunk size
SCANS: list[Case] = [
    (f"{model} scans", {"K": K, "V": 128, "T": 330, "H": 1, "dtype": torch.bfloat16}, None)
    for model, K in (("kda", 128), ("gla", 256))
]
CASES: dict[str, list[Case]] = {
    "o_dv": [("exp", {"K": 128, "V": 128}, None), ("exp", {"K": 128, "V": 256, "carried": False}, None)],
    "dq_dk": [("exp", {"K": 128, "V": 256}, None), ("exp", {"K": 256, "V": 128}, None)],
    "dk_dv": [("sigmoid", {"K": 128, "V": 128, "T": 330}, None)],
    "segment_states": [("exp", {"K": 128, "V": 128, "T": 330}, 128)],
    "small_head": [
        ("exp", {"K": 64, "V": 64, "T": 330}, None), ("sigmoid", {"K": 64, "V": 64, "T": 450}, 64),
        ("exp", {"K": 64, "V": 128, "H": 1}, None),
    ],
    "pipeline": [
        ("exp", {"K": 128, "V": 128}, None), ("exp", {"K": 64, "V": 64}, None),
        ("gdn dq", {"K": 128, "V": 128, "T": 330, "H": 1}, None),
    ],
    "gate_warp": [("exp", {"K": 128, "V": 128}, None), ("exp", {"K": 64, "V": 64}, None)],
    "normalizer": [("exp", {"K": 128, "V": 128}, None), ("exp", {"K": 256, "V": 128}, None)],
    "store_warp": [("exp", {"K": 128, "V": 128}, None), ("gdn dq", {"K": 128, "V": 128, "T": 330, "H": 1}, None)],
    "split_reduce": [("sigmoid", {"K": 128, "V": 512, "T": 330, "H": 1}, None)],
    "delta_h": [
        ("gdn", {"K": 128, "V": 128, "T": 330, "H": 1}, None),
        ("gdn norms", {"K": 128, "V": 128, "T": 330, "H": 1}, None),
    ],
    "delta_action": [("gdn segments", {"K": 128, "V": 128, "T": 900, "H": 1}, None)],
    "delta_dv_dk": [("gdn dq", {"K": 128, "V": 128, "T": 330, "H": 1}, None)],
    "delta_dq_dk": [
        ("gdn dq", {"K": 128, "V": 128, "T": 330, "H": 1}, None),
        ("gdn norms", {"K": 128, "V": 128, "T": 330, "H": 1}, None),
    ],
    "reader_norms": [("gdn norms", {"K": 128, "V": 136, "T": 330, "H": 1}, None)],
    "delta_solve": [("gdn", {"K": 64, "V": 64, "T": 130, "H": 2}, None)],
    "delta_tiles": [("gdn", {"K": 128, "V": 128, "T": 330, "H": 1}, None)],
    "channel_operands": [("kda bfloat16", {"K": 136, "V": 64, "T": 70, "H": 1, "dtype": torch.bfloat16}, None)],
    # Gates in float32 and in float16, for which there is shared memory of one tile and of two
    "channel_gradients": [
        ("kda dq", {"K": 128, "V": 128, "T": 200, "H": 1}, None),
        ("kda dq short", {"K": 128, "V": 128, "T": 200, "H": 1}, None),
        ("kda with norms", {"K": 128, "V": 64, "T": 130, "H": 1, "dtype": torch.bfloat16}, None),
    ],
    "channel_h": SCANS,
    "channel_dv": SCANS,
    "channel_states": SCANS,
}  # fmt: skip
# Barriers between warps of a partition, which the simulator does not tell apart; the compiler inserts one there, too.
REDUNDANT = {
    ("normalizer", "store_shared_inverse", "barrier()"), ("split_reduce", "run_zero_fill_warp", "barrier()"),
    ("channel_operands", "exponents_from_middle", "pipeline.barrier()"),
    ("channel_operands", "channel_operands_kernel", "pipeline.barrier()"),
    ("channel_gradients", "run_key_warp", "pipeline.barrier()"),
    ("channel_gradients", "release_gates", "pipeline.barrier()"),
    ("channel_gradients", "store_scores", "pipeline.barrier()"),
    ("channel_gradients", "store_sums", "pipeline.barrier()"),
    ("channel_gradients", "compute_projections", "pipeline.barrier()"),
}  # fmt: skip


def synchronizing_statements(module: str) -> Iterator[tuple[str, str, str, int]]:
    """Yield module, function, statement and line of each statement that synchronizes."""
    for function in ast.parse((FOLDER / f"{module}.py").read_text()).body:
        statements = (node for node in ast.walk(function) if isinstance(node, ast.Expr))
        for node in statements:
            if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in SYNCHRONIZES:
                assert isinstance(function, ast.FunctionDef)
                yield module, function.name, ast.unparse(node), node.lineno


def write_without(module: str, line: int, folder: Path) -> Path:
    """Write the source of a module with `pass` in one line, and return the file."""
    source = (FOLDER / f"{module}.py").read_text().splitlines()
    end = next(node.end_lineno for node in ast.walk(ast.parse("\n".join(source))) if getattr(node, "lineno", 0) == line)
    assert end == line, "statements of one line"
    indent = len(source[line - 1]) - len(source[line - 1].lstrip())
    source[line - 1] = " " * indent + "pass"
    file = folder / f"{module}.py"
    file.write_text("\n".join(source))
    return file


def run(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Implementation, "refusal", lambda implementation, dtype: None)
    for form, sizes, chunk_size in cases:
        sizes = {"B": 1, "T": 130, "H": 2, "Hq": 1, "dtype": torch.float16, **sizes}
        model, _, backward = form.partition(" ")
        if model in DELTA_MODELS:
            DELTA_CHECKS[backward](delta_problem(model, **sizes))
            continue
        p = problem(form, **sizes)
        check_beside_terms(
            solve(p, Implementation("hopper", "fused", "cpu"), chunk_size=chunk_size), p, TOLERANCE[p.dtype]
        )


def check_delta_forward(p: DeltaProblem) -> None:
    """h, E and C of the kernel are those of Triton's kernels."""
    found, expected = (DELTA_BACKENDS[name].forward(p.x, p.spec("fused")) for name in ("hopper", "triton"))
    for name in ("h", "E", "C"):
        assert error(getattr(found, name), getattr(expected, name).double()) <= TOLERANCE[p.x.q.dtype], name


def check_norms(p: DeltaProblem) -> None:
    """h, dq and dk of the kernels with norms inside are those of Triton's kernels of normalized q and k."""
    spec = p.spec("fused")
    q, k = (t.double().requires_grad_() for t in (p.x.q, p.x.k))
    normalized = [functional.normalize(t, dim=-1) for t in (q, k)]
    plain = p.x._replace(q=normalized[0].detach().to(p.x.q.dtype), k=normalized[1].detach().to(p.x.k.dtype))
    out = {"triton": DELTA_BACKENDS["triton"].forward(plain, spec)}
    out["hopper"] = DELTA_BACKENDS["hopper"].forward(p.x, spec._replace(normalize_qk=True))
    assert error(out["hopper"].h, out["triton"].h.double()) <= TOLERANCE[p.x.q.dtype]
    found = DELTA_BACKENDS["hopper"].backward(p.x, out["hopper"], p.dh, p.dC.float(), spec._replace(normalize_qk=True))
    by_triton = DELTA_BACKENDS["triton"].backward(plain, out["triton"], p.dh, p.dC.float(), spec)
    expected = torch.autograd.grad(normalized, (q, k), [by_triton.q.double(), by_triton.k.double()])
    for mine, exact in zip((found.q, found.k), expected, strict=True):
        assert error(mine, exact) <= TOLERANCE[p.x.q.dtype]
    assert found.log_f is not None
    assert error(found.log_f, by_triton.log_f.double()) <= TOLERANCE[p.x.q.dtype]


def check_segments(p: DeltaProblem) -> None:
    """h and C of three segments from what the kernel computes of the first two are those by Triton."""
    spec = p.spec("segmented", 320)
    found, expected = (DELTA_BACKENDS[name].forward(p.x, spec) for name in ("hopper", "triton"))
    for name in ("h", "C"):
        assert error(getattr(found, name), getattr(expected, name).double()) <= TOLERANCE[p.x.q.dtype], name


def check_bfloat16_forward(p: DeltaProblem) -> None:
    """The same in bfloat16, which the kernel of operands needs."""
    from interpreted_bfloat16 import use_bfloat16

    with pytest.MonkeyPatch.context() as patch:
        use_bfloat16(patch)
        check_delta_forward(p)


def gradients_by(backend: str, p: DeltaProblem) -> DeltaGrads:
    """The gradients by a backend of what Triton's kernels store."""
    spec = p.spec("fused")
    return DELTA_BACKENDS[backend].backward(p.x, forward_by_triton(p), p.dh, p.dC.float(), spec)


@functools.cache
def forward_by_triton(p: DeltaProblem) -> DeltaOutputs:
    return DELTA_BACKENDS["triton"].forward(p.x, p.spec("fused"))


@functools.cache
def gradients_by_triton(p: DeltaProblem) -> DeltaGrads:
    return gradients_by("triton", p)


def check_delta_dq(p: DeltaProblem) -> None:
    """The gradients are those of Triton's scans."""
    found, expected = gradients_by("hopper", p), gradients_by_triton(p)
    for name in ("q", "k", "v", "beta", "log_f"):
        assert error(getattr(found, name), getattr(expected, name).double()) <= TOLERANCE[p.x.q.dtype], name


def check_short_gates(p: DeltaProblem) -> None:
    """The same with gates in the dtype of q."""
    check_delta_dq(with_short_gates(p))


def check_channels_with_norms(p: DeltaProblem) -> None:
    """The gradients of q and k are right where kernels for gates by channel divide them by their norms."""
    from interpreted_bfloat16 import use_bfloat16
    from test_channel_activations import check_gradients

    with pytest.MonkeyPatch.context() as patch:
        use_bfloat16(patch)
        check_gradients(p, gate_activation="none")


def check_channel_scans(p: DeltaProblem) -> None:
    """The scans with gates by channel compute what they do in float64."""
    check_scans(p, 1e-2)


DELTA_CHECKS = {
    "": check_delta_forward, "bfloat16": check_bfloat16_forward, "dq": check_delta_dq, "dq short": check_short_gates,
    "scans": check_channel_scans, "segments": check_segments, "norms": check_norms,
    "with norms": check_channels_with_norms,
}  # fmt: skip


@pytest.mark.parametrize("module", CASES)
def test_with_all(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tfla.backends.hopper.fused", exc_type=ImportError)
    from gluon_simulator.hopper import on_cpu

    with on_cpu():
        run(CASES[module], monkeypatch)


@pytest.mark.parametrize(
    ("module", "function", "statement", "line"),
    [found for module in CASES for found in synchronizing_statements(module)],
    ids=lambda x: str(x).partition("(")[0],
)  # fmt: skip
def test_without(
    module: str, function: str, statement: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tfla.backends.hopper.fused", exc_type=ImportError)
    from gluon_simulator.hopper import on_cpu

    redundant = (module, function, statement) in REDUNDANT
    found = contextlib.nullcontext() if redundant else pytest.raises((RuntimeError, AssertionError))
    with on_cpu({module: write_without(module, line, tmp_path)}), found:
        run(CASES[module], monkeypatch)
