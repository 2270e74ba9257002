"""Where to compute."""

from __future__ import annotations

import torch

from tfla.train.messages import UserError


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU if there is one.

    Raises:
        UserError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device: {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
