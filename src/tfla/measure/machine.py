"""The machine of a measurement: its names and versions, and the rates of its roofline."""

from __future__ import annotations

import shutil
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tfla.measure.timing import Sampling, clock_of, measure
from tfla.ops.tuned import cpu_name

PACKAGES = (
    "tfla",
    "torch",
    "triton",
    "transformers",
    "mlstm_kernels",
    "flash-linear-attention",
    "fla-core",
    "mamba_ssm",
    "flash_attn",
)


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, or None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def environment(device: str) -> dict[str, Any]:
    """Return the GPU or CPU, the driver, the versions of packages and the date."""
    cuda = device.startswith("cuda")
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if cuda else cpu_name(),
        "date": date.today().isoformat(),
        "versions": {name: number for name in PACKAGES if (number := installed_version(name))},
    }
    if cuda:
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "driver": _driver(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
            "memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count,
        }  # fmt: skip
    return found


def rates(device: str, sampling: Sampling) -> dict[str, dict[str, float]]:
    """Measure byte/s of a device copy, counting reads and writes, and FLOP/s of a large matrix product."""
    cuda = device.startswith("cuda")
    size, dtype = (8192, torch.bfloat16) if cuda else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.empty(2**30 if cuda else 2**22, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    clock = clock_of(device)
    found = {}
    for name, call, amount in (
        ("copy", lambda: target.copy_(source), 2 * source.nbytes),
        ("gemm", lambda: torch.mm(a, b), 2 * size**3),
    ):
        row = measure(call, clock, sampling)
        found[name] = {"rested": amount / row["seconds"]}
        found[name]["sustained"] = amount / row.get("sustained_seconds", row["seconds"])
    return found
