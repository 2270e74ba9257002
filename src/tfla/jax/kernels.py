"""The kernels for GPUs under JAX: the choice of a backend, plans of its launches, and the gradient.

The launch code and the kernels are those of :mod:`tfla.backends`. For each signature of a call its launches are
planned once and lowered into the function that is being traced, see :mod:`tfla.jax.launches`.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tfla.jax import chunkwise, exchanging, partitions
from tfla.jax.gates import clamp, log_gates
from tfla.jax.hosting import by_batch, on_platform, with_empty, without_empty
from tfla.jax.inputs import Inputs, Spec, acc_dtype, vary_alike
from tfla.jax.plans import (
    GPU,
    KernelInputs,
    KernelSpec,
    Signature,
    backward_plan,
    forward_plan,
    signature,
    torch_inputs,
)  # fmt: skip
from tfla.jax.state import State

BACKENDS = ("hopper", "triton")  # the fastest first
# Float32 products of the kernels by `jax.default_matmul_precision`; for all other values they are tf32.
PRODUCTS = {"highest": "ieee", "float32": "ieee", "high": "tf32x3", "bfloat16_3x": "tf32x3"}


def present_gpu() -> GPU | None:
    """Return the GPU of this process, or None where the default device of JAX is none of NVIDIA's."""
    if jax.default_backend() != "gpu":
        return None
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    if not capability.replace(".", "").isdigit():  # AMD's have names
        return None
    precision = str(getattr(jax.config, "jax_default_matmul_precision", None) or "default")
    return GPU(round(10 * float(capability)), int(device.core_count), PRODUCTS.get(precision, "tf32"))


@functools.lru_cache(1024)
def unsupported(backend: str, gpu: GPU, given: Signature) -> str | None:
    """Return why a backend does not run these inputs on a GPU, or None."""
    from tfla.backends import BACKENDS as backends
    from tfla.backends import Inputs as TorchInputs
    from tfla.backends.gpu import runtime
    from tfla.jax import launches

    if not runtime.INSTALLED:
        return 'Triton is not installed: pip install "tfla[triton]"'
    if (reason := launches.unsupported()) is not None:
        return reason
    from tfla.backends.gpu.planning import planning

    x = TorchInputs(*torch_inputs(given))
    with planning(runtime.PlannedGPU(*gpu)):
        found = backends[backend]
        reason = found.unsupported(x) or found.kernel_unsupported(x, "fused")
    uses_descriptors = gpu.architecture == 90 and x.q.element_size() == 2
    return launches.descriptors_unsupported() if reason is None and uses_descriptors else reason


def why_not(given: Signature, chosen: str, otherwise: str) -> dict[str, str]:
    """Return for each backend but the chosen one why it does not run these inputs, `otherwise` where it could."""
    gpu = present_gpu()
    if gpu is None:
        return {name: "it needs an NVIDIA GPU, JAX has none" for name in BACKENDS if name != chosen}
    return {name: unsupported(name, gpu, given) or otherwise for name in BACKENDS if name != chosen}


def choose(
    q: Array, k: Array, v: Array, i: Array | None, f: Array, initial_state: State | None, cu_seqlens: Any,
    context_parallel: str | None,
) -> str | None:  # fmt: skip
    """Return the fastest backend with kernels that run a checked call, or None; a warning then says why, on a GPU."""
    gpu = present_gpu()
    if gpu is None or 0 in q.shape:
        return None
    C, n, m = (None, None, None) if initial_state is None else initial_state
    offsets = jnp.asarray(cu_seqlens, np.int32) if isinstance(cu_seqlens, tuple) else cu_seqlens
    given = signature((q, k, v, i, f, C, n, m, offsets))
    reasons = {}
    for name in BACKENDS:
        reasons[name] = unsupported(name, gpu, given)
        if reasons[name] is None and context_parallel is not None:
            reasons[name] = exchanging.unsupported(name, gpu, given)
        if reasons[name] is None:
            return name
    warn_once(str(reasons["triton"]))
    return None


def describe(spec: KernelSpec, x: KernelInputs) -> tuple[int, dict[str, object]]:
    """Return how many states of each head are stored for the backward, and the sizes of the kernels."""
    from tfla.backends import BACKENDS as backends
    from tfla.backends import Inputs as TorchInputs
    from tfla.backends.gpu import runtime
    from tfla.backends.gpu.planning import planning

    inputs, chunk_size = TorchInputs(*torch_inputs(signature(x))), spec.options.chunk_size
    with planning(runtime.PlannedGPU(*spec.gpu)):
        backend = backends[spec.backend]
        return backend.stored_states(inputs, chunk_size, "fused"), backend.details(inputs, chunk_size, "fused")


@functools.lru_cache(1024)
def best_chunk_size(backend: str, gpu: GPU, given: Signature) -> int:
    """Return the chunk size that the backend chooses where the caller leaves it open."""
    from tfla.backends import BACKENDS as backends
    from tfla.backends import Inputs as TorchInputs
    from tfla.backends.gpu import runtime
    from tfla.backends.gpu.planning import planning

    with planning(runtime.PlannedGPU(*gpu)):
        return backends[backend].default_chunk_size(TorchInputs(*torch_inputs(given)), "fused")


Results = tuple[Array, Any, Any, Any]  # h and the final C, n and m


def fallback(spec: KernelSpec, x: KernelInputs) -> Results:
    """Compute the results by the chunkwise form; parts that the options do not ask for are None.

    With a mesh axis the final states are whole ones on its last device.
    """
    o = spec.options
    dtype = acc_dtype(x.q)
    if x.i is None:
        log_f = clamp(x.f)
        log_i = jnp.zeros_like(log_f)
    else:
        log_i, log_f = log_gates(x.i, x.f, o.gates)
    N = x.q.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    H, K, V = x.v.shape[2], x.q.shape[3], x.v.shape[3]
    state = State(x.C, x.n, x.m) if x.C is not None else State.zeros(N, H, K, V, normalize=o.normalize, dtype=dtype)
    C, n, m = jax.tree.map(lambda t: t.astype(dtype), state)
    inputs = Inputs(x.q, x.k, x.v, log_i.astype(dtype), log_f.astype(dtype), C, n, m, x.cu_seqlens)
    h, C, n, m = chunkwise.attend(
        Spec("chunkwise", "segmented", o.scale, o.normalize, o.normalizer_grad, chunkwise.CHUNK,
             o.gates == "log" and not o.normalize, None, axis=spec.axis),
        Inputs(*vary_alike(*inputs)),
    )  # fmt: skip
    return (h, *_asked_for(spec, C, n, m))


def _asked_for(spec: KernelSpec, C: Any, n: Any, m: Any) -> tuple[Any, Any, Any]:
    """Return the final states, with None for those that the options do not ask for."""
    final, normalize = spec.options.final_state, spec.options.normalize
    return C if final else None, n if final and normalize else None, m if final and normalize else None


def _planned(spec: KernelSpec, arrays: tuple[Array | None, ...], forward: bool) -> list[Array]:
    """Launch the forward, whose results are those of :class:`tfla.backends.base.Outputs`, or the backward."""
    lowered = (forward_plan if forward else backward_plan)(spec, signature(arrays))
    return on_platform(lowered, arrays, lambda whole: _by_chunks(spec, whole, forward))


def _by_chunks(spec: KernelSpec, arrays: list[Array | None], forward: bool) -> list[Array | None]:
    """Compute the results of a plan by the chunkwise form, on devices that are no GPUs.

    What a forward saves for its backward is left out: the chunkwise backward computes it again.
    """
    x = KernelInputs(*arrays[:9])  # type: ignore[arg-type]
    if forward:
        return list(fallback(spec, x))
    results, pull = jax.vjp(lambda y: fallback(spec, y._replace(cu_seqlens=x.cu_seqlens)), x._replace(cu_seqlens=None))
    dh, dC, dn = arrays[9:12]
    dm = None if results[3] is None else jnp.zeros_like(results[3])
    (found,) = pull((dh, *_asked_for(spec, dC, dn, dm)))
    return list(found[:7])


@functools.partial(jax.jit, static_argnums=(0, 2))
def _by_batch(spec: KernelSpec, arrays: tuple[Array | None, ...], forward: bool) -> list[Any]:
    """Launch for a batch on all devices, as one compiled function, also where the caller is not compiled.

    The functions with rules for gradients call it, and it contains none of them: JAX traces what a compiled function
    contains without its rules first, so that kernels of a forward without a backward would be compiled for nothing.
    Results of a forward that have no elements are left out, as :class:`tfla.jax.hosting.Absent` where they are saved.
    """
    arrays = with_empty(arrays)
    if spec.axis is not None:
        found = by_batch(lambda arrays: exchanging.launch(spec, arrays, forward, _planned), arrays, None)
    else:
        dims = partitions.FORWARD if forward else partitions.BACKWARD
        found = by_batch(lambda arrays: _planned(spec, arrays, forward), arrays, dims)
    if forward:
        return [found[0], *_asked_for(spec, *found[1:4]), *without_empty(found[4:])]
    return [g if x is not None else None for g, x in zip(found, arrays, strict=False)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(spec: KernelSpec, x: KernelInputs) -> Results:
    """Compute h and the final C, n and m; parts that the options do not ask for are None."""
    options = spec.options._replace(save=False)
    h, C, n, m, *_ = _by_batch(spec._replace(options=options), tuple(x), True)
    return h, C, n, m


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _saving(spec: KernelSpec, x: KernelInputs) -> list[Array]:
    """Compute the results and what the backward reads.

    It has a rule for its gradient of its own, since JAX differentiates it where derivatives of gradients are taken.
    """
    return _by_batch(spec, tuple(x), True)


def _attend_forward(spec: KernelSpec, x: KernelInputs) -> tuple[Results, Any]:
    h, C, n, m, *saved = _saving(spec, x)
    return (h, C, n, m), (x, (h, *saved))


def _attend_backward(spec: KernelSpec, kept: Any, cotangents: Results) -> tuple[KernelInputs]:
    x, saved = kept
    return (gradients(spec, x, saved, cotangents),)


def _saving_forward(spec: KernelSpec, x: KernelInputs) -> tuple[list[Array], Any]:
    found = _saving(spec, x)
    return found, (x, (found[0], *found[4:]))


def _saving_backward(spec: KernelSpec, kept: Any, cotangents: list[Array]) -> tuple[KernelInputs]:
    x, saved = kept  # cotangents of what was saved are 0: derivatives of `gradients` are with respect to x
    h, C, n, m, *_ = cotangents
    return (gradients(spec, x, saved, (h, C, n, m)),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gradients(spec: KernelSpec, x: KernelInputs, saved: tuple[Array, ...], cotangents: Results) -> KernelInputs:
    """Compute the gradients from what the forward saved: h, d, and C and n at the starts of segments."""
    dh, dC, dn, _ = cotangents
    given = (*x, dh, dC, dn, *saved)
    q, k, v, i, f, C, n = _by_batch(spec, given, False)
    m = None
    if x.m is not None:
        assert x.C is not None
        assert x.n is not None
        m = (x.C * C).sum((-2, -1)) + (x.n * n).sum(-1)
    return KernelInputs(q, k, v, i, f, C, n, m, None)


def _gradients_forward(
    spec: KernelSpec, x: KernelInputs, saved: tuple[Array, ...], cotangents: Results
) -> tuple[KernelInputs, Any]:
    return gradients(spec, x, saved, cotangents), (x, saved, cotangents)


def _gradients_backward(spec: KernelSpec, kept: Any, second: KernelInputs) -> tuple[Any, Any, Any]:
    """Differentiate the gradients as the chunkwise form computes them, which does not read what was saved."""
    x, saved, cotangents = kept
    offsets = x.cu_seqlens

    def of(x: KernelInputs, cotangents: Results) -> KernelInputs:
        _, pull = jax.vjp(lambda x: fallback(spec, x._replace(cu_seqlens=offsets)), x)
        (found,) = pull(cotangents)
        return found

    _, pull = jax.vjp(of, x._replace(cu_seqlens=None), cotangents)
    dx, dcotangents = pull(second)
    return dx, jax.tree.map(jnp.zeros_like, saved), dcotangents


gradients.defvjp(_gradients_forward, _gradients_backward)
attend.defvjp(_attend_forward, _attend_backward)
_saving.defvjp(_saving_forward, _saving_backward)


def compute(spec: KernelSpec, x: KernelInputs) -> Results:
    """Compute :func:`attend`, and take the results of padded heads out of those of the kernels."""
    x = KernelInputs(*vary_alike(*x))
    if spec.axis is None:
        x = KernelInputs(*partitions.by_types(x, partitions.FORWARD))  # type: ignore[arg-type]
    h, C, n, m = attend(spec, x)
    if spec.head_dims is None:
        return h, C, n, m
    K, V = spec.head_dims
    return h[..., :V], None if C is None else C[..., :K, :V], None if n is None else n[..., :K], m


@functools.cache
def warn_once(reason: str) -> None:
    """Warn that a call on a GPU does not run its kernels, once for each reason."""
    warnings.warn(f"tfla: the kernels for GPUs do not run, {reason}; using the chunkwise form", stacklevel=2)


def prepare(
    q: Array, k: Array, v: Array, i: Array | None, f: Array, gates: str, normalize: bool, initial_state: State | None,
    return_state: bool, cu_seqlens: Any, chunk_size: int | None, scale: float | None, backend: str,
    normalizer_grad: bool, store_dtype: Any, context_parallel: str | None,
) -> tuple[KernelSpec, KernelInputs]:  # fmt: skip
    """Return the options and the arrays of a checked call that the kernels of a backend compute.

    Raises:
        ValueError: the backend does not run these inputs here.
    """
    gpu = present_gpu()
    if gpu is None:
        raise ValueError(f"backend: {backend!r} cannot run this: it needs an NVIDIA GPU, JAX has none")
    C = n = m = None
    if initial_state is not None:
        C, n, m = (None if t is None else jnp.asarray(t).astype(jnp.float32) for t in initial_state)
        m = None if m is None else clamp(m)
    offsets = None
    if cu_seqlens is not None:
        offsets = jnp.asarray(np.asarray(cu_seqlens, np.int32) if isinstance(cu_seqlens, tuple) else cu_seqlens)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    if factor < 0 and backend == "hopper":  # its kernels read the scale as a power of two
        q, factor = -q, -factor
    x = KernelInputs(q, k, v, None if i is None else jnp.asarray(i), jnp.asarray(f), C, n, m, offsets)
    given = signature(x)
    reason = unsupported(backend, gpu, given)
    if reason is None and context_parallel is not None:
        reason = exchanging.unsupported(backend, gpu, given)
    if reason is not None:
        raise ValueError(f"backend: {backend!r} cannot run this: {reason}")
    head_dims = None
    if context_parallel is not None:
        dims = exchanging.kernel_head_dims(backend, gpu, given)
        if dims != (q.shape[3], v.shape[3]):
            head_dims, x = (q.shape[3], v.shape[3]), exchanging.pad_heads(x, dims)
            given = signature(x)
    if chunk_size is None:
        chunk_size = best_chunk_size(backend, gpu, given)
    if context_parallel is not None:
        chunk_size = exchanging.chunk_size(backend, gpu, given, chunk_size)
    assert chunk_size is not None
    chosen = options(
        scale=factor, normalize=bool(normalize), normalizer_grad=bool(normalizer_grad), final_state=bool(return_state),
        chunk_size=chunk_size, store_dtype=store_dtype, gates=gates,
    )  # fmt: skip
    devices = 1 if context_parallel is None else jax.lax.axis_size(context_parallel)
    return KernelSpec(backend, gpu, chosen, context_parallel, devices, head_dims), x


def options(
    *, scale: float, normalize: bool, normalizer_grad: bool, chunk_size: int, final_state: bool, store_dtype: Any,
    gates: str,
) -> Any:  # fmt: skip
    """Return the options of a call as backends read them."""
    import torch

    from tfla.backends.base import Spec as TorchSpec

    return TorchSpec(
        scale=scale, normalize=normalize, normalizer_grad=normalizer_grad, chunk_size=chunk_size, kernel="fused",
        save=True, final_state=final_state, gates=gates,  # type: ignore[arg-type]
        store_dtype=None if store_dtype is None else getattr(torch, str(jnp.dtype(store_dtype))),
    )  # fmt: skip
