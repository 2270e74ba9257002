"""The arrays and the options of one call of the delta rule, as callers give them and as implementations read them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tfla.jax.delta.activations import log_gate, normalized, write_strength
from tfla.jax.inputs import acc_dtype, vary_alike


class DeltaInputs(NamedTuple):
    """The arrays of one call as implementations read them; Hq divides H, and N is the number of sequences."""

    q: Array  # (B, T, Hq, dqk)
    k: Array  # (B, T, Hq, dqk), the write keys
    v: Array  # (B, T, H, dhv)
    beta: Array  # (B, T, H)
    log_f: Array  # (B, T, H, 1) or (B, T, H, dqk), finite
    read_key: Array | None  # (B, T, Hq, dqk); None: no correction
    C: Array  # (N, H, dqk, dhv), the initial state
    cu_seqlens: Array | None  # (N + 1,) int, of packed sequences; None: N = B, or the offsets are in DeltaSpec

    @property
    def group(self) -> int:
        """The number of heads of v for each head of q and k."""
        return self.v.shape[2] // self.q.shape[2]


class DeltaArrays(NamedTuple):
    """The arrays of one call as the caller gives them, before all activations."""

    q: Array  # (B, T, Hq, dqk)
    k: Array  # (B, T, Hq, dqk)
    v: Array  # (B, T, H, dhv)
    beta: Array | None  # (B, T, H); None: all 1
    log_f: Array | None  # (B, T, H) or (B, T, H, dqk); None: no decay
    read_key: Array | None  # (B, T, Hq, dqk); None: k
    A_log: Array | None  # (H,)
    dt_bias: Array | None  # (H,) or (H, dqk)
    C: Array | None  # (N, H, dqk, dhv); None: zero
    cu_seqlens: Array | None  # (N + 1,) int


class Rule(NamedTuple):
    """The options of the recurrence itself, all of them static."""

    scale: float  # factor of the queries
    correct: bool  # subtract what the state predicts; False: E = v, without read_key
    read_before_decay: bool  # E_t reads C_{t-1} instead of its decayed form
    normalize_qk: bool  # divide q, k and read_key by sqrt(their squared norm + 1e-6)
    beta_activation: str  # "none", "sigmoid" or "2sigmoid"
    gate_activation: str  # "none", "softplus" or "sigmoid"
    lower_bound: float  # of gate_activation "sigmoid"


class DeltaSpec(NamedTuple):
    """The options of one call, all of them static."""

    rule: Rule
    backend: str
    kernel: str
    chunk_size: int  # distance in steps between stored states
    sequences: int  # N
    offsets: tuple[int, ...] | None  # of packed sequences, where they are known when the call is traced
    axis: str | None  # of the mesh, over whose devices the sequence is divided


def activated(rule: Rule, x: DeltaArrays, sequences: int) -> DeltaInputs:
    """Return the arrays with activations applied and with what was left out, varying over the same mesh axes."""
    dtype = acc_dtype(x.q)
    q, k, r = x.q, x.k, x.k if x.read_key is None else x.read_key
    if rule.normalize_qk:
        q, k, r = normalized(q), normalized(k), normalized(r)
    gates = x.v.shape[:3]
    beta = jnp.ones(gates, dtype) if x.beta is None else write_strength(x.beta, rule.beta_activation)
    if x.log_f is None:
        log_f = jnp.zeros(gates, dtype)
    else:
        log_f = log_gate(x.log_f, rule.gate_activation, x.A_log, x.dt_bias, rule.lower_bound)
    log_f = log_f if log_f.ndim == 4 else log_f[..., None]
    C = jnp.zeros((sequences, gates[2], q.shape[3], x.v.shape[3]), dtype) if x.C is None else x.C
    read_key = r if rule.correct else None
    return DeltaInputs(
        *vary_alike(q, k, x.v, beta.astype(dtype), log_f.astype(dtype), read_key, C.astype(dtype), x.cu_seqlens)
    )
