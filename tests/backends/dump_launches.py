"""Writes the launches of every call, to compare two versions of the launch code. Needs no GPU; nothing is computed.

    python tests/backends/dump_launches.py [--sampled COUNT] [--compile | --gpu] [CASE...] > launches.txt

CASE is as in every_kernel.py; without one, all of them and COUNT random calls. A change of launch code that is not
meant to change launches leaves the file as it was. With --compile the kernels of the cases are compiled for an H100,
and each launch also has the registers, spills and shared memory of its kernel and a digest of its PTX. With --gpu the
cases run on the GPU that is there, and each case also has the digests of its results. The file has a line for each
step of the recorder:

    %9 = new (1, 150, 2, 128) bfloat16                    an allocation
    %12 = do %3 -> (1, 150, 2, 64) (19200, 128, 64) ...   an operation of PyTorch, or a TMA descriptor
    o_dv_scan[(1, 2)] %1 %2 ... 150 64 | BK=64 ...        a launch: kernel, grid, operands, numbers, constants

Operands are numbered as the recorder does: the inputs of the call first, then each result in its order. Constants are
in the order of the kernel's parameters, so that a new name moves none of them.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
from typing import Any
from unittest import mock

import every_kernel
import torch
import triton
from compile_for import AbsentGPU, compile_only
from torch import Tensor
from triton.runtime.driver import driver

from tfla._util import caching
from tfla.backends import BACKENDS, DELTA_BACKENDS, Inputs
from tfla.backends.base import Outputs, Spec
from tfla.backends.gpu import config, segmentation
from tfla.backends.gpu.replay import LaunchRecorder
from tfla.backends.gpu.runtime import DEFERRED_CHUNK_SIZE

PROCESSORS, SEGMENT = 132, 128  # multiprocessors; steps of a segment where the length decides on it
DIMS = {
    "triton": ((64, 64), (64, 128), (128, 128), (128, 256), (256, 512), (512, 512), (100, 72), (24, 40), (16, 16)),
    "hopper": (
        (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (128, 512), (256, 128), (256, 256), (256, 512),
        (512, 256), (512, 512), (1024, 128), (1024, 1024), (96, 192), (40, 56), (160, 320), (56, 72),
    ),
}  # fmt: skip


def described(x: Any) -> str:
    """Return the shape, strides and dtype of a result, or of a TMA descriptor what it addresses."""
    if isinstance(x, Tensor):
        return f"{tuple(x.shape)} {x.stride()} {x.dtype}".replace("torch.", "")
    return f"descriptor {list(x.shape)} {list(x.strides)} {x.block_shape}"


def digest(text: bytes) -> str:
    """Return twelve hexadecimal digits that differ where texts differ."""
    return hashlib.sha256(text).hexdigest()[:12]


def ptx_digest(ptx: str, name: str) -> str:
    """Return the digest of a kernel's PTX without its name, comments, and what only debuggers read."""
    lines = re.sub(r"//.*", "", ptx.partition(".section")[0]).replace(name, "kernel").splitlines()
    kept = (line.strip() for line in lines if not re.match(r"\s*(\.loc|\.file|\$L__tmp|\$L__func|$)", line))
    return digest("\n".join(kept).encode())


def compiled_to(kernel: Any) -> str:
    """Return what Triton made of a kernel: resources of a thread and a program, and the digest of its PTX."""
    made = kernel.metadata
    on_gpu = hasattr(kernel, "n_regs") and kernel.n_regs
    registers, spills = (kernel.n_regs, kernel.n_spills) if on_gpu else (made.registers, made.spilled)
    ptx = ptx_digest(kernel.asm["ptx"], made.name)
    return f" -> registers={registers} spills={spills} shared={made.shared} ptx={ptx}"


class Dump:
    """The lines of one call; its launches are only noted unless they are compiled, and run where there is a GPU."""

    def __init__(self, compiled: bool) -> None:
        self.lines: list[str] = []
        self.compiled = compiled

    def __enter__(self) -> Dump:
        do, launch, dump = LaunchRecorder.do, LaunchRecorder.launch, self

        def noted_do(self: LaunchRecorder, fn: Any, *read: Any) -> Any:
            numbers = [f"%{self.numbers[id(x)]}" for x in read]
            made = do(self, fn, *read)
            what = " ".join(["do", *numbers, "->"] if numbers else ["new"])
            dump.lines.append(f"%{self.numbers[id(made)]} = {what} {described(made)}")
            return made

        def noted_launch(
            self: LaunchRecorder, kernel: Any, grid: Any, *args: Any, num_warps: int, tunable: bool = False, **c: Any
        ) -> None:
            operands = [str(x) if isinstance(x, int | float) else f"%{self.numbers[id(x)]}" for x in args]
            options = {"num_warps": num_warps, "tunable": tunable}
            order = [*kernel.arg_names, *sorted(c)]  # an option of the launch, such as num_ctas, is no parameter
            constants = [f"{name}={x}" for name, x in (sorted(c.items(), key=lambda x: order.index(x[0])))]
            constants += [f"{name}={x}" for name, x in options.items()]
            line = f"{kernel.__name__}[{grid}] {' '.join(operands)} | {' '.join(constants)}"
            if dump.compiled:
                launch(self, kernel, grid, *args, **options, **c)
                line += compiled_to(self.steps[-1][0].kernel)
            dump.lines.append(line)

        caching.clear_caches()
        self.patches = [
            mock.patch.object(LaunchRecorder, "do", noted_do), mock.patch.object(LaunchRecorder, "launch", noted_launch)
        ]  # fmt: skip
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


def sampled_call(rng: random.Random) -> tuple[str, Inputs, Spec, str, tuple[bool, bool]]:
    """Return a random call: its name, inputs, options, backend, and which cotangents of the final state are given."""
    backend = rng.choice(("triton", "hopper", "hopper"))
    kernel = rng.choice(("fused", "fused", "tfla")) if backend == "triton" else "fused"
    K, V = rng.choice(DIMS[backend])
    dtype = rng.choice((torch.bfloat16, torch.float16, *((torch.float32,) if backend == "triton" else ())))
    H = rng.choice((1, 2, 3, 4, 8))
    Hq = rng.choice([n for n in range(1, H + 1) if H % n == 0])
    T, B = rng.choice((1, 63, 64, 130, 300, 1100, 2048)), rng.choice((1, 1, 2))
    packed, given_state, normalize = rng.random() < 0.3, rng.random() < 0.5, rng.random() < 0.6
    gates: Any = rng.choice(("exp", "log")) if normalize else rng.choice(("sigmoid", "log"))
    q, k, v = (torch.zeros(B, T, heads, d, dtype=dtype) for heads, d in ((Hq, K), (Hq, K), (H, V)))
    x = Inputs(q, k, v, torch.zeros(B, T, H), torch.zeros(B, T, H), None, None, None, None)
    N = 4 if packed else B
    if packed:
        x = x._replace(**{name: t[:1] for name, t in x._asdict().items() if t is not None})
        x = x._replace(cu_seqlens=torch.tensor([0, T // 3, T // 3, T - T // 4, T], dtype=torch.int32))
    if rng.random() < 0.3:  # heads before steps
        x = x._replace(**{name: getattr(x, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"})
    if rng.random() < 0.2 and gates != "exp":
        x = x._replace(log_i=None)
    if given_state:
        x = x._replace(C=torch.zeros(N, H, K, V), n=torch.zeros(N, H, K), m=torch.zeros(N, H))
        if rng.random() < 0.3:
            x = x._replace(C=torch.zeros(N, H, K, V, dtype=torch.bfloat16))
        if not normalize:
            x = x._replace(n=None, m=None)
    spec = Spec(
        scale=rng.choice((K**-0.5, 1.0, -0.5, 0.0)), normalize=normalize, normalizer_grad=rng.random() < 0.7,
        chunk_size=rng.choice((16, 64, 128, 256, 512, 4096, DEFERRED_CHUNK_SIZE)), kernel=kernel,
        save=rng.random() < 0.9, final_state=rng.random() < 0.5,
        store_dtype=rng.choice((None, None, torch.bfloat16)), gates=gates,
    )  # fmt: skip
    if kernel == "tfla" and spec.chunk_size == DEFERRED_CHUNK_SIZE:
        spec = spec._replace(chunk_size=256)
    cotangents = rng.random() < 0.6, rng.random() < 0.6
    name = f"{backend} {spec} {[None if t is None else (t.shape, t.stride(), t.dtype) for t in x]} {cotangents}"
    return name, x, spec, backend, cotangents


def call(x: Inputs, spec: Spec, backend: str, cotangents: tuple[bool, bool]) -> None:
    """Call the forward and, where it saves for it, the backward of a backend."""
    out: Outputs = BACKENDS[backend].forward(x, spec)
    if not spec.save:
        return
    N, (H, V), K = x.sequences, x.v.shape[2:], x.q.shape[3]
    dC = torch.zeros(N, H, K, V) if spec.final_state and cotangents[0] else None
    dn = torch.zeros(N, H, K) if spec.final_state and spec.normalize and cotangents[1] else None
    BACKENDS[backend].backward(x, out, torch.zeros_like(x.v), dC, dn, spec)


def without_gpu() -> None:
    """Make the launch code of both GPU backends run on the CPU, for an H100, where nothing is launched."""
    driver.set_active(AbsentGPU("sm_90"))
    every_kernel.DEVICE = "cpu"
    for backend in (BACKENDS["triton"], BACKENDS["hopper"], DELTA_BACKENDS["triton"]):
        for name in ("unsupported", "steps_unsupported"):
            setattr(type(backend), name, lambda self, x: None)
    # Before the launch code is imported, which reads these by name.
    config.processors = lambda device: PROCESSORS  # type: ignore[assignment]
    segmentation.best_chunk_size = lambda x, *_: SEGMENT  # type: ignore[assignment]


def run_case(case: str) -> list[Tensor]:
    """Return the results of a case: of the operator, forward and backward, or of decoding steps."""
    backend, kernel, gate, dqk, dhv, dtype, shape = case.split(",")
    K, V, dt = int(dqk), int(dhv), getattr(torch, dtype)
    if kernel == "steps":
        return every_kernel.steps(backend, gate, K, V, dt, 4 if shape == "several" else 1)
    if kernel == "delta":
        return every_kernel.delta(backend, gate, K, V, dt, shape)
    if kernel == "delta_steps":
        return every_kernel.delta_steps(backend, gate, K, V, dt, 4 if shape == "several" else 1)
    return every_kernel.operator(backend, kernel, gate, K, V, dt, shape)


def digests(results: list[Tensor]) -> str:
    """Return the line of the digests of the bits of results."""
    bits = [x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for x in results]
    return " ".join(["results", *map(digest, bits)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sampled", type=int, default=400, metavar="COUNT")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    triton.knobs.compilation.disable_line_info = True
    if not options.gpu:
        without_gpu()
    if options.compile:
        compile_only({})
    for case in options.cases or every_kernel.CASES:
        if case.split(",")[1] == "model":
            continue
        torch.manual_seed(0)
        with Dump(options.gpu or options.compile) as dump:
            results = run_case(case)
        print("##", case, *dump.lines, *[digests(results)] * options.gpu, sep="\n", flush=True)
    rng = random.Random(0)
    for _ in range(0 if options.cases or options.gpu or options.compile else options.sampled):
        name, x, spec, backend, cotangents = sampled_call(rng)
        with Dump(compiled=False) as dump:
            call(x, spec, backend, cotangents)
        print("##", name, *dump.lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
