"""Compiles what forward and backward launch for a GPU that is not there: one JSON line a kernel.

python compile_for.py CAPABILITY CASE...    with CASE = gate,dqk,dhv,dtype[,chunk_size]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class AbsentGPU:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "int"


def resources(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills, as ptxas reports them."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newest = tools / "ptxas-blackwell"
    ptxas = newest if capability >= 100 and newest.exists() else tools / "ptxas"
    target = re.search(r"\.target (\w+)", ptx)
    assert target
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(ptxas), "-v", f"-arch={target[1]}", str(source), "-o", str(source.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    return int(registers[1]) if registers else 0, int(spilled[1]) if spilled else 0


def compile_only(capability: int, found: dict[str, dict[str, Any]]) -> None:
    """Launches compile and do not run; what they compiled is added to `found`."""
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in found:
            name = self.__name__ + (" back" if kwargs.get("BACK") else "")
            name += "" if kwargs.get("OUTPUT", True) else " states"
            registers, spilled = resources(kernel.asm["ptx"], capability)
            shared = kernel.metadata.shared
            found[kernel.hash] = {"kernel": name, "registers": registers, "spilled": spilled, "shared": shared}
        return kernel

    JITFunction.run = run


def forward_and_backward(gate: str, dqk: str, dhv: str, dtype: str, chunk_size: str = "") -> None:
    import tfla

    T, H, K, V = 256, 2, int(dqk), int(dhv)
    q, k, v = (torch.randn(1, T, H, d, dtype=getattr(torch, dtype), requires_grad=True) for d in (K, K, V))
    i, f = (torch.randn(1, T, H, requires_grad=True) for _ in range(2))
    h = tfla.mlstm(q, k, v, i, f, input_gate=gate, backend="triton", chunk_size=int(chunk_size or T))
    torch.autograd.grad(h, (q, k, v, i, f), torch.randn_like(v))


def main() -> None:
    capability = int(sys.argv[1])
    driver.set_active(AbsentGPU(capability))
    from tfla.backends.triton import Triton

    Triton.unsupported = lambda self, x: None  # type: ignore[method-assign]
    found: dict[str, dict[str, Any]] = {}
    compile_only(capability, found)
    for case in sys.argv[2:]:
        found.clear()
        forward_and_backward(*case.split(","))
        for line in found.values():
            print(json.dumps({"capability": capability, "case": case, **line}), flush=True)


main()
