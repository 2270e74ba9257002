"""The explanation of a call on JAX: what it would run, and why no other backend does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from tfla.jax import kernels
from tfla.jax.api import prepare
from tfla.jax.choice import KERNELS, Offsets
from tfla.jax.chunkwise import TILE, stored_states
from tfla.jax.inputs import Inputs, Spec
from tfla.jax.plans import KernelInputs, KernelSpec, signature
from tfla.jax.state import State
from tfla.ops.checks import check_input_gate
from tfla.ops.explain import Explanation
from tfla.ops.gates import InputGate


def with_shapes(explained: Callable[[Any], Explanation], arrays: Any) -> Explanation:
    """Explain a call of arrays, some of which may be shapes and dtypes alone.

    Args:
        explained: the explanation as a function of the arrays, which are traced where there are shapes alone.
        arrays: the arrays, `jax.ShapeDtypeStruct` and other arguments.
    """
    leaves, tree = jax.tree.flatten(arrays)
    places = [n for n, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)]
    if not places:
        return explained(arrays)
    found: list[Explanation] = []

    def traced(given: list[Array]) -> None:
        for n, x in zip(places, given, strict=True):
            leaves[n] = x
        found.append(explained(jax.tree.unflatten(tree, leaves)))

    jax.eval_shape(traced, [leaves[n] for n in places])
    return found[0]


def explain(
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    *,
    input_gate: InputGate = "exp",
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Offsets | None = None,
    chunk_size: int | None = None,
    scale: float | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    normalizer_grad: bool = True,
    store_dtype: Any = None,
    context_parallel: str | None = None,
) -> Explanation:
    """Return what :func:`mlstm` would run for the same arguments, without running it.

    Args:
        q, k, v, i, f: as in :func:`mlstm`; only their shapes and dtypes matter, and `jax.ShapeDtypeStruct` serves.
        input_gate, initial_state, return_state, cu_seqlens, chunk_size, scale: as in :func:`mlstm`.
        backend, kernel, normalizer_grad, store_dtype, context_parallel: as in :func:`mlstm`.

    Returns:
        the chosen backend, kernel and chunk size, and for each other backend why it does not run the call.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    check_input_gate(input_gate)

    def explained(arrays: Any) -> Explanation:
        """Explain the call of these arrays."""
        q, k, v, i, f, initial_state, cu_seqlens = arrays
        spec, x = prepare(
            q, k, v, i, f, input_gate, input_gate == "exp", initial_state, return_state, cu_seqlens, chunk_size, scale,
            backend, kernel, normalizer_grad, store_dtype, context_parallel,
        )  # fmt: skip
        return _of_checked(spec, x, cu_seqlens, backend is not None)

    return with_shapes(explained, (q, k, v, i, f, initial_state, cu_seqlens))


def _of_checked(
    spec: Spec | KernelSpec, x: Inputs | KernelInputs, cu_seqlens: Offsets | None, asked_for: bool
) -> Explanation:
    """Explain a call that has been checked; `asked_for`: the caller has chosen the backend."""
    why = "it could, but {} " + ("was asked for" if asked_for else "comes before it")
    if isinstance(spec, KernelSpec):
        assert isinstance(x, KernelInputs)
        rows, details = kernels.describe(spec, x)
        others = kernels.why_not(signature(x), spec.backend, why.format(repr(spec.backend)))
        others |= {name: why.format(repr(spec.backend)) for name in KERNELS if name not in (*others, spec.backend)}
        return Explanation(spec.backend, "fused", spec.options.chunk_size, rows, details, others)
    assert isinstance(spec, Spec)
    assert isinstance(x, Inputs)
    rows, details = 0, {}
    if spec.backend == "chunkwise":
        sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
        rows = stored_states(spec, x.v.shape[1], x.v.shape[0], sequences)
        details = {"tile": min(TILE, spec.chunk_size, x.v.shape[1])}
    others = {name: why.format(repr(spec.backend)) for name in KERNELS if name != spec.backend}
    given = signature((x.q, x.k, x.v, x.log_i, x.log_f, None, None, None, None))
    others |= kernels.why_not(given, spec.backend, why.format(repr(spec.backend)))
    return Explanation(spec.backend, spec.kernel, spec.chunk_size, rows, details, others)
