"""Processes that are killed while they save together leave a complete checkpoint, which one process loads."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import forked_by_server, run_alone
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tfla.distributed import parallelize
from tfla.nn import LanguageModel, ModelConfig
from tfla.train.checkpoint import Checkpoints, latest_checkpoint, restore
from tfla.train.config import Data, Optim
from tfla.train.ranks import Ranks
from tfla.train.recipe import optimizer
from tfla.train.tokenizer import create_tokenizer

PROCESSES, STEPS = 2, 3
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.listdir", "os.scandir")
CONFIG = ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=257, ffn_multiple=8)


def fill(model: LanguageModel, adamw: torch.optim.Optimizer, step: int) -> None:
    """Set weights and moments to values that say of which step they are."""
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.fill_(step + number / 1000)
    for state in adamw.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].fill_(10.0 * step)


def trained(ranks: Ranks | None = None) -> tuple[LanguageModel, torch.optim.AdamW]:
    """Return a model and an optimizer that has states."""
    model = LanguageModel(CONFIG)
    if ranks is not None:
        parallelize(model, ranks.mesh)
    adamw = optimizer(model, Optim())
    model(torch.ones(1, 4, dtype=torch.long)).sum().backward()
    adamw.step()
    return model, adamw


class Deadly:
    """A hook that counts a process's calls to the file system, and kills the process at one of them."""

    def __init__(self, at: int | None) -> None:
        self.count, self.at, self.armed = 0, at, False
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.armed and event in EVENTS:
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)


def save_all(rank: int, folder: Path, at: int | None, pipe: Any) -> None:
    """Save step 1, then two more while the weights change, as one of two processes."""
    torch.set_num_threads(1)
    store = join(rank, PROCESSES, folder)
    sizes = {"dp_shard": PROCESSES}
    mesh = init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("dp_shard",))
    ranks = Ranks(rank, PROCESSES, sizes, {"dp_shard": rank}, mesh, store=dist.PrefixStore("run", store))
    pipe.send(save_steps(folder, ranks, *trained(ranks), at))
    dist.barrier()


def join(rank: int, count: int, folder: Path) -> dist.Store:
    """Connect a process with the others and return their store."""
    store = dist.FileStore(str(folder / "store"), count)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("groups", store), rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    return store


def save_steps(folder: Path, ranks: Ranks, model: LanguageModel, adamw: torch.optim.Optimizer, at: int | None) -> int:
    """Save all steps, and return the number of calls to the file system after the first one."""
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=1, ranks=ranks)
    tokenizer = create_tokenizer(Data().tokenizer, None)
    deadly = Deadly(at)
    for step in range(1, STEPS + 1):
        fill(model, adamw, step)
        checkpoints.save(step, model, adamw, tokenizer, {"elapsed": float(step)})
        fill(model, adamw, 100)  # the training goes on while the checkpoint is written
        if step == 1:
            checkpoints.finish()
            dist.barrier()
            deadly.armed = True
    checkpoints.finish()
    deadly.armed = False
    return deadly.count


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A server of processes that have imported all of this already."""
    return forked_by_server()


def run(server: Any, folder: Path, victim: int | None = None, at: int | None = None) -> list[int]:
    """Save on two processes and return their exit codes; the other one is killed after the victim."""
    pipes, processes = [], []
    for rank in range(PROCESSES):
        ours, theirs = server.Pipe()
        process = server.Process(target=save_all, args=(rank, folder, at if rank == victim else None, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    if victim is not None:
        processes[victim].join(60)
        for process in processes:
            process.kill()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    return [pipe.recv() for pipe in pipes] if victim is None else codes


def check(folder: Path) -> int:
    """Load the last complete checkpoint on one process, compare it with what was saved, and return its step."""
    Checkpoints(folder)  # the next start of a run
    assert not list(folder.glob(".tmp-*"))
    latest = latest_checkpoint(folder)
    assert latest is not None
    model, adamw = trained()
    step, progress = restore(latest, model, adamw)
    assert latest.name == f"step-{step:08d}"
    assert progress == {"elapsed": float(step)}
    for number, (name, p) in enumerate(model.named_parameters()):
        assert not isinstance(p, DTensor)
        assert torch.equal(p, torch.full_like(p, step + number / 1000)), name
        if p.requires_grad:
            assert torch.equal(adamw.state[p]["exp_avg"], torch.full_like(p, 10.0 * step)), name
    return step


@pytest.fixture(scope="module")
def calls(server: Any, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The calls to the file system of each process from step 2 on, if none of them is killed."""
    folder = tmp_path_factory.mktemp("whole")
    found = run(server, folder)
    assert check(folder / "checkpoints") == STEPS
    assert found[0] > 20  # the first process also completes checkpoints and deletes earlier ones
    assert found[1] >= STEPS - 1
    return found


@settings(max_examples=3)
@given(data=st.data())
def test_a_process_killed_at_any_call_leaves_a_complete_checkpoint(
    data: st.DataObject, server: Any, calls: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    victim = data.draw(st.integers(0, PROCESSES - 1), "victim")
    at = data.draw(st.integers(1, calls[victim]), "call")
    folder = tmp_path_factory.mktemp("killed")
    codes = run(server, folder, victim, at)
    assert codes[victim] == -signal.SIGKILL
    assert 1 <= check(folder / "checkpoints") <= STEPS


def test_the_process_that_completes_checkpoints_is_killed_at_its_calls(tmp_path: Path) -> None:
    """The first process, alone, is killed at every second call until one attempt succeeds: it renames and deletes."""
    run_alone(_save_and_die_at_each_call, tmp_path)


def _save_and_die_at_each_call(parent: Path) -> None:
    model, adamw = trained()
    reached = []
    for at in range(1, 300, 2):
        folder = parent / str(at)
        folder.mkdir()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                ranks = Ranks(0, PROCESSES, store=join(0, 1, folder))  # which saves as one of several processes does
                save_steps(folder, ranks, model, adamw, at)
                os._exit(0)
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL)
        reached.append(check(folder / "checkpoints"))
        if status == 0:
            break
    assert set(reached) == {1, 2, 3}
    assert reached == sorted(reached)
    assert min(reached.count(step) for step in (1, 2, 3)) > 1
