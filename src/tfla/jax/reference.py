"""The paper's equations as they are written: recurrent (1)-(8), parallel (27)-(35), chunkwise (36)-(56), in JAX.

They are the functions of :mod:`tfla.backends.reference` for PyTorch, with gradients by JAX's own differentiation, in
forward mode too. All three are one scan over parts of the sequence, of one step, of all steps or of `chunk_size` steps.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tfla.jax.explicit import across_explicit_axes
from tfla.jax.inputs import Inputs, Spec, acc_dtype, vary_alike
from tfla.jax.scans import over_parts
from tfla.jax.tiles import tiling
from tfla.ops.gates import LOG_GATE_MIN

KERNELS = ("recurrent", "parallel", "chunkwise")
Triple = tuple[Array, Any, Any]  # C, n, m; without a normalizer n and m are None


def bounded_denominator(d: Array, m: Array) -> Array:
    """Return max(|d|, exp(-m)), the denominator of (4) and (34) for a stabilized d, but never 0, so that 0 / 0 is 0.

    Where exp(-m) would overflow, it is about the largest number of the dtype: the gradient of m would else be NaN.
    """
    info = jnp.finfo(m.dtype)
    largest = float(np.log(float(info.max)) * (1 - 4 * float(info.eps)))  # exp of it does not overflow when rounded
    floor = jnp.maximum(jnp.exp(jnp.minimum(-m, largest)), info.tiny)
    return jnp.where(jnp.abs(d) > floor, jnp.abs(d), floor)


def step(
    q: Array, k: Array, v: Array, log_i: Array, log_f: Array, state: Triple, scale: float, normalize: bool,
    normalizer_grad: bool = True, eps: float = 0.0, m_gradient: bool = False,
) -> tuple[Array, Triple]:  # fmt: skip
    """Compute one time step, (1)-(8), over any leading dimensions.

    m cancels out of h and of the true state exp(m) C, so it is a constant for differentiation.

    Args:
        q, k, v: (..., dqk), (..., dqk), (..., dhv).
        log_i, log_f: (...).
        state: the state before the step.
        scale: the factor of the queries.
        normalize: whether there are n, m and the denominator.
        normalizer_grad: False: no gradient through the denominator.
        eps: is added to the stabilized denominator.
        m_gradient: differentiate m too, which matters where it does not cancel: in a returned m and beside an eps.

    Returns:
        h (..., dhv), and the new state.
    """
    C, n, m = state
    if not normalize:  # (22)-(24)
        C = jnp.exp(log_f)[..., None, None] * C + jnp.exp(log_i)[..., None, None] * k[..., :, None] * v[..., None, :]
        return jnp.einsum("...kv,...k->...v", C, q) * scale, (C, n, m)
    m_new = jnp.maximum(log_f + m, log_i)  # (1)
    m_new = m_new if m_gradient else jax.lax.stop_gradient(m_new)
    f = jnp.exp(log_f + (m - m_new))  # (6)
    i = jnp.exp(log_i - m_new)  # (7)
    C = f[..., None, None] * C + i[..., None, None] * k[..., :, None] * v[..., None, :]  # (2)
    n = f[..., None] * n + i[..., None] * k  # (3)
    D = bounded_denominator(jnp.einsum("...k,...k->...", n, q) * scale, m_new) + eps
    D = D if normalizer_grad else jax.lax.stop_gradient(D)
    return jnp.einsum("...kv,...k->...v", C, q) * scale / D[..., None], (C, n, m_new)  # (4)


def weigh(x: Array, log_weight: Array) -> Array:
    """Return exp(log_weight) x.

    Half of the exponent is applied twice, because the weight alone may exceed float32 where the product does not.
    """
    root = jnp.exp(log_weight / 2)
    return x * root * root


def parallel(
    q: Array, k: Array, v: Array, log_i: Array, log_f: Array, state: Triple, spec: Spec
) -> tuple[Array, Triple]:
    """Compute the parallel form, (27)-(35), quadratic in T: h (R, H, T, dhv) and the final state.

    Args:
        q, k, v: (R, H, T, dqk), (R, H, T, dqk), (R, H, T, dhv).
        log_i, log_f: (R, H, T).
        state: the initial state, which contributes like one more key and value before the first step.
        spec: the options.
    """
    C, n, m_start = state
    T = q.shape[2]
    causal, earlier = jnp.tri(T, dtype=bool), jnp.tri(T, k=-1, dtype=bool)
    m: Any = None
    if spec.normalize:
        gates = jnp.moveaxis(jnp.stack([log_f, log_i]), -1, 0)
        _, m = jax.lax.scan(lambda m, g: (jnp.maximum(g[0] + m, g[1]),) * 2, m_start, gates)
        m = jax.lax.stop_gradient(jnp.moveaxis(m, 0, -1))
        before = jnp.concatenate([m_start[..., None], m[..., :-1]], -1)
        # The growth of the max state is taken from each gate first, so that no term of a sum is above 0.
        log_f, log_i = log_f + (before - m), log_i - m
    # The sum of log_f over j+1 .. i is taken directly, since differences of long sums cancel.
    sums = jnp.cumsum(jnp.where(earlier, log_f[..., :, None], 0), -2)
    D = jnp.where(causal, sums + log_i[..., None, :], -jnp.inf)  # (27)-(30)
    inter = jnp.cumsum(log_f, -1)
    S = weigh(jnp.einsum("rhik,rhjk->rhij", q, k) * spec.scale, D)  # (31)-(33)
    h = jnp.einsum("rhij,rhjv->rhiv", S, v)
    h += weigh(jnp.einsum("rhik,rhkv->rhiv", q, C) * spec.scale, inter[..., None])
    root = jnp.exp(D[..., -1, :] / 2)  # weights of steps in the new state, applied as in `weigh`
    k_up = root[..., None] * k
    new_C = weigh(C, inter[..., -1, None, None]) + jnp.einsum("rhj,rhjk,rhjv->rhkv", root, k_up, v)
    if not spec.normalize:
        return h, (new_C, n, m_start)
    d = S.sum(-1) + weigh(jnp.einsum("rhik,rhk->rhi", q, n) * spec.scale, inter)
    new_n = weigh(n, inter[..., -1, None]) + jnp.einsum("rhj,rhjk->rhk", root, k_up)
    denominator = bounded_denominator(d, m)
    denominator = denominator if spec.normalizer_grad else jax.lax.stop_gradient(denominator)
    return h / denominator[..., None], (new_C, new_n, m[..., -1])  # (34), (35)


def recurrent(
    q: Array, k: Array, v: Array, log_i: Array, log_f: Array, state: Triple, spec: Spec
) -> tuple[Array, Triple]:
    """Compute the recurrent form, (1)-(8), of one step: h (R, H, 1, dhv) and the final state."""
    now = q[:, :, 0], k[:, :, 0], v[:, :, 0], log_i[..., 0], log_f[..., 0]
    h, state = step(*now, state, spec.scale, spec.normalize, spec.normalizer_grad)
    return h[:, :, None], state


@across_explicit_axes
@functools.partial(jax.jit, static_argnums=0)
def compute(spec: Spec, x: Inputs) -> tuple[Array, Array, Array | None, Array | None]:
    """Compute h (B, T, H, dhv) and the final C, n and m, of which m carries no gradient."""
    x = Inputs(*vary_alike(*x))
    T, dtype = x.v.shape[1], acc_dtype(x.q)
    cut = tiling(
        T,
        {"recurrent": 1, "parallel": T, "chunkwise": min(T, spec.chunk_size)}[spec.kernel],
        x.cu_seqlens,
        spec.offsets,
    )
    form: Any = recurrent if spec.kernel == "recurrent" else parallel
    q, k = (cut.split(jnp.repeat(t.astype(dtype), x.group, 2)) for t in (x.q, x.k))
    v, log_i, log_f = cut.split(x.v.astype(dtype)), cut.split(x.log_i, LOG_GATE_MIN), cut.split(x.log_f)
    parts = q, k, v, log_i, log_f
    initial: Triple = x.C, x.n, x.m
    if spec.normalize:  # max states are constants; the weight is 1, with the derivative of the given one
        assert x.n is not None
        assert x.m is not None
        m0 = jax.lax.stop_gradient(x.m)
        weight = jnp.exp(x.m - m0)
        initial = x.C * weight[..., None, None], x.n * weight[..., None], m0

    h, (C, n, m) = over_parts(lambda state, at: form(*at, state, spec), initial, parts, cut)
    return cut.join(h).astype(x.v.dtype), C, n, jax.lax.stop_gradient(m)
