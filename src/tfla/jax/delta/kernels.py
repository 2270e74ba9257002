"""The kernels for GPUs of the delta rule under JAX: plans of their launches, and the gradient.

As in :mod:`tfla.jax.kernels`, the launch code is that of PyTorch's backends, planned once for each signature.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax import partitions
from tfla.jax.chunkwise import CHUNK
from tfla.jax.delta import chunkwise, segments
from tfla.jax.delta.activations import log_gate
from tfla.jax.delta.inputs import DeltaArrays, DeltaInputs, DeltaSpec, activated
from tfla.jax.delta.segments import BY_SEGMENTS, Cut
from tfla.jax.hosting import by_batch, on_platform, with_empty, without_empty
from tfla.jax.inputs import vary_alike
from tfla.jax.kernels import BACKENDS, present_gpu, warn_once
from tfla.jax.plans import GPU, Signature, result_signature, signature, torch_inputs
from tfla.ops.delta_dispatch import READS_AFTER, choose_kernel

PACKED_ALONE = "with context_parallel it takes packed sequences alone"  # it has no plans that exchange states


class KernelArrays(NamedTuple):
    """The arrays of one call that kernels read, named as those of :class:`tfla.backends.delta.DeltaInputs`.

    Activations have been applied to them, but for those that kernels apply themselves, by `KernelSpec.options`.
    """

    q: Array  # (B, T, Hq, dqk)
    k: Array  # (B, T, Hq, dqk)
    v: Array  # (B, T, H, dhv)
    beta: Array | None  # (B, T, H), float32 or the dtype of q; None: all 1
    log_f: Array | None  # (B, T, H) or (B, T, H, dqk), float32 or the dtype of q; kernels clamp it
    read_key: Array | None  # (B, T, Hq, dqk)
    A_log: Array | None  # (H,) float32, where kernels apply the activation of the gates
    dt_bias: Array | None  # (H,) or (H, dqk) float32, likewise
    C: Array | None  # (N, H, dqk, dhv) float32
    cu_seqlens: Array | None  # (N + 1,) int


class KernelSpec(NamedTuple):
    """The options of one call, all of them static."""

    backend: str
    gpu: GPU
    options: Any  # tfla.backends.delta.DeltaSpec
    plain: DeltaSpec  # of the same call in the chunkwise form


GIVEN = len(KernelArrays._fields)
Results = tuple[Array, Any]  # h and the final C
STEPS = ("btgk", "btgk", "bthv", "bth")  # q, k, v and beta
INPUTS = (*STEPS, "bthk", "btgk", "h", "hk", "nhkv", "o")  # KernelArrays with gates by channel
OF_PARAMETERS = ("bhk", "bhk")  # what each row of the batch adds to the gradients of A_log and dt_bias
SAVED = ("bthv", "bthx")  # E and X
NORMS = ("bth", "bth")  # and 1 / |q| and 1 / |k|, where kernels with at most one gate a step normalize q and k
SAVED_OF_SEGMENTS = (*SAVED, "shkv", "shky")  # and the states at the starts of segments, and transitions of segments


def _dims(spec: KernelSpec, x: KernelArrays, forward: bool) -> partitions.Dims:
    """Return the dims of the arguments and of the results of the forward, or else of the backward."""
    saved: tuple[str, ...] = SAVED if Cut.of(x.v, spec.options) is None else SAVED_OF_SEGMENTS
    saved += NORMS if _stores_norms(spec, x) else ()
    by_channel = x.log_f is None or x.log_f.ndim == 4
    bias = "h" if x.dt_bias is not None and x.dt_bias.ndim == 1 else "hk"
    inputs = (*STEPS, "bthk" if by_channel else "bth", *INPUTS[5:7], bias, *INPUTS[8:])
    if forward:
        return partitions.Dims(inputs, ("bthv", "nhkv", *saved), GIVEN - 1)
    gradients = *inputs[:6], *OF_PARAMETERS, "nhkv"
    there = [dims for dims, t in zip(gradients, x[:-1], strict=True) if t is not None]
    return partitions.Dims((*inputs, *saved, "bthv", "nhkv"), tuple(there), GIVEN - 1)


def _stores_norms(spec: KernelSpec, x: Any) -> bool:
    """Return whether a forward stores norms for the backward; `x` has the gates as an array or as a tensor."""
    return bool(spec.options.normalize_qk) and (x.log_f is None or x.log_f.ndim == 3)


def _torch_inputs(given: Signature) -> Any:
    """Return the inputs as tensors of the meta device."""
    from tfla.backends import DeltaInputs as TorchInputs

    return TorchInputs(*torch_inputs(given))


@functools.lru_cache(1024)
def unsupported(backend: str, gpu: GPU, given: Signature, read_before_decay: bool) -> str | None:
    """Return why the kernels of a backend do not run these inputs on a GPU, or None."""
    from tfla.backends import DELTA_BACKENDS
    from tfla.backends.gpu import runtime
    from tfla.jax import launches

    if not runtime.INSTALLED:
        return 'Triton is not installed: pip install "tfla[triton]"'
    if (reason := launches.unsupported()) is not None:
        return reason
    from tfla.backends.gpu.planning import planning

    with planning(runtime.PlannedGPU(*gpu)):
        reason = DELTA_BACKENDS[backend].unsupported(_torch_inputs(given))
    if reason is None and read_before_decay and not DELTA_BACKENDS[backend].reads_before_decay:
        reason = READS_AFTER
    return launches.descriptors_unsupported() if reason is None and gpu.architecture == 90 else reason


@functools.lru_cache(256)
def _kernel_signature(spec: DeltaSpec, given: Signature) -> Signature:
    """Return shapes and dtypes of the arrays that kernels read, from those of a checked call."""
    x = DeltaArrays._make(None if t is None else jax.ShapeDtypeStruct(*t) for t in given)
    return signature(jax.eval_shape(functools.partial(arrays_of, spec), x))


def reasons(spec: DeltaSpec, x: DeltaArrays) -> dict[str, str | None]:
    """Return for each backend with kernels why it does not run a checked call here, or None where it does."""
    gpu = present_gpu()
    if gpu is None:
        return dict.fromkeys(BACKENDS, "it needs an NVIDIA GPU, JAX has none")
    given = _kernel_signature(spec, signature(x))
    found = {name: unsupported(name, gpu, given, spec.rule.read_before_decay) for name in BACKENDS}
    return found if spec.axis is None else {name: reason or PACKED_ALONE for name, reason in found.items()}


def choose(spec: DeltaSpec, x: DeltaArrays) -> str | None:
    """Return the fastest backend with kernels that run a checked call, or None; a warning then says why, on a GPU."""
    if present_gpu() is None or 0 in x.q.shape:
        return None
    found = reasons(spec, x)
    chosen = next((name for name, reason in found.items() if reason is None), None)
    if chosen is None:
        warn_once(str(found["triton"]))
    return chosen


def _launch_code(backend: str) -> tuple[Any, Any]:
    """Return the launchers of a forward, and the backward of a call with at most one gate a step."""
    if backend == "triton":
        from tfla.backends.triton import delta

        return delta.KERNELS, delta.backward
    from tfla.backends.hopper import delta_backend, delta_backward

    return delta_backend.forward_kernels(), delta_backward.backward


@functools.lru_cache(256)
def _plan(spec: KernelSpec, cut: Cut | None, given: Signature, forward: bool) -> Any:
    """Return the lowered plan of a forward, or of a backward, which is also given what was saved, dh and dC.

    Norms, (2, B, T, H), are one array for the plans.

    With a cut, the signature has segments as packed sequences, except for C and dC, which are those of whole sequences.
    A forward that saves also compiles the kernels of its backward, beside its own.
    """
    from tfla.backends.gpu import planning, runtime
    from tfla.backends.triton import delta
    from tfla.jax.launches import LoweredPlan

    with planning.planning_side_by_side(runtime.PlannedGPU(*spec.gpu)):
        x, more = _torch_inputs(given[:GIVEN]), torch_inputs(given[GIVEN:])
        recorder = planning.PlanRecorder([*x, *more])
        kernels, backward = _launch_code(spec.backend)
        if forward:
            if cut is None:
                results = [
                    *delta.launch_forward(recorder, x, spec.options, kernels)[: 5 if _stores_norms(spec, x) else 4]
                ]
            else:
                results = segments.launch_forward(spec.backend, spec.options, cut, recorder, x)
            plan = recorder.finish(results)
            if spec.options.save:
                h, C, *saved = result_signature(plan)
                if cut is not None and C is not None:
                    C = (cut.batch, *C[0][1:]), C[1]
                _plan(spec, cut, (*given, *saved, h, C if spec.options.final_state else None), False)
            return LoweredPlan(plan)
        if cut is None:
            E, X, *norms, dh, dC = more
            grads = delta.launch_backward(recorder, x, spec.options, E, X, dh, dC, backward, kernels.by_channel, *norms)
        else:
            grads = segments.launch_backward(spec.backend, spec.options, cut, recorder, x, more)
        return LoweredPlan(
            recorder.finish([g for g, t in zip(grads, x, strict=False) if g is not None and t is not None])
        )


def _plain(spec: KernelSpec, x: KernelArrays) -> Results:
    """Compute h and the final C in the chunkwise form; None for what the options do not ask for."""
    options = spec.options
    rule = spec.plain.rule._replace(
        normalize_qk=options.normalize_qk, beta_activation="none", gate_activation=options.gate_activation,
        lower_bound=options.lower_bound,
    )  # fmt: skip
    sequences = x.q.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    h, C = chunkwise.attend(spec.plain, activated(rule, DeltaArrays(*x), sequences))
    return h, C if options.final_state else None


def _plain_gradients(spec: KernelSpec, x: KernelArrays, cotangents: Results) -> KernelArrays:
    """Compute the gradients in the chunkwise form."""
    _, pull = jax.vjp(lambda y: _plain(spec, y._replace(cu_seqlens=x.cu_seqlens)), x._replace(cu_seqlens=None))
    (found,) = pull(cotangents)
    return found


def _gradients_by_row(spec: KernelSpec, x: KernelArrays, cotangents: Results) -> KernelArrays:
    """Compute the gradients, those of A_log and dt_bias as kernels do: for each row of the batch, (B, H, dqk)."""
    o = spec.options
    if x.log_f is None or (x.A_log is None and x.dt_bias is None):
        return _plain_gradients(spec, x, cotangents)
    activation = functools.partial(log_gate, activation=o.gate_activation, lower_bound=o.lower_bound)
    gates = activation(x.log_f, A_log=x.A_log, dt_bias=x.dt_bias)
    plain = spec._replace(options=o._replace(gate_activation="none"))
    found = _plain_gradients(plain, x._replace(log_f=gates, A_log=None, dt_bias=None), cotangents)

    def of_row(f: Array, cotangent: Array) -> Any:
        _, pull = jax.vjp(
            lambda f, A_log, dt_bias: activation(f[None], A_log=A_log, dt_bias=dt_bias), f, x.A_log, x.dt_bias
        )
        return pull(cotangent[None])

    def by_channel(g: Array | None) -> Array | None:  # a number of a head stands in its first channel
        return g if g is None or g.ndim == 3 else jnp.pad(g[..., None], [(0, 0), (0, 0), (0, x.q.shape[3] - 1)])

    assert found.log_f is not None
    log_f, A_log, dt_bias = jax.vmap(of_row)(x.log_f, found.log_f)
    return found._replace(log_f=log_f, A_log=by_channel(A_log), dt_bias=by_channel(dt_bias))


def _as_segments(cut: Cut, x: KernelArrays) -> KernelArrays:
    """Return the arrays of a dense call with its segments as packed sequences; C stays that of whole sequences."""
    return KernelArrays._make([*map(cut.as_row, x[:6]), *x[6:9], cut.offsets(x.v)])


def _as_sequences(cut: Cut, x: KernelArrays) -> KernelArrays:
    """Return the arrays of a dense call, the inverse of `_as_segments`."""
    return KernelArrays._make([*map(cut.as_batch, x[:6]), *x[6:9], None])


@functools.partial(jax.jit, static_argnums=0)
def _launch_forward(spec: KernelSpec, x: KernelArrays) -> list[Any]:
    """Launch the forward as one compiled function and return h, the final C, and the arrays that the backward reads."""

    def launch(arrays: tuple[Array | None, ...]) -> list[Array]:
        own = KernelArrays(*arrays)  # type: ignore[arg-type]
        cut = Cut.of(own.v, spec.options)
        given = own if cut is None else _as_segments(cut, own)

        def without_kernels(whole: list[Array | None]) -> list[Array | None]:
            arrays = KernelArrays(*whole)  # type: ignore[arg-type]
            if cut is None:
                return list(_plain(spec, arrays))
            h, C = _plain(spec, _as_sequences(cut, arrays))
            return [cut.as_row(h), cut.states_of_segments(C, -1)]

        found: list[Array] = on_platform(_plan(spec, cut, signature(given), True), given, without_kernels)
        norms: list[Array] = []
        if _stores_norms(spec, own):  # one array of the plan is two here, whose first dim is that of the batch
            both = found.pop()
            norms = [*both] if both.size else [both, both]
        if cut is None:
            return found + norms
        h, C, E, X, *of_segments = found
        first = cut.as_batch(h), cut.states_of_sequences(C, -1), cut.as_batch(E), cut.as_batch(X)
        return [*first, *of_segments, *map(cut.as_batch, norms)]

    h, C, *saved = by_batch(launch, x, _dims(spec, x, True))
    return [h, C if spec.options.final_state else None, *without_empty(saved)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(spec: KernelSpec, x: KernelArrays) -> Results:
    """Compute h and the final C; None for what the options do not ask for."""
    h, C, *_ = _launch_forward(spec._replace(options=spec.options._replace(save=False)), x)
    return h, C


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _saving(spec: KernelSpec, x: KernelArrays) -> list[Array]:
    """Compute the results and the arrays that the backward reads, as :func:`tfla.jax.kernels._saving` does."""
    return _launch_forward(spec, x)


def _saving_forward(spec: KernelSpec, x: KernelArrays) -> tuple[list[Array], Any]:
    found = _saving(spec, x)
    return found, (x, found[2:])


def _backward(spec: KernelSpec, kept: Any, cotangents: Any) -> tuple[KernelArrays]:
    x, saved = kept  # cotangents of what was saved are 0: derivatives of `gradients` are with respect to x
    return (gradients(spec, x, saved, (cotangents[0], cotangents[1])),)


def _attend_forward(spec: KernelSpec, x: KernelArrays) -> tuple[Results, Any]:
    h, C, *saved = _saving(spec, x)
    return (h, C), (x, saved)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gradients(spec: KernelSpec, x: KernelArrays, saved: list[Array], cotangents: Results) -> KernelArrays:
    """Compute the gradients from what the forward saved."""
    return _launch_backward(spec, x, saved, cotangents)


@functools.partial(jax.jit, static_argnums=0)
def _launch_backward(spec: KernelSpec, x: KernelArrays, saved: list[Array], cotangents: Results) -> KernelArrays:
    """Launch the backward as one compiled function."""
    dh, dC = cotangents

    def launch(arrays: tuple[Array | None, ...]) -> list[Array]:
        own = KernelArrays(*arrays[:GIVEN])  # type: ignore[arg-type]
        cut = Cut.of(own.v, spec.options)
        given: tuple[Array | None, ...]
        E, X, *more, dh, dC = arrays[GIVEN:]
        if _stores_norms(spec, own):
            more, norms = more[:-2], more[-2:]
            more = [*more, jnp.stack(norms if cut is None else [*map(cut.as_row, norms)])]  # type: ignore[arg-type]
        given = *own, E, X, *more, dh, dC
        if cut is not None:
            given = *_as_segments(cut, own), cut.as_row(E), cut.as_row(X), *more, cut.as_row(dh), dC

        def without_kernels(whole: list[Array | None]) -> list[Array | None]:
            x, dh = KernelArrays(*whole[:GIVEN]), whole[-2]  # type: ignore[arg-type]
            assert dh is not None
            if cut is not None:
                x, dh = _as_sequences(cut, x), cut.as_batch(dh)
            found: list[Any] = list(_gradients_by_row(spec, x, (dh, whole[-1]))[:-1])
            if cut is not None:
                found = [*map(cut.as_row, found[:6]), *found[6:8], cut.states_of_segments(found[8], 0)]
            return [g for g, t in zip(found, whole, strict=False) if t is not None]

        found: list[Array] = on_platform(_plan(spec, cut, signature(given), False), given, without_kernels)
        if cut is None:
            return found
        steps = sum(t is not None for t in own[:6])
        return [*map(cut.as_batch, found[:steps]), *(cut.states_of_sequences(g, 0) for g in found[steps:])]

    found = by_batch(launch, (*x, *with_empty(saved), dh, dC), _dims(spec, x, False))
    every = KernelArrays._make([*(None if t is None else found.pop(0) for t in x[:-1]), None])
    if every.A_log is not None:
        every = every._replace(A_log=every.A_log.sum((0, 2)))
    if every.dt_bias is not None and x.dt_bias is not None:
        every = every._replace(dt_bias=every.dt_bias.sum((0, 2) if x.dt_bias.ndim == 1 else 0))
    return KernelArrays._make(None if g is None else g.astype(t.dtype) for g, t in zip(every, x, strict=True))  # type: ignore[union-attr]


def _gradients_forward(spec: KernelSpec, x: KernelArrays, saved: list[Array], cotangents: Results) -> tuple[Any, Any]:
    return gradients(spec, x, saved, cotangents), (x, saved, cotangents)


def _gradients_backward(spec: KernelSpec, kept: Any, second: KernelArrays) -> tuple[Any, Any, Any]:
    """Differentiate the gradients as the chunkwise form computes them, which does not read what was saved."""
    x, saved, cotangents = kept
    at = x.cu_seqlens
    _, pull = jax.vjp(
        lambda y, d: _plain_gradients(spec, y._replace(cu_seqlens=at), d), x._replace(cu_seqlens=None), cotangents
    )
    dx, dcotangents = pull(second)
    return dx, jax.tree.map(jnp.zeros_like, saved), dcotangents


attend.defvjp(_attend_forward, _backward)
_saving.defvjp(_saving_forward, _backward)
gradients.defvjp(_gradients_forward, _gradients_backward)


def arrays_of(
    spec: DeltaSpec, given: DeltaArrays, normalize_qk: bool = False, activate_gates: bool = False
) -> KernelArrays:
    """Return the arrays that kernels read: activations are applied, and what is not given is None.

    Write strengths and gates without an activation that have the dtype of q are read as they are.

    Args:
        spec, given: the options and the arrays of a checked call.
        normalize_qk, activate_gates: whether the kernels themselves divide q and k by their norms, and apply the
            activation of the gates.
    """
    rule, parameters = spec.rule, (given.A_log, given.dt_bias)
    if normalize_qk:
        rule = rule._replace(normalize_qk=False)
    if activate_gates:
        rule = rule._replace(gate_activation="none")
    x: DeltaInputs = activated(rule, given, spec.sequences)
    beta, log_f = None if given.beta is None else x.beta, None
    if rule.beta_activation == "none" and given.beta is not None and given.beta.dtype == x.q.dtype:
        beta = given.beta
    if given.log_f is not None:
        as_given = rule.gate_activation == "none" and given.log_f.dtype == x.q.dtype
        log_f = given.log_f if as_given else x.log_f if given.log_f.ndim == 4 else x.log_f[..., 0]
        if activate_gates and not as_given:
            log_f = given.log_f.astype(jnp.float32)
    A_log, dt_bias = (t.astype(jnp.float32) if activate_gates and t is not None else None for t in parameters)
    offsets = x.cu_seqlens if spec.offsets is None else jnp.asarray(spec.offsets, jnp.int32)
    return KernelArrays(
        *vary_alike(
            x.q, x.k, x.v, beta, log_f, None if given.read_key is None else x.read_key, A_log, dt_bias,
            None if given.C is None else x.C, offsets,
        )
    )  # fmt: skip


def prepare(spec: DeltaSpec, x: DeltaArrays, return_state: bool) -> KernelSpec:
    """Return the options of a checked call that the kernels compute.

    Raises:
        ValueError: they do not run these inputs here.
    """
    gpu, reason = present_gpu(), reasons(spec, x)[spec.backend]
    if gpu is None or reason is not None:
        raise ValueError(f"backend: {spec.backend!r} cannot run this: {reason}")
    from tfla.backends.delta import DeltaSpec as TorchSpec

    rule = spec.rule
    options = TorchSpec(
        scale=rule.scale, correct=rule.correct, read_before_decay=rule.read_before_decay, chunk_size=spec.chunk_size,
        kernel=spec.kernel, save=True, final_state=return_state,
    )  # fmt: skip
    normalizes, activates = _applied(spec.backend, gpu, _kernel_signature(spec, signature(x)), options)
    if rule.normalize_qk and normalizes:
        options = options._replace(normalize_qk=True)
    if rule.gate_activation != "none" and activates:
        activation: Any = rule.gate_activation
        options = options._replace(gate_activation=activation, lower_bound=rule.lower_bound)
    plain = spec._replace(backend="chunkwise", kernel="segmented", chunk_size=CHUNK, offsets=None)
    return KernelSpec(spec.backend, gpu, options, plain)


@functools.lru_cache(256)
def _applied(backend: str, gpu: GPU, given: Signature, options: Any) -> tuple[bool, bool]:
    """Return whether the kernels of a call and of its backward divide q and k by their norms, and activate gates."""
    from tfla.backends import DELTA_BACKENDS
    from tfla.backends.gpu import runtime
    from tfla.backends.gpu.planning import planning

    x, chosen = _torch_inputs(given), DELTA_BACKENDS[backend]
    with planning(runtime.PlannedGPU(*gpu)):
        return chosen.normalizes(x, options), chosen.activates(x, options)


def with_kernel(spec: DeltaSpec, x: DeltaArrays, kernel: str | None, chunk_size: int | None) -> DeltaSpec:
    """Return options with the kernel and the chunk size that PyTorch's backend would take for the same call.

    Args:
        spec, x: the options and the arrays of a checked call; a backend that does not run it is left to `prepare`.
        kernel, chunk_size: what the caller asks for; None leaves the choice open.

    Raises:
        ValueError: the kernel does not run these inputs.
    """
    gpu = present_gpu()
    if gpu is None or reasons(spec, x)[spec.backend] is not None:
        return spec
    from tfla.backends import DELTA_BACKENDS
    from tfla.backends.gpu import runtime
    from tfla.backends.gpu.planning import planning

    inputs = _torch_inputs(_kernel_signature(spec, signature(x)))
    with planning(runtime.PlannedGPU(*gpu)):
        name, steps = choose_kernel(
            DELTA_BACKENDS[spec.backend], inputs, spec.rule.read_before_decay, kernel, chunk_size
        )  # fmt: skip
    return spec._replace(kernel=name, chunk_size=steps if name == BY_SEGMENTS else spec.chunk_size)


def describe(kernels: KernelSpec, spec: DeltaSpec, x: DeltaArrays) -> tuple[int, dict[str, object]]:
    """Return how many states of each head are stored for the backward, and the sizes of the kernels."""
    from tfla.backends import DELTA_BACKENDS
    from tfla.backends.gpu import runtime
    from tfla.backends.gpu.planning import planning

    inputs = _torch_inputs(_kernel_signature(spec, signature(x)))
    backend, options = DELTA_BACKENDS[kernels.backend], kernels.options
    with planning(runtime.PlannedGPU(*kernels.gpu)):
        saved = backend.saved(inputs, options.correct, options.chunk_size, options.kernel)
        return saved.chunk_C[0][0], backend.details(inputs, options.chunk_size, options.kernel)


_arrays_of = jax.jit(arrays_of, static_argnums=(0, 2, 3))


def compute(kernels: KernelSpec, spec: DeltaSpec, x: DeltaArrays) -> Results:
    """Compute :func:`attend` of arrays before their activations."""
    options = kernels.options
    arrays = _arrays_of(spec, x, options.normalize_qk, options.gate_activation != "none")
    return attend(kernels, KernelArrays(*partitions.by_types(arrays, _dims(kernels, arrays, True))))  # type: ignore[arg-type]
