"""The kernels for GPUs under JAX: the choice of a backend, plans of its launches, and the gradient.

The launch code and the kernels are those of :mod:`tfla.backends`. For each signature of a call its launches are
planned once and lowered into the function that is being traced, see :mod:`tfla.jax.launches`.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tfla.jax.gates import clamp
from tfla.jax.state import State

Signature = tuple[tuple[tuple[int, ...], str] | None, ...]  # shapes and dtypes of arrays
BACKENDS = ("hopper", "triton")  # the fastest first
PRODUCTS = {"highest": "ieee", "float32": "ieee", "high": "tf32x3", "bfloat16_3x": "tf32x3"}  # others: tf32


class GPU(NamedTuple):
    """The GPU that kernels are compiled for, as :class:`tfla.backends.gpu.runtime.PlannedGPU` describes it."""

    architecture: int
    processors: int
    float32_products: str


class KernelSpec(NamedTuple):
    """The options of one call, all of them static."""

    backend: str
    gpu: GPU
    options: Any  # tfla.backends.base.Spec


class KernelInputs(NamedTuple):
    """The arrays of one call, as :class:`tfla.backends.base.Inputs`: gates are those of the model."""

    q: Array  # (B, T, Hq, dqk)
    k: Array  # (B, T, Hq, dqk)
    v: Array  # (B, T, H, dhv)
    i: Array | None  # (B, T, H)
    f: Array  # (B, T, H)
    C: Array | None  # (N, H, dqk, dhv) float32
    n: Array | None  # (N, H, dqk) float32
    m: Array | None  # (N, H) float32
    cu_seqlens: Array | None  # (N + 1,) int32


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


def signature(arrays: tuple[Array | None, ...]) -> Signature:
    """Return shapes and dtypes of arrays."""
    return tuple(None if x is None else (tuple(x.shape), str(x.dtype)) for x in arrays)


def _torch_inputs(given: Signature) -> Any:
    """Return tensors of the meta device of these shapes and dtypes."""
    import torch

    from tfla.backends.gpu.planning import like

    return [None if x is None else like(x[0], getattr(torch, x[1])) for x in given]


@functools.lru_cache(1024)
def unsupported(backend: str, gpu: GPU, given: Signature) -> str | None:
    """Return why a backend does not run these inputs on a GPU, or None."""
    from tfla.backends import BACKENDS as backends
    from tfla.backends import Inputs
    from tfla.backends.gpu import runtime
    from tfla.jax import launches

    if not runtime.INSTALLED:
        return 'Triton is not installed: pip install "tfla[triton]"'
    if (reason := launches.unsupported()) is not None:
        return reason
    from tfla.backends.gpu.planning import planning

    x = Inputs(*_torch_inputs(given))
    with planning(runtime.PlannedGPU(*gpu)):
        found = backends[backend]
        reason = found.unsupported(x) or found.kernel_unsupported(x, "fused")
    uses_descriptors = gpu.architecture == 90 and x.q.element_size() == 2
    if reason is None and uses_descriptors and launches.jaxlib_version() < launches.DESCRIPTORS:
        return f"it needs jaxlib {'.'.join(map(str, launches.DESCRIPTORS))} or newer"
    return reason


def why_not(given: Signature, chosen: str, otherwise: str) -> dict[str, str]:
    """Return for each backend but the chosen one why it does not run these inputs, `otherwise` where it could."""
    gpu = present_gpu()
    if gpu is None:
        return {name: "it needs an NVIDIA GPU, JAX has none" for name in BACKENDS if name != chosen}
    return {name: unsupported(name, gpu, given) or otherwise for name in BACKENDS if name != chosen}


def describe(spec: KernelSpec, x: KernelInputs) -> tuple[int, dict[str, object]]:
    """Return how many states of each head are stored for the backward, and the sizes of the kernels."""
    from tfla.backends import BACKENDS as backends
    from tfla.backends import Inputs
    from tfla.backends.gpu import runtime
    from tfla.backends.gpu.planning import planning

    inputs, chunk_size = Inputs(*_torch_inputs(signature(x))), spec.options.chunk_size
    with planning(runtime.PlannedGPU(*spec.gpu)):
        backend = backends[spec.backend]
        return backend.stored_states(inputs, chunk_size, "fused"), backend.details(inputs, chunk_size, "fused")


@functools.lru_cache(1024)
def best_chunk_size(backend: str, gpu: GPU, given: Signature) -> int:
    """Return the chunk size that the backend chooses where the caller leaves it open."""
    from tfla.backends import BACKENDS as backends
    from tfla.backends import Inputs
    from tfla.backends.gpu import runtime
    from tfla.backends.gpu.planning import planning

    with planning(runtime.PlannedGPU(*gpu)):
        return backends[backend].default_chunk_size(Inputs(*_torch_inputs(given)), "fused")


def _family(backend: str, x: Any) -> Any:
    """Return the launch code of a backend for these inputs."""
    if backend == "triton":
        from tfla.backends.triton import fused

        return fused.FAMILY
    from tfla.backends import hopper

    return hopper._family(x)


@functools.lru_cache(256)
def _forward_plan(spec: KernelSpec, given: Signature) -> Any:
    """Return the lowered plan of a forward."""
    from tfla.backends import Inputs
    from tfla.backends.gpu import planning, runtime
    from tfla.jax.launches import LoweredPlan

    with planning.planning(runtime.PlannedGPU(*spec.gpu)):
        x = Inputs(*_torch_inputs(given))
        family, recorder = _family(spec.backend, x), planning.PlanRecorder(x)
        out = family.forward(family.context(recorder, x, spec.options))
        return LoweredPlan(recorder.finish(out))


@functools.lru_cache(256)
def _backward_plan(spec: KernelSpec, given: Signature) -> Any:
    """Return the lowered plan of a backward, whose inputs are those of the forward, dh, dC, dn, h, d and states."""
    from tfla.backends import Inputs
    from tfla.backends.base import Outputs
    from tfla.backends.gpu import planning, runtime
    from tfla.jax.launches import LoweredPlan

    with planning.planning(runtime.PlannedGPU(*spec.gpu)):
        tensors = _torch_inputs(given)
        x = Inputs(*tensors[:9])
        dh, dC, dn, h, d, chunk_C, chunk_n = tensors[9:]
        family, recorder = _family(spec.backend, x), planning.PlanRecorder(tensors)
        out = Outputs(h=h, C=h, n=h, m=h, d=d, chunk_C=chunk_C, chunk_n=chunk_n)
        grads = family.backward(family.context(recorder, x, spec.options), out, dh, dC, dn)
        return LoweredPlan(recorder.finish(grads))


def _forward(spec: KernelSpec, x: KernelInputs) -> list[Array]:
    """Return h, the final C, n and m, and d and the stored states, as :class:`tfla.backends.base.Outputs`."""
    return _forward_plan(spec, signature(x))(x)


Results = tuple[Array, Array, Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(spec: KernelSpec, x: KernelInputs) -> Results:
    """Compute h and the final C, n and m; parts that the options do not ask for have shape (0,)."""
    options = spec.options._replace(save=False)
    h, C, n, m, *_ = _forward(spec._replace(options=options), x)
    return h, C, n, m


def _attend_forward(spec: KernelSpec, x: KernelInputs) -> tuple[Results, Any]:
    h, C, n, m, *saved = _forward(spec, x)
    return (h, C, n, m), (x, h, *saved)


def _attend_backward(spec: KernelSpec, kept: Any, cotangents: Results) -> tuple[KernelInputs]:
    x, *saved = kept
    dh, dC, dn, _ = cotangents
    final, normalize = spec.options.final_state, spec.options.normalize
    given = (*x, dh, dC if final else None, dn if final and normalize else None, *saved)
    q, k, v, i, f, C, n = _backward_plan(spec, signature(given))(given)
    m = None
    if x.m is not None:
        m = (x.C * C).sum((-2, -1)) + (x.n * n).sum(-1)
    return (
        KernelInputs(
            q, k, v, None if x.i is None else i, f, None if x.C is None else C, None if x.n is None else n, m, None
        ),
    )  # fmt: skip


attend.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.jit, static_argnums=0)
def compute(spec: KernelSpec, x: KernelInputs) -> Results:
    """Compute :func:`attend` as one compiled function, also where the caller is not compiled."""
    return attend(spec, x)


@functools.cache
def warn_once(reason: str) -> None:
    """Warn that a call on a GPU does not run its kernels, once for each reason."""
    warnings.warn(f"tfla: the kernels for GPUs do not run, {reason}; using the chunkwise form", stacklevel=2)


def prepare(
    q: Array, k: Array, v: Array, i: Array | None, f: Array, gates: str, normalize: bool, initial_state: State | None,
    return_state: bool, cu_seqlens: Any, chunk_size: int | None, scale: float | None, backend: str,
    normalizer_grad: bool, store_dtype: Any,
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
    if (reason := unsupported(backend, gpu, given)) is not None:
        raise ValueError(f"backend: {backend!r} cannot run this: {reason}")
    chosen = options(
        scale=factor, normalize=bool(normalize), normalizer_grad=bool(normalizer_grad), final_state=bool(return_state),
        chunk_size=best_chunk_size(backend, gpu, given) if chunk_size is None else chunk_size,
        store_dtype=store_dtype, gates=gates,
    )  # fmt: skip
    return KernelSpec(backend, gpu, chosen), x


def options(
    *, scale: float, normalize: bool, normalizer_grad: bool, chunk_size: int, final_state: bool, store_dtype: Any,
    gates: str,
) -> Any:  # fmt: skip
    """Return the options of a call as backends read them."""
    import torch

    from tfla.backends.base import Spec

    return Spec(
        scale=scale, normalize=normalize, normalizer_grad=normalizer_grad, chunk_size=chunk_size, kernel="fused",
        save=True, final_state=final_state, gates=gates,  # type: ignore[arg-type]
        store_dtype=None if store_dtype is None else getattr(torch, str(jnp.dtype(store_dtype))),
    )  # fmt: skip
