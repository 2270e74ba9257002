"""Processes of a run that end together: each one says why, even if the process that holds the store ends first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import free_ports, start

from tfla._util.errors import UserError
from tfla.train.config import Parallel
from tfla.train.ranks import join_ranks

PROCESSES = 3
LAST_GOOD = "the last good checkpoint is step-00000002"


def _fail(rank: int, failing: int, port: int, folder: Path) -> None:
    """Join the processes, of which one fails while the others wait for it, and end as `tfla train` does."""
    torch.set_num_threads(1)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES, "MASTER_ADDR": "localhost"}
    os.environ |= {name: str(value) for name, value in (variables | {"MASTER_PORT": port}).items()}
    try:
        with join_ranks(Parallel(), torch.device("cpu")) as ranks:
            ranks.last_good = lambda: LAST_GOOD
            if rank == failing:
                raise UserError("the disk is full")
            dist.barrier()
    except Exception as error:
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # at once, as `end_process_of_group` does


@pytest.mark.parametrize("failing", [0, 2])
def test_every_process_says_which_one_has_failed(failing: int, tmp_path: Path) -> None:
    start(PROCESSES, _fail, failing, free_ports(1)[0], tmp_path)
    for rank in range(PROCESSES):
        reason = f"process {rank} stops, because process {failing} has failed: the disk is full; {LAST_GOOD}"
        expected = "the disk is full" if rank == failing else reason
        assert (tmp_path / f"error-{rank}").read_text() == f"UserError: {expected}"
