"""The explanation of a call of the delta rule on JAX: what it would run, and why no other backend does."""

from __future__ import annotations

from typing import Any

from jax import Array

from tfla.backends.delta import BetaActivation, GateActivation
from tfla.jax.choice import DELTA_KERNELS, Offsets
from tfla.jax.delta import kernels
from tfla.jax.delta.api import prepare
from tfla.jax.delta.chunkwise import stored_states, tile_steps
from tfla.jax.delta.inputs import DeltaArrays, DeltaSpec
from tfla.jax.explain import with_shapes
from tfla.jax.state import State
from tfla.ops.explain import Explanation


def explain_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array | None,
    log_f: Array | None = None,
    *,
    read_key: Array | None = None,
    read_before_decay: bool = False,
    normalize_qk: bool = False,
    beta_activation: BetaActivation = "none",
    gate_activation: GateActivation = "none",
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Offsets | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    context_parallel: str | None = None,
) -> Explanation:
    """Return what :func:`delta_rule` would run for the same arguments, without running it.

    Args:
        q, k, v, beta, log_f, read_key: as in :func:`delta_rule`; only their shapes and dtypes matter, and
            `jax.ShapeDtypeStruct` serves.
        read_before_decay, normalize_qk, beta_activation, gate_activation, A_log, dt_bias, lower_bound: as in
            :func:`delta_rule`.
        scale, initial_state, return_state, cu_seqlens, chunk_size, backend, kernel, context_parallel: as in
            :func:`delta_rule`.

    Returns:
        the chosen backend, kernel and chunk size, and for each other backend why it does not run the call.

    Raises:
        ValueError, TypeError: as :func:`delta_rule`.
    """
    given: Any = DeltaArrays(q, k, v, beta, log_f, read_key, A_log, dt_bias, None, None)

    def explained(arrays: Any) -> Explanation:
        """Explain the call of these arrays."""
        x, state, offsets = arrays
        prepared = prepare(
            x, state, return_state, True, read_before_decay, normalize_qk, beta_activation, gate_activation,
            lower_bound, scale, offsets, chunk_size, backend, kernel, context_parallel,
        )  # fmt: skip
        return _of_checked(*prepared, bool(return_state), offsets is not None, backend is not None)

    return with_shapes(explained, (given, initial_state, cu_seqlens))


def _of_checked(spec: DeltaSpec, x: DeltaArrays, return_state: bool, packed: bool, asked_for: bool) -> Explanation:
    """Explain a call that has been checked; `asked_for`: the caller has chosen the backend."""
    rows = 0
    details: dict[str, object] = {}
    if spec.backend == "chunkwise":
        sequences = spec.sequences if packed else None
        rows = stored_states(spec.chunk_size, x.v.shape[1], x.v.shape[0], sequences)
        details = {"tile": tile_steps(x.v.shape[1], spec.chunk_size)}
    elif spec.backend in kernels.BACKENDS:
        rows, details = kernels.describe(kernels.prepare(spec, x, return_state), spec, x)
    why = f"it could, but {spec.backend!r} " + ("was asked for" if asked_for else "comes before it")
    others = {name: why for name in DELTA_KERNELS if name != spec.backend}
    if packed:  # kernels run packed calls of each device
        spec = spec._replace(axis=None)
    others |= {n: reason or why for n, reason in kernels.reasons(spec, x).items() if n != spec.backend}
    return Explanation(spec.backend, spec.kernel, spec.chunk_size, rows, details, others)
