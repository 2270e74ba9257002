"""Checks of device names, and tensors that are sent to a device."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla._util.errors import UserError


def check_device(device: object, name: str = "device") -> torch.device:
    """Return a device after a test that tensors can be allocated on it.

    Args:
        device: a torch.device, or its name, such as "cpu" or "cuda:1".
        name: the name of the argument in error messages.

    Raises:
        TypeError: the argument is neither a device nor a string.
        ValueError: this machine or this build of PyTorch has no such device; the message lists the devices it has.
    """
    if not isinstance(device, str | torch.device):
        raise TypeError(f"{name}: got {type(device).__name__}, expected a torch.device or its name")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{name}: got {str(device)!r}, expected {expected_devices()}{_why(device)}") from error


def pick_device(name: str) -> torch.device:
    """Return the device that a command line names; "auto" is the GPU if there is one, else the CPU.

    Raises:
        UserError: this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = check_device(name)
    except ValueError as error:
        raise UserError(str(error)) from error
    if device.type == "meta":
        raise UserError(f"device: got 'meta', whose tensors hold no numbers, expected {expected_devices()}")
    return device


def send(x: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device, where the host does not wait for what a GPU has to compute before.

    A plain copy from main memory waits for all that is enqueued; one from pinned memory is enqueued after it.
    """
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def expected_devices() -> str:
    """Return the names of this machine's devices as a phrase for error messages."""
    found = ["'cpu'", *(f"'cuda:{n}'" for n in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        found.append("'mps'")
    return " or ".join(found)


def _why(device: str | torch.device) -> str:
    """Return ": " and why there is no CUDA device, or nothing where the reason is plain."""
    if str(device).partition(":")[0] == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda is not None or torch.version.hip is not None
        why = "PyTorch finds no GPU" if built else f"PyTorch {torch.__version__} was built without CUDA"
        return f": {why}"
    return ""
