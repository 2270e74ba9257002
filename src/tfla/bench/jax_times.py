"""Times of operators called from JAX and from PyTorch, on one GPU in one run: `python -m tfla.bench.jax_times`.

Each implementation runs each length in a process of its own. With several workers, these processes compile in parallel
and take samples one at a time. A sample is a run of calls back to back. The host enqueues them faster than the GPU
computes them, so that their mean time is the GPU's. The first call includes compilation: Triton's cache is empty.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

TOKENS, HEADS = 65536, 16
SAMPLE = 0.1  # seconds of a sample: during shorter ones the clock of a GPU still rises after a pause
DIRECTIONS = ("forward", "forward + backward")
HEAD_DIMS = ((128, 256), (256, 512))
LENGTHS = (512, 8192, TOKENS)
NAMES = ("PyTorch", "JAX", "mlstm_kernels.jax", "jax-linear-attention")
DELTA = {"gdn": (16, 128, 128), "kda": (32, 128, 128), "gla": (8, 256, 512)}  # heads, dqk and dhv
DELTA_STEPS, DELTA_NAMES = 8192, ("PyTorch", "JAX")


class Case(NamedTuple):
    """The problem that one process times, and the implementation that computes it."""

    name: str  # of the implementation
    model: str  # "mlstm" or one of DELTA
    form: str  # the input gate of the mLSTM
    heads: int
    dqk: int
    dhv: int
    T: int  # steps of a sequence; the sequences have TOKENS in all

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of q, k, v, the cotangent of h, and of the gates of the mLSTM."""
        steps = TOKENS // self.T, self.T, self.heads
        return [*((*steps, d) for d in (self.dqk, self.dqk, self.dhv, self.dhv)), steps, steps]


def _cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases that the options of the command select."""
    found = []
    if "mlstm" in options.models:
        every = itertools.product(options.head_dims, options.forms, options.lengths, options.names)
        for heads, form, T, name in every:
            dqk, dhv = (int(d) for d in heads.split("x"))
            found.append(Case(name, "mlstm", form, HEADS, dqk, dhv, T))
    for model in options.models:
        if model in DELTA:
            found += [Case(n, model, "", *DELTA[model], DELTA_STEPS) for n in options.names if n in DELTA_NAMES]
    return found


@contextlib.contextmanager
def _alone(lock: Path | None) -> Iterator[None]:
    """Hold the lock, so that no other process of this run takes samples or runs its compiled functions."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases it
        yield


def _samples(call: Callable[[], Any], wait: Callable[[Any], None], repeats: int, calls: int) -> dict[str, Any]:
    """Time runs of at least `calls` calls and SAMPLE seconds, after two runs in which the GPU reaches its clock."""

    def run(count: int) -> float:
        """Return the mean seconds of a call in a run of `count` calls."""
        begin = time.perf_counter()
        for _ in range(count):
            out = call()
        wait(out)
        return (time.perf_counter() - begin) / count

    calls = max(calls, math.ceil(SAMPLE / run(calls)))
    found = [run(calls) for _ in range(repeats + 1)][1:]
    return {"seconds": statistics.median(found), "min": min(found), "max": max(found), "samples": repeats}


def _from_torch(case: Case, repeats: int, calls: int, lock: Path | None) -> list[dict[str, Any]]:
    """Time an operator of this library in PyTorch."""
    import torch

    import tfla

    *heads, gates, _ = case.shapes
    cotangent = torch.randn(heads[3], device="cuda", dtype=torch.bfloat16)
    if case.model == "mlstm":
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in heads[:3])
        x = [q, k, v, torch.randn(gates, device="cuda") - 1, torch.randn(gates, device="cuda") + 3]
        run: Callable[..., Any] = functools.partial(tfla.mlstm, input_gate=case.form)
    else:
        from tfla.bench import delta
        from tfla.measure.problem import Problem

        work = delta.chunk(Problem(TOKENS // case.T, case.T, case.heads, case.dqk, case.dhv), case.model)  # type: ignore[arg-type]
        x, run = work.inputs, work.run

    def forward() -> Any:
        with torch.no_grad():
            return run(*x)

    def both() -> Any:
        return torch.autograd.grad(run(*x), x, cotangent)

    rows = []
    for direction, call in zip(DIRECTIONS, (forward, both), strict=True):
        for t in x:
            t.requires_grad_(direction != "forward")
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        with _alone(lock):
            call()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            torch.cuda.synchronize()
            memory = torch.cuda.max_memory_allocated() - before
            row = _samples(call, lambda _: torch.cuda.synchronize(), repeats, calls)
        rows.append({"direction": direction, "first_seconds": first, "peak_bytes": memory} | row)
    return rows


def _of_delta(case: Case, q: Any, k: Any, v: Any, beta: Any, backend: str | None) -> tuple[list[Any], Any]:
    """Return the arrays and the function of the delta rule or of GLA, with inputs as :mod:`tfla.bench.delta` has them.

    Args:
        case: the model and its sizes.
        q, k, v, beta: normally distributed numbers.
        backend: the backend of this library.
    """
    import jax
    import jax.numpy as jnp

    import tfla.jax

    q, k = (x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True).astype(x.dtype) for x in (q, k))
    by_channel = case.model != "gdn"
    gates = jax.random.normal(jax.random.key(1), k.shape if by_channel else beta.shape)
    log_f = jax.nn.log_sigmoid(gates + 4.5).astype(q.dtype if by_channel else jnp.float32)
    if case.model == "gla":
        return [q, k, v, log_f], functools.partial(tfla.jax.linear_attention, backend=backend)
    return [q, k, v, jax.nn.sigmoid(beta), log_f], functools.partial(tfla.jax.delta_rule, backend=backend)


def _from_jax(
    case: Case, repeats: int, calls: int, lock: Path | None, backend: str | None = None
) -> list[dict[str, Any]]:
    """Time an operator of this library or of another one as a jitted function of JAX.

    mlstm_kernels.jax 2.0.6 needs jax_triton 0.3: in 0.4 a call that is given its output as an operand is an error.

    Args:
        case: the problem and its implementation.
        repeats, calls: as in :func:`_samples`.
        lock: as in :func:`_alone`.
        backend: the backend of this library; with None the kernels for this GPU, or an error if they do not run.
    """
    import jax
    import jax.numpy as jnp

    import tfla.jax

    name, form, shapes = case.name, case.form, case.shapes
    dtypes = [jnp.bfloat16] * 4 + [jnp.float32] * 2
    keys = jax.random.split(jax.random.key(0), len(shapes))
    q, k, v, cotangent, i, f = map(jax.random.normal, keys, shapes, dtypes)
    x = [q, k, v, i - 1, f + 3]
    if backend is None and name == "JAX":
        backend = "hopper" if jax.devices()[0].compute_capability == "9.0" else "triton"
    run: Callable[..., Any]
    if case.model != "mlstm":
        x, run = _of_delta(case, q, k, v, i, backend)
    elif name == "JAX":
        run = functools.partial(tfla.jax.mlstm, input_gate=form, backend=backend)
    elif name == "jax-linear-attention":
        from jla.ops import linear_attention

        if form != "exp":
            raise ValueError(f"form: got {form!r}, jax-linear-attention has 'exp'")

        def run(*x: Any) -> Any:
            q, k, v, i, f = x
            return linear_attention("mlstm", q, k, v, g=jax.nn.log_sigmoid(f), i=i, impl="mosaic_gpu")[0]
    else:
        from mlstm_kernels.jax import get_mlstm_kernel

        kernel = get_mlstm_kernel("chunkwise--triton_xl_chunk" + ("_siging" if form == "sigmoid" else ""))
        x, cotangent = [jnp.swapaxes(t, 1, 2) for t in x], jnp.swapaxes(cotangent, 1, 2)

        def run(*x: Any) -> Any:
            return kernel(*x)

    def both(cotangent: Any, *x: Any) -> Any:
        h, pull = jax.vjp(run, *x)
        return h, pull(cotangent.astype(h.dtype))  # mlstm_kernels' h is float32

    rows = []
    for direction, fn, given in zip(DIRECTIONS, (run, both), (x, [cotangent, *x]), strict=True):
        begin = time.perf_counter()
        compiled = jax.jit(fn).lower(*given).compile()
        first = time.perf_counter() - begin
        sizes = compiled.memory_analysis()
        memory = 0 if sizes is None else sizes.temp_size_in_bytes + sizes.output_size_in_bytes
        with _alone(lock):
            begin = time.perf_counter()
            jax.block_until_ready(compiled(*given))
            first += time.perf_counter() - begin
            row = _samples(lambda fn=compiled, given=given: fn(*given), jax.block_until_ready, repeats, calls)  # type: ignore[misc]
        rows.append({"direction": direction, "first_seconds": first, "peak_bytes": memory} | row)
    return rows


def _one(options: argparse.Namespace) -> None:
    """Print the rows of one implementation, in a process of its own, as lines of JSON."""
    case = Case(*json.loads(options.one))
    facts = {key: value for key, value in case._asdict().items() if key != "T"} | {"x": case.T}
    given = case, options.repeats, options.calls, options.lock
    try:
        rows = _from_torch(*given) if case.name == "PyTorch" else _from_jax(*given)
    except Exception as error:
        rows = [{"error": f"{type(error).__name__}: {error}"[:300]}]
    for row in rows:
        print(json.dumps(facts | row), flush=True)


def main() -> None:
    """Measure all implementations and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--models", nargs="+", default=["mlstm"], choices=["mlstm", *DELTA])
    parser.add_argument("--forms", nargs="+", default=["exp"], help="of the mLSTM")
    parser.add_argument("--head-dims", nargs="+", default=[f"{K}x{V}" for K, V in HEAD_DIMS], help="of the mLSTM")
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="of the mLSTM")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile in parallel")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which every process ends")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        _one(options)
        return
    end = time.monotonic() + options.budget
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(options.workers) as pool:
        options.lock = lock.name
        found = pool.map(lambda case: _in_a_process(case, options, end), _cases(options))
        rows = list(itertools.chain.from_iterable(found))
    from tfla.measure.machine import environment, installed_version

    machine = environment("cuda")
    machine["versions"] |= {n: v for n in ("jax", "jaxlib") if (v := installed_version(n))}
    config = {key: value for key, value in vars(options).items() if key not in ("out", "one", "lock")}
    options.out.write_text(
        json.dumps({"kind": "jax", "environment": machine, "config": config, "rows": rows}, indent=1) + "\n"
    )


def _in_a_process(case: Case, options: argparse.Namespace, end: float) -> list[dict[str, Any]]:
    """Return the rows of one implementation, measured in a process of its own with an empty cache of Triton.

    Args:
        case: the problem and its implementation.
        options: the options of the command.
        end: the time after which the process ends, of `time.monotonic`.
    """
    left = end - time.monotonic()
    if left <= 0:
        return []
    with tempfile.TemporaryDirectory() as cache:
        command = [
            sys.executable, "-m", "tfla.bench.jax_times", "--one", json.dumps(case), "--repeats", str(options.repeats),
            "--calls", str(options.calls), "--lock", str(options.lock), "--out", str(options.out),
        ]  # fmt: skip
        kept = {"TRITON_CACHE_DIR": cache, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        try:
            done = subprocess.run(
                command, env=os.environ | kept, capture_output=True, text=True, check=False, timeout=left
            )
            said = done.stdout
        except subprocess.TimeoutExpired as error:
            said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
    rows = [line for line in said.splitlines() if line.startswith("{")]
    print("\n".join(rows), flush=True)
    return [json.loads(row) for row in rows]


if __name__ == "__main__":
    main()
