"""Functions that run on several processes, connected by gloo."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from garbage import collect_seldom

PRELOADED = [
    "torch._dynamo", "tfla.distributed.parallel_model", "tfla.train.distributed_checkpoint", "tfla.train.loop",
    "safetensors.torch", "process_pool",
]  # fmt: skip


def forked_by_server() -> Any:
    """Return the way to start processes that a server forks, which imports PyTorch once for all of a session."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start(count: int, function: Callable[..., None], *args: Any) -> None:
    """Call ``function(rank, *args)`` on ``count`` new processes, and raise here what any of them raises."""
    forked_by_server()
    mp.start_processes(function, args, nprocs=count, start_method="forkserver")


def run_on_processes(count: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` on ``count`` processes with a process group of gloo; return what rank 0 returns.

    An exception of any process is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        start(count, _process, count, folder, function, args)
        return torch.load(Path(folder) / "result.pt", weights_only=False)


def _process(rank: int, count: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    collect_seldom()
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=120))
    result = function(*args)
    if rank == 0:
        torch.save(result, Path(folder) / "result.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_alone(function: Callable[..., Any], *args: Any) -> None:
    """Call ``function(*args)`` in a new process, which has no other threads and may therefore fork itself.

    A child that is forked while another thread holds a lock, of a thread pool of PyTorch or JAX for example, waits for
    it without end. An exception is raised here.
    """
    mp.spawn(_alone, (function, args), nprocs=1)


def _alone(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    function(*args)


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on, below those that the system gives to connections in the meantime."""
    ports: list[int] = []
    random = SystemRandom()  # other processes of the same tests have the same seed
    while len(ports) < count:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port))
            ports += [port] * (port not in ports)
    return ports
