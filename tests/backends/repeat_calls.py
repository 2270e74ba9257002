"""Repeats a call of the delta rule, and prints how often its outputs have other bits: python repeat_calls.py SECONDS.

Heads are 64 x 64: with these, tensors of `solve_kernel` come to lie where its mbarrier was.
"""

import sys
import time

import torch

import tfla

CALLS = 8  # of a CUDA graph


def main() -> None:
    torch.manual_seed(0)
    shape = 64, 256, 4, 64
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    beta = torch.rand(shape[:3], device="cuda")

    def call() -> torch.Tensor:
        return tfla.delta_rule(q, k, v, beta, normalize_qk=True)

    expected = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.stack([(call() != expected).any() for _ in range(CALLS)]).sum()
    total, start = torch.zeros_like(found), time.perf_counter()
    while time.perf_counter() - start < float(sys.argv[1]):
        for _ in range(20):
            graph.replay()
            total += found
        torch.cuda.synchronize()
    print(int(total))


if __name__ == "__main__":
    main()
