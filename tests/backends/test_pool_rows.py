"""Tests that the fused kernels of the mLSTM and of linear attention read and overwrite rows of a pool of states.

They run on a GPU, those of Hopper on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, Gluon kernels in the
simulator.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import INTERPRETED, alike, problem
from test_hopper import simulation
from torch import Tensor

import tfla
from tfla.backends import BACKENDS
from tfla.backends.base import Gates, Inputs, Spec
from tfla.backends.gpu.runtime import DEFERRED_CHUNK_SIZE
from tfla.ops.state_pool import PoolRows

__all__ = ["simulation"]

DEVICE = "cpu" if INTERPRETED else "cuda"
ON_HOPPER = INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0))
pytestmark = (
    [pytest.mark.interpreter]
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
GATES: dict[str, Gates] = {"exp": "exp", "sigmoid": "sigmoid", "plain": "log", "normalized": "log"}
LENGTHS = (3, 70, 0, 5, 9)
ROWS = (4, -1, 0, 9, 6)  # in a pool of 7 rows: the second sequence has no row, and that of the fourth is not there
LACKING = slice(73, 78)  # the steps of the fourth sequence
WHOLE = DEFERRED_CHUNK_SIZE - 1  # the chunk size with which no sequence is cut into segments


def setting(
    form: str, dims: tuple[int, int], chunk_size: int, lengths: tuple[int, ...] = LENGTHS
) -> tuple[Inputs, Spec]:
    """Return inputs whose sequences have separate initial states, and options without gradients."""
    p = problem(form, lengths=lengths, H=2, Hq=1, K=dims[0], V=dims[1], dtype=torch.float16)
    assert p.state is not None
    given = (p.q, p.k, p.v, p.i, p.f, *p.state, p.cu_seqlens)
    x = Inputs(*(None if t is None else t.to(DEVICE) for t in given))  # type: ignore[arg-type]
    spec = Spec(
        scale=dims[0] ** -0.5, normalize=p.normalize, normalizer_grad=True, chunk_size=chunk_size, kernel="fused",
        save=False, final_state=True, gates=GATES[form],
    )  # fmt: skip
    return x, spec


def cases() -> list[Any]:
    """Return cases for all kernels, by backend and head dims; with segments (64), state passing reads the rows."""
    found = [("triton", form, (40, 72), n) for form in GATES for n in (WHOLE, 64)]
    found += [("triton", "exp", (16, 160), WHOLE)]  # two blocks of columns in a program
    dims = {(128, 128): "exp", (128, 256): "sigmoid", (256, 128): "exp", (256, 256): "normalized", (64, 64): "exp"}
    found += [("hopper", form, sizes, WHOLE) for sizes, form in dims.items()]
    found += [("hopper", "exp", (512, 128), WHOLE)]  # programs share the rows of a state
    found += [("hopper", "plain", (64, 128), WHOLE), ("hopper", "exp", (128, 128), 64), ("hopper", "exp", (64, 64), 64)]
    return [pytest.param(*case, marks=needs_hopper if case[0] == "hopper" else ()) for case in found]


@pytest.mark.parametrize(("backend", "form", "dims", "chunk_size"), cases())
def test_rows_are_the_states(backend: str, form: str, dims: tuple[int, int], chunk_size: int) -> None:
    """Results equal those of separate states bit by bit: rows in any order, no row, and a row that the pool lacks."""
    chosen = BACKENDS[backend]
    x, spec = setting(form, dims, chunk_size)
    assert x.C is not None
    pages = torch.randn(7, 2, *x.C.shape[1:], generator=torch.Generator().manual_seed(0)).to(DEVICE)
    pool = pages[:, 1]  # rows that are not adjacent in memory
    C = pool[[4, 0, 0, 0, 6]].clone()
    C[1] = 0
    expected = chosen.forward(x._replace(C=C), spec)
    after = pages.clone()
    after[[4, 0, 6], 1] = expected.C[[0, 2, 4]]
    for dtype in (torch.int32, torch.int64):
        rows, written = torch.tensor(ROWS, dtype=dtype, device=DEVICE), pages.clone()
        read = chosen.forward_by_rows(x._replace(C=written[:, 1]), rows, spec._replace(final_state=False))
        assert torch.equal(written, pages)
        assert read is not None
        out = chosen.forward_by_rows(x._replace(C=written[:, 1]), rows, spec)
        assert out is not None
        assert torch.equal(written, after)
        for h in (read.h, out.h):
            assert torch.equal(h[:, : LACKING.start], expected.h[:, : LACKING.start])
            assert h[:, LACKING].isnan().all()
            assert torch.equal(h[:, LACKING.stop :], expected.h[:, LACKING.stop :])
        if spec.normalize:
            assert torch.equal(out.n, expected.n)
            assert torch.equal(out.m, expected.m)
    # The final states of another pool, whose rows stand apart by another distance.
    others, final = torch.zeros(6, 3, *x.C.shape[1:], device=DEVICE), torch.tensor([0, 5, 1, -1, 3], device=DEVICE)
    read = chosen.forward_by_rows(x._replace(C=pool), torch.tensor(ROWS, device=DEVICE), spec, (others[:, 2], final))
    assert read is not None
    assert torch.equal(read.h[:, : LACKING.start], expected.h[:, : LACKING.start])
    assert torch.equal(others[[0, 5, 1, 3], 2], expected.C[[0, 1, 2, 4]])
    assert not others[:, :2].any()
    assert not others[[2, 4], 2].any()


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=needs_hopper)])
def test_what_the_kernels_do_not_take_is_left_to_the_caller(backend: str) -> None:
    chosen = BACKENDS[backend]
    x, spec = setting("exp", (64, 64), WHOLE, lengths=(3, 7))
    assert x.C is not None
    rows = torch.tensor([1, 0], device=DEVICE)
    wide = torch.zeros(2, 2, 64, 65, device=DEVICE)  # its first 64 columns are not contiguous
    not_packed = x._replace(cu_seqlens=None)
    for C in (x.C.half(), wide[..., :64], wide[:0, ..., :64], x.C[:1].expand(2, -1, -1, -1)):
        assert chosen.forward_by_rows(x._replace(C=C), rows, spec) is None
    assert chosen.forward_by_rows(not_packed, rows, spec) is None
    if backend == "hopper":  # the kernels pad these heads
        x, spec = setting("exp", (56, 64), WHOLE, lengths=(3, 7))
        assert chosen.forward_by_rows(x, rows, spec) is None


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
    found += [("triton", "sigmoid", (40, 72), 1, 70, None), ("triton", "exp", (40, 72), 4, 1, None)]
    found += [("hopper", "exp", (128, 128), 4, 70, None), ("hopper", "exp", (128, 128), 1, 70, 64)]
    found += [("hopper", "plain", (64, 128), 4, 70, None), ("hopper", "exp", (64, 64), 4, 70, 64)]
    found += [("hopper", "normalized", (256, 128), 4, 1, None)]
    return [pytest.param(*case, marks=needs_hopper if case[0] == "hopper" else ()) for case in found]


@pytest.mark.parametrize(("backend", "form", "dims", "B", "T", "chunk_size"), batches())
def test_a_batch_takes_the_rows(
    backend: str, form: str, dims: tuple[int, int], B: int, T: int, chunk_size: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Calls on a batch have the results of separate states, with their bits on a CPU; no C is gathered or scattered."""
    x, pool = batch(form, dims, B, T)
    options: dict[str, Any] = {"backend": backend, "chunk_size": chunk_size}
    rows = torch.tensor(ROWS[:B], device=DEVICE)
    lacking = rows == 9
    separate = pool.gather([row if 0 <= row < 7 else 0 for row in rows.tolist()])
    separate.reset((rows == -1).nonzero().flatten())
    expected_h, states = attend(form, x, separate, return_state=True, **options)
    written = ((rows >= 0) & ~lacking).nonzero().flatten()
    before, after = pool.clone(), pool.clone()
    after.scatter(rows[written], states.gather(written))
    for method in ("read", "write"):
        monkeypatch.setattr(PoolRows, method, without_matrices(getattr(PoolRows, method)))
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


def without_matrices(method: Any) -> Any:
    """Return a method of `PoolRows` that fails for C."""

    def call(rows: PoolRows, t: Tensor, *more: Tensor) -> Any:
        assert t.dim() < 4, "C is gathered or scattered"
        return method(rows, t, *more)

    return call


def same(a: tfla.State, b: tfla.State) -> bool:
    return all(s is t is None or torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("change", ["batch not outermost", "the same gates for all", "16 bits", "kernel"])
def test_the_rows_of_other_batches_are_gathered(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where packing a batch would be a copy, in a pool of 16 bits, and by kernels that do not read rows."""
    x, pool = batch("exp", (40, 72), 4, 70)
    rows, options = torch.tensor([4, -1, 0, 2], device=DEVICE), {"backend": "triton"}
    if change == "batch not outermost":
        x = x._replace(v=x.v.transpose(0, 1).contiguous().transpose(0, 1))
    if change == "the same gates for all":
        x = x._replace(log_f=x.log_f[:1].expand(4, -1, -1))
    if change == "16 bits":
        pool = pool._replace(C=pool.C.half())
    if change == "kernel":
        options["kernel"] = "tfla"
    separate = pool.gather([4, 0, 0, 2])
    separate.reset([1])
    expected_h, states = attend("exp", x, separate._replace(C=separate.C.float()), return_state=True, **options)
    after = pool.clone()
    after.scatter([4, 0, 2], states.gather([0, 2, 3])._replace(C=states.C[[0, 2, 3]].to(pool.C.dtype)))
    monkeypatch.setattr(type(BACKENDS["triton"]), "forward_by_rows", lambda *_: pytest.fail("reads rows"))
    h, _ = attend("exp", x, pool, state_indices=rows, return_state=True, **options)
    assert torch.equal(h, expected_h)
    assert same(pool, after)
