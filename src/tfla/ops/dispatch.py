"""The plan of a call: what runs it, found under its call signature or chosen after its checks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla._util.caching import CallCache
from tfla.backends import BACKENDS, Backend, Inputs, select
from tfla.backends.base import Gates, Replay, Spec, static
from tfla.ops import checks, tuned
from tfla.ops.autocast import autocast
from tfla.ops.gates import clamp, log_gates
from tfla.ops.state import State
from tfla.ops.transforms import needs_dispatcher

# Looks up the tuned entry of a shape: inputs, name of the backend, kernel asked for, whether there is a normalizer.
Find = Callable[[Inputs, str, str | None, bool], tuned.Entry | None]


class Request(NamedTuple):
    """The arguments of one call of a public operator, unchecked but for `scale` and the name of the input gate.

    Fields 0 to 4 are the tensors of the steps, field 5 is the state and field 6 the lengths. Fields 7 to the last but
    one are the options, on which the plan depends together with properties of the tensors.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    i: Tensor | None  # the input gate, as `gates` says; None, for log-gates alone: all zero
    f: Tensor  # the forget gate
    state: State | None  # the initial state
    lengths: Tensor | None  # cu_seqlens of packed sequences, or the lengths of decoding steps
    gates: Gates  # what i and f are
    normalize: bool
    return_state: bool
    scale: float | None
    backend: str | None
    # Decoding steps alone have these options,
    time: bool = True  # whether tensors have a dimension of time
    in_place: bool = False
    eps: float = 0.0  # added to the stabilized denominator
    # whole sequences alone these,
    chunk_size: int | None = None
    kernel: str | None = None
    normalizer_grad: bool = True
    store_dtype: torch.dtype | None = None
    # and decoding steps alone this tensor, which is the last field.
    state_indices: Tensor | None = None  # the rows of the state, which is a pool

    @property
    def overwrites(self) -> bool:
        """True if decoding steps overwrite C of the state."""
        return self.in_place or (self.state_indices is not None and self.return_state)


class Plan:
    """The backend and options of all calls of one signature.

    Plans of the delta rule are of this class, too, with its backends and options.

    Attributes:
        backend: the backend.
        spec: the options that it gets.
        use_dispatcher: whether PyTorch's dispatcher has to see the operator.
        replay: the recorded forward, None where there is none.
        record: whether to ask the backend for a recorded forward after the next call, which is the first one.
        convert: whether q, k and v have to be converted before the backend can read them.
    """

    __slots__ = ("backend", "convert", "record", "replay", "spec", "use_dispatcher")

    def __init__(self, backend: Any, spec: Any, use_dispatcher: bool, record: bool, convert: bool) -> None:
        self.backend, self.spec, self.use_dispatcher, self.record = backend, spec, use_dispatcher, record
        self.convert = convert
        self.replay: Replay | None = None


def call_signature(
    given: tuple[Tensor | None, ...],
    state: State | None,
    lengths: Tensor | None,
    options: Hashable = (),
    *,
    state_indices: Tensor | None = None,
) -> Hashable:
    """Return everything that the checks and the choice of a call depend on, or None where the call cannot be cached.

    A call cannot be cached where the dispatcher has to see it, where an argument is no tensor or no State, and where
    ``lengths`` or ``state_indices`` is on a CPU, since the checks then depend on its values.

    Args:
        given: the tensors of the call; the first one is present in every valid call.
        state: the initial state.
        lengths: `cu_seqlens` of packed sequences, or the lengths of decoding steps.
        options: every other argument of the call.
        state_indices: the rows of the state of decoding steps.

    Returns:
        whether autocast is on and to which dtype, whether a gradient is recorded, the options, and the shape, strides,
        dtype, device and alignment of each tensor.
    """
    if type(state) is not State and state is not None:
        return None
    tensors = *given, *(state or (None, None, None)), lengths, state_indices
    if needs_dispatcher(tensors) or given[0] is None or _on_cpu(lengths) or _on_cpu(state_indices):
        return None
    recorded = False
    if torch.is_grad_enabled():
        for t in tensors:  # a loop, since a generator takes twice the host time
            if t is not None and t.requires_grad:
                recorded = True
                break
    device = "cuda" if given[0].is_cuda else given[0].device.type  # the first takes a fraction of the host time
    autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    try:
        return autocast_dtype, recorded, options, static(tensors)
    except RuntimeError:  # a nested or sparse tensor has no shape or memory, which the checks say
        return None


def _on_cpu(t: Tensor | None) -> bool:
    """Return whether t is a tensor on a CPU."""
    return t is not None and t.device.type == "cpu"


# The plans of calls that have passed the checks.
_PLANS: CallCache[Plan] = CallCache()


def plan(request: Request) -> tuple[Inputs, Plan]:
    """Look up what runs a call under its signature, or check the call and choose it.

    Returns:
        the inputs as the backend reads them, and the plan.

    Raises:
        ValueError, TypeError: an argument is invalid, or no backend or kernel can run the call as it asks.
    """
    checks.check_chunk_size(request.chunk_size)  # here, since True equals the valid chunk size 1
    call = call_signature(request[:5], request.state, request.lengths, request[7:-1])
    found = _PLANS.get(call)
    if found is None:
        x, found = _check_and_choose(request, cached=call is not None)
        _PLANS.add(call, found)
    else:
        x = backend_inputs(request, found.convert)
    if not found.backend.takes_gates:
        x = with_log_gates(x, request.gates)
    return x, found


def backend_inputs(request: Request, convert: bool = True) -> Inputs:
    """Return the inputs as backends read them: autocast, with a dense last dimension and a clamped initial m.

    Args:
        request: the request.
        convert: whether q, k and v may need a conversion; a plan says where they do not.
    """
    q, k, v, i, f, state, lengths = request[:7]
    if convert:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in autocast(q, k, v))
    C, n, m = state or (None, None, None)
    return Inputs(q, k, v, i, f, C, n, m if m is None else clamp(m), lengths)


def with_log_gates(x: Inputs, gates: Gates) -> Inputs:
    """Return inputs whose gates are log-gates, from those that `gates` describes."""
    log_i, log_f = (None, clamp(x.log_f)) if x.log_i is None else log_gates(x.log_i, x.log_f, gates)
    # No `_replace`: torch.compile of PyTorch 2.11 loses the fields of the tuple that it makes at a break of the graph.
    return Inputs(*x[:3], log_i, log_f, *x[5:])


def check(request: Request) -> Inputs:
    """Check the arguments of a call over whole sequences, apart from the names of backend and kernel.

    Returns:
        the inputs as backends read them, with the gates as they were given.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    q, k, v, i, f, state, cu_seqlens = request[:7]
    checks.check_store_dtype(request.store_dtype)
    checks.check_flags(
        normalize=request.normalize, return_state=request.return_state, normalizer_grad=request.normalizer_grad
    )
    checks.check_inputs(q, k, v, checks.named_gates(i, f, request.gates), time=True)
    checks.check_chunk_size(request.chunk_size)
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, q)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state is not None:
        checks.check_state(state, sequences, q, v, request.normalize, "initial_state")
    return backend_inputs(request)


def _check_and_choose(request: Request, cached: bool) -> tuple[Inputs, Plan]:
    """Check a call and choose what runs it."""
    x = check(request)
    backend, kernel, chunk_size = choose(x, request.normalize, request.backend, request.kernel, request.chunk_size)
    spec = spec_of(request, x, backend, kernel, chunk_size)
    convert = not backend.takes_gates or any(a is not b for a, b in zip(x[:3], request[:3], strict=True))
    return x, Plan(backend, spec, not cached and needs_dispatcher(x), cached, convert)


def spec_of(request: Request, x: Inputs, backend: Backend, kernel: str, chunk_size: int) -> Spec:
    """Return the options that a backend gets for a request and its inputs, with the kernel and chunk size chosen."""
    return Spec(
        scale=x.q.shape[-1] ** -0.5 if request.scale is None else request.scale,
        normalize=request.normalize,
        normalizer_grad=request.normalizer_grad,
        chunk_size=chunk_size,
        kernel=kernel,
        save=torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x),
        final_state=request.return_state,
        store_dtype=request.store_dtype,
        gates=request.gates if backend.takes_gates else "log",
    )


def check_kernel(kernel: object, chosen: Any, x: Any) -> None:
    """Check the name of the kernel that a caller asks for, or None, against the backend that was chosen.

    Raises:
        ValueError: the backend has no kernel of that name, or it cannot run these inputs.
    """
    if kernel is not None and (not isinstance(kernel, str) or kernel not in chosen.kernels):
        allowed = ", ".join(map(repr, chosen.kernels))
        raise ValueError(f"kernel: got {kernel!r}, backend {chosen.name!r} has {allowed}")
    if kernel is not None and (why := chosen.kernel_unsupported(x, kernel)) is not None:
        raise ValueError(f"kernel: {kernel!r} of backend {chosen.name!r} cannot run these inputs: {why}")


def choose(
    x: Inputs, normalize: bool, backend: str | None, kernel: str | None, chunk_size: int | None, find: Find = tuned.find
) -> tuple[Backend, str, int]:
    """Choose what runs a call, in this order: what the caller asks for, what `tfla tune` found, the backend's default.

    Args:
        x: the inputs of the call.
        normalize: whether the call has a normalizer.
        backend, kernel, chunk_size: what the caller asks for; None leaves the choice open.
        find: the function that looks up the tuned entry of a shape.

    Returns:
        the backend, the name of its kernel and the chunk size.

    Raises:
        ValueError: no backend or kernel has that name, or it cannot run these inputs (the message says why).
    """
    chosen = select(backend, x, BACKENDS)
    check_kernel(kernel, chosen, x)
    found = find(x, chosen.name, kernel, normalize) if chunk_size is None else None
    if found is not None:
        return chosen, found.kernel, found.chunk_size
    kernel = chosen.default_kernel(x, chunk_size) if kernel is None else kernel
    return chosen, kernel, chunk_size or chosen.default_chunk_size(x, kernel)
