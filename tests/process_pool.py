"""A pool of processes with process groups, of gloo on the CPU or of NCCL with one GPU each, for tests of several ranks.

The processes are started once for all tests of a session, since starting them is slow: a server process imports PyTorch
once and forks them. A test sends each rank a function by name and its arguments, and gets back what it returns.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from garbage import collect_seldom
from processes import forked_by_server

TIMEOUTS = {"gloo": 60.0, "nccl": 240.0}  # seconds until a call counts as hung; GPUs compile kernels meanwhile


def _serve(backend: str, rank: int, count: int, port: int, pipe: Any) -> None:
    """Answer calls until the pipe is closed."""
    collect_seldom()
    torch.set_num_threads(1)
    if backend == "nccl":
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=TIMEOUTS[backend])
    )
    groups = {size: dist.new_group(list(range(size))) for size in range(1, count + 1)}
    while True:
        try:
            module, name, size, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            if "torch._dynamo" in sys.modules:  # what earlier calls compiled counts towards the limit of recompiles
                torch.compiler.reset()
            found = getattr(importlib.import_module(module), name)(groups[size], **kwargs)
            pipe.send((True, found))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


class RankError(Exception):
    """A rank raised an exception: its type and its message."""


class Pool:
    """Processes that wait for calls.

    Those of a call that hangs are replaced, since their answers would come during later calls.

    Args:
        count: the number of processes; smaller groups have the first ones.
        backend: of torch.distributed, "gloo" or "nccl".
    """

    def __init__(self, count: int = 4, backend: str = "gloo") -> None:
        self.count, self.backend, self.timeout = count, backend, TIMEOUTS[backend]
        self._start()

    def _start(self) -> None:
        """Start the processes."""
        context = forked_by_server()
        # The store listens here from the beginning, on a port that nothing else can take in the meantime.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes, self.processes = [], []
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            args = (self.backend, rank, self.count, self.store.port, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(
        self, size: int, fn: Callable[..., Any], each: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``fn(group, **kwargs)`` on `size` ranks, with additional arguments `each`, and return the results."""
        for rank in range(size):
            own = each[rank] if each is not None else {}
            self.pipes[rank].send((fn.__module__, fn.__name__, size, {**kwargs, **own}))
        answers = []
        for rank in range(size):
            if not self.pipes[rank].poll(self.timeout + 30.0):
                self.close(patience=0.0)
                self._start()
                errors = "".join(
                    f"\nrank {other}:\n{answer[2]}" for other, (good, answer) in enumerate(answers) if not good
                )
                raise TimeoutError(f"rank {rank} of {size} does not answer{errors}")
            answers.append(self.pipes[rank].recv())
        for rank, (good, answer) in enumerate(answers):
            if not good:
                kind, message, trace = answer
                raise RankError(f"{kind}: {message}\nrank {rank}:\n{trace}")
        return [answer for _, answer in answers]

    def close(self, patience: float = 10.0) -> None:
        """End the processes, and kill those that have not ended after `patience` seconds."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(patience)
            if process.is_alive():
                process.kill()
