"""The delta rule in plain differentiable PyTorch.

It serves the transforms that the backends do not support: forward-mode AD and derivatives of the backward. Each
sequence is computed in tiles by the parallel form of the reference, without operations in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.backends.base import sequence_bounds
from tfla.backends.delta import DeltaInputs, DeltaOutputs, DeltaSpec
from tfla.backends.reference_delta import Sequence, parallel
from tfla.ops.autocast import without_autocast
from tfla.ops.delta_activations import activated

TILE = 32


def delta(x: DeltaInputs, spec: DeltaSpec) -> DeltaOutputs:
    """Compute the results of a backend's `forward`, without what it stores, as a differentiable function of x.

    Sequences are computed one after another; cu_seqlens are read on the host.
    """
    with without_autocast(x.q.device.type):
        x = activated(x, spec.normalize_qk, spec.beta_activation, spec.gate_activation, spec.lower_bound)
        return _delta(x, spec)


def _delta(x: DeltaInputs, spec: DeltaSpec) -> DeltaOutputs:
    """Compute :func:`delta` with autocast off and activations applied."""
    group, dtype = x.v.shape[2] // x.q.shape[2], x.acc_dtype
    gates = x.v.shape[:3]
    q, k = (t.to(dtype).repeat_interleave(group, 2) for t in (x.q, x.k))
    r = k if x.read_key is None else x.read_key.to(dtype).repeat_interleave(group, 2)
    v = x.v.to(dtype)
    beta = v.new_ones(gates) if x.beta is None else x.beta.to(dtype)
    log_f = v.new_zeros(gates) if x.log_f is None else x.log_f.to(dtype)
    given = Sequence(q, k, v, beta, log_f if x.channel_gates else log_f.unsqueeze(-1), r)
    shape = (x.sequences, gates[2], q.shape[3], v.shape[3])
    first = v.new_zeros(shape) if x.C is None else x.C.to(dtype)
    rows: list[Tensor] = []
    states = []
    for s, (b, start, stop) in enumerate(sequence_bounds(x)):
        C, tiles = first[s], []
        for t in range(start, stop, TILE):
            h, C = parallel(Sequence(*(part[b, t : min(t + TILE, stop)] for part in given)), C, spec)
            tiles.append(h)
        states.append(C)
        rows += [torch.cat(tiles)] if tiles else []
    none = v.new_zeros(0)
    h = (
        none.view(gates + v.shape[3:])
        if not rows
        else torch.stack(rows)
        if x.cu_seqlens is None
        else torch.cat(rows)[None]
    )
    C = torch.stack(states) if states and spec.final_state else none.clone()
    return DeltaOutputs(h.to(x.v.dtype).contiguous(), C, none.clone(), none.clone(), none.clone())
