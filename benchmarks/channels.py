"""Times the kernels of gates by channel on a GPU, each launch of a forward and backward, with and without wgmma.

    python benchmarks/channels.py [FOLDER ...] [--models kda gla] [--steps 8192] [--tokens 65536] [--out FILE]

Each FOLDER is a checkout of the repository; without one it is this one. First the relative errors of all gradients
against the chunkwise backend in float64 are printed, of at most 2,048 steps with gates of medium length and with closed
gates; then the median milliseconds of each launch, in their order. With wgmma the option that keeps kernels from it is
taken away: errors there, or an illegal access, are what the option is for.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

MODELS = {"kda": (32, 128, 128), "gla": (8, 256, 512)}  # heads, dqk, dhv
BUILDS = ("as it is", "wgmma")
ERROR_STEPS = 2048  # of the sequence whose errors are printed: float64 takes the chunkwise backend long
HERE = Path(__file__).resolve().parents[1]


def inputs(model: str, batch: int, steps: int, closed: bool = False) -> dict[str, Any]:
    """Return random inputs of a call on the GPU, in bfloat16."""
    import torch

    H, K, V = MODELS[model]
    torch.manual_seed(0)
    q, k, v, f = (torch.randn(batch, steps, H, d, device="cuda") for d in (K, K, V, K))
    log_f = torch.nn.functional.logsigmoid(f + 3)
    if closed:
        log_f = torch.where(f > 0, log_f, -20.0)
    x = {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v, "log_f": log_f}
    if model == "kda":
        x["beta"] = torch.rand(batch, steps, H, device="cuda")
    return {name: t.bfloat16().requires_grad_() for name, t in x.items()}


def gradients(model: str, x: dict[str, Any], backend: str) -> dict[str, Any]:
    """Return h and the gradients of all inputs."""
    import torch

    import tfla

    operator = tfla.delta_rule if model == "kda" else tfla.linear_attention
    h = operator(**x, backend=backend)
    found = torch.autograd.grad(h, list(x.values()), torch.ones_like(h))
    return {"h": h.detach(), **{f"d{name}": t for name, t in zip(x, found, strict=True)}}


def print_errors(model: str, steps: int) -> None:
    """Print the relative errors of one sequence of so many steps against the chunkwise backend in float64."""
    for closed in (False, True):
        x = inputs(model, 1, steps, closed)
        exact = gradients(model, {n: t.detach().double().requires_grad_() for n, t in x.items()}, "chunkwise")
        found = gradients(model, x, "triton")
        errors = {n: float((t.double() - exact[n]).norm() / exact[n].norm()) for n, t in found.items()}
        print(
            f"  {model}{', half of the gates closed' if closed else ''}:", *(f"{n} {e:.1e}" for n, e in errors.items())
        )


def print_times(model: str, batch: int, steps: int, repeats: int) -> None:
    """Print the median milliseconds of each launch of a forward and backward, of so many calls."""
    from unittest import mock

    import torch
    from triton.runtime.jit import JITFunction

    from tfla._util import caching

    x = inputs(model, batch, steps)
    launch, names, times = JITFunction.run, [], []

    def timed(self: Any, *args: Any, **options: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        kernel = launch(self, *args, **options)
        end.record()
        names.append(self.__name__ + (" levels" if options.get("LEVELED") else ""))
        times.append((start, end))
        return kernel

    gradients(model, x, "triton")
    samples = []
    for _ in range(repeats):
        caching.clear_caches()  # what is recorded is replayed past Triton's launch
        names.clear()
        times.clear()
        with mock.patch.object(JITFunction, "run", timed):
            gradients(model, x, "triton")
        torch.cuda.synchronize()
        samples.append([start.elapsed_time(end) for start, end in times])
    print(
        f"  {model}:", *(f"{name} {median(t):.2f}" for name, t in zip(names, zip(*samples, strict=True), strict=True))
    )


def without(*device: object) -> Any:
    """Return what `ampere_mmas` does where it does nothing."""
    return {} if device else contextlib.nullcontext()


def options() -> argparse.Namespace:
    """Return the options of the command line.

    Exits with an error that names the option where its value is not allowed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=[str(HERE)], metavar="FOLDER", help="checkouts of the repository")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="which gates and heads")
    parser.add_argument("--steps", type=int, default=8192, help="steps of a sequence (8192)")
    parser.add_argument("--tokens", type=int, default=65536, help="steps of all sequences together (65536)")
    parser.add_argument("--repeats", type=int, default=20, help="calls that are timed (20)")
    parser.add_argument("--out", type=Path, help="a file that gets the same lines")
    parser.add_argument("--build", choices=BUILDS, help="measure the package that Python imports, in this process")
    found = parser.parse_args()
    for name in ("steps", "tokens", "repeats"):
        if getattr(found, name) < 1:
            parser.error(f"--{name}: got {getattr(found, name)}, expected at least 1")
    if found.tokens % found.steps:
        parser.error(f"--tokens: got {found.tokens}, expected a multiple of --steps, {found.steps}")
    return found


def measure(given: argparse.Namespace) -> None:
    """Print errors and times of the package that is imported."""
    if given.build == "wgmma":
        from tfla.backends.triton import channel_gradients, channel_tiles

        for module in (channel_gradients, channel_tiles):
            if not hasattr(module, "ampere_mmas"):
                return
            module.ampere_mmas = without  # a context before it was an option of the launch
    for model in given.models:
        print_errors(model, min(ERROR_STEPS, given.steps))
        print_times(model, given.tokens // given.steps, given.steps, given.repeats)


def main() -> None:
    """Run a process for each checkout and build."""
    given = options()
    if given.build is not None:
        measure(given)
        return
    sizes = (f"--{name}={getattr(given, name)}" for name in ("steps", "tokens", "repeats"))
    command = [sys.executable, __file__, *sizes, "--models", *given.models]
    with contextlib.nullcontext() if given.out is None else given.out.open("w") as out:
        for folder in given.folders:
            for build in BUILDS:
                environment = {**os.environ, "PYTHONPATH": str(Path(folder) / "src")}
                with subprocess.Popen(
                    [*command, "--build", build], env=environment, stdout=subprocess.PIPE, text=True
                ) as process:
                    for line in itertools.chain([f"{folder}, {build}\n"], process.stdout or ()):
                        print(line, end="", flush=True)
                        if out is not None:
                            out.write(line)


if __name__ == "__main__":
    main()
