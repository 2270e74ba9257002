"""A process that ends right after a backward on a GPU ends cleanly."""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading

import pytest
import torch

pytest.importorskip("triton")

from tfla.backends.gpu import at_exit, replay

# On one core the backward's thread has hardly a turn between handing over the gradients and the end of the process.
SCRIPT = """
import os
import torch
import tfla

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
q, k, v = (torch.randn(1, 256, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
i, f = (torch.randn(1, 256, 2, device="cuda", requires_grad=True) for _ in range(2))
torch.autograd.grad(tfla.mlstm(q, k, v, i, f).sum(), [q, k, v, i, f])
"""
PROCESSES = 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_process_ends_cleanly() -> None:
    command = [sys.executable, "-c", SCRIPT]
    subprocess.run(command, check=True)  # compiles
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    said = [process.communicate()[1] for process in running]
    assert not any("terminate called" in text for text in said), said
    assert [process.returncode for process in running] == [0] * PROCESSES, said


def test_only_threads_of_backwards_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each GPU, whatever the thread; a forward in the main thread registers nothing."""
    registered: list[torch.device] = []
    monkeypatch.setattr(atexit, "register", lambda settle, device: registered.append(device))
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)
    monkeypatch.setattr(replay, "_THREAD", replay._Thread())
    at_exit.settle_at_exit.cache_clear()
    gpu = torch.device("cuda", 0)
    try:
        replay._make_context_current(gpu)
        assert not registered
        for _ in range(2):
            thread = threading.Thread(target=replay._make_context_current, args=(gpu,))
            thread.start()
            thread.join()
        assert registered == [gpu]
    finally:
        at_exit.settle_at_exit.cache_clear()


@pytest.mark.parametrize("device", ["cpu", "cuda:99"])
def test_a_device_that_has_failed_does_not_matter(device: str) -> None:
    at_exit._settle(torch.device(device))
