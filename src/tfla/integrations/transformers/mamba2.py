"""The functions by which Mamba-2 layers of transformers compute their recurrence, on tfla's operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tfla.integrations.arguments import drop_unknown
from tfla.integrations.mamba import mamba_chunk_scan_combined, selective_state_update

step = drop_unknown(selective_state_update)


@drop_unknown
def scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> Any:
    """Compute whole sequences; see :func:`~tfla.integrations.mamba.mamba_chunk_scan_combined`.

    Args:
        hidden_states: (batch, seqlen, nheads, headdim), the x of that function.
        cu_seq_lens_q: (sequences + 1,) int, the name that models have for its cu_seqlens.

    The other arguments and the results are those of that function.
    """
    if initial_states is not None and torch.is_grad_enabled():
        # The cache writes the new states over these, and the backward needs the old ones.
        initial_states = initial_states.clone()
    return mamba_chunk_scan_combined(
        hidden_states, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seq_lens_q, dt_softplus,
        dt_limit, return_final_states,
    )  # fmt: skip


def skip_fused_layer(*args: Any, **kwargs: Any) -> None:
    """Return None for a whole layer, so that the layer calls its convolution, its scan and its norm one by one.

    The fused layer would leave the ``attention_mask`` out after the convolution, and hooks and adapters of out_proj.
    """
