"""The delta rule and gated linear attention as their equations are written: recurrent, and parallel in one tile.

All tests compare with this backend in float64. Functions take one sequence: q, k, read_key (T, H, dqk), v (T, H, dhv),
beta (T, H), log_f (T, H, dqk or 1), state (H, dqk, dhv), all of one dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tfla.backends.base import own, sequence_bounds
from tfla.backends.delta import DeltaBackend, DeltaGrads, DeltaInputs, DeltaOutputs, DeltaSpec, Saved
from tfla.backends.reference import read


class Sequence(NamedTuple):
    """The inputs of one sequence; q and k have the heads of v."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_f: Tensor
    read_key: Tensor  # not read without correction


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_f: Tensor,
    read_key: Tensor,
    C: Tensor,
    scale: float,
    correct: bool,
    read_before_decay: bool,
) -> tuple[Tensor, Tensor]:
    """Compute one time step over any leading dimensions: h (..., dhv) and the new state (..., dqk, dhv).

    C' = diag(exp(log_f)) C      E = v - (C' or C)^T r      C_new = C' + beta k E^T      h = scale C_new^T q
    """
    decayed = log_f.exp()[..., None] * C
    E = v
    if correct:
        E = v - read(C if read_before_decay else decayed, read_key)
    C = decayed + (beta[..., None] * k)[..., :, None] * E[..., None, :]
    return scale * read(C, q), C


def recurrent(x: Sequence, C: Tensor, spec: DeltaSpec) -> tuple[Tensor, Tensor]:
    """Compute the recurrent form: h (T, H, dhv) and the final state."""
    h = []
    for q, k, v, beta, log_f, r in zip(*x, strict=True):
        h_t, C = step(q, k, v, beta, log_f, r, C, spec.scale, spec.correct, spec.read_before_decay)
        h.append(h_t)
    return torch.stack(h), C


def decays_between(log_f: Tensor) -> Tensor:
    """Return exp(log_f_{j+1} + ... + log_f_i) for i >= j, else 0: (T, T, H, d) from (T, H, d).

    The log-gates of each pair of steps are added up by themselves, since differences of long sums cancel.
    """
    T = log_f.shape[0]
    causal = torch.ones(T, T, dtype=torch.bool, device=log_f.device).tril()
    below = causal.tril(-1)[..., None, None]
    sums = log_f[:, None].expand(T, *log_f.shape).masked_fill(~below, 0.0).cumsum(0)
    return sums.masked_fill(~causal[..., None, None], -torch.inf).exp()


def parallel(x: Sequence, C: Tensor, spec: DeltaSpec) -> tuple[Tensor, Tensor]:
    """Compute the parallel form, one tile of all T steps: h (T, H, dhv) and the final state.

    The prediction errors solve the triangular system (I + M B) E = R, where M_ij is what step i reads of step j < i.
    """
    D, start = decays_between(x.log_f), x.log_f.cumsum(0).exp()  # (T, T, H, d), (T, H, d)
    channels = "d" if D.shape[-1] > 1 else "x"

    def scores(readers: Tensor, decays: Tensor) -> Tensor:  # (H, T, T)
        return torch.einsum(f"ihd,jhd,ijh{channels}->hij", readers, x.k, decays)

    E = x.v
    if spec.correct:
        between, to = D, start
        if spec.read_before_decay:  # as after the decay of the step before
            between = torch.cat([torch.zeros_like(D[:1]), D[:-1]])
            to = torch.cat([torch.ones_like(start[:1]), start[:-1]])
        M = scores(x.read_key, between).tril(-1)
        R = x.v - torch.einsum("ihd,hdv->ihv", x.read_key * to, C)
        eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
        system = eye + M * x.beta.T[:, None, :]
        E = torch.linalg.solve_triangular(system, R.transpose(0, 1), upper=False, unitriangular=True).transpose(0, 1)
    U = x.beta[..., None] * E
    h = torch.einsum("hij,jhv->ihv", scores(x.q, D), U) + torch.einsum("ihd,hdv->ihv", x.q * start, C)
    C = start[-1][..., None] * C + torch.einsum("jhd,jhv->hdv", x.k * D[-1], U)
    return spec.scale * h, C


def recurrent_backward(x: Sequence, C: Tensor, dh: Tensor, dC: Tensor, spec: DeltaSpec) -> tuple[Sequence, Tensor]:
    """Compute the exact gradients of one sequence, from the last step to the first.

    Returns:
        the gradients of the inputs, and the cotangent of the initial state.
    """
    states = [C]
    for q, k, v, beta, log_f, r in zip(*x, strict=True):
        state = step(q, k, v, beta, log_f, r, states[-1], spec.scale, spec.correct, spec.read_before_decay)[1]
        states.append(state)
    grads = Sequence(*(torch.zeros_like(t) for t in x))
    for t in reversed(range(x.q.shape[0])):
        q, k, v, beta, log_f, r = (part[t] for part in x)
        C, f = states[t], log_f.exp()[..., None]
        decayed = f * C
        C_read = C if spec.read_before_decay else decayed
        E = v - torch.einsum("hkv,hk->hv", C_read, r) if spec.correct else v
        grads.q[t] = spec.scale * torch.einsum("hkv,hv->hk", states[t + 1], dh[t])
        dC = dC + spec.scale * q[:, :, None] * dh[t][:, None, :]
        written = torch.einsum("hkv,hk->hv", dC, k)  # the cotangent of beta E
        dE = beta[:, None] * written
        grads.k[t] = beta[:, None] * torch.einsum("hkv,hv->hk", dC, E)
        grads.beta[t] = (written * E).sum(-1)
        grads.v[t] = dE
        read = torch.zeros_like(dC)
        if spec.correct:
            grads.read_key[t] = -torch.einsum("hkv,hv->hk", C_read, dE)
            read = -r[:, :, None] * dE[:, None, :]
        decayed_grad = dC if spec.read_before_decay else dC + read
        gate = (decayed * decayed_grad).sum(-1)
        grads.log_f[t] = gate if log_f.shape[-1] > 1 else gate.sum(-1, keepdim=True)
        dC = f * decayed_grad + (read if spec.read_before_decay else 0.0)
    return grads, dC


FORMS: dict[str, Callable[[Sequence, Tensor, DeltaSpec], tuple[Tensor, Tensor]]] = {
    "recurrent": recurrent,
    "parallel": parallel,
}


class ReferenceDelta(DeltaBackend):
    """The backend that calls one of the forms above for each sequence."""

    name = "reference"
    priority = -10
    kernels = tuple(FORMS)

    def unsupported(self, x: DeltaInputs) -> str | None:
        """Return None: the backend runs every input."""
        return None

    def default_chunk_size(self, x: DeltaInputs, kernel: str) -> int:
        """Return a chunk size, which has no effect: no states are stored."""
        return 64

    def tile_steps(self, T: int, chunk_size: int, kernel: str) -> int:
        """Return the steps whose products are quadratic: none, or all."""
        return {"recurrent": 0, "parallel": T}[kernel]

    def saved(self, x: DeltaInputs, correct: bool, chunk_size: int, kernel: str) -> Saved:
        """Return shapes without elements: the backward repeats the recurrence."""
        none = ((0,), x.acc_dtype)
        return Saved(none, none, none)

    def _sequences(self, x: DeltaInputs) -> tuple[Sequence, Tensor]:
        """Return the inputs with the heads of v in the dtype of the arithmetic, (B, T, H, ...), and the states."""
        group, dtype = x.v.shape[2] // x.q.shape[2], x.acc_dtype

        def heads(t: Tensor) -> Tensor:
            return t.to(dtype).repeat_interleave(group, 2)

        v, gates = x.v.to(dtype), x.v.shape[:3]
        beta = v.new_ones(gates) if x.beta is None else x.beta.to(dtype)
        log_f = v.new_zeros(gates) if x.log_f is None else x.log_f.to(dtype)
        log_f = log_f if x.channel_gates else log_f.unsqueeze(-1)
        k = heads(x.k)
        C = v.new_zeros(x.sequences, gates[2], x.q.shape[3], v.shape[3]) if x.C is None else own(x.C, dtype)
        return Sequence(heads(x.q), k, v, beta, log_f, k if x.read_key is None else heads(x.read_key)), C

    def forward(self, x: DeltaInputs, spec: DeltaSpec) -> DeltaOutputs:
        """Compute one sequence after another."""
        given, C = self._sequences(x)
        h, form = given.v.new_empty(given.v.shape), FORMS[spec.kernel]  # dense, whatever the strides of v
        for s, (b, a, e) in enumerate(sequence_bounds(x)):
            if a < e:
                h[b, a:e], C[s] = form(Sequence(*(t[b, a:e] for t in given)), C[s], spec)
        none = C.new_empty(0)
        return DeltaOutputs(h.to(x.v.dtype), C if spec.final_state else none, none, none, none)

    def backward(self, x: DeltaInputs, out: DeltaOutputs, dh: Tensor, dC: Tensor | None, spec: DeltaSpec) -> DeltaGrads:
        """Compute the gradients of one sequence after another."""
        given, C = self._sequences(x)
        dC = torch.zeros_like(C) if dC is None else own(dC, C.dtype)
        grads = Sequence(*(torch.zeros_like(t) for t in given))
        for s, (b, a, e) in enumerate(sequence_bounds(x)):
            if a < e:
                found, dC[s] = recurrent_backward(
                    Sequence(*(t[b, a:e] for t in given)), C[s], dh[b, a:e].to(C.dtype), dC[s], spec
                )
                for target, part in zip(grads, found, strict=True):
                    target[b, a:e] = part

        def shared(t: Tensor) -> Tensor:
            return t.unflatten(2, (x.q.shape[2], -1)).sum(3)

        dr = shared(grads.read_key) if spec.correct else 0.0
        return DeltaGrads(
            q=shared(grads.q),
            k=shared(grads.k) + (dr if x.read_key is None else 0.0),
            v=grads.v,
            beta=None if x.beta is None else grads.beta,
            log_f=None if x.log_f is None else grads.log_f if x.channel_gates else grads.log_f.squeeze(-1),
            read_key=None if x.read_key is None else shared(grads.read_key),
            A_log=None,
            dt_bias=None,
            C=dC,
        )


DELTA_BACKEND = ReferenceDelta()
