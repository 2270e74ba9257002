"""The Hopper kernels of the delta rule and of gates by channel read and overwrite rows of a pool of states.

They run on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, Gluon kernels in the simulator.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delta_cases import delta_problem
from low_pools import LOW, rounding
from test_hopper_delta import BACKEND, DEVICE, DTYPE, inputs, pytestmark, simulation

import tfla
from tfla.backends.base import FinalRows
from tfla.ops.state_pool import PoolRows

__all__ = ["pytestmark", "rounding", "simulation"]


@pytest.mark.parametrize(("model", "K"), [("gdn", 128), ("kda", 72), ("gla", 200)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_are_the_states(model: str, K: int, dtype: torch.dtype) -> None:
    """Bit by bit those of states of their own: of rows in any order, of no row, and of one that the pool lacks."""
    check_rows(model, K, dtype, torch.float32)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(("model", "K"), [("gdn", 128), ("kda", 72), ("gla", 200)])
@pytest.mark.parametrize("of_pool", [dtypes[0] for dtypes in LOW], ids=str)
def test_rows_of_16_bits_are_the_states(model: str, K: int, of_pool: torch.dtype) -> None:
    """Kernels compute in float32, and round final states to the dtype of the pool."""
    check_rows(model, K, torch.int32, of_pool)


def check_rows(model: str, K: int, dtype: torch.dtype, of_pool: torch.dtype) -> None:
    """Check calls with rows of a dtype in a pool of another, and with final rows in a pool of float32."""
    p = delta_problem(model, lengths=(3, 70, 0, 5, 9), H=2, Hq=2, K=K, V=136, dtype=DTYPE)
    x = inputs(p)
    spec = p.spec("fused", BACKEND.default_chunk_size(p.x, "fused"))._replace(save=False)
    assert x.C is not None
    pages = torch.randn(7, 2, *x.C.shape[1:], generator=torch.Generator().manual_seed(0)).to(DEVICE, of_pool)
    pool = pages[:, 1]  # rows that do not follow each other
    rows = torch.tensor([4, -1, 0, 9, 6], dtype=dtype, device=DEVICE)
    C = pool[[4, 0, 0, 0, 6]].float()
    C[1] = 0
    expected = BACKEND.forward(x._replace(C=C), spec)
    after = pages.clone()
    after[[4, 0, 6], 1] = expected.C[[0, 2, 4]].to(of_pool)
    without = pages.clone()
    h = BACKEND.forward_by_rows(x._replace(C=without[:, 1]), rows, spec._replace(final_state=False))
    assert torch.equal(without, pages)
    assert h is not None
    written = BACKEND.forward_by_rows(x._replace(C=pool), rows, spec)
    for found in (h, written):
        assert torch.equal(found[:, :73], expected.h[:, :73])
        assert found[:, 73:78].isnan().all()
        assert torch.equal(found[:, 78:], expected.h[:, 78:])
    assert torch.equal(pages, after)
    # The final states of another pool, whose rows stand apart by another distance.
    others, final = torch.zeros(6, 3, *x.C.shape[1:], device=DEVICE), torch.tensor([0, 5, 1, -1, 3], device=DEVICE)
    pages[[4, 0, 6], 1] = C[[0, 2, 4]].to(of_pool)
    h = BACKEND.forward_by_rows(x._replace(C=pool), rows, spec, FinalRows(others[:, 2], final))
    assert h is not None
    assert torch.equal(h[:, :73], expected.h[:, :73])
    assert torch.equal(others[[0, 5, 1, 3], 2], expected.C[[0, 1, 2, 4]])
    assert not others[:, :2].any()
    assert not others[[2, 4], 2].any()
    assert torch.equal(pool[[4, 0, 6]], C[[0, 2, 4]])


def test_what_the_kernels_do_not_take_is_left_to_the_caller() -> None:
    p = delta_problem("gdn", lengths=(3, 7), H=1, Hq=1, K=64, V=64, dtype=DTYPE)
    x = inputs(p)
    spec = p.spec("fused", BACKEND.default_chunk_size(p.x, "fused"))._replace(save=False)
    assert x.C is not None
    rows = torch.tensor([1, 0], device=DEVICE)
    wide = torch.zeros(2, 1, 64, 65, device=DEVICE)
    dense = delta_problem("gdn", T=7, B=2, H=1, Hq=1, K=64, V=64, dtype=DTYPE)
    for other in (
        x._replace(C=x.C.double()), x._replace(C=wide[..., :64]), x._replace(C=wide[:0, ..., :64]), inputs(dense),
    ):  # fmt: skip
        assert BACKEND.forward_by_rows(other, rows, spec) is None


@pytest.mark.parametrize(("model", "K", "B"), [("gdn", 128, 3), ("gdn", 64, 1), ("kda", 72, 3), ("gla", 200, 3)])
def test_a_batch_takes_the_rows(model: str, K: int, B: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on a batch have the bits of separate states, and no state is gathered or scattered."""
    x = inputs(delta_problem(model, B=B, T=70, H=2, Hq=1, K=K, V=136, dtype=DTYPE))
    rows = torch.tensor([2, -1, 0][:B], device=DEVICE)
    pool = tfla.State(torch.randn(4, 2, K, 136, generator=torch.Generator().manual_seed(0)).to(DEVICE))
    assert x.log_f is not None

    def call(state: tfla.State, **given: Any) -> Any:
        given |= {"initial_state": state, "return_state": True, "backend": "hopper"}
        with torch.no_grad():
            if model == "gla":
                return tfla.linear_attention(x.q, x.k, x.v, x.log_f, **given)
            return tfla.delta_rule(x.q, x.k, x.v, x.beta, x.log_f, normalize_qk=True, kernel="fused", **given)

    separate, after = pool.gather([2, 0, 0][:B]), pool.clone()
    separate.C[1:2] = 0
    expected, states = call(separate)
    after.scatter(rows[rows >= 0], states.gather((rows >= 0).nonzero().flatten()))
    for method in ("read", "write"):
        monkeypatch.setattr(PoolRows, method, lambda *_: pytest.fail("states are gathered or scattered"))
    h, found = call(pool, state_indices=rows)
    assert torch.equal(h, expected)
    assert torch.equal(pool.C, after.C)
    assert found is pool


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(
    ("backend", "B", "T", "dtype", "of_pool"),
    [
        ("triton", 3, 150, torch.int32, torch.float32),
        ("triton", 3, 150, torch.int64, torch.bfloat16),
        ("triton", 2, 40, torch.int64, torch.float32),
        ("hopper", 2, 150, torch.int32, torch.float32),
        ("hopper", 2, 150, torch.int64, torch.bfloat16),
        ("hopper", 2, 150, torch.int64, torch.float16),
    ],
    ids=str,
)
def test_segments_read_and_overwrite_the_rows(
    backend: str, B: int, T: int, dtype: torch.dtype, of_pool: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel "segmented" has the bits of separate states: a row, no row, and one that the pool lacks."""
    x = inputs(delta_problem("gdn", B=B, T=T, H=2, Hq=1, K=64, V=72, dtype=DTYPE))
    pages = torch.randn(4, 2, 2, 64, 72, generator=torch.Generator().manual_seed(0)).to(DEVICE, of_pool)
    options: dict[str, Any] = {"backend": backend, "kernel": "segmented", "chunk_size": 64, "return_state": True}

    def call(state: tfla.State, **given: Any) -> Any:
        with torch.no_grad():
            return tfla.delta_rule(
                x.q, x.k, x.v, x.beta, x.log_f, normalize_qk=True, initial_state=state, **options | given
            )

    expected, states = call(tfla.State(pages[[2, 0, 0][:B], 1].float()))
    without, _ = call(tfla.State(torch.zeros_like(states.C)))
    for method in ("read", "write"):
        monkeypatch.setattr(PoolRows, method, lambda *_: pytest.fail("states are gathered or scattered"))
    monkeypatch.setattr("tfla.ops.checks.check_values_of_indices", lambda *_: None)
    rows = torch.tensor([2, -1, 9][:B], dtype=dtype, device=DEVICE)
    own = pages.clone()
    read = call(tfla.State(own[:, 1]), state_indices=rows, return_state=False)
    assert torch.equal(own, pages)
    h, _ = call(tfla.State(own[:, 1]), state_indices=rows)
    after = pages.clone()
    after[2, 1] = states.C[0].to(of_pool)
    assert torch.equal(own, after)
    for found in (read, h):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], without[1])
        assert found[2:].isnan().all()


def test_activations_before_segments_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernels cannot read the rows, which are gathered then."""
    x = inputs(delta_problem("gdn", B=1, T=200, H=1, Hq=1, K=64, V=64, dtype=DTYPE))
    pool, rows = tfla.State(torch.ones(3, 1, 64, 64, device=DEVICE)), torch.tensor([1], device=DEVICE)
    options: dict[str, Any] = {"backend": "hopper", "kernel": "segmented", "chunk_size": 64}
    expected = tfla.delta_rule(x.q, x.k, x.v, x.beta, x.log_f, initial_state=pool.gather([0]), **options)
    counted: list[int] = []
    monkeypatch.setattr("tfla.ops.delta_dispatch.activated_inputs", lambda x, *_, **__: counted.append(1) or x)
    for own in (pool, tfla.State(pool.C.to(torch.float64))):
        h = tfla.delta_rule(x.q, x.k, x.v, x.beta, x.log_f, initial_state=own, state_indices=rows, **options)
        assert torch.equal(h, expected)
    assert counted == [1, 1]
