"""Runs every kernel on the GPU, forward and backward, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/backends/every_kernel.py [CASE...]

CASE = backend kernel gate dqk dhv dtype shape, with commas between; all of them if none is named. Lengths are ragged,
so that tiles reach over every end.
"""

from __future__ import annotations

import itertools
import sys

import torch

import tfla

CASES = [
    "triton,fused,exp,64,128,bfloat16,whole",
    "triton,fused,exp,64,128,bfloat16,segmented",
    "triton,fused,sigmoid,100,72,bfloat16,packed",
    "triton,fused,exp,24,40,float32,packed segmented",
    "triton,tfla,exp,64,128,bfloat16,segmented",
    "triton,tfla,sigmoid,100,72,bfloat16,packed",
    "triton,tfla,exp,24,40,float32,packed segmented",
    "hopper,fused,exp,128,256,bfloat16,whole",
    "hopper,fused,exp,128,256,bfloat16,segmented",
    "hopper,fused,sigmoid,128,128,bfloat16,whole",
    "hopper,fused,exp,256,512,bfloat16,segmented",
    "hopper,fused,exp,1024,128,bfloat16,whole",
    "hopper,fused,exp,64,64,bfloat16,segmented",
    "hopper,fused,sigmoid,128,64,bfloat16,whole",
    "hopper,fused,exp,128,256,bfloat16,packed",
    "hopper,fused,sigmoid,256,128,bfloat16,packed segmented",
]
T, H, LENGTHS, SEGMENT = 150, 2, (70, 0, 1, 79), 64


def run(backend: str, kernel: str, gate: str, dqk: str, dhv: str, dtype: str, shape: str) -> None:
    """With an initial and a final state."""
    K, V = int(dqk), int(dhv)
    lengths = LENGTHS if "packed" in shape else (T,)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda") if "packed" in shape else None
    q, k, v = (torch.randn(1, T, H, d, device="cuda", dtype=getattr(torch, dtype)) for d in (K, K, V))
    i, f = (torch.randn(1, T, H, device="cuda") for _ in range(2))
    C, n, m = (torch.randn(len(lengths), H, *size, device="cuda") for size in ((K, V), (K,), ()))
    leaves = [x.requires_grad_() for x in (q, k, v, i, f, C)]
    h, last = tfla.mlstm(
        q, k, v, i, f, input_gate="exp" if gate == "exp" else "sigmoid", return_state=True, cu_seqlens=cu_seqlens,
        initial_state=tfla.State(C, n, m) if gate == "exp" else tfla.State(C), backend=backend, kernel=kernel,
        chunk_size=SEGMENT if "segmented" in shape else T,
    )  # fmt: skip
    grads = torch.autograd.grad([h, last.C], leaves, [torch.ones_like(h), torch.ones_like(last.C)])
    assert all(x.isfinite().all() for x in (h, last.C, *grads))


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        run(*case.split(","))
        print(case, flush=True)
