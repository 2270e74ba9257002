"""What the kernels compute, by tfla's operator: heads first, and eps added to the stabilised denominator."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

import tfla
from tfla.integrations.arguments import check_epsilon, check_flags, check_float_dtype
from tfla.integrations.denominator import LARGEST, attend_with_offset, max_states
from tfla.ops.checks import check_float, check_shape
from tfla.ops.gates import InputGate, cast, log_gates
from tfla.ops.signature import autocast_dtype as enabled_autocast_dtype
from tfla.ops.signature import without_autocast
from tfla.ops.steps import step_with_offset

States = tuple[Tensor, ...]
Result = Tensor | tuple[Tensor, States]


@dataclass(frozen=True)
class Form:
    """What tells the kernels apart, apart from their speed."""

    gate: InputGate
    exact: bool
    """Gradients are those of the function; without, none passes the denominator and the max state."""
    rows: bool = False
    """The max state is the row maximum of (29), and there are no states, neither in nor out."""


def check_inputs(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> None:
    """Check the dtypes and the shapes of a sequence with heads before time."""
    for name, t in {"q": q, "k": k, "v": v, "i": i, "f": f}.items():
        check_float(name, t)
    check_shape("q", q, ("B", "NH", "S", "DHQK"))
    check_shape("k", k, tuple(q.shape))
    check_shape("v", v, (*q.shape[:3], "DHHV"))
    for name, t in {"i": i, "f": f}.items():
        check_shape(name, t, tuple(q.shape[:3]))


def _max_state(m: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return m, (B, NH, 1) or (B, NH), as (B, NH)."""
    check_float("m", m)
    if m.shape != shape:
        check_shape("m", m, (*shape, 1))
        m = m[..., 0]
    return m


def _initial(
    form: Form, normalize: bool, q: Tensor, v: Tensor, c: Tensor | None, n: Tensor | None, m: Tensor | None
) -> tfla.State | None:
    """Return the initial state as tfla has it, zeros for parts that are None; `m` has no effect without exp gate."""
    if c is None and n is None and m is None:
        return None
    B, H, K, V = *q.shape[:2], q.shape[3], v.shape[3]
    zeros = q.new_zeros(B, H, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    for name, t, shape in (("c", c, (B, H, K, V)), ("n", n, (B, H, K))):
        if t is not None:
            check_float(name, t)
            check_shape(name, t, shape)
    m = zeros if m is None else _max_state(m, (B, H))
    c = zeros[..., None, None].expand(B, H, K, V) if c is None else c
    if not normalize:
        return tfla.State(c)
    n = zeros[..., None].expand(B, H, K) if n is None else n
    return tfla.State(c, n, zeros if form.gate == "sigmoid" else m)


def _normalized(
    form: Form, q: Tensor, k: Tensor, v: Tensor, log_i: Tensor, log_f: Tensor, state: tfla.State | None, eps: float
) -> tuple[Tensor, States]:
    """Compute h (B, S, NH, DHHV) and the last states of a form with a normalizer, from inputs with time before heads.

    The max states are computed here too: eps stands beside exp(-m), and returned states are stabilized by m, so where
    gradients are exact they pass m.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and form.exact):
        m = max_states(log_i, log_f, 0.0 if state is None or state.m is None else state.m)
        if form.gate == "sigmoid":
            weight = torch.exp(-m.detach()).clamp(max=LARGEST)
        else:
            weight = torch.exp((max_states(log_i, log_f, -torch.inf) if form.rows else m) - m.detach())
    if not form.exact:  # forward-mode AD passes what records no gradients
        m, weight = m.detach(), weight.detach()
    if eps == 0:
        h, last = tfla.linear_attention(
            q, k, v, log_f, log_i, normalize=True, initial_state=state, return_state=True, normalizer_grad=form.exact
        )
    else:
        h, last = attend_with_offset(q, k, v, log_i, log_f, m, eps * weight, state, form.exact)
    assert last.n is not None
    assert last.m is not None
    if form.gate == "sigmoid":
        return h, tuple(t * torch.exp(last.m).view(*last.m.shape, *[1] * (t.dim() - 2)) for t in (last.C, last.n))
    # The derivative of the max state, 0 in value, by which C and n shrink where m grows.
    change = (m[:, -1] - m[:, -1].detach()).to(last.C.dtype)
    rescale = torch.exp(-change)
    return h, (last.C * rescale[..., None, None], last.n * rescale[..., None], (last.m + change)[..., None])


def sequence(
    form: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None,
    n_initial: Tensor | None,
    m_initial: Tensor | None,
    return_last_states: bool,
    eps: float,
    *,
    normalize: bool = True,
    autocast_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
) -> Result:
    """Compute the outputs of a whole sequence of any length.

    Under autocast q, k and v become `autocast_dtype`, if given. `eps` is added to max(|d|, exp(-m)), stabilised.

    Returns:
        h (B, NH, S, DHHV) in the dtype of v, contiguous; with `return_last_states` also (c, n, m), or (c, n) with a
        sigmoid input gate, in float32 or `state_dtype`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    check_inputs(q, k, v, i, f)
    check_epsilon("eps", eps)
    check_flags(return_last_states=return_last_states, normalize=normalize)
    for name, dtype in {"autocast_kernel_dtype": autocast_dtype, "dtype_state": state_dtype}.items():
        if dtype is not None:
            check_float_dtype(name, dtype)
    if form.rows and (return_last_states or not (c_initial is None and n_initial is None and m_initial is None)):
        raise ValueError("return_last_states, c_initial, n_initial, m_initial: parallel kernels have no states")
    state = _initial(form, normalize, q, v, c_initial, n_initial, m_initial)
    q, k, v, i, f = (t.transpose(1, 2) for t in (q, k, v, i, f))
    log_i, log_f = log_gates(i, f, form.gate)
    autocast: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if autocast_dtype is not None and enabled_autocast_dtype(q.device.type) is not None:
        q, k, v = (t.to(autocast_dtype) for t in (q, k, v))
        autocast = without_autocast(q.device.type)
    with autocast:
        if normalize:
            h, states = _normalized(form, q, k, v, log_i, log_f, state, eps)
        else:
            h, last = tfla.linear_attention(q, k, v, log_f, log_i, initial_state=state, return_state=True)
            states = last.C, last.C.new_zeros(last.C.shape[:3])
    h = h.transpose(1, 2).contiguous()  # mlstm_kernels' users call .view on it
    if not return_last_states:
        return h
    return h, tuple(s if state_dtype is None else s.to(state_dtype) for s in states)


def step(
    form: Form, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor, m: Tensor, eps: float,
    state_dtype: torch.dtype, normalize: bool = True,
) -> tuple[Tensor, States]:  # fmt: skip
    """Compute one step: q, k (B, NH, DHQK), v (B, NH, DHHV), i, f (B, NH, 1).

    Returns h (B, NH, DHHV) in v's dtype and (c, n, m) in `state_dtype`; with a sigmoid input gate m is 0.
    """
    check_epsilon("eps", eps)
    check_float_dtype("dtype_state", state_dtype)
    for name, x in {"q": q, "i": i, "f": f, "c": c, "n": n, "m": m}.items():
        check_float(name, x)
    check_shape("q", q, ("B", "NH", "DHQK"))
    for name, gate in {"i": i, "f": f}.items():
        check_shape(name, gate, (*q.shape[:2], 1))
    if form.gate == "sigmoid":
        m = torch.zeros_like(m)
    check_shape("m", m, (*q.shape[:2], 1))
    i, f = i.squeeze(-1), f.squeeze(-1)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    c = c if c.dtype == state_dtype else cast(c, wide)  # a state is kept in its own dtype
    if not normalize:
        h, new = tfla.mlstm_step(q, k, v, i, f, tfla.State(c), input_gate=form.gate)
        return h, (cast(new.C, state_dtype), cast(n, state_dtype), cast(m, state_dtype))
    state = tfla.State(c, cast(n, wide), cast(m.squeeze(-1), wide))
    if form.gate == "exp":
        h, new = step_with_offset(q, k, v, i, f, state, eps)
    else:
        log_i, log_f = log_gates(i, f, form.gate)
        h, new = tfla.linear_attention_step(q, k, v, log_f, state, log_i, normalize=True)
    C_new, n_new, m_new = new
    assert n_new is not None
    assert m_new is not None
    if form.gate == "exp":
        return h, (cast(C_new, state_dtype), cast(n_new, state_dtype), cast(m_new.unsqueeze(-1), state_dtype))
    if eps != 0:
        d = torch.einsum("bhk,bhk->bh", q.to(n_new.dtype), n_new) * q.shape[-1] ** -0.5
        bound = torch.maximum(d.abs(), torch.exp(-m_new).clamp(torch.finfo(m_new.dtype).tiny, LARGEST))
        offset = eps * torch.exp(-m_new).clamp(max=LARGEST)
        h = h * (bound / (bound + offset))[..., None].to(h.dtype)
    weight = torch.exp(m_new)
    C_new, n_new = C_new * weight[..., None, None], n_new * weight[..., None]
    return h, (C_new.to(state_dtype), n_new.to(state_dtype), torch.zeros_like(m).to(state_dtype))
