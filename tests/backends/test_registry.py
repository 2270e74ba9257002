"""The choice of a backend, and the addition of one."""

from __future__ import annotations

import pytest
import torch
from cases import check, implementations, problem, solve, truth

import tfla
from tfla.backends import BACKENDS, Inputs, select
from tfla.backends.base import Outputs, Spec
from tfla.backends.reference import Reference


class Added(Reference):
    """Counts its calls; does not take more than 100 steps."""

    name = "mine"
    priority = 1000
    kernels = ("parallel", "recurrent")

    def __init__(self) -> None:
        self.used: list[str] = []

    def unsupported(self, x: Inputs) -> str | None:
        return "it takes 100 steps at most" if x.q.shape[1] > 100 else None

    def forward(self, x: Inputs, spec: Spec) -> Outputs:
        self.used.append(spec.kernel)
        return super().forward(x, spec)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Added:
    backend = Added()
    monkeypatch.setitem(BACKENDS, "mine", backend)
    return backend


def inputs(T: int = 9) -> dict[str, torch.Tensor]:
    return problem(T=T, carried=False).leaves


def test_a_backend_is_added_by_putting_it_into_the_registry(added: Added) -> None:
    """All tests that run on every implementation run on it too."""
    found = [implementation for implementation in implementations() if implementation.backend == "mine"]
    assert [implementation.kernel for implementation in found if implementation.device == "cpu"] == [
        "parallel",
        "recurrent",
    ]
    p = problem()
    check(solve(p, found[0]), truth(p), p.dtype)
    assert added.used == ["parallel"]


def test_none_takes_the_highest_priority_that_can_run(added: Added) -> None:
    tfla.mlstm(**inputs())
    assert added.used == ["parallel"]
    tfla.mlstm(**inputs(T=101))
    assert added.used == ["parallel"]


def test_first_kernel_is_the_default(added: Added) -> None:
    tfla.mlstm(**inputs(), backend="mine")
    tfla.mlstm(**inputs(), backend="mine", kernel="recurrent")
    assert added.used == ["parallel", "recurrent"]


def test_asking_for_a_backend_that_cannot_run_says_why(added: Added) -> None:
    with pytest.raises(ValueError, match=r"backend: 'mine' cannot run these inputs: it takes 100 steps at most"):
        tfla.mlstm(**inputs(T=101), backend="mine")


def test_unknown_names_say_what_there_is(added: Added) -> None:
    with pytest.raises(ValueError, match=r"backend: got 'your', allowed are None and .*'chunkwise'.*'mine'"):
        tfla.mlstm(**inputs(), backend="your")
    with pytest.raises(ValueError, match=r"kernel: got 'segmented', backend 'mine' has 'parallel', 'recurrent'"):
        tfla.mlstm(**inputs(), backend="mine", kernel="segmented")


def test_cpu_takes_chunkwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.zeros(1, 1, 1, 1)
    assert select(None, Inputs(x, x, x, None, x[..., 0], None, None, None, None), BACKENDS).name == "chunkwise"


def test_backends_say_who_they_are() -> None:
    for name, backend in BACKENDS.items():
        assert backend.name == name
        assert backend.kernels
        assert len(set(backend.kernels)) == len(backend.kernels)
