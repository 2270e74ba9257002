"""How the workers of pytest-xdist share GPUs: importing this spreads them over all, before any of them touches one."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
if worker and count > 1:
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices, first = given.split(","), int(worker.removeprefix("gw")) % count
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first:] + devices[:first])


@contextmanager
def taking_turns() -> Iterator[None]:
    """Around what takes tens of GB of a GPU: one process at a time does, and gives back what it no longer holds."""
    with (Path(tempfile.gettempdir()) / f"tfla_tests_{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        try:
            yield
        finally:
            torch.cuda.empty_cache()
