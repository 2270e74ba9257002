"""The division of GPUs among the workers of pytest-xdist, which takes effect when this module is imported."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock

worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
if worker and count > 1:
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices, first = given.split(","), int(worker.removeprefix("gw")) % count
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first:] + devices[:first])


@contextmanager
def taking_turns() -> Iterator[None]:
    """Around what takes tens of GB of a GPU: one process at a time does, and gives back what it no longer holds."""
    with FileLock(Path(tempfile.gettempdir()) / "tfla_tests.lock", mode=0o666):
        try:
            yield
        finally:
            torch.cuda.empty_cache()
