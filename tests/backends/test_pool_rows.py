"""Tests that the fused kernels of the mLSTM and of linear attention read and overwrite rows of a pool of states.

They run on a GPU, those of Hopper on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, Gluon kernels in the
simulator.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import INTERPRETED, problem
from test_hopper import simulation

import tfla
from tfla.backends import BACKENDS
from tfla.backends.base import Gates, Inputs, Spec
from tfla.backends.gpu.runtime import DEFERRED_CHUNK_SIZE

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

    def run(state: tfla.State, **more: Any) -> Any:
        options = {
            "initial_state": state,
            "cu_seqlens": x.cu_seqlens,
            "return_state": True,
            "backend": "triton",
            **more,
        }
        if form in ("exp", "sigmoid"):
            return tfla.mlstm(x.q, x.k, x.v, x.log_i, x.log_f, input_gate=form, **options)
        return tfla.linear_attention(x.q, x.k, x.v, x.log_f, x.log_i, normalize=form == "normalized", **options)

    with torch.no_grad():
        separate = tfla.State(*(None if t is None else t[rows.clamp(min=0)].clone() for t in pool))  # type: ignore[arg-type]
        for t in separate:
            if t is not None:
                t[1] = 0
        expected, states = run(separate)
        after = pool.clone()
        after.scatter(rows[[0, 2, 3, 4]], tfla.State(*(None if t is None else t[[0, 2, 3, 4]] for t in states)))
        h, found = run(pool, state_indices=rows)
    assert [out is not None for out in calls] == [True]
    assert torch.equal(h, expected)
    assert all(a is b for a, b in zip(found, pool, strict=True))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(pool, after, strict=True))
