"""Compares versions of this library on one GPU: correctness first, then times, kernel by kernel, then host times.

    python benchmarks/compare.py [--setups NAME,NAME] [--check-only | --time-only] [--output FILE] FOLDER ...

Each FOLDER is a checkout of the repository, or a folder that has its src; its name stands beside its times. All
versions are first compiled and checked against the chunkwise backend in float64, in processes that run side by side.
Then one process for each version stays, and the versions are timed in turn, SAMPLES calls each, ROUNDS times over, so
that the clocks of the GPU are the same for all. A line has the median time of each version and, for all but the first,
the median over rounds of its time divided by that of the first, with the smallest and the largest one in brackets.

Times of the GPU are milliseconds of calls that start after a pause, while the GPU is still busy, so that they hold no
host time. Below them stand the microseconds of each kernel of a forward and backward, in their order. Host times are
the microseconds that the host takes to enqueue a call of small shapes, in a loop of such calls; the processes of all
versions run on the same core. The step of a model is
that of a Decoder with one sequence and blocks like those of the 7B model, which replays a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

SETUPS = {  # T, tokens, heads, dqk, dhv
    "fig4": (8192, 65536, 16, 128, 256),
    "long": (65536, 65536, 16, 128, 256),
    "square": (8192, 65536, 32, 128, 128),
    "small_head": (8192, 32768, 64, 64, 64),
    "wide": (8192, 65536, 8, 256, 512),
    "w512": (8192, 65536, 8, 512, 512),
}
HOST_SETUPS = {"one short sequence": (128, 128, 4, 128, 256), "one sequence": (1024, 1024, 4, 128, 256)}
GATES = ("sigmoid", "exp")
KERNELS: dict[str, dict[str, Any]] = {  # after a colon in the name of a setup: arguments of tfla.mlstm
    "": {},
    "triton": {"backend": "triton"},
    "tfla": {"backend": "triton", "kernel": "tfla", "chunk_size": 128},
}
ROUNDS, SAMPLES, PAUSE = 5, 6, 0.004  # times that a version has its turn, samples of a turn, seconds before each
LIMIT = 300  # seconds that a process of a check may take
HOST_CALLS = 40  # calls in a row of a sample of host time, fewer than fill the queue of launches
MODEL_BLOCKS = 8  # of 4,096 channels, 8 heads
AT_ONCE = 11  # processes, of up to 7 GiB of GPU memory: inputs, results, states and 0.5 GiB of the driver
TOLERANCE = 1e-2  # relative error in bfloat16, or a third more than the Triton backend's, where denominators are small


def inputs(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return random inputs on the GPU: q, k, v and dh in bfloat16, gates in float32."""
    import torch

    T, tokens, H, K, V = sizes
    torch.manual_seed(0)
    shapes = {"q": (K,), "k": (K,), "v": (V,), "i": (), "f": (), "dh": (V,)}

    def random(name: str) -> torch.Tensor:
        x = torch.randn(tokens // T, T, H, *shapes[name], device="cuda")
        x = x + 3 if name == "f" else x if name == "i" else x.bfloat16()  # one by one, for the sake of memory
        return x.requires_grad_(name != "dh")

    return {name: random(name) for name in shapes}


def setup(sizes: tuple[int, ...], gate: str, kernels: str = "") -> tuple[Callable[..., list], ...]:
    """Return forward(**options) and forward_backward(**options), which return results."""
    import torch

    import tfla

    x = inputs(sizes)

    def forward(dtype: torch.dtype | None = None, **options: str) -> list[torch.Tensor]:
        leaves = [x[n] if dtype is None else x[n].detach().to(dtype).requires_grad_() for n in "qkvif"]
        return [tfla.mlstm(*leaves, input_gate=gate, **(options or KERNELS[kernels])), *leaves]

    def both(**options: Any) -> list[torch.Tensor]:
        h, *leaves = forward(**options)
        return [h.detach(), *torch.autograd.grad(h, leaves, x["dh"].to(h.dtype))]

    return forward, both


def decoding_step(gate: str) -> Callable[[], object]:
    """Return a call that decodes one step of one sequence from the state that the last call returned."""
    import torch

    import tfla

    x = inputs((1, 1, 4, 128, 256))
    state = tfla.State.zeros(1, 4, 128, 256, normalize=gate == "exp", device="cuda")

    @torch.no_grad()
    def step() -> torch.Tensor:
        nonlocal state
        h, state = tfla.mlstm_steps(*(x[n] for n in "qkvif"), state, input_gate=gate)
        return h

    return step


def check(name: str, gate: str) -> None:
    """Raise an AssertionError if results are wrong, or not the same twice."""
    import torch

    shape, _, kernels = name.partition(":")
    T, _, *sizes = SETUPS[shape]
    _, both = setup((min(T, 4000), 4000, *sizes), gate, kernels)
    first, second, truth = both(), both(), both(dtype=torch.float64, backend="chunkwise")
    assert all(map(torch.equal, first, second)), f"{name} {gate}: other bits the second time"
    names = ("h", "dq", "dk", "dv", "di", "df")
    errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(first, truth, strict=True)]
    if max(errors) > TOLERANCE:
        for what, error, x, y in zip(names, errors, both(backend="triton"), truth, strict=True):
            allowed = max(TOLERANCE, 1.3 * float((x.double() - y).norm() / y.norm()))
            assert error <= allowed, f"{name} {gate}: {what} is off by {error:.1e}, allowed is {allowed:.1e}"


def model_step() -> Callable[[], object]:
    """Return a call that decodes one token of one sequence with a whole model."""
    import torch

    from tfla.nn import Decoder, LanguageModel, ModelConfig

    torch.manual_seed(0)
    with torch.device("cuda"):
        config = ModelConfig(d_model=4096, num_blocks=MODEL_BLOCKS, num_heads=8, vocab_size=50_304)
        model = LanguageModel(config).bfloat16()
    decoder, ids = Decoder(model, model.initial_state(1)), torch.zeros(1, dtype=torch.int64, device="cuda")
    return lambda: decoder.step(ids)


def milliseconds(call: Callable[[], object]) -> float:
    """Return the GPU's time of one call after a pause."""
    import torch

    torch.cuda.synchronize()
    time.sleep(PAUSE)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(4_000_000)  # keeps the GPU busy for 2 ms, in which the host enqueues the call
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def host_microseconds(call: Callable[[], object]) -> float:
    """Return the host's time to enqueue one of HOST_CALLS calls."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return (time.perf_counter() - begin) / HOST_CALLS * 1e6


def kernels(call: Callable[[], object], calls: int = 4) -> str:
    """Return the microseconds of each kernel, in their order."""
    import torch
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(calls):
            call()
            torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    each = len(events) // calls
    times = (sum(events[n + each * i].time_range.elapsed_us() for i in range(calls)) / calls for n in range(each))
    return " ".join(f"{e.name} {t:.0f}" for e, t in zip(events, times, strict=False))


def calls(case: str, gate: str = "") -> dict[str, Callable[[], object]]:
    """Return the calls of a case: "model", "host" or the name of a setup."""
    import torch

    if case == "model":
        return {"step": model_step()}
    if case == "host":
        found = {"decoding step": decoding_step(gate)}
        for name, sizes in HOST_SETUPS.items():
            forward, both = setup(sizes, gate)
            found |= {f"forward, {name}": torch.no_grad()(forward), f"forward + backward, {name}": both}
        return found
    shape, _, kernels = case.partition(":")
    forward, both = setup(SETUPS[shape], gate, kernels)
    return {"forward": torch.no_grad()(forward), "forward + backward": both}


def warm_up(*case: str) -> None:
    """Compile what a case takes."""
    for call in calls(*case).values():
        call()


def serve() -> None:
    """Time calls as standard input asks for them, a line of JSON each, and answer with a line on standard output."""
    # Cores of one machine differ in speed by what else runs on them, so all versions, which take turns, use the same.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import torch

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    found: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        what, *rest = json.loads(line)
        answer: object = None
        try:
            if what == "prepare":
                found = {}
                torch.cuda.empty_cache()
                found = calls(*rest)
                for name in list(found) * 3:
                    found[name]()
                torch.cuda.synchronize()
                answer = list(found)
            elif what == "profile":
                answer = kernels(found[rest[0]])
            else:
                clock = host_microseconds if what == "host" else milliseconds
                answer = [clock(found[rest[0]]) for _ in range(SAMPLES)]
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers)


def environment(folder: str) -> dict[str, str]:
    """Return the environment of a process with the version in `folder`."""
    return {**os.environ, "PYTHONPATH": f"{Path(folder, 'src').resolve()}:{os.environ.get('PYTHONPATH', '')}"}


def run(folder: str, *arguments: str) -> str | None:
    """Run this file in a process with the version in `folder` and return why it failed, or None."""
    command = [sys.executable, __file__, "--one", *arguments]
    try:
        done = subprocess.run(
            command, env=environment(folder), timeout=LIMIT, check=False, stderr=subprocess.PIPE, text=True
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {LIMIT} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]


class Version:
    """A process with one version, which makes calls when it is asked to."""

    def __init__(self, folder: str) -> None:
        self.name = Path(folder).absolute().name
        command = [sys.executable, __file__, "--one", "serve"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment(folder), stdin=pipe, stdout=pipe, text=True)

    def ask(self, *request: str) -> None:
        """Send a request."""
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """Wait for the answer to a request."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or '"the process has ended"')


def ratios(versions: list[Version], what: str, call: str) -> dict[str, dict[str, Any]]:
    """Return the times of a call by version: the median, and what it is by round in times of the first version."""
    rounds: dict[str, list[list[float]]] = {version.name: [] for version in versions}
    for number in range(ROUNDS):
        for version in versions if number % 2 == 0 else versions[::-1]:
            version.ask(what, call)
            samples = version.answer()
            if isinstance(samples, str):
                raise RuntimeError(f"{version.name}: {samples}")
            rounds[version.name].append(samples)
    first = [median(turn) for turn in rounds[versions[0].name]]
    return {
        name: {
            "median": median(sample for turn in turns for sample in turn),
            "ratios": [median(turn) / base for turn, base in zip(turns, first, strict=True)],
        }
        for name, turns in rounds.items()
    }


def text(times: dict[str, dict[str, Any]]) -> str:
    """Return the times of a call by version, with ratios to the first."""
    parts = []
    for number, (name, row) in enumerate(times.items()):
        part = f"{name} {row['median']:.4g}"
        if number:
            part += f" = {median(row['ratios']):.3f} x ({min(row['ratios']):.3f} to {max(row['ratios']):.3f})"
        parts.append(part)
    return ", ".join(parts)


def compare(folders: list[str], cases: list[tuple[str, ...]], output: str | None) -> bool:
    """Print the times of all cases, write them to a file, and return whether no version failed."""
    versions, rows, complete = [Version(folder) for folder in folders], [], True
    for case in cases:
        what, profiled = "host" if case[0] == "host" else "time", case[0] not in ("host", "model")
        for version in versions:
            version.ask("prepare", *case)
        answers = {version.name: version.answer() for version in versions}
        failed = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
        if failed:
            print(f"{' '.join(case):30} failed: {failed}", flush=True)
            complete = False
            continue
        row: dict[str, Any] = {"case": list(case), "unit": "us" if what == "host" else "ms", "calls": {}}
        for call in answers[versions[0].name]:
            row["calls"][call] = ratios(versions, what, call)
            print(f"{' '.join(case):24} {call}, {row['unit']}: {text(row['calls'][call])}", flush=True)
        if profiled:
            row["kernels"] = {}
            for version in versions:
                version.ask("profile", "forward + backward")
                row["kernels"][version.name] = version.answer()
                print(f"  {version.name}, us: {row['kernels'][version.name]}", flush=True)
        rows.append(row)
        if output:
            Path(output).write_text(json.dumps(rows, indent=1) + "\n")
    for version in versions:
        version.process.communicate()
    return complete


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", default=",".join(SETUPS), help="names with commas between (default: %(default)s)")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--check-only", action="store_true", help="time nothing")
    parts.add_argument("--time-only", action="store_true", help="compile first, but check nothing")
    parser.add_argument("--output", help="a JSON file for the times, written after each case")
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    options = parser.parse_args()
    names = options.setups.split(",")
    allowed = [shape + (kernels and f":{kernels}") for shape in SETUPS for kernels in KERNELS]
    if unknown := sorted(set(names) - set(allowed)):
        parser.error(f"--setups: got {unknown[0]!r}, allowed are {', '.join(allowed)}")
    for folder in options.folders:
        if not Path(folder, "src", "tfla").is_dir():
            parser.error(f"FOLDER: got {folder}, which has no src/tfla; it has to be a checkout of this library")
    if len({Path(folder).absolute().name for folder in options.folders}) < len(options.folders):
        parser.error("FOLDER: got two folders of one name, expected different names, which stand beside the times")
    setups = [(name, gate) for name in names for gate in GATES]
    timed = [] if options.check_only else [("model",), *(("host", gate) for gate in GATES), *setups]
    jobs = [(folder, "warm_up", *case) for case in timed for folder in options.folders]
    if not options.time_only:
        jobs += [(folder, "check", *case) for case in setups for folder in options.folders]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        reasons = list(pool.map(lambda job: run(*job), jobs))
    failed = {job: reason for job, reason in zip(jobs, reasons, strict=True) if reason}
    print(f"{len(jobs) - len(failed)} of {len(jobs)} checks and compilations passed", flush=True)
    for job, reason in failed.items():
        print(f"  {' '.join(job)}: {reason}", flush=True)
    complete = options.check_only or compare(options.folders, timed, options.output)
    return 0 if complete and not failed else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        what, *rest = sys.argv[2:]
        {"check": check, "warm_up": warm_up, "serve": serve}[what](*rest)
    else:
        sys.exit(main())
