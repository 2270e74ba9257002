"""The same inputs give the same bits, whatever runs first."""

from __future__ import annotations

import pytest
import torch
from cases import Implementation, problem, solve


@pytest.mark.parametrize("lengths", [None, (150, 0, 1, 149)], ids=["batch", "packed"])
@pytest.mark.parametrize("chunk_size", [64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_same_bits_every_time(
    implementation: Implementation, form: str, dtype: torch.dtype, chunk_size: int, lengths: tuple[int, ...] | None
) -> None:
    sizes = (
        {"T": 40, "H": 2} if implementation.device == "cpu" else {"T": 300, "H": 64, "K": 64, "V": 64}
    )  # more than fit at once
    p = problem(
        form, dtype=dtype, lengths=lengths if implementation.device == "cuda" else lengths and (21, 0, 1, 18), **sizes
    )
    first = solve(p, implementation, chunk_size=chunk_size)
    for _ in range(5 if implementation.device == "cuda" else 1):
        again = solve(p, implementation, chunk_size=chunk_size)
        assert all(torch.equal(x, first[name]) for name, x in again.items())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_second_gpu_of_a_process(implementation: Implementation, form: str) -> None:
    """Kernels run where the tensors are, not on the current device."""
    if implementation.device == "cpu":
        pytest.skip("runs on no GPU")
    p = problem(form, dtype=implementation.widest)
    first, second = (
        solve(p, Implementation(implementation.backend, implementation.kernel, device))
        for device in ("cuda:0", "cuda:1")
    )
    assert all(torch.equal(x, first[name]) for name, x in second.items())
