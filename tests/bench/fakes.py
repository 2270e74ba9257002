"""Implementations that work or fail, for `tfla.bench.gpu`; imported in the processes that it starts."""

import os
import sys
import time

import torch

from tfla.measure.problem import Work


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        raise NotImplementedError("no gradient here\nmore about it")


def works(problem):
    print("a library that prints")
    return Work(lambda x: x * 2, problem.qkv()[:1], {"implementation": "fake"})


def half(problem):
    return Work(NoBackward.apply, problem.qkv()[:1])


def aborts(problem):
    print("LLVM ERROR: cannot select\nstack dump", file=sys.stderr, flush=True)
    os.abort()


def hangs(problem):
    time.sleep(60)


def together(problem, fails=None, how="raises"):
    """Wait for the other processes in each call; the process `fails` does not come."""
    import torch.distributed as dist

    rank = dist.get_rank()

    def run(x):
        if rank == fails:
            if how == "aborts":
                aborts(problem)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        time.sleep(0.01 * rank)
        dist.barrier()
        return x * 2

    return Work(run, problem.qkv()[:1], {"allocated_bytes": 100 + rank})
