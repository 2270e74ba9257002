"""The dtype of the corrections X of the delta rule, for kernels and for the backends, which do not import Triton."""

from __future__ import annotations

import torch

from tfla.backends.delta import DeltaInputs


def correction_dtype(x: DeltaInputs) -> torch.dtype:
    """Return the dtype of X.

    With X and R in bfloat16 their product would cost the errors E more than all other roundings do. float16 has 3 more
    bits, and X, which is bounded by |r_i| |k_j|, does not need the range of bfloat16.
    """
    return torch.float32 if x.q.dtype == torch.float32 else torch.float16
