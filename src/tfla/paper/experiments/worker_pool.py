"""The pool of worker processes that train several models at once and save them when they are stopped."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfla._util.errors import UserError
from tfla.paper.experiments.outcome import FAILED, finished
from tfla.train.config import TrainConfig
from tfla.train.run_folder import TOKENS_FOLDER


def work(jobs: Any, results: Any, stop: Any, tokens: Path, log: Path) -> None:
    """Train one run after the other in this worker process, until a job is None or `stop` is set."""
    with open(log, "a", buffering=1) as file, contextlib.redirect_stderr(file):
        from tfla.train.loop import train

        while not stop.is_set():
            config: TrainConfig | None = jobs.get()
            if config is None:
                return
            why = None
            try:
                if not (config.run / TOKENS_FOLDER).exists():
                    config.run.mkdir(parents=True, exist_ok=True)
                    shutil.copytree(tokens, config.run / TOKENS_FOLDER)
                step = train(config).step
            except UserError as error:
                step, why = config.steps, str(error)
            except ValueError as error:  # a backend that does not take these inputs
                step, why = config.steps, str(error).splitlines()[0]
            if why is not None:
                (config.run / FAILED).write_text(why + "\n")
            results.put((config.run.name, why))
            if step < config.steps:  # a signal asked for it
                return


def train_all(
    configs: list[TrainConfig], tokens: Path, processes: int, budget: float | None, say: Callable[[str], None]
) -> int:
    """Train the runs that are not finished; return how many are left when the budget is spent.

    Args:
        configs: the runs.
        tokens: folder of the tokens that all runs share.
        processes: the number of runs at once.
        budget: seconds after which runs save a checkpoint and end; they continue next time. None is no limit.
        say: prints a line on the progress.
    """
    todo = [config for config in configs if not finished(config)]
    if len(todo) < len(configs):
        say(f"{len(configs) - len(todo)} of {len(configs)} runs are finished already")
    if not todo:
        return 0
    context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a forked process
    jobs, results, stop = context.Queue(), context.Queue(), context.Event()
    count = min(processes, len(todo))
    for job in (*todo, *[None] * count):
        jobs.put(job)
    folder = todo[0].run.parent
    pool = [
        context.Process(target=work, args=(jobs, results, stop, tokens, folder / f"worker-{number}.log"))
        for number in range(count)
    ]
    start = time.monotonic()
    for process in pool:
        process.start()
    ended = 0
    try:
        while any(process.is_alive() for process in pool) or not results.empty():
            if budget is not None and time.monotonic() - start > budget and not stop.is_set():
                say(f"the budget of {budget:.0f} s is spent: runs save a checkpoint")
                stop.set()
                for process in pool:
                    process.terminate()
            with contextlib.suppress(queue.Empty):
                name, why = results.get(timeout=0.5)
                ended += 1
                note = f": {why}" if why else ""
                say(f"{time.monotonic() - start:6.0f} s  {ended} of {len(todo)}  {name}{note}")
    except KeyboardInterrupt:
        stop.set()  # the runs got the signal too
        raise
    finally:
        for process in pool:
            process.join()
        jobs.cancel_join_thread()
    return sum(not finished(config) for config in configs)


def default_processes(device: str) -> int:
    """Return the number of runs at once: one a core, up to 16, on a GPU, and half of the cores on a CPU."""
    return min(16, os.cpu_count() or 1) if device.startswith("cuda") else max(1, (os.cpu_count() or 2) // 2)


def say(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)
