"""The chunk size is a knob for memory: results do not depend on it."""

from __future__ import annotations

import pytest
import torch
from cases import FORMS, Implementation, check, problem, solve, truth
from torch._subclasses import FakeTensorMode

from tfla.backends import Inputs


@pytest.mark.parametrize("chunk_size", [1, 3, 64, pytest.param(100, marks=pytest.mark.interpreter), 1000])
@pytest.mark.parametrize("lengths", [None, (0, 70, 1, 60)], ids=["batch", "packed"])
@pytest.mark.parametrize("form", FORMS)
def test_any_chunk_size(
    implementation: Implementation, form: str, lengths: tuple[int, ...] | None, chunk_size: int
) -> None:
    p = problem(form, dtype=implementation.widest, T=131, lengths=lengths, Hq=1, H=2)
    check(solve(p, implementation, chunk_size=chunk_size), truth(p), p.dtype)


@pytest.mark.parametrize("chunk_size", [1, 64])
def test_small_chunks_in_bfloat16(implementation: Implementation, chunk_size: int) -> None:
    """States pass from chunk to chunk unrounded."""
    p = problem(dtype=torch.bfloat16, T=131)
    check(solve(p, implementation, chunk_size=chunk_size), truth(p), p.dtype)


@pytest.mark.parametrize("lengths", [None, (0, 70, 1, 60)], ids=["batch", "packed"])
@pytest.mark.parametrize(
    ("form", "carried"), [pytest.param("exp", True, marks=pytest.mark.interpreter), ("exp", False), ("sigmoid", True)]
)
def test_chunk_size_picked_at_the_call(
    implementation: Implementation,
    form: str,
    carried: bool,
    lengths: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls of traced graphs store no states; the backward computes those of its segments again."""
    if implementation.backend not in ("triton", "hopper") or implementation.kernel != "fused":
        pytest.skip("has no segments picked by length")
    from tfla.backends.gpu import runtime, segmentation

    picked = []
    monkeypatch.setattr(segmentation, "best_chunk_size", lambda x, *choices: picked.append(choices) or 64)
    p = problem(form, dtype=implementation.widest, T=131, lengths=lengths, Hq=1, H=2, carried=carried)
    check(solve(p, implementation, chunk_size=runtime.DEFERRED_CHUNK_SIZE), truth(p), p.dtype)
    assert len(picked) == 2  # forward and backward


@pytest.mark.parametrize("lengths", [None, (0, 300, 1, 130)], ids=["batch", "packed"])
@pytest.mark.parametrize(
    ("carried", "K"), [pytest.param(True, 24, marks=pytest.mark.interpreter), (True, 256), (False, 24), (False, 256)]
)
def test_denominators_of_sequences_cut(
    implementation: Implementation,
    carried: bool,
    K: int,
    lengths: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scan for n is divided where multiprocessors would be idle, others are not."""
    if implementation.backend not in ("triton", "hopper") or implementation.kernel != "fused":
        pytest.skip("n and the state have one scan")
    from tfla._util import caching
    from tfla.backends.triton import denominators

    monkeypatch.setattr(denominators, "processors", lambda device: 132)
    monkeypatch.setattr(denominators, "SHORTEST_SEGMENT", 128)
    scans = []
    launch_scan = denominators.launch_scan
    monkeypatch.setattr(denominators, "launch_scan", lambda *args, **kw: scans.append(launch_scan(*args, **kw)))
    caching.clear_caches()
    try:
        p = problem(dtype=implementation.widest, T=290, lengths=lengths, Hq=1, H=2, K=K, V=256, carried=carried)
        check(solve(p, implementation, chunk_size=1000), truth(p), p.dtype)
    finally:
        caching.clear_caches()
    assert len(scans) == 2


def chosen(B: int, T: int, H: int, sequences: int | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """The chunk size for heads of 128 x 256 on 132 multiprocessors; sequences: packed ones."""
    pytest.importorskip("triton")
    from tfla.backends.gpu import config, segmentation

    monkeypatch.setattr(segmentation, "processors", lambda device: 132)
    with FakeTensorMode():
        q, v, g = (torch.empty(B, T, H, *d, device="cuda") for d in ((128,), (256,), ()))
        ends = None if sequences is None else torch.empty(sequences + 1, dtype=torch.int32, device="cuda")
        x = Inputs(q, q, v, g, g, None, None, None, ends)
        return segmentation.best_chunk_size(x, config.choose_kernel_config(128, 256, 2, "tf32", 90), 1)


@pytest.mark.parametrize(
    ("sequences", "H", "packed", "segment"),
    [
        (32, 16, True, None), (32, 16, False, None), (8, 16, False, None), (8, 16, True, 4096), (1, 2, True, 1024),
        (1, 2, False, 1024), (32, 4, True, 1024), (32, 4, False, None), (8, 5, False, 2752), (1, 16, False, 8192),
    ],
)  # fmt: skip
def test_segments_where_multiprocessors_would_be_idle(
    sequences: int, H: int, packed: bool, segment: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are 65,536 tokens; of packed sequences one is expected to be long."""
    B, T = (1, 65_536) if packed else (sequences, 65_536 // sequences)
    assert chosen(B, T, H, sequences if packed else None, monkeypatch) == (segment or T)


@pytest.mark.parametrize(("T", "segment"), [(512, 512), (1024, 1024), (2048, 512), (4096, 512)])
def test_short_sequences_are_whole(T: int, segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments would save less time there than their additional launches take."""
    assert chosen(1, T, 1, None, monkeypatch) == segment
