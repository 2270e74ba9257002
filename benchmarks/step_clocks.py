"""Measures the clocks of each step of a Hopper kernel, inside the kernel, on a GPU.

    python benchmarks/step_clocks.py MODULE [--model kda] [--steps 8192] [--batch 8] [--heads H --dqk K --dhv V]

MODULE is a module of `src/tfla/backends/hopper/` with a function `process_tile`, whose comments number its steps. The
command makes a copy of the library, in which each consumer stores the clock of its multiprocessor (`%clock`) before
each step of a tile and after each wait for an mbarrier, and runs a forward and backward of the model there. It prints
the median clocks, over programs and tiles of the last launch, from each mark to the next one, for each consumer.

The marks cost clocks, and registers: consumers that have none left spill more. So compare the printed time of the
kernel with that of the same kernel without marks, which the command prints, too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HOPPER = Path("src/tfla/backends/hopper")
HERE = Path(__file__).resolve().parents[1]
MODELS = {  # heads, dqk, dhv
    "kda": (32, 128, 128),
    "gla": (8, 256, 512),
    "gdn": (16, 128, 128),
    "exp": (16, 128, 256),
    "sigmoid": (16, 128, 256),
}
TILES, MARKS = 64, 32  # of each consumer and program, for which there is memory
CONSUMERS, PROGRAMS = 2, 1024
ADDRESS = "TFLA_CLOCKS"  # the environment variable with the address of that memory
CALLS = 5  # of which the mean time of the kernel is taken

MARK = '''

import os as _os


@gluon.constexpr_function
def _store_clock(mark):
    """Return the assembly that stores the clock as a mark of a tile."""
    address = int(_os.environ["ADDRESS"]) + 4 * mark
    return (
        "{ .reg .pred p; .reg .u32 t; .reg .s64 a; setp.eq.s32 p, $2, 0; mov.u32 t, %clock; mul.wide.s32 a, $1, 4; "
        f"add.s64 a, a, {address}; @p st.global.u32 [a], t; "
        "mov.u32 $0, t; }"
    )


@gluon.jit
def _mark(mark: gl.constexpr, tile, half: gl.constexpr):
    """Store the clock as a mark of the program's tile, by the first thread of a consumer."""
    thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    program = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    at = ((program * CONSUMERS + half) * TILES + tile) * MARKS
    asm: gl.constexpr = _store_clock(mark)
    wanted = gl.where(gl.to_tensor(tile) < TILES, thread, 1)
    gl.inline_asm_elementwise(asm, "=r,r,r", [thread * 0 + at, wanted], dtype=gl.int32, is_pure=False, pack=1)
'''


def with_marks(source: str) -> tuple[str, list[str]]:
    """Return the source of a module with marks in `process_tile`, and their names: steps, and waits that are over.

    Raises:
        ValueError: The module has no `process_tile` whose steps can be marked.
    """
    found = re.search(r"\n@gluon\.jit\ndef process_tile\((.*?)\):\n    \"\"\".*?\"\"\"\n", source, re.S)
    half = "half" if found is not None and "half: gl.constexpr" in found[1] else "0"
    if found is None or (half == "0" and "gl.constexpr" in found[1]):
        raise ValueError("expected a function process_tile of a consumer, half, or of the only consumer")
    end = source.index("\n\n\n", found.end())
    tile = "pipe_state.count" if "pipe_state" in found[1] else "n"
    names: list[str] = []
    lines = [f"    marked_tile = {tile}"]

    def mark(name: str) -> None:
        lines.append(f"    _mark({len(names)}, marked_tile, {half})")
        names.append(name)

    mark("start")
    for line in source[found.end() : end].split("\n"):
        step = re.match(r"    # (\(\d+\)(?:(?:,| and| to) \(\d+\))*)", line)
        if step or line.startswith("    return"):
            mark(step[1] if step else "end")
        lines.append(line)
        if wait := re.match(r"    mbarrier\.wait\(shared\.(\w+)", line):
            mark(f"after {wait[1]}")
    if names[-1] != "end":
        mark("end")
    if len(names) > MARKS:
        raise ValueError(f"got {len(names)} steps and waits, expected at most {MARKS}")
    text = MARK.replace("ADDRESS", ADDRESS)
    warps = 4 if half == "half" else 8  # the only consumer has two warpgroups
    for name, value in (("CONSUMERS", CONSUMERS), ("TILES", TILES), ("MARKS", MARKS), ("WARPS", warps)):
        text = text.replace(name, str(value))
    signature, body = source[found.start() : found.end()], "\n".join(lines)
    return f"{source[: found.start()]}{text}\n{signature}{body}{source[end:]}", names


def call_of_model(given: argparse.Namespace) -> Any:
    """Return a forward and backward of the model on the GPU."""
    from tfla.bench import delta
    from tfla.measure import operator
    from tfla.measure.problem import BOTH, Problem, call_of

    problem = Problem(given.batch, given.steps, given.heads, given.dqk, given.dhv)
    if given.model in ("exp", "sigmoid"):
        return call_of(operator.mlstm(problem, given.model, backend="hopper"), BOTH)
    return call_of(delta.chunk(problem, given.model, backend="hopper"), BOTH)


def print_time(call: Any, module: str) -> None:
    """Print the mean milliseconds of the module's kernels in a call, by the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    total = sum(e.device_time_total for e in found.key_averages() if e.key.startswith(f"{module}_kernel"))
    print(f"{module}_kernel: {total / CALLS / 1e3:.3f} ms in a call", flush=True)


def measure(given: argparse.Namespace) -> None:
    """Print the time of the kernel, and with marks its clocks, of the package that is imported."""
    import torch

    memory = torch.zeros(PROGRAMS, CONSUMERS, TILES, MARKS, dtype=torch.int32, device="cuda")
    os.environ[ADDRESS] = str(memory.data_ptr())
    call = call_of_model(given)
    for _ in range(2):
        call()
    memory.zero_()
    print_time(call, given.module)
    if not given.marks:
        return
    clocks = memory.cpu().long()
    programs = int((clocks[:, 0, 2, 0] != 0).sum())
    if programs == 0:
        sys.exit(f"--model {given.model}: no program of {given.module}_kernel has computed three tiles")
    for consumer in range(CONSUMERS if clocks[:, 1].any() else 1):
        tiles = clocks[:programs, consumer, 2:]  # the first tiles wait for their data
        between = (tiles[..., 1 : len(given.marks)] - tiles[..., : len(given.marks) - 1]) & 0xFFFFFFFF
        between = between[tiles[..., 0] != 0].float().median(0).values
        whole = ((tiles[:, 1:, 0] - tiles[:, :-1, 0]) & 0xFFFFFFFF)[tiles[:, 1:, 0] != 0].float().median()
        print(f"consumer {consumer}, {programs} programs; a tile: {whole:.0f} clocks", flush=True)
        for first, second, count in zip(given.marks, given.marks[1:], between.tolist(), strict=False):
            print(f"  {first:>16} to {second:<16} {count:7.0f}", flush=True)


def options() -> argparse.Namespace:
    """Return the options of the command line.

    Exits with an error that names the option where its value is not allowed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="the module of the kernel, such as channel_gradients")
    parser.add_argument("--model", default="kda", choices=MODELS, help="which recurrence (kda)")
    parser.add_argument("--steps", type=int, default=8192, help="steps of a sequence (8192)")
    parser.add_argument("--batch", type=int, default=8, help="sequences (8)")
    for i, name in enumerate(("heads", "dqk", "dhv")):
        sizes = ", ".join(f"{model} {size[i]}" for model, size in MODELS.items())
        parser.add_argument(f"--{name}", type=int, help=f"by default that of the model: {sizes}")
    parser.add_argument("--marks", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    for name, size in zip(("heads", "dqk", "dhv"), MODELS[given.model], strict=True):
        setattr(given, name, size if getattr(given, name) is None else getattr(given, name))
    for name in ("steps", "batch", "heads", "dqk", "dhv"):
        if getattr(given, name) < 1:
            parser.error(f"--{name}: got {getattr(given, name)}, expected at least 1")
    if not (HERE / HOPPER / f"{given.module}.py").is_file():
        parser.error(f"MODULE: got {given.module!r}, expected a module of {HOPPER}")
    return given


def main() -> None:
    """Run a process for the library as it is, and one for the copy with marks."""
    given = options()
    if given.marks is not None:
        measure(given)
        return
    source = (HERE / HOPPER / f"{given.module}.py").read_text()
    try:
        marked, names = with_marks(source)
    except ValueError as error:
        sys.exit(f"MODULE: got {given.module!r}: {error}")
    import torch

    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no NVIDIA GPU, which this command needs")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(HERE / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        (copy / HOPPER / f"{given.module}.py").write_text(marked)
        for root, marks in ((HERE, []), (copy, names)):
            environment = {**os.environ, "PYTHONPATH": str(root / "src")}
            if marks:  # the address of the memory is part of what is compiled, and not of the name in Triton's cache
                environment["TRITON_CACHE_DIR"] = str(copy / "cache")
            command = [sys.executable, __file__, *sys.argv[1:], "--marks", *marks]
            if code := subprocess.run(command, env=environment, check=False).returncode:
                sys.exit(code)


if __name__ == "__main__":
    main()
