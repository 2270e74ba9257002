"""The simulator of Hopper kernels computes their results, and reports missing synchronization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("tfla.backends.hopper.fused", exc_type=ImportError)
from gluon_simulator import language, memory, simulated
from gluon_simulator.clocks import RaceError
from gluon_simulator.values import Number, Pointer
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tfla.backends.hopper import gate_warp

SIZE = 64
FAULTS: dict[str, tuple[type[Exception], str]] = {
    "wait for a free stage": (RaceError, "load, writes over what"),
    "announcement": (RuntimeError, "no partition can go on"),
    "wait for a full stage": (RaceError, "square, reads what a copy from memory may not have written yet"),
    "wait for the product": (RuntimeError, "used before a wait"),
    "barrier": (RaceError, "load, writes over what an MMA of partition 0 may not have read yet"),
    "arrival": (RuntimeError, "no partition can go on"),
    "wait for the copy before": (RaceError, "writes over what a copy to memory of partition 0 may not have read yet"),
    "fence": (RaceError, "reads what warps have stored without a fence"),
    "wait for the last copy": (RuntimeError, "it ends before its MMAs and copies"),
    "fence of barriers": (RaceError, "made without a fence"),
    "mask": (IndexError, "element 32 of a tensor that has 32"),
}


def kernel() -> Any:
    names = [f"tfla.backends.hopper.{name}" for name in ("scheduler", "pipeline", "mma", "gate_warp")]
    return simulated(["tfla.backends.gpu.gate_kernels", *names, "gluon_simulator.example"])[
        "gluon_simulator.example"
    ].squares


def tiles(x: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [SIZE, 1], [SIZE, SIZE], gl.NVMMASharedLayout(128, 16, 2))


def run(without: str, rows: int = 5 * SIZE) -> tuple[torch.Tensor, ...]:
    """Tiles, what has become of them, and the last of the rest."""
    torch.manual_seed(0)
    x = torch.randn(rows, SIZE, dtype=torch.float16)
    out, last = torch.zeros_like(x), torch.zeros(32)
    count = -(-rows // SIZE)
    kernel()[(1,)](tiles(x), tiles(out), last, count, SIZE=SIZE, STAGES=2, WITHOUT=without, num_warps=4)
    return x, out, last


@pytest.mark.parametrize("seed", range(5))
def test_the_whole_kernel_in_whatever_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "SEED", seed)
    x, out, last = run("")
    expected = torch.cat([(tile.float() @ tile.float()).half() for tile in x.split(SIZE)])
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    assert (last == 5).all()


def test_what_is_outside_a_tensor_is_zero_and_stays() -> None:
    x, out, _ = run("", rows=SIZE + 8)
    assert torch.equal(out[SIZE:], (x[SIZE:, :8].float() @ x[SIZE:].float()).half())


@pytest.mark.parametrize("without", FAULTS)
def test_what_is_left_out_is_found(without: str) -> None:
    error, message = FAULTS[without]
    with pytest.raises(error, match=message):
        run(without)


def test_prefetches_are_of_whole_units_inside_a_tensor() -> None:
    pointer = Pointer.to_first(torch.zeros(64, dtype=torch.float16))
    memory.prefetch(pointer + 8, 112)
    with pytest.raises(IndexError, match="element 71 of a tensor that has 64"):
        memory.prefetch(pointer + 8, 128)
    with pytest.raises(AssertionError, match="parts of 16 bytes"):
        memory.prefetch(pointer + 1, 16)


def test_modules_are_as_before() -> None:
    kernel()
    assert gate_warp.gl is gl
    assert __import__("tfla.backends.hopper.gate_warp", fromlist=["gl"]) is gate_warp


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda x: x // 2, -3), (lambda x: x % 4, -3), (lambda x: x & -4, -8), (lambda x: x >> 1, -4),
        (lambda x: -x + 1, 8), (lambda x: 3 - x, 10),
    ],
)  # fmt: skip
def test_integers_are_those_of_the_gpu(compute: Callable[[Number], Number], expected: int) -> None:
    made = compute(Number(-7, torch.int32))
    assert int(made) == expected
    assert made.dtype == torch.int32


def test_integers_that_do_not_fit_are_found() -> None:
    large = Number(2**30, torch.int32)
    assert int(large.to(torch.int64) * 4) == 2**32
    with pytest.raises(OverflowError, match="4294967296 is no"):
        large * 4
