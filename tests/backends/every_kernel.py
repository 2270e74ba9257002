"""Runs every kernel on the GPU, forward and backward, under compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/backends/every_kernel.py [CASE...]

CASE = backend kernel gate dqk dhv dtype shape, with commas between; all of them if none is named. Lengths are ragged,
so that tiles reach over every end. The kernel "steps" is decoding, and "model" the fused step of a language model.
The kernels "delta" and "delta_steps" are those of the delta rule, whose gate is "step", "channel" or "none".
"""

from __future__ import annotations

import itertools
import sys

import torch
from torch import Tensor

import tfla
from tfla.nn import LanguageModel, ModelConfig
from tfla.nn.fused_step import FusedStep

CASES = [
    "triton,fused,exp,64,128,bfloat16,whole",
    "triton,fused,exp,64,128,bfloat16,segmented",
    "triton,fused,sigmoid,100,72,bfloat16,packed",
    "triton,fused,exp,24,40,float32,packed segmented",
    "triton,fused,exp,512,40,float32,whole grouped",
    "triton,tfla,exp,64,128,bfloat16,segmented",
    "triton,tfla,sigmoid,100,72,bfloat16,packed",
    "triton,tfla,exp,24,40,float32,packed segmented",
    "triton,steps,exp,64,128,bfloat16,one",
    "triton,steps,sigmoid,24,40,float32,several",
    "triton,model,exp,16,32,bfloat16,one",
    "triton,model,exp,16,32,bfloat16,several",
    "triton,delta,step,128,128,bfloat16,packed",
    "triton,delta,none,72,136,bfloat16,whole grouped",
    "triton,delta_steps,step,100,72,bfloat16,one",
    "triton,delta_steps,channel,64,128,bfloat16,several",
    "hopper,fused,exp,128,256,bfloat16,whole",
    "hopper,fused,exp,128,256,bfloat16,segmented",
    "hopper,fused,sigmoid,128,128,bfloat16,whole",
    "hopper,fused,exp,256,512,bfloat16,segmented",
    "hopper,fused,sigmoid,512,512,bfloat16,packed",
    "hopper,fused,exp,1024,128,bfloat16,whole",
    "hopper,fused,exp,64,64,bfloat16,segmented",
    "hopper,fused,sigmoid,128,64,bfloat16,whole",
    "hopper,fused,exp,128,256,bfloat16,packed",
    "hopper,fused,sigmoid,256,128,bfloat16,packed segmented",
]
T, H, LENGTHS, SEGMENT = 150, 2, (70, 0, 1, 79), 64
DEVICE = "cuda"


def rows(T: int, *shape: int) -> Tensor:
    return torch.randn(1, T, *shape, device=DEVICE)


def operator(backend: str, kernel: str, gate: str, K: int, V: int, dtype: torch.dtype, shape: str) -> list[Tensor]:
    """Run the forward and the backward, with an initial and a final state."""
    lengths = LENGTHS if "packed" in shape else (T,)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE) if "packed" in shape else None
    groups = H // 2 if "grouped" in shape else H
    q, k, v = (rows(T, heads, d).to(dtype) for heads, d in ((groups, K), (groups, K), (H, V)))
    i, f = rows(T, H), rows(T, H)
    C, n, m = (torch.randn(len(lengths), H, *size, device=DEVICE) for size in ((K, V), (K,), ()))
    leaves = [x.requires_grad_() for x in (q, k, v, i, f, C)]
    h, last = tfla.mlstm(
        q, k, v, i, f, input_gate="exp" if gate == "exp" else "sigmoid", return_state=True, cu_seqlens=cu_seqlens,
        initial_state=tfla.State(C, n, m) if gate == "exp" else tfla.State(C), backend=backend, kernel=kernel,
        chunk_size=SEGMENT if "segmented" in shape else T,
    )  # fmt: skip
    grads = torch.autograd.grad([h, last.C], leaves, [torch.ones_like(h), torch.ones_like(last.C)])
    return [h, last.C, *grads]


def steps(backend: str, gate: str, K: int, V: int, dtype: torch.dtype, count: int) -> list[Tensor]:
    q, k, v = (rows(count, H, d).to(dtype) for d in (K, K, V))
    state = tfla.State.zeros(1, H, K, V, normalize=gate == "exp", device=DEVICE)
    h, last = tfla.mlstm_steps(q, k, v, rows(count, H), rows(count, H), state, input_gate=gate, backend=backend)
    return [h, last.C]


def delta_inputs(gate: str, K: int, V: int, dtype: torch.dtype, count: int, heads: int = H) -> dict[str, Tensor]:
    q, k, v = rows(count, heads, K).to(dtype), rows(count, heads, K).to(dtype), rows(count, H, V).to(dtype)
    x = {"q": q, "k": k / k.norm(dim=-1, keepdim=True), "v": v, "beta": rows(count, H).sigmoid()}
    if gate != "none":
        x["log_f"] = -rows(count, H, *[K] * (gate == "channel")).abs()
    return x


def delta(backend: str, gate: str, K: int, V: int, dtype: torch.dtype, shape: str) -> list[Tensor]:
    """Run the forward and the backward, with an initial and a final state."""
    lengths = LENGTHS if "packed" in shape else (T,)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE) if "packed" in shape else None
    x = delta_inputs(gate, K, V, dtype, T, H // 2 if "grouped" in shape else H)
    C = torch.randn(len(lengths), H, K, V, device=DEVICE)
    leaves = [t.requires_grad_() for t in (*x.values(), C)]
    h, last = tfla.delta_rule(
        **x, initial_state=tfla.State(C), return_state=True, cu_seqlens=cu_seqlens, backend=backend
    )
    grads = torch.autograd.grad([h, last.C], leaves, [torch.ones_like(h), torch.ones_like(last.C)])
    return [h, last.C, *grads]


def delta_steps(backend: str, gate: str, K: int, V: int, dtype: torch.dtype, count: int) -> list[Tensor]:
    state = tfla.State.zeros(1, H, K, V, normalize=False, device=DEVICE)
    x = delta_inputs(gate, K, V, dtype, count)
    h, last = tfla.delta_rule_steps(**x, state=state, backend=backend)
    h, last = tfla.delta_rule_steps(**x, state=last, backend=backend)
    return [h, last.C]


def fused_step(gate: str, width: int, dtype: torch.dtype, batch: int) -> list[Tensor]:
    """Two steps, the second from the state of the first."""
    config = ModelConfig(
        d_model=width, num_blocks=1, num_heads=H, vocab_size=70, mixer="mlstm_exp" if gate == "exp" else "mlstm_sig"
    )
    model = LanguageModel(config).to(DEVICE, dtype)
    step, state = FusedStep(model, batch), model.initial_state(batch)
    ids = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    with torch.no_grad():
        for _ in range(2):
            out, state = step(ids, state)
    return [out]


def run(backend: str, kernel: str, gate: str, dqk: str, dhv: str, dtype: str, shape: str) -> None:
    K, V, dt = int(dqk), int(dhv), getattr(torch, dtype)
    if kernel == "steps":
        found = steps(backend, gate, K, V, dt, 4 if shape == "several" else 1)
    elif kernel == "delta":
        found = delta(backend, gate, K, V, dt, shape)
    elif kernel == "delta_steps":
        found = delta_steps(backend, gate, K, V, dt, 4 if shape == "several" else 1)
    elif kernel == "model":
        found = fused_step(gate, H * V, dt, 3 if shape == "several" else 1)
    else:
        found = operator(backend, kernel, gate, K, V, dt, shape)
    assert all(x.isfinite().all() for x in found)


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        run(*case.split(","))
        print(case, flush=True)
