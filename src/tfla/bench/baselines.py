"""The kernels of other libraries, called as their users call them and imported in the process that times them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import torch
from torch import Tensor

from tfla.measure.problem import Problem, Work


def _first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return a result, or the first one of several."""
    return out if isinstance(out, Tensor) else out[0]


def mlstm_kernels(problem: Problem, kernel: str, chunk_size: int | None = None, **options: bool) -> Work:
    """Return a call of NX-AI's kernels, (B, H, T, d), with gates as pre-activations, in the dtype of the inputs."""
    from mlstm_kernels.torch import get_mlstm_kernel

    run = get_mlstm_kernel(f"chunkwise--{kernel}")
    inputs = [x.transpose(1, 2).contiguous() for x in (*problem.qkv(), *problem.gates())]
    options_all = {"chunk_size": problem.chunk_size or chunk_size, **options}
    dtype = getattr(torch, problem.dtype)
    return Work(
        lambda q, k, v, i, f: run(q=q, k=k, v=v, i=i, f=f, autocast_kernel_dtype=dtype, **options_all), inputs
    )  # fmt: skip


def mlstm_kernels_step(problem: Problem, kernel: str) -> Work:
    """Return a call of NX-AI's decoding step, with gates (B, H, 1)."""
    from mlstm_kernels.torch import get_mlstm_step_kernel

    run = get_mlstm_step_kernel(kernel)
    q, k, v, i, f = (t[:, 0] for t in (*problem.qkv(), *problem.gates()))
    c = problem.randn(problem.B, problem.H, problem.dqk, problem.dhv, dtype="float32")
    state = {"c": c, "n": c[..., 0].clone(), "m": torch.zeros_like(i)[..., None]}
    return Work(
        lambda q, k, v, i, f: run(q=q, k=k, v=v, i=i, f=f, **state)[0], [q, k, v, i[..., None], f[..., None]]
    )  # fmt: skip


def simple_gla(problem: Problem, kernel: str, packed: bool = False) -> Work:
    """Return a call of flash-linear-attention's scalar-gated kernels, with log-gates and no input gate."""
    run = getattr(importlib.import_module("fla.ops.simple_gla"), f"{kernel}_simple_gla")
    inputs, ends = [*problem.qkv(), problem.log_forget()], {}
    if packed:
        inputs, ends["cu_seqlens"] = problem.packed(inputs)
    return Work(lambda q, k, v, g: run(q=q, k=k, v=v, g=g, **ends)[0], inputs)


def simple_gla_step(problem: Problem) -> Work:
    """Return a call of one step of flash-linear-attention's recurrent kernel, from a state to the next."""
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    C = problem.randn(problem.B, problem.H, problem.dqk, problem.dhv, dtype="float32")
    return Work(
        lambda q, k, v, g: fused_recurrent_simple_gla(q, k, v, g, initial_state=C, output_final_state=True)[0],
        [*problem.qkv(), problem.log_forget()],
    )


def simple_gla_constant(problem: Problem) -> Work:
    """Return a call with a constant decay per head, as in Lightning Attention and RetNet."""
    from fla.ops.simple_gla import chunk_simple_gla

    decay = -8 / problem.H * torch.arange(problem.H, device=problem.device, dtype=torch.float32)
    return Work(lambda q, k, v: chunk_simple_gla(q=q, k=k, v=v, g_gamma=decay)[0], problem.qkv())


def gla(problem: Problem, kernel: str) -> Work:
    """Return a call of gated linear attention, with a log-gate for every key dimension."""
    run = getattr(importlib.import_module("fla.ops.gla"), f"{kernel}_gla")
    gate = problem.randn(problem.B, problem.T, problem.H, problem.dqk, dtype="float32") + 4.5
    g = torch.nn.functional.logsigmoid(gate).to(getattr(torch, problem.dtype))
    return Work(lambda q, k, v, g: run(q=q, k=k, v=v, g=g)[0], [*problem.qkv(), g])


def lightning(problem: Problem) -> Work:
    """Return a call of flash-linear-attention's Lightning Attention, with the decays of the first of 24 layers."""
    from fla.ops.lightning_attn import chunk_lightning_attn

    return Work(lambda q, k, v: chunk_lightning_attn(q=q, k=k, v=v, layer_idx=0, num_layers=24)[0], problem.qkv())


def mamba_module(name: str) -> ModuleType:
    """Import a module of mamba_ssm without the imports of its package.

    Those need CUDA extensions, which the Triton kernels do without.
    """
    if "mamba_ssm" not in sys.modules:
        spec = importlib.util.find_spec("mamba_ssm")
        if spec is None:
            raise ModuleNotFoundError("No module named 'mamba_ssm'", name="mamba_ssm")
        package = sys.modules["mamba_ssm"] = ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations or [])
    return importlib.import_module(f"mamba_ssm.{name}")


def mamba2(problem: Problem, groups: int) -> Work:
    """Return a call of Mamba-2's SSD kernels; dqk is the size of the state, and each group of heads has one B and C."""
    run = mamba_module("ops.triton.ssd_combined").mamba_chunk_scan_combined
    return Work(lambda *inputs: run(*inputs, chunk_size=256), problem.ssd(groups))


def mamba(problem: Problem) -> Work:
    """Return a call of Mamba's selective scan with H channels; dqk is the size of the state."""
    run = mamba_module("ops.selective_scan_interface").selective_scan_fn
    u = problem.randn(problem.B, problem.H, problem.T)
    delta = torch.nn.functional.softplus(problem.randn(problem.B, problem.H, problem.T) - 4)
    A = -torch.rand(problem.H, problem.dqk, device=problem.device) - 0.5
    B, C = (problem.randn(problem.B, problem.dqk, problem.T) for _ in range(2))
    return Work(lambda u, delta, A, B, C: run(u, delta, A, B, C), [u, delta, A, B, C])


def sdpa(problem: Problem, backend: str) -> Work:
    """Return a call of PyTorch's causal attention with one of its backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run(*qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Work(run, problem.qkv())


def flash_attention(problem: Problem, module: str) -> Work:
    """Return a call of the causal attention of a flash-attention package."""
    run = importlib.import_module(module).flash_attn_func
    return Work(lambda q, k, v: _first(run(q, k, v, causal=True)), problem.qkv())
