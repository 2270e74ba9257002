"""No output and no gradient has memory that was never written: torch.empty fills what it allocates with NaN."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import pytest
import torch
from cases import FORMS, INTERPRETED, call, problem
from delta_cases import MODELS, delta_problem
from delta_cases import call as call_delta
from hypothesis import given, settings
from hypothesis import strategies as st
from several_writes import writes_problem
from torch import Tensor

import tfla
from tfla.backends import BACKENDS, DELTA_BACKENDS

OPERATORS = (*FORMS, *(model for model in MODELS if model != "simple"), "delta_product", "dplr")
NAMES = ("triton",) if INTERPRETED else ("chunkwise", "reference")
BY_SEGMENTS = ("deltanet", "gdn", "read", "delta_product")  # what Triton's kernel "segmented" takes, of dense batches
RUNS = [
    pytest.param(name, kernel, operator, id=f"{name}-{kernel}-{operator}")
    for name in NAMES
    for operator in OPERATORS
    for kernel in (BACKENDS if operator in FORMS else DELTA_BACKENDS)[name].kernels
    if (name, kernel) != ("triton", "segmented") or operator in BY_SEGMENTS
]


@pytest.fixture(autouse=True)
def filled_with_nan() -> Iterator[None]:
    """Let torch.empty fill what it allocates with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def prepared(operator: str, **sizes: Any) -> tuple[Any, dict[str, Tensor]]:
    """A function that calls the operator on leaves with options, and these leaves."""
    if operator in FORMS:
        p = problem(operator, dtype=torch.float32, **sizes)
        leaves, run = dict(p.leaves), lambda leaves, **options: call(p, leaves, **options)
    elif operator in MODELS:
        d = delta_problem(operator, dtype=torch.float32, **sizes)
        leaves, run = dict(d.leaves), lambda leaves, **options: call_delta(d, leaves, **options)
    else:
        w = writes_problem(operator, dtype=torch.float32, **sizes)
        leaves, run = dict(w.leaves), lambda leaves, **options: w.call(leaves, return_state=True, **options)
    return run, {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}


def tensors(results: Any) -> list[Tensor]:
    """All tensors of nested results."""
    if isinstance(results, Tensor):
        return [results]
    return [] if results is None else [x for part in results for x in tensors(part)]


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.interpreter
@pytest.mark.parametrize(("backend", "kernel", "operator"), RUNS)
@settings(max_examples=ceil(settings.default.max_examples / 4))
@given(
    shape=st.fixed_dictionaries({"K": st.integers(1, 17), "V": st.integers(1, 17), "T": st.integers(1, 40)}),
    heads=st.sampled_from([(1, 1), (1, 2), (2, 2)]),
    batch=st.integers(0, 2),
    lengths=st.none() | st.lists(st.integers(0, 20), min_size=1, max_size=3).filter(any),
    carried=st.booleans(),
    chunk_size=st.none() | st.integers(1, 64),
    states_every=st.none() | st.integers(1, 20),
)
def test_results_and_gradients_are_finite(
    backend: str, kernel: str, operator: str, shape: dict[str, Any], heads: tuple[int, int], batch: int,
    lengths: list[int] | None, carried: bool, chunk_size: int | None, states_every: int | None,
) -> None:  # fmt: skip
    sizes = shape | {"Hq": heads[0], "H": heads[1], "carried": carried, "B": batch}
    if lengths is not None and (backend, kernel) != ("triton", "segmented"):
        sizes["lengths"] = tuple(lengths)
    run, leaves = prepared(operator, **sizes)
    options: dict[str, Any] = {"backend": backend, "kernel": kernel, "chunk_size": chunk_size}
    if states_every is not None and operator not in ("delta_product", "dplr"):
        options["states_every"] = states_every
    results = tensors(run(leaves, **options))
    assert all(x.isfinite().all() for x in results)
    grads = torch.autograd.grad([x for x in results if x.requires_grad], list(leaves.values()), [
        torch.ones_like(x) for x in results if x.requires_grad
    ], allow_unused=True)  # fmt: skip
    assert all(g is None or g.isfinite().all() for g in grads)


@pytest.mark.interpreter
@pytest.mark.parametrize("operator", ["exp", "sigmoid", "gdn", "kda", "gla"])
@given(
    rows=st.permutations(range(4)).flatmap(lambda rows: st.tuples(*(st.sampled_from([-1, row]) for row in rows[:3]))),
    lengths=st.none() | st.tuples(*[st.integers(0, 3)] * 3),
    several=st.booleans(),
)
def test_steps_are_finite(operator: str, rows: tuple[int, ...], lengths: Any, several: bool) -> None:
    """Rows of a pool, or none of it, and any lengths."""
    make = problem if operator in FORMS else delta_problem
    p: Any = make(operator, B=4, T=3, dtype=torch.float32)
    x = {name: (t[:3] if several else t[:3, 0]) for name, t in p.leaves.items() if name not in ("C0", "n0", "m0", "C")}
    pool = p.state.clone() if operator in FORMS else tfla.State(p.leaves["C"].clone())
    options: dict[str, Any] = {"state": pool, "state_indices": torch.tensor(rows)}
    if several and lengths is not None:
        options["lengths"] = torch.tensor(lengths)
    kind = "mlstm" if operator in FORMS else "delta_rule"
    if operator == "gla":
        kind = "linear_attention"
    if operator in FORMS:
        options["input_gate"] = operator
    with torch.no_grad():
        found = getattr(tfla, f"{kind}_step{'s' * several}")(**x, **options)
    assert all(t.isfinite().all() for t in tensors(found))
