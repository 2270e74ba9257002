"""Which device to compute on."""

from __future__ import annotations

import torch

from tfla.ops.device import check_device, expected_devices
from tfla.train.messages import UserError


def pick_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is the GPU if there is one.

    Raises:
        UserError: there is no such device here.
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
