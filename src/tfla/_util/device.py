"""Devices by name, and one sentence where there is no such device."""

from __future__ import annotations

import torch


def check_device(device: object, name: str = "device") -> torch.device:
    """Return the device that is meant, after a test that tensors can be made on it.

    Args:
        device: a torch.device, or its name, such as "cpu" or "cuda:1".
        name: what the error calls it.

    Raises:
        TypeError: it is neither.
        ValueError: this machine or this build of PyTorch has no such device; the message lists what there is.
    """
    if not isinstance(device, str | torch.device):
        raise TypeError(f"{name}: got {type(device).__name__}, expected a torch.device or its name")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{name}: got {str(device)!r}, expected {expected_devices()}{_why(device)}") from error


def expected_devices() -> str:
    """Return the devices of this machine as an error lists them."""
    found = ["'cpu'", *(f"'cuda:{n}'" for n in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        found.append("'mps'")
    return " or ".join(found)


def _why(device: str | torch.device) -> str:
    if str(device).partition(":")[0] == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda is not None or torch.version.hip is not None
        why = "PyTorch finds no GPU" if built else f"PyTorch {torch.__version__} was built without CUDA"
        return f": {why}"
    return ""
