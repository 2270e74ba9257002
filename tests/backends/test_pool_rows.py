"""Tests that kernels of the mLSTM and of linear attention read and overwrite rows of a pool of states.

They run on a GPU, those of Hopper on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, Gluon kernels in the
simulator.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import pytest
import torch
from cases import INTERPRETED, alike, error, problem
from hypothesis import given, settings
from hypothesis import strategies as st
from low_pools import LOW, in_dtypes, rounding
from test_hopper import simulation
from torch import Tensor

import tfla
from tfla.backends import BACKENDS
from tfla.backends.base import FinalRows, Gates, Inputs, Spec
from tfla.backends.gpu import replay
from tfla.backends.gpu.runtime import DEFERRED_CHUNK_SIZE
from tfla.ops.state_pool import PoolRows

__all__ = ["rounding", "simulation"]

DEVICE = "cpu" if INTERPRETED else "cuda"
ON_HOPPER = INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0))
pytestmark = (
    [pytest.mark.interpreter]
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
GATES: dict[str, Gates] = {"exp": "exp", "sigmoid": "sigmoid", "plain": "log", "normalized": "log"}
ROUNDED = {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}  # few numbers of n are rounded otherwise
LENGTHS = (3, 70, 0, 5, 9)
ROWS = (4, -1, 0, 9, 6)  # in a pool of 7 rows: the second sequence has no row, and that of the fourth is not there
LACKING = slice(73, 78)  # the steps of the fourth sequence
WHOLE = DEFERRED_CHUNK_SIZE - 1  # the chunk size with which no sequence is cut into segments


def setting(
    form: str, dims: tuple[int, int], chunk_size: int, lengths: tuple[int, ...] = LENGTHS, kernel: str = "fused"
) -> tuple[Inputs, Spec]:
    """Return inputs whose sequences have separate initial states, and options without gradients."""
    p = problem(form, lengths=lengths, H=2, Hq=1, K=dims[0], V=dims[1], dtype=torch.float16)
    assert p.state is not None
    given = (p.q, p.k, p.v, p.i, p.f, *p.state, p.cu_seqlens)
    x = Inputs(*(None if t is None else t.to(DEVICE) for t in given))  # type: ignore[arg-type]
    spec = Spec(
        scale=dims[0] ** -0.5, normalize=p.normalize, normalizer_grad=True, chunk_size=chunk_size, kernel=kernel,
        save=False, final_state=True, gates=GATES[form],
    )  # fmt: skip
    return x, spec


def implementation(backend: str) -> tuple[str, str]:
    """Return a backend and its kernel; "tfla" stands for that kernel of Triton."""
    return ("triton", backend) if backend == "tfla" else (backend, "fused")


def with_state(x: Inputs, state: tfla.State) -> Inputs:
    return x._replace(**state._asdict())


def random_pages(x: Inputs, rows: int, layers: int) -> tfla.State:
    """Return tensors (rows, layers, ...) of the shapes of the states of x."""
    generator = torch.Generator().manual_seed(rows)
    parts = [None if t is None else torch.randn(rows, layers, *t.shape[1:], generator=generator) for t in x[5:8]]
    return tfla.State(*(None if t is None else t.to(DEVICE) for t in parts))  # type: ignore[arg-type]


def page(pages: tfla.State, layer: int) -> tfla.State:
    """Return the pool of a layer, whose rows are not adjacent in memory."""
    return tfla.State(*(None if t is None else t[:, layer] for t in pages))  # type: ignore[arg-type]


def cases() -> list[Any]:
    """Return cases for all kernels, by backend and head dims; with segments (64), state passing reads the rows."""
    found = [("triton", form, (40, 72), n) for form in GATES for n in (WHOLE, 64)]
    found += [("triton", "exp", (16, 160), WHOLE)]  # two blocks of columns in a program
    found += [("tfla", form, (40, 72), 64) for form in GATES] + [("tfla", "exp", (72, 72), 256)]
    dims = {(128, 128): "exp", (128, 256): "sigmoid", (256, 128): "exp", (256, 256): "normalized", (64, 64): "exp"}
    found += [("hopper", form, sizes, WHOLE) for sizes, form in dims.items()]
    found += [("hopper", "exp", (512, 128), WHOLE)]  # programs share the rows of a state
    found += [("hopper", "plain", (64, 128), WHOLE), ("hopper", "exp", (128, 128), 64), ("hopper", "exp", (64, 64), 64)]
    # Heads that the kernels pad: the pool has no padding.
    found += [
        ("hopper", "exp", (72, 136), WHOLE),
        ("hopper", "exp", (136, 72), WHOLE),
        ("hopper", "exp", (40, 56), WHOLE),
    ]
    found += [
        ("hopper", "normalized", (64, 72), WHOLE),
        ("hopper", "exp", (72, 120), 64),
        ("hopper", "exp", (56, 64), 64),
    ]
    return [pytest.param(*case, marks=needs_hopper if case[0] == "hopper" else ()) for case in found]


def low_cases() -> list[Any]:
    """Return cases of each kernel that reads or stores C."""
    found = [("triton", "exp", (40, 72), WHOLE), ("triton", "normalized", (40, 72), 64)]
    found += [("triton", "sigmoid", (16, 160), WHOLE), ("tfla", "exp", (40, 72), 64)]
    dims = {(128, 128): "exp", (256, 128): "exp", (64, 64): "exp", (512, 128): "plain"}
    found += [("hopper", form, sizes, WHOLE) for sizes, form in dims.items()] + [("hopper", "exp", (128, 128), 64)]
    found += [("hopper", "exp", (72, 120), WHOLE), ("hopper", "exp", (56, 64), 64)]
    return [pytest.param(*case, marks=needs_hopper if case[0] == "hopper" else ()) for case in found]


@pytest.mark.parametrize(("backend", "form", "dims", "chunk_size"), cases())
def test_rows_are_the_states(backend: str, form: str, dims: tuple[int, int], chunk_size: int) -> None:
    """Results equal those of separate states bit by bit: rows in any order, no row, and a row that the pool lacks."""
    check_rows(backend, form, dims, chunk_size, (torch.float32,) * 3)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("dtypes", LOW, ids=str)
@pytest.mark.parametrize(("backend", "form", "dims", "chunk_size"), low_cases())
def test_rows_of_16_bits_are_the_states(
    backend: str, form: str, dims: tuple[int, int], chunk_size: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Kernels compute in float32, and round final states to the dtypes of C, n and m of the pool."""
    check_rows(backend, form, dims, chunk_size, dtypes)


def check_rows(
    backend: str, form: str, dims: tuple[int, int], chunk_size: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Check calls with rows of a pool, whose C, n and m have these dtypes, and rows of another one of their inverse."""
    name, kernel = implementation(backend)
    chosen = BACKENDS[name]
    # The kernel "tfla" adds up n in an order that the compiler takes from the dtype of the pool.
    rounds = backend == "tfla" and dtypes[0] != torch.float32 and not INTERPRETED

    def equal(a: tfla.State, b: tfla.State) -> bool:
        """Whether states have the same bits, but for n of that kernel."""
        if not rounds or a.n is None or b.n is None:
            return same(a, b)
        return same(a._replace(n=None), b._replace(n=None)) and error(a.n, b.n) <= ROUNDED[a.n.dtype]

    def check_h(found: Tensor, truth: Tensor) -> None:
        assert error(found, truth) <= 1e-4 if rounds else torch.equal(found, truth)  # few numbers are rounded otherwise

    x, spec = setting(form, dims, chunk_size, kernel=kernel)
    pages = in_dtypes(random_pages(x, 7, 2), dtypes)
    pool = page(pages, 1)  # rows that are not adjacent in memory
    separate = in_dtypes(pool.gather([4, 0, 0, 0, 6]), (torch.float32,) * 3)
    separate.reset([1])
    expected = chosen.forward(with_state(x, separate), spec)
    # Without a normalizer n and m of the results are tensors without elements.
    last = tfla.State(*(None if t is None else getattr(expected, name) for name, t in pool._asdict().items()))  # type: ignore[arg-type]
    after = pages.clone()
    page(after, 1).scatter([4, 0, 6], last.gather([0, 2, 4]))
    for dtype in (torch.int32, torch.int64):
        rows, written = torch.tensor(ROWS, dtype=dtype, device=DEVICE), pages.clone()
        own = with_state(x, page(written, 1))
        read = chosen.forward_by_rows(own, rows, spec._replace(final_state=False))
        assert same(written, pages)
        h = chosen.forward_by_rows(own, rows, spec)
        assert equal(written, after)
        for found in (read, h):
            assert found is not None
            check_h(found[:, : LACKING.start], expected.h[:, : LACKING.start])
            assert found[:, LACKING].isnan().all()
            check_h(found[:, LACKING.stop :], expected.h[:, LACKING.stop :])
    # The final states of another pool, whose rows stand apart by another distance.
    others, rows = in_dtypes(random_pages(x, 6, 3), dtypes[::-1]), torch.tensor(ROWS, device=DEVICE)
    after, final = others.clone(), torch.tensor([0, 5, 1, -1, 3], device=DEVICE)
    page(after, 2).scatter([0, 5, 1, 3], last.gather([0, 1, 2, 4]))
    C, n, m = page(others, 2)
    h = chosen.forward_by_rows(with_state(x, pool), rows, spec, FinalRows(C, final, n, m))
    assert h is not None
    check_h(h[:, : LACKING.start], expected.h[:, : LACKING.start])
    assert equal(others, after)


@given(
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(any), spare=st.integers(0, 3),
    layers=st.integers(1, 3), heads=st.integers(1, 3), far=st.booleans(), data=st.data(),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_rows_of_any_pool(
    lengths: list[int], spare: int, layers: int, heads: int, far: bool, data: st.DataObject
) -> None:
    """Sequences with rows in any order, without one and without steps; max states within and beyond the clamp."""
    x = problem("exp", lengths=tuple(lengths), H=heads, Hq=1, K=16, V=24, dtype=torch.float16)
    assert x.state is not None
    size = len(lengths) + spare
    own = Inputs(*(None if t is None else t.to(DEVICE) for t in (x.q, x.k, x.v, x.i, x.f, *x.state, x.cu_seqlens)))  # type: ignore[arg-type]
    pages = random_pages(own, size, layers)
    assert pages.m is not None
    pages.m.mul_(1e6 if far else 1.0)
    order = data.draw(st.permutations(range(size)))
    rows = [order[s] if data.draw(st.booleans()) else -1 for s in range(len(lengths))]
    layer, written = data.draw(st.integers(0, layers - 1)), [s for s, row in enumerate(rows) if row >= 0]
    separate, after = page(pages, layer).gather([max(row, 0) for row in rows]), pages.clone()
    separate.reset([s for s, row in enumerate(rows) if row < 0])
    options: dict[str, Any] = {"cu_seqlens": own.cu_seqlens, "backend": "triton", "return_state": True}
    expected, states = attend("exp", own, separate, **options)
    page(after, layer).scatter([rows[s] for s in written], states.gather(written))
    with pytest.MonkeyPatch.context() as patch:
        for method in ("read", "write"):
            patch.setattr(PoolRows, method, lambda *_: pytest.fail("rows are gathered or scattered"))
        h, _ = attend("exp", own, page(pages, layer), state_indices=torch.tensor(rows, device=DEVICE), **options)
    assert torch.equal(h, expected)
    assert same(pages, after)


@pytest.mark.parametrize(("kernel", "tuned"), [("fused", []), ("tfla", ["chunk_outputs"])])
def test_no_kernel_that_overwrites_rows_is_autotuned(
    kernel: str, tuned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The autotuner runs a kernel several times, each of which would start from the states after the one before."""
    x, spec = setting("exp", (24, 40), WHOLE if kernel == "fused" else 64, kernel=kernel)
    found = []

    def autotuned(kernel: Any, *_: Any) -> Any:
        found.append(kernel.fn.__name__)
        return defaultdict(lambda: functools.partial(kernel[(1,)], num_warps=4, STAGES=1))

    monkeypatch.setenv(replay.AUTOTUNE, "1")
    monkeypatch.setattr(replay, "autotuned", autotuned)
    assert BACKENDS["triton"].forward_by_rows(x, torch.arange(5, device=DEVICE), spec) is not None
    assert found == tuned


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=needs_hopper)])
def test_what_the_kernels_do_not_take_is_left_to_the_caller(backend: str) -> None:
    chosen = BACKENDS[backend]
    x, spec = setting("exp", (64, 64), WHOLE, lengths=(3, 7))
    assert x.C is not None
    rows = torch.tensor([1, 0], device=DEVICE)
    wide = torch.zeros(2, 2, 64, 65, device=DEVICE)  # its first 64 columns are not contiguous
    not_packed = x._replace(cu_seqlens=None)
    for C in (x.C.double(), wide[..., :64], wide[:0, ..., :64], x.C[:1].expand(2, -1, -1, -1)):
        assert chosen.forward_by_rows(x._replace(C=C), rows, spec) is None
    assert x.n is not None
    assert x.m is not None
    n_apart, m_apart = (t.mT.contiguous().mT for t in (x.n, x.m))
    of_one = x.n[:1].expand_as(x.n), x.m[:1].expand_as(x.m)
    for n, m in ((x.n.double(), x.m), (x.n, x.m.double()), (n_apart, x.m), (x.n, m_apart), of_one):
        assert chosen.forward_by_rows(x._replace(n=n, m=m), rows, spec) is None
    assert chosen.forward_by_rows(not_packed, rows, spec) is None


@pytest.mark.parametrize("form", list(GATES))
def test_the_operators_take_them(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on a pool equal calls on separate states bit by bit, and the kernels read and write the pool."""
    x, _ = setting(form, (40, 72), WHOLE)
    size = 7
    generator = torch.Generator().manual_seed(0)
    tensors = [None if t is None else torch.randn(size, *t.shape[1:], generator=generator).to(DEVICE) for t in x[5:8]]
    pool, rows = tfla.State(*tensors), torch.tensor([4, -1, 0, 2, 6], device=DEVICE)  # type: ignore[arg-type]
    calls = []
    by_rows = type(BACKENDS["triton"]).forward_by_rows
    monkeypatch.setattr(
        type(BACKENDS["triton"]), "forward_by_rows", lambda *a: calls.append(by_rows(*a)) or calls[-1]
    )  # fmt: skip

    options = {"cu_seqlens": x.cu_seqlens, "return_state": True, "backend": "triton"}
    with torch.no_grad():
        separate = tfla.State(*(None if t is None else t[rows.clamp(min=0)].clone() for t in pool))  # type: ignore[arg-type]
        for t in separate:
            if t is not None:
                t[1] = 0
        expected, states = attend(form, x, separate, **options)
        after = pool.clone()
        after.scatter(rows[[0, 2, 3, 4]], tfla.State(*(None if t is None else t[[0, 2, 3, 4]] for t in states)))
        h, found = attend(form, x, pool, state_indices=rows, **options)
    assert [out is not None for out in calls] == [True]
    assert torch.equal(h, expected)
    assert all(a is b for a, b in zip(found, pool, strict=True))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(pool, after, strict=True))


def batch(form: str, dims: tuple[int, int], B: int, T: int) -> tuple[Inputs, tfla.State]:
    """Return a batch whose q, k and v are parts of one projection, and a pool of 7 rows that are not adjacent."""
    p = problem(form, B=B, T=T, H=2, Hq=1, K=dims[0], V=dims[1], dtype=torch.float16)
    assert p.state is not None
    joined = torch.cat([t.flatten(2) for t in (p.q, p.k, p.v)], -1).to(DEVICE)
    q, k, v = joined.split([dims[0], dims[0], 2 * dims[1]], -1)
    gates = (None if t is None else t.to(DEVICE) for t in (p.i, p.f))
    generator = torch.Generator().manual_seed(0)
    pages = [None if t is None else torch.randn(7, 2, *t.shape[1:], generator=generator) for t in p.state]
    pool = tfla.State(*(None if t is None else t.to(DEVICE)[:, 1] for t in pages))  # type: ignore[arg-type]
    heads = q.unflatten(2, (1, -1)), k.unflatten(2, (1, -1)), v.unflatten(2, (2, -1))
    return Inputs(*heads, *gates, None, None, None, None), pool  # type: ignore[arg-type]


def attend(form: str, x: Inputs, state: tfla.State, **options: Any) -> Any:
    """Compute the operator of a form without gradients."""
    with torch.no_grad():
        if form in ("exp", "sigmoid"):
            return tfla.mlstm(x.q, x.k, x.v, x.log_i, x.log_f, input_gate=form, initial_state=state, **options)
        options["normalize"] = form == "normalized"
        return tfla.linear_attention(x.q, x.k, x.v, x.log_f, x.log_i, initial_state=state, **options)


def batches() -> list[Any]:
    """Return batches by backend, form, head dims and chunk size; only with 64, sequences are cut into segments."""
    found = [("triton", form, (40, 72), 4, 70, None) for form in GATES]
    found += [("triton", "exp", (40, 72), 4, 70, 64), ("triton", "exp", (40, 72), 1, 70, 64)]
    found += [("tfla", "exp", (40, 72), 4, 70, 64), ("tfla", "plain", (40, 72), 4, 70, None)]
    found += [("triton", "sigmoid", (40, 72), 1, 70, None), ("triton", "exp", (40, 72), 4, 1, None)]
    found += [("hopper", "exp", (128, 128), 4, 70, None), ("hopper", "exp", (128, 128), 1, 70, 64)]
    found += [("hopper", "plain", (64, 128), 4, 70, None), ("hopper", "exp", (64, 64), 4, 70, 64)]
    found += [("hopper", "normalized", (256, 128), 4, 1, None), ("hopper", "exp", (56, 72), 4, 70, None)]
    return [pytest.param(*case, marks=needs_hopper if case[0] == "hopper" else ()) for case in found]


@pytest.mark.parametrize(("backend", "form", "dims", "B", "T", "chunk_size"), batches())
def test_a_batch_takes_the_rows(
    backend: str, form: str, dims: tuple[int, int], B: int, T: int, chunk_size: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Calls on a batch have the results of separate states, with their bits on a CPU; none is gathered or scattered."""
    x, pool = batch(form, dims, B, T)
    name, kernel = implementation(backend)
    options: dict[str, Any] = {"backend": name, "kernel": kernel, "chunk_size": chunk_size}
    rows = torch.tensor(ROWS[:B], device=DEVICE)
    lacking = rows == 9
    separate = pool.gather([row if 0 <= row < 7 else 0 for row in rows.tolist()])
    separate.reset((rows == -1).nonzero().flatten())
    expected_h, states = attend(form, x, separate, return_state=True, **options)
    written = ((rows >= 0) & ~lacking).nonzero().flatten()
    before, after = pool.clone(), pool.clone()
    after.scatter(rows[written], states.gather(written))
    for method in ("read", "write"):
        monkeypatch.setattr(PoolRows, method, lambda *_: pytest.fail("rows are gathered or scattered"))
    monkeypatch.setattr("tfla.ops.checks.check_values_of_indices", lambda *_: None)
    read = attend(form, x, pool, state_indices=rows, **options)
    assert same(pool, before)
    h, found = attend(form, x, pool, state_indices=rows, return_state=True, **options)
    assert (same if INTERPRETED else alike)(pool, after)
    assert all(a is b for a, b in zip(found, pool, strict=True))
    for own in (read, h):
        assert own.shape == expected_h.shape
        assert torch.equal(own[~lacking], expected_h[~lacking])
        assert own[lacking].isnan().all()


def same(a: tfla.State, b: tfla.State) -> bool:
    return all(s is t is None or torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("change", ["batch not outermost", "the same gates for all", "64 bits"])
def test_the_rows_of_other_batches_are_gathered(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where packing a batch would be a copy, and in a pool of float64."""
    x, pool = batch("exp", (40, 72), 4, 70)
    rows, options = torch.tensor([4, -1, 0, 2], device=DEVICE), {"backend": "triton"}
    if change == "batch not outermost":
        x = x._replace(v=x.v.transpose(0, 1).contiguous().transpose(0, 1))
    if change == "the same gates for all":
        x = x._replace(log_f=x.log_f[:1].expand(4, -1, -1))
    if change == "64 bits":
        pool = pool._replace(C=pool.C.double())
    separate = pool.gather([4, 0, 0, 2])
    separate.reset([1])
    expected_h, states = attend("exp", x, separate._replace(C=separate.C.float()), return_state=True, **options)
    after = pool.clone()
    after.scatter([4, 0, 2], states.gather([0, 2, 3])._replace(C=states.C[[0, 2, 3]].to(pool.C.dtype)))
    monkeypatch.setattr(type(BACKENDS["triton"]), "forward_by_rows", lambda *_: pytest.fail("reads rows"))
    h, _ = attend("exp", x, pool, state_indices=rows, return_state=True, **options)
    assert torch.equal(h, expected_h)
    assert same(pool, after)
