"""The calls that `python -m tfla.bench.jax_times` times: operators from PyTorch and from JAX, and their samples."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

TOKENS = 65536
SAMPLE = 0.1  # seconds of a sample: during shorter ones the clock of a GPU still rises after a pause
DIRECTIONS = ("forward", "forward + backward")


class Operation(NamedTuple):
    """An operator and its sizes; the sequences have TOKENS in all."""

    model: str  # "mlstm", or "gdn", "kda" or "gla"
    form: str  # the input gate of the mLSTM
    heads: int
    dqk: int
    dhv: int
    T: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of q, k, v, the cotangent of h, and of the gates of the mLSTM."""
        steps = TOKENS // self.T, self.T, self.heads
        return [*((*steps, d) for d in (self.dqk, self.dqk, self.dhv, self.dhv)), steps, steps]


class Ready(NamedTuple):
    """A compiled call in one direction, which has been made once."""

    direction: str
    first_seconds: float  # of the first call, compilation included
    peak_bytes: int  # what a call allocates beyond its inputs
    call: Callable[[], Any]
    wait: Callable[[Any], None]  # waits for what a call returned

    def facts(self) -> dict[str, Any]:
        """Return what is known of the first call."""
        return {"direction": self.direction, "first_seconds": self.first_seconds, "peak_bytes": self.peak_bytes}


def samples_in_turn(ready: Sequence[Ready], repeats: int, calls: int) -> list[dict[str, Any]]:
    """Time runs of at least `calls` calls and SAMPLE seconds, one of each call in turn, and return the seconds of each.

    Two runs of each, in which the GPU reaches its clock, come before those that count.
    """

    def run(one: Ready, count: int) -> float:
        """Return the mean seconds of a call in a run of `count` calls."""
        begin = time.perf_counter()
        for _ in range(count):
            out = one.call()
        one.wait(out)
        return (time.perf_counter() - begin) / count

    counts = [max(calls, math.ceil(SAMPLE / run(one, calls))) for one in ready]
    rounds = [[run(one, count) for one, count in zip(ready, counts, strict=True)] for _ in range(repeats + 1)][1:]
    return [
        {"seconds": statistics.median(found), "min": min(found), "max": max(found), "samples": repeats}
        for found in zip(*rounds, strict=True)
    ]


def from_torch(operation: Operation) -> Iterator[Ready]:
    """Make the first calls of an operator of this library in PyTorch, one for each direction."""
    import torch

    import tfla

    *heads, gates, _ = operation.shapes
    cotangent = torch.randn(heads[3], device="cuda", dtype=torch.bfloat16)
    if operation.model == "mlstm":
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in heads[:3])
        x = [q, k, v, torch.randn(gates, device="cuda") - 1, torch.randn(gates, device="cuda") + 3]
        run: Callable[..., Any] = functools.partial(tfla.mlstm, input_gate=operation.form)
    else:
        from tfla.bench import delta
        from tfla.measure.problem import Problem

        B, T, *sizes = heads[0][0], operation.T, operation.heads, operation.dqk, operation.dhv
        work = delta.chunk(Problem(B, T, *sizes), operation.model)  # type: ignore[arg-type]
        x, run = work.inputs, work.run
    for t in x:
        t.requires_grad_()

    def forward() -> Any:
        with torch.no_grad():
            return run(*x)

    def both() -> Any:
        return torch.autograd.grad(run(*x), x, cotangent)

    for direction, call in zip(DIRECTIONS, (forward, both), strict=True):
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        gc.collect()  # what a first call leaves must not be freed during the next one, whose memory is measured
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        memory = torch.cuda.max_memory_allocated() - before
        yield Ready(direction, first, memory, call, lambda _: torch.cuda.synchronize())


def from_jax(name: str, operation: Operation, backend: str | None = None) -> Iterator[Ready]:
    """Make the first calls of an operator as a jitted function of JAX, one for each direction.

    Args:
        name: the implementation: "JAX" for this library, or another one.
        operation: the operator and its sizes.
        backend: the backend of this library; with None the kernels for this GPU, or an error if they do not run.
    """
    import jax

    x, cotangent, run = _of_jax(name, operation, backend)

    def both(cotangent: Any, *x: Any) -> Any:
        h, pull = jax.vjp(run, *x)
        return h, pull(cotangent.astype(h.dtype))  # mlstm_kernels' h is float32

    for direction, fn, given in zip(DIRECTIONS, (run, both), (x, [cotangent, *x]), strict=True):
        begin = time.perf_counter()
        compiled = jax.jit(fn).lower(*given).compile()
        jax.block_until_ready(compiled(*given))
        first = time.perf_counter() - begin
        sizes = compiled.memory_analysis()
        memory = 0 if sizes is None else sizes.temp_size_in_bytes + sizes.output_size_in_bytes
        yield Ready(direction, first, memory, functools.partial(compiled, *given), jax.block_until_ready)


def _of_jax(name: str, operation: Operation, backend: str | None) -> tuple[list[Any], Any, Callable[..., Any]]:
    """Return the arrays, the cotangent of h and the function of an implementation.

    mlstm_kernels.jax 2.0.6 needs jax_triton 0.3: in 0.4 a call that is given its output as an operand is an error.
    """
    import jax
    import jax.numpy as jnp

    import tfla.jax

    dtypes = [jnp.bfloat16] * 4 + [jnp.float32] * 2
    shapes = operation.shapes
    keys = jax.random.split(jax.random.key(0), len(shapes))
    q, k, v, cotangent, i, f = map(jax.random.normal, keys, shapes, dtypes)
    x = [q, k, v, i - 1, f + 3]
    if backend is None and name == "JAX":
        backend = "hopper" if jax.devices()[0].compute_capability == "9.0" else "triton"
    if operation.model != "mlstm":
        x, run = _of_delta(operation, q, k, v, i, backend)
    elif name == "JAX":
        run = functools.partial(tfla.jax.mlstm, input_gate=operation.form, backend=backend)
    elif name == "jax-linear-attention":
        from jla.ops import linear_attention

        if operation.form != "exp":
            raise ValueError(f"form: got {operation.form!r}, jax-linear-attention has 'exp'")

        def run(*x: Any) -> Any:
            q, k, v, i, f = x
            return linear_attention("mlstm", q, k, v, g=jax.nn.log_sigmoid(f), i=i, impl="mosaic_gpu")[0]
    else:
        from mlstm_kernels.jax import get_mlstm_kernel

        kernel = get_mlstm_kernel("chunkwise--triton_xl_chunk" + ("_siging" if operation.form == "sigmoid" else ""))
        x, cotangent = [jnp.swapaxes(t, 1, 2) for t in x], jnp.swapaxes(cotangent, 1, 2)

        def run(*x: Any) -> Any:
            return kernel(*x)

    return x, cotangent, run


def _of_delta(
    operation: Operation, q: Any, k: Any, v: Any, beta: Any, backend: str | None
) -> tuple[list[Any], Callable[..., Any]]:
    """Return the arrays and the function of the delta rule or of GLA, with inputs as :mod:`tfla.bench.delta` has them.

    Args:
        operation: the model and its sizes.
        q, k, v, beta: normally distributed numbers.
        backend: the backend of this library.
    """
    import jax
    import jax.numpy as jnp

    import tfla.jax

    q, k = (x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True).astype(x.dtype) for x in (q, k))
    by_channel = operation.model != "gdn"
    gates = jax.random.normal(jax.random.key(1), k.shape if by_channel else beta.shape)
    log_f = jax.nn.log_sigmoid(gates + 4.5).astype(q.dtype if by_channel else jnp.float32)
    if operation.model == "gla":
        return [q, k, v, log_f], functools.partial(tfla.jax.linear_attention, backend=backend)
    return [q, k, v, jax.nn.sigmoid(beta), log_f], functools.partial(tfla.jax.delta_rule, backend=backend)
