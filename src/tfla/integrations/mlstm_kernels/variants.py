"""The functions that the kernels of mlstm_kernels compute, by tfla's operator.

With the max state m_t (1) and the denominator d_t = scale n_t^T q_t of the stabilized state, that is

    h_t = num_t / (max(|d_t|, exp(-m_t)) + eps)

where tfla's operator has no eps. The dimension of heads comes before that of time.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

import tfla
from tfla.integrations.arguments import check_epsilon, check_flags, check_float_dtype
from tfla.integrations.mlstm_kernels import shapes
from tfla.integrations.mlstm_kernels.denominator import MAX_EXP, attend_with_offset, max_states
from tfla.ops.autocast import autocast_dtype as enabled_autocast_dtype
from tfla.ops.autocast import without_autocast
from tfla.ops.checks import check_float, check_shape
from tfla.ops.gates import InputGate, cast, log_gates
from tfla.ops.steps import step_with_offset
from tfla.ops.transforms import transforms_active

States = tuple[Tensor, ...]
Result = Tensor | tuple[Tensor, States]


@dataclass(frozen=True)
class KernelVariant:
    """The properties that decide what a kernel computes.

    Attributes:
        input_gate: "exp" or "sigmoid".
        exact_gradients: whether the gradients are those of the function. Else they are those of the paper, in which
            none passes through the denominator and the max state.
        parallel: whether the max state is the row maximum of (29), not (1), which starts from the initial state. Such a
            kernel neither takes nor returns states.
    """

    input_gate: InputGate
    exact_gradients: bool
    parallel: bool = False


def check_inputs(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> None:
    """Check the dtypes and the shapes of q, k (B, NH, S, DHQK), v (B, NH, S, DHHV) and i, f (B, NH, S)."""
    shapes.check_inputs(check_float, check_shape, q, k, v, i, f)


def _read_max_state(m: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Check m, (B, NH, 1) or (B, NH), and return it as (B, NH)."""
    check_float("m_initial", m)
    if m.shape != shape:
        check_shape("m_initial", m, (*shape, 1))
        m = m[..., 0]
    return m


def _read_initial_state(
    variant: KernelVariant, normalize: bool, q: Tensor, v: Tensor, c: Tensor | None, n: Tensor | None, m: Tensor | None
) -> tfla.State | None:
    """Return the initial state as tfla's operator takes it, or None where c, n and m are None.

    Those of the three that are None become zeros. With a sigmoid input gate m has no effect.
    """
    if c is None and n is None and m is None:
        return None
    B, H, K, V = *q.shape[:2], q.shape[3], v.shape[3]
    zeros = q.new_zeros(B, H, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    for name, t, shape in (("c_initial", c, (B, H, K, V)), ("n_initial", n, (B, H, K))):
        if t is not None:
            check_float(name, t)
            check_shape(name, t, shape)
    m = zeros if m is None else _read_max_state(m, (B, H))
    c = zeros[..., None, None].expand(B, H, K, V) if c is None else c
    if not normalize:
        return tfla.State(c)
    n = zeros[..., None].expand(B, H, K) if n is None else n
    return tfla.State(c, n, zeros if variant.input_gate == "sigmoid" else m)


def _attend_normalized(
    variant: KernelVariant, q: Tensor, k: Tensor, v: Tensor, log_i: Tensor, log_f: Tensor, state: tfla.State | None,
    eps: float,
) -> tuple[Tensor, States]:  # fmt: skip
    """Compute normalized linear attention from inputs that have time before heads.

    The kernel adds eps to the denominator that is stabilized by its own max state m'. Relative to the operator's max
    state m, it adds eps exp(m' - m). So m is computed here too, and also for the gradients of the returned states,
    which m scales.

    Returns:
        h (B, S, NH, DHHV), and the last states as the kernel returns them.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and variant.exact_gradients):
        m = max_states(log_i, log_f, 0.0 if state is None or state.m is None else state.m)
        if variant.input_gate == "sigmoid":  # m' = 0
            eps_factor = torch.exp(-m.detach()).clamp(max=MAX_EXP)
        else:
            kernel_m = max_states(log_i, log_f, -torch.inf) if variant.parallel else m
            eps_factor = torch.exp(kernel_m - m.detach())
    if not variant.exact_gradients:  # tangents of forward-mode AD pass through no_grad
        m, eps_factor = m.detach(), eps_factor.detach()
    if eps == 0:
        h, last = tfla.linear_attention(
            q, k, v, log_f, log_i, normalize=True, initial_state=state, return_state=True,
            normalizer_grad=variant.exact_gradients,
        )  # fmt: skip
    else:
        h, last = attend_with_offset(q, k, v, log_i, log_f, m, eps * eps_factor, state, variant.exact_gradients)
    assert last.n is not None
    assert last.m is not None
    if variant.input_gate == "sigmoid":
        scale = torch.exp(last.m)
        return h, (last.C * scale[..., None, None], last.n * scale[..., None])
    # The operator's states carry no gradient of m. `dm` is 0 and carries it: C and n shrink where m grows.
    dm = (m[:, -1] - m[:, -1].detach()).to(last.C.dtype)
    scale = torch.exp(-dm)
    return h, (last.C * scale[..., None, None], last.n * scale[..., None], (last.m + dm)[..., None])


def compute_sequence(
    variant: KernelVariant,
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
    """Compute the outputs of a batch of sequences of any length.

    Args:
        variant: the kernel's properties.
        q, k: (B, NH, S, DHQK).
        v: (B, NH, S, DHHV).
        i, f: (B, NH, S), pre-activations of the gates.
        c_initial, n_initial, m_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK) and (B, NH, 1) or (B, NH); zeros if None.
        return_last_states: also return the last states.
        eps: the number that is added to the stabilized denominator max(|d|, exp(-m)).
        normalize: divide by the denominator.
        autocast_dtype: the dtype that q, k and v take under autocast; None leaves it to PyTorch.
        state_dtype: the dtype of the last states; None is float32, or float64 where q is.

    Returns:
        h (B, NH, S, DHHV) in the dtype of v, contiguous; with `return_last_states` also (c, n, m), or (c, n) with a
        sigmoid input gate.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    check_inputs(q, k, v, i, f)
    check_epsilon("eps", eps)
    check_flags(return_last_states=return_last_states, normalize=normalize)
    for name, dtype in {"autocast_kernel_dtype": autocast_dtype, "dtype_state": state_dtype}.items():
        if dtype is not None:
            check_float_dtype(name, dtype)
    if variant.parallel and (return_last_states or not (c_initial is None and n_initial is None and m_initial is None)):
        raise ValueError("return_last_states, c_initial, n_initial, m_initial: parallel kernels have no states")
    state = _read_initial_state(variant, normalize, q, v, c_initial, n_initial, m_initial)
    q, k, v, i, f = (t.transpose(1, 2) for t in (q, k, v, i, f))
    log_i, log_f = log_gates(i, f, variant.input_gate)
    autocast: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if autocast_dtype is not None and enabled_autocast_dtype(q.device.type) is not None:
        q, k, v = (t.to(autocast_dtype) for t in (q, k, v))
        autocast = without_autocast(q.device.type)
    with autocast:
        if normalize:
            h, states = _attend_normalized(variant, q, k, v, log_i, log_f, state, eps)
        else:
            h, last = tfla.linear_attention(q, k, v, log_f, log_i, initial_state=state, return_state=True)
            states = last.C, last.C.new_zeros(last.C.shape[:3])
    h = h.transpose(1, 2).contiguous()  # callers of mlstm_kernels call .view on it
    if not return_last_states:
        return h
    return h, tuple(s if state_dtype is None else s.to(state_dtype) for s in states)


def compute_step(
    variant: KernelVariant, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor, m: Tensor,
    eps: float, state_dtype: torch.dtype, normalize: bool = True, scale: float | None = None,
) -> tuple[Tensor, States]:  # fmt: skip
    """Compute one step.

    Args:
        variant: the kernel's properties.
        q, k: (B, NH, DHQK).
        v: (B, NH, DHHV).
        i, f: (B, NH, 1), pre-activations of the gates.
        c, n, m: the state before the step, (B, NH, DHQK, DHHV), (B, NH, DHQK) and (B, NH, 1).
        eps: the number that is added to the stabilized denominator max(|d|, exp(-m)).
        state_dtype: the dtype of the new state.
        normalize: divide by the denominator. Without, n is returned as it is given.
        scale: the factor of q^T k; None is 1 / sqrt(DHQK).

    Returns:
        h (B, NH, DHHV) in the dtype of v, and the new state (c, n, m); with a sigmoid input gate m is 0.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    check_epsilon("eps", eps)
    check_float_dtype("dtype_state", state_dtype)
    shapes.check_step(check_float, check_shape, q, v, i, f, c, n, m)
    if variant.input_gate == "sigmoid":
        m = torch.zeros_like(m)
    i, f = i.squeeze(-1), f.squeeze(-1)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    c = c if c.dtype == state_dtype else cast(c, wide)  # the operator computes a state in its own dtype
    if not normalize:
        h, new = tfla.mlstm_step(q, k, v, i, f, tfla.State(c), input_gate=variant.input_gate, scale=scale)
        return h, (cast(new.C, state_dtype), cast(n, state_dtype), cast(m, state_dtype))
    state = tfla.State(c, cast(n, wide), cast(m.squeeze(-1), wide))
    if variant.input_gate == "exp":
        h, new = step_with_offset(q, k, v, i, f, state, eps, scale)
        if torch.is_grad_enabled() and (transforms_active() or any(t.requires_grad for t in (q, k, v, i, f, *state))):  # type: ignore[union-attr]
            h, new = _differentiate_max_state(q, i, f, state, h, new, eps, scale)
        C, n_new, m_new = new
        assert n_new is not None
        assert m_new is not None
        return h, (cast(C, state_dtype), cast(n_new, state_dtype), cast(m_new.unsqueeze(-1), state_dtype))
    h, C, n = _step_sigmoid(q, k, v, i, f, state, eps, scale)
    return h, (C.to(state_dtype), n.to(state_dtype), torch.zeros_like(m).to(state_dtype))


def _differentiate_max_state(
    q: Tensor, i: Tensor, f: Tensor, old: tfla.State, h: Tensor, new: tfla.State, eps: float, scale: float | None
) -> tuple[Tensor, tfla.State]:
    """Return the results of a step with the gradients of the max state, which the operator takes for a constant.

    `dm` is 0 and carries the gradient of m: C and n shrink where m grows, and h as if eps grew by exp(m).
    """
    C, n, m = new
    assert old.m is not None
    assert n is not None
    assert m is not None
    log_i, log_f = (t.to(m.dtype) for t in log_gates(i, f, "exp"))
    exact = torch.maximum(log_f + old.m, log_i)
    dm = exact - exact.detach()
    if eps != 0:
        denominator = _step_denominator(q, n, m, scale)
        h = h * ((denominator + eps) / (denominator + eps * torch.exp(dm)))[..., None].to(h.dtype)
    shrink = torch.exp(-dm)
    return h, tfla.State(C * shrink[..., None, None].to(C.dtype), n * shrink[..., None].to(n.dtype), m + dm)


def _step_denominator(q: Tensor, n: Tensor, m: Tensor, scale: float | None) -> Tensor:
    """Return max(|d|, exp(-m)) (B, NH) of a step with q (B, NH, DHQK), for the new state n, m."""
    d = torch.einsum("bhk,bhk->bh", q.to(n.dtype), n) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.maximum(d.abs(), torch.exp(-m.detach()).clamp(torch.finfo(m.dtype).tiny, MAX_EXP))


def _step_sigmoid(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: tfla.State, eps: float, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one normalized step with a sigmoid input gate; i, f (B, NH) are pre-activations.

    Returns:
        h (B, NH, DHHV), and the new C (B, NH, DHQK, DHHV) and n (B, NH, DHQK) without max state.
    """
    log_i, log_f = log_gates(i, f, "sigmoid")
    h, (C, n, m) = tfla.linear_attention_step(q, k, v, log_f, state, log_i, normalize=True, scale=scale)
    assert n is not None
    assert m is not None
    if eps != 0:
        denominator = _step_denominator(q, n, m, scale)
        offset = eps * torch.exp(-m).clamp(max=MAX_EXP)
        h = h * (denominator / (denominator + offset))[..., None].to(h.dtype)
    unit = torch.exp(m)
    return h, C * unit[..., None, None], n * unit[..., None]
