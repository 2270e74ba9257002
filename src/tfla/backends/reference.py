"""The paper's equations as they are written: recurrent (1)-(8), parallel (27)-(35), chunkwise (36)-(56).

All tests compare with this backend in float64. Functions take one sequence: q, k (T, H, dqk), v (T, H, dhv), log-gates
(T, H), state (H, ...), all of one dtype. They generalize the paper in two points: the normalizer can be off (mLSTMsig
(22)-(24), any scalar-gated linear attention), and every form starts from a given state. Without a normalizer the max
state is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tfla.backends.base import (
    Backend,
    Grads,
    Inputs,
    Outputs,
    Spec,
    initial_state,
    input_gate,
    own,
    sequence_bounds,
)

Triple = tuple[Tensor, Tensor, Tensor]  # C, n, m; without a normalizer n and m are ignored


def bounded_denominator(d: Tensor, m: Tensor) -> Tensor:
    """Return max(|d|, exp(-m)), the denominator of (4) and (34) for a stabilized d, but never 0, so that 0 / 0 is 0."""
    floor = torch.exp(-m).clamp(min=torch.finfo(m.dtype).tiny)
    return torch.where(d.abs() > floor, d.abs(), floor)


def read(C: Tensor, x: Tensor) -> Tensor:
    """Return C^T x (..., V) for C (..., K, V) and x (..., K), with the same bits for any leading dimensions of 1."""
    return (x[..., None, :] @ C)[..., 0, :]


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_i: Tensor,
    log_f: Tensor,
    C: Tensor,
    n: Tensor,
    m: Tensor,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor, Triple]:
    """Compute one time step, (1)-(8), over any leading dimensions.

    m cancels out of h and of the true state exp(m) C, so it is a constant for autograd. It may be large, but exponents
    contain only differences of m.

    Returns:
        h (..., dhv), the stabilized d = scale n^T q (...), and the new state.
    """
    if not normalize:  # (22)-(24)
        C = log_f.exp()[..., None, None] * C + log_i.exp()[..., None, None] * k[..., :, None] * v[..., None, :]
        return read(C, q) * scale, torch.zeros_like(log_f), (C, n, m)
    m_new = torch.maximum(log_f + m, log_i).detach()  # (1)
    f = torch.exp(log_f + (m - m_new))  # (6)
    i = torch.exp(log_i - m_new)  # (7)
    C = f[..., None, None] * C + i[..., None, None] * k[..., :, None] * v[..., None, :]  # (2)
    n = f[..., None] * n + i[..., None] * k  # (3)
    d = read(n[..., None], q)[..., 0] * scale
    h = read(C, q) * scale / bounded_denominator(d, m_new)[..., None]  # (4)
    return h, d, (C, n, m_new)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_i: Tensor,
    log_f: Tensor,
    state: Triple,
    scale: float,
    normalize: bool,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor, Triple]:
    """Compute the recurrent form, (1)-(8): h (T, H, dhv), d (T, H) and the final state."""
    h, d = [], []
    for t in range(q.shape[0]):
        h_t, d_t, state = step(q[t], k[t], v[t], log_i[t], log_f[t], *state, scale, normalize)
        h.append(h_t)
        d.append(d_t)
    return torch.stack(h), torch.stack(d), state


def gate_matrix(log_i: Tensor, log_f: Tensor, m: Tensor, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log D (27)-(30) as (H, T, T), the log-weights of the initial state (T, H), and the max state (T, H).

    D~_ij = sum of log_f over j+1 .. i, plus log_i_j. It is summed directly, since differences of long sums cancel; with
    a normalizer the growth of the max state is taken from each gate first, as in :func:`step`, so that no term of a sum
    is above 0. The max state is that of (1), the same in every form to the last bit.
    """
    T = log_f.shape[0]
    causal = torch.ones(T, T, dtype=torch.bool, device=log_f.device).tril()
    rows = [m]
    if normalize:
        for t in range(T):
            rows.append(torch.maximum(log_f[t] + rows[-1], log_i[t]))
        before, after = torch.stack(rows[:-1]).detach(), torch.stack(rows[1:]).detach()
        log_f, log_i = log_f + (before - after), log_i - after
    wide = torch.float64 if log_f.is_cuda else log_f.dtype  # CPUs sum float32 in float64 by themselves
    decay = log_f.T[:, :, None].expand(-1, T, T).masked_fill(~causal.tril(-1), 0.0).cumsum(1, dtype=wide)
    D = (decay + log_i.T[:, None, :]).masked_fill(~causal, -torch.inf)
    return D, log_f.cumsum(0, dtype=wide), after if normalize else torch.zeros_like(log_f)


def weigh(x: Tensor, log_weight: Tensor) -> Tensor:
    """Return exp(log_weight) x.

    Half of the exponent is applied twice, because the weight alone may exceed float32 where the product does not.
    """
    root = torch.exp(log_weight / 2).to(x.dtype)
    return x * root * root


def parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_i: Tensor,
    log_f: Tensor,
    state: Triple,
    scale: float,
    normalize: bool,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor, Triple]:
    """Compute the parallel form, (27)-(35), quadratic in T: h (T, H, dhv), d (T, H) and the final state.

    The initial state contributes like one more key and value before the first step.
    """
    C, n, m_start = state
    D, inter, m = gate_matrix(log_i, log_f, m_start, normalize)
    S = weigh(torch.einsum("ihk,jhk->hij", q, k) * scale, D)  # (31)-(33)
    h = torch.einsum("hij,jhv->ihv", S, v) + weigh(torch.einsum("ihk,hkv->ihv", q, C) * scale, inter[..., None])
    root = torch.exp(D[:, -1].T / 2).to(q.dtype)  # weights of steps in the new state, applied as in `weigh`
    k_up = root[..., None] * k
    C = weigh(C, inter[-1][:, None, None]) + torch.einsum("jh,jhk,jhv->hkv", root, k_up, v)
    if not normalize:
        return h, torch.zeros_like(m), (C, n, m_start)
    d = S.sum(-1).T + weigh(torch.einsum("ihk,hk->ih", q, n) * scale, inter)
    n = weigh(n, inter[-1][:, None]) + torch.einsum("jh,jhk->hk", root, k_up)
    return h / bounded_denominator(d, m)[..., None], d, (C, n, m[-1])  # (34), (35)


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_i: Tensor,
    log_f: Tensor,
    state: Triple,
    scale: float,
    normalize: bool,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor, Triple]:
    """Compute the chunkwise form, (36)-(56): h (T, H, dhv), d (T, H) and the final state.

    Each chunk is the parallel form with initial state C_{k-1}, (44)-(56). Its last row of weights is exp(a_k - m_k), so
    the state it returns is that of (39)-(43).
    """
    h, d = [], []
    for c in range(0, q.shape[0], chunk_size):
        part = slice(c, c + chunk_size)
        h_c, d_c, state = parallel(q[part], k[part], v[part], log_i[part], log_f[part], state, scale, normalize)
        h.append(h_c)
        d.append(d_c)
    return torch.cat(h), torch.cat(d), state


def recurrent_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_i: Tensor,
    log_f: Tensor,
    state: Triple,
    dh: Tensor,
    dC: Tensor,
    dn: Tensor,
    spec: Spec,
) -> tuple[Tensor, ...]:
    """Compute the exact gradients of one sequence, from the last step to the first (docs/mathematics.md).

    The cotangents of states are stored as exp(m_t) dL/dC_t, so that no exponent is positive.

    Args:
        q, k, v, log_i, log_f, state: the inputs of the forward.
        dh: (T, H, dhv), the cotangent of h.
        dC, dn: (H, dqk, dhv), (H, dqk), the cotangents of the stabilized final state.
        spec: the options of the forward.

    Returns:
        dq, dk, dv, dlog_i, dlog_f and the cotangents of the initial C and n.
    """
    T = q.shape[0]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dlog_i, dlog_f = torch.empty_like(log_i), torch.empty_like(log_f)
    states, outputs = [state], []
    for t in range(T):
        h_t, d_t, state = step(q[t], k[t], v[t], log_i[t], log_f[t], *state, spec.scale, spec.normalize)
        states.append(state)
        outputs.append((h_t, d_t))
    for t in reversed(range(T)):
        C, n, m = states[t + 1]
        (h_t, d_t), m_prev = outputs[t], states[t][2]
        do, dd = dh[t], torch.zeros_like(d_t)
        f, i = log_f[t].exp(), log_i[t].exp()
        if spec.normalize:
            D = bounded_denominator(d_t, m)
            do = dh[t] / D[:, None]
            if spec.normalizer_grad:
                dd = torch.where(d_t.abs() > torch.exp(-m), -d_t.sign() * (dh[t] * h_t).sum(-1) / D, dd)
            f, i = torch.exp(log_f[t] + (m_prev - m)), torch.exp(log_i[t] - m)
        dC = dC + spec.scale * q[t][:, :, None] * do[:, None, :]
        dq[t] = spec.scale * torch.einsum("hkv,hv->hk", C, do)
        dk[t] = i[:, None] * torch.einsum("hkv,hv->hk", dC, v[t])
        dv[t] = i[:, None] * torch.einsum("hkv,hk->hv", dC, k[t])
        if spec.normalize:
            dn = dn + spec.scale * q[t] * dd[:, None]
            dq[t] += spec.scale * n * dd[:, None]
            dk[t] += i[:, None] * dn
        dlog_i[t] = (k[t] * dk[t]).sum(-1)
        dC = f[:, None, None] * dC
        dlog_f[t] = (states[t][0] * dC).sum((-2, -1))
        if spec.normalize:
            dn = f[:, None] * dn
            dlog_f[t] += (states[t][1] * dn).sum(-1)
    return dq, dk, dv, dlog_i, dlog_f, dC, dn


FORMS: dict[str, Callable[..., tuple[Tensor, Tensor, Triple]]] = {
    "recurrent": recurrent,
    "parallel": parallel,
    "chunkwise": chunkwise,
}


class Reference(Backend):
    """The backend that calls one of the forms above for each sequence, with q and k repeated for the heads of v."""

    name = "reference"
    priority = -10
    kernels = tuple(FORMS)

    def unsupported(self, x: Inputs) -> str | None:
        """Return None: the backend runs every input."""
        return None

    def default_chunk_size(self, x: Inputs, kernel: str) -> int:
        """Return the steps of a chunk of the chunkwise form; the other forms ignore it."""
        return 64

    def stored_states(self, x: Inputs, chunk_size: int, kernel: str) -> int:
        """Return 0: the backward repeats the recurrence, so no state is stored."""
        return 0

    def tile_steps(self, T: int, chunk_size: int, kernel: str) -> int:
        """Return the steps whose products are quadratic: none, the whole sequence or one chunk."""
        return {"recurrent": 0, "parallel": T, "chunkwise": min(chunk_size, T)}[kernel]

    def _heads(self, x: Inputs) -> tuple[Tensor, ...]:
        """Return q, k, v, log_i and log_f with equal numbers of heads, in the dtype of the arithmetic."""
        group = x.v.shape[2] // x.q.shape[2]
        dtype = x.acc_dtype
        q, k = (t.to(dtype).repeat_interleave(group, 2) for t in (x.q, x.k))
        return q, k, x.v.to(dtype), input_gate(x).to(dtype), x.log_f.to(dtype)

    def forward(self, x: Inputs, spec: Spec) -> Outputs:
        """Compute the forward with the form that `spec.kernel` names, one sequence after another."""
        q, k, v, log_i, log_f = self._heads(x)
        C, n, m = initial_state(x, spec)
        h, d = v.new_empty(v.shape), log_f.new_empty(log_f.shape)
        form = FORMS[spec.kernel]
        for s, (b, a, e) in enumerate(sequence_bounds(x)):
            if a == e:
                continue
            state = (C[s], n[s], m[s]) if spec.normalize else (C[s], n, m)
            part = (b, slice(a, e))
            h[part], d[part], new = form(
                q[part], k[part], v[part], log_i[part], log_f[part], state, spec.scale, spec.normalize, spec.chunk_size
            )
            C[s] = new[0]
            if spec.normalize:
                n[s], m[s] = new[1:]
        none = C.new_empty(0)
        d = d if spec.normalize and spec.save else none.clone()
        # No states are stored, because the backward repeats the recurrence.
        kept = C[:0].clone() if spec.save else none.clone()
        kept_n = n[:0].clone() if spec.save and spec.normalize else none.clone()
        if not spec.final_state:
            C, n, m = none, none.clone(), none.clone()
        return Outputs(h.to(x.v.dtype), C, n, m, d, kept, kept_n)

    def backward(self, x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, spec: Spec) -> Grads:
        """Compute the gradients with the recurrent form, whatever form the forward used."""
        q, k, v, log_i, log_f = self._heads(x)
        C, n, m = initial_state(x, spec)
        dC_all = torch.zeros_like(C) if dC is None else own(dC, C.dtype)
        dn_all = torch.zeros_like(n) if dn is None else own(dn, C.dtype)
        dq, dk, dv, dlog_i, dlog_f = (torch.empty_like(t) for t in (q, k, v, log_i, log_f))
        for s, (b, a, e) in enumerate(sequence_bounds(x)):
            if a == e:
                continue
            part = (b, slice(a, e))
            state = (C[s], n[s], m[s]) if spec.normalize else (C[s], n, m)
            dn_s = dn_all[s] if spec.normalize else dn_all
            dq[part], dk[part], dv[part], dlog_i[part], dlog_f[part], dC_all[s], dn_s = recurrent_backward(
                q[part], k[part], v[part], log_i[part], log_f[part], state, dh[part].to(q.dtype), dC_all[s], dn_s, spec
            )
            if spec.normalize:
                dn_all[s] = dn_s
        group = q.shape[2] // x.q.shape[2]
        dq, dk = (t.unflatten(2, (-1, group)).sum(3) for t in (dq, dk))
        return Grads(dq, dk, dv, dlog_i, dlog_f, dC_all, dn_all)


BACKEND = Reference()
