"""A call on a GPU compiles once, does not wait for the device, and can be captured in a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla
from tfla._util import caching
from tfla.backends import BACKENDS, Inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

KERNELS = ("triton fused", "triton tfla", "hopper fused")
GATES = ("exp", "sigmoid")
H, K, V = 3, 128, 256
Run = Callable[..., list[Tensor]]


def random_inputs(B: int, T: int, device: str = "cuda") -> list[Tensor]:
    """Leaves q, k, v, i, f, and a cotangent."""
    shapes = [(K,), (K,), (V,), (), (), (V,)]
    wide = [torch.randn(B, T, H, *shape, device=device) for shape in shapes]
    x = [t if t.dim() == 3 else t.bfloat16() for t in wide]
    return [t.requires_grad_() for t in x[:5]] + x[5:]


def packed_lengths(*lengths: int, device: str = "cuda") -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


@pytest.fixture(params=[f"{implementation} {gate}" for implementation in KERNELS for gate in GATES])
def run(request: pytest.FixtureRequest) -> Run:
    """Forward and backward: h and all gradients."""
    backend, kernel, gate = request.param.split()

    def call(*x: Tensor, **options: Any) -> list[Tensor]:
        *leaves, dh = x
        h = tfla.mlstm(*leaves, input_gate=gate, backend=backend, kernel=kernel, **options)
        return [h.detach(), *torch.autograd.grad(h, leaves, dh)]

    *leaves, _ = random_inputs(1, 1)
    why = BACKENDS[backend].unsupported(Inputs(*leaves, None, None, None, None))
    if why is not None:
        pytest.skip(why)
    return call


def skip_if_refused(run: Run, **options: Any) -> None:
    try:
        run(*random_inputs(1, 8), **options | {"cu_seqlens": packed_lengths(8)})
    except ValueError as why:
        pytest.skip(str(why))


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("chunk_size", [None, 128])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_graph(run: Run, packed: bool, chunk_size: int | None) -> None:
    """A replay with other values, and other lengths of sequences, gives the bits of a call."""
    options: dict[str, Any] = {"chunk_size": chunk_size}
    B, T = (1, 500) if packed else (2, 250)
    if packed:
        skip_if_refused(run)
        options["cu_seqlens"] = packed_lengths(100, 0, 400)
    x, y = random_inputs(B, T), random_inputs(B, T)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(*x, **options)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*x, **options)
    with torch.no_grad():
        for to, values in zip(x, y, strict=True):
            to.copy_(values)
        if packed:
            options["cu_seqlens"].copy_(packed_lengths(3, 397, 100))
    graph.replay()
    assert same(found, run(*y, **options))


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_nothing_waits_for_the_gpu(run: Run, packed: bool) -> None:
    options = {"cu_seqlens": packed_lengths(100, 0, 150)} if packed else {}
    if packed:
        skip_if_refused(run)
    x = random_inputs(1, 250)
    for _ in range(2):  # compiled, then remembered
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(*x, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("chunk_size", [1 << 20, 256], ids=["whole", "segments"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_compiled_once_for_all_lengths(
    run: Run, packed: bool, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    compiled: list[str] = []

    def note(*_: Any, fn: Any, **__: Any) -> None:
        compiled.append(fn.name)

    def lengths(*each: int) -> None:
        if packed:
            run(*random_inputs(1, sum(each)), cu_seqlens=packed_lengths(*each), chunk_size=chunk_size)
        else:
            run(*random_inputs(len(each), max(each)), chunk_size=chunk_size)

    if packed:
        skip_if_refused(run)
    lengths(1100, 1100)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for each in ((1100,), (1024, 1024), (1025,), (2048,) * 3, (601, 601, 601, 601), (513, 700), (300, 2000)):
        lengths(*each)
    assert not compiled


def test_streams_and_threads(run: Run) -> None:
    """Two threads, each on a stream of its own, at the same time from the first call of these sizes on."""
    inputs = [random_inputs(2, 700 + 64), random_inputs(2, 700 + 64)]
    found: list[list[Tensor]] = [[], []]
    torch.cuda.synchronize()

    def work(n: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(5):
                found[n] = run(*inputs[n])
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(found[n], run(*inputs[n])) for n in range(2))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_gpu_of_the_tensors(run: Run) -> None:
    assert torch.cuda.current_device() == 0
    x = random_inputs(2, 300)
    there = [t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in x]
    found = run(*there)
    assert all(t.device == torch.device("cuda:1") for t in found)
    assert torch.cuda.current_device() == 0
    assert same([t.to("cuda:0") for t in found], run(*x))


@pytest.mark.parametrize("kernel", ["fused", "tfla"])
def test_tritons_autotuner_is_asked_for(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's autotuner times configurations once, and results are those of the default ones except for rounding."""
    from tfla.backends.gpu import replay as compiled

    x = [t[..., :32].detach().requires_grad_() if t.dim() == 4 else t for t in random_inputs(2, 192)]

    def solve() -> list[Tensor]:
        h = tfla.mlstm(*x[:5], backend="triton", kernel=kernel)
        return [h.detach(), *torch.autograd.grad(h, x[:5], x[5])]

    expected = solve()
    caching.clear_caches()
    compiled.autotuned.cache_clear()
    monkeypatch.setenv(compiled.AUTOTUNE, "1")
    try:
        found = solve()
        assert compiled.autotuned.cache_info().currsize > 0
        tuned = compiled.autotuned.cache_info().misses
        again = solve()
        assert compiled.autotuned.cache_info().misses == tuned
    finally:
        caching.clear_caches()
    assert same(again, found)
    assert all(
        (a.double() - b.double()).norm() <= 5e-3 * b.double().norm() for a, b in zip(found, expected, strict=True)
    )
