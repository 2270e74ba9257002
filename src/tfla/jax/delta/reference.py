"""The delta rule as its equations are written: recurrent (D1) to (D4), and parallel in one tile, in JAX.

They are the functions of :mod:`tfla.backends.reference_delta` for PyTorch, with gradients by JAX's own differentiation,
in forward mode too.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax.delta.inputs import DeltaArrays, DeltaSpec, Rule, activated
from tfla.jax.explicit import across_explicit_axes
from tfla.jax.inputs import acc_dtype
from tfla.jax.scans import over_parts
from tfla.jax.tiles import tiling


class Sequence(NamedTuple):
    """The inputs of sequences or of steps; q and k have the heads of v."""

    q: Array  # (..., dqk)
    k: Array  # (..., dqk)
    v: Array  # (..., dhv)
    beta: Array  # (...)
    log_f: Array  # (..., 1) or (..., dqk)
    read_key: Array  # (..., dqk); not read without correction


def step(rule: Rule, x: Sequence, C: Array) -> tuple[Array, Array]:
    """Compute one step over any leading dims: h (..., dhv) and the new state (..., dqk, dhv)."""
    decayed = jnp.exp(x.log_f)[..., None] * C
    E = x.v
    if rule.correct:
        E = x.v - jnp.einsum("...kv,...k->...v", C if rule.read_before_decay else decayed, x.read_key)
    C = decayed + (x.beta[..., None] * x.k)[..., :, None] * E[..., None, :]
    return rule.scale * jnp.einsum("...kv,...k->...v", C, x.q), C


def parallel(rule: Rule, x: Sequence, C: Array) -> tuple[Array, Array]:
    """Compute the parallel form, one tile of all T steps.

    The prediction errors solve the triangular system (I + M B) E = R, where M_ij is what step i reads of step j < i.

    Args:
        rule: the options.
        x: the inputs, (R, H, T, ...).
        C: the states before the first step, (R, H, dqk, dhv).

    Returns:
        h (R, H, T, dhv) and the final states.
    """
    T = x.q.shape[2]
    causal, below = jnp.tri(T, dtype=bool)[..., None], jnp.tri(T, k=-1, dtype=bool)[..., None]
    # The log-gates of each pair of steps are added up by themselves, since differences of long sums cancel.
    sums = jnp.cumsum(jnp.where(below, x.log_f[..., :, None, :], 0), 2)
    D = jnp.exp(jnp.where(causal, sums, -jnp.inf))  # (R, H, T, T, c)
    start = jnp.exp(jnp.cumsum(x.log_f, 2))

    def scores(readers: Array, decays: Array) -> Array:
        return (readers[..., :, None, :] * x.k[..., None, :, :] * decays).sum(-1)

    E = x.v
    if rule.correct:
        among, to = D, start
        if rule.read_before_decay:  # as after the decay of the step before
            among = jnp.concatenate([jnp.zeros_like(D[:, :, :1]), D[:, :, :-1]], 2)
            to = jnp.concatenate([jnp.ones_like(start[:, :, :1]), start[:, :, :-1]], 2)
        system = jnp.eye(T, dtype=C.dtype) + jnp.tril(scores(x.read_key, among), -1) * x.beta[..., None, :]
        R = x.v - (x.read_key * to) @ C
        E = jax.lax.linalg.triangular_solve(system, R, left_side=True, lower=True, unit_diagonal=True)
    U = x.beta[..., None] * E
    h = scores(x.q, D) @ U + (x.q * start) @ C
    C = start[:, :, -1, :, None] * C + (x.k * D[:, :, -1]).mT @ U
    return rule.scale * h, C


def recurrent(rule: Rule, x: Sequence, C: Array) -> tuple[Array, Array]:
    """Compute the recurrent form of one step: h (R, H, 1, dhv) and the final states."""
    h, C = step(rule, Sequence(*(t[:, :, 0] for t in x)), C)
    return h[:, :, None], C


def with_heads_of_v(x: Any) -> Sequence:
    """Return inputs in the dtype of the arithmetic, whose q and k have the heads of v."""
    dtype, group = acc_dtype(x.q), x.v.shape[2] // x.q.shape[2]
    q, k, r = (jnp.repeat(t.astype(dtype), group, 2) for t in (x.q, x.k, x.k if x.read_key is None else x.read_key))
    return Sequence(q, k, x.v.astype(dtype), x.beta, x.log_f, r)


@across_explicit_axes
@functools.partial(jax.jit, static_argnums=0)
def compute(spec: DeltaSpec, given: DeltaArrays) -> tuple[Array, Array]:
    """Compute h (B, T, H, dhv) and the final C."""
    x = activated(spec.rule, given, spec.sequences)
    T = x.v.shape[1]
    cut = tiling(T, {"recurrent": 1, "parallel": T}[spec.kernel], x.cu_seqlens, spec.offsets)
    form = recurrent if spec.kernel == "recurrent" else parallel

    def of_part(state: Any, at: Any) -> tuple[Array, Any]:
        h, C = form(spec.rule, at, *state)
        return h, (C,)

    h, (C,) = over_parts(of_part, (x.C,), Sequence(*map(cut.split, with_heads_of_v(x))), cut)
    return cut.join(h).astype(x.v.dtype), C
