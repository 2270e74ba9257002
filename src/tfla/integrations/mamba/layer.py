"""The function that computes a whole Mamba-2 layer after its input projection."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.integrations.mamba.scan import check_dt_limit, check_sequence_ids, mamba_chunk_scan_combined
from tfla.integrations.mamba.terms import check_devices, check_groups
from tfla.nn.layers import at_least_float32, recomputed
from tfla.ops.autocast import autocast_dtype, without_autocast
from tfla.ops.checks import check_float, check_shape
from tfla.ops.gates import cast

ACTIVATIONS = (None, "silu", "swish")


def _convolve_and_activate(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, activation: str | None
) -> Tensor:
    """Return activation(conv(x)), (batch, seqlen, channels), with the causal convolution of :func:`convolve`."""
    y = convolve(x, weight, bias, seq_idx)
    y = y if activation is None else F.silu(y)
    # Dense here: one copy in place of three in the operator, of x, B and C.
    return y.to(x.dtype, memory_format=torch.contiguous_format)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None) -> Tensor:
    """Return the causal depthwise convolution of x (batch, seqlen, channels) with weight (channels, width).

        y_t = bias + sum_{0 <= i < width} weight[:, width - 1 - i] x_{t-i}

    With seq_idx (batch, seqlen), terms whose step belongs to another sequence are left out. With a bias or seq_idx the
    result is at least float32, so that only the activation's result is rounded after it; else it has the dtype of x.
    """
    width = weight.shape[1]
    if seq_idx is None:
        padded = F.pad(x.transpose(1, 2), (width - 1, 0))
        y = F.conv1d(padded, cast(weight, x.dtype)[:, None], groups=x.shape[-1]).transpose(1, 2)
        return y if bias is None else y + at_least_float32(bias)
    # An index that comes back after another one starts a new sequence, as it does for the scan.
    sequence = F.pad(torch.diff(seq_idx, dim=1) != 0, (1, 0)).cumsum(1)
    wide, weight = at_least_float32(x), at_least_float32(weight)
    y = wide * weight[:, -1]
    for i in range(1, min(width, x.shape[1])):
        differs = (sequence[:, i:] != sequence[:, :-i])[..., None]
        y = y + F.pad(wide[:, :-i].masked_fill(differs, 0.0) * weight[:, -1 - i], (0, 0, i, 0))
    return y if bias is None else y + bias


def _gated_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float, ngroups: int, norm_before_gate: bool) -> Tensor:
    """Return RMSNorm(y) silu(z) with norm_before_gate, else RMSNorm(y silu(z)), for y, z (batch, seqlen, channels).

    Each of the ngroups groups of channels is normalized by itself. All is computed in at least float32.
    """
    gate = F.silu(at_least_float32(z))
    out = at_least_float32(y) if norm_before_gate else at_least_float32(y) * gate
    out = out.unflatten(-1, (ngroups, -1))
    out = F.rms_norm(out, out.shape[-1:], eps=eps).flatten(-2) * weight
    return cast(out * gate if norm_before_gate else out, y.dtype)


def _gated_mlp(gate: Tensor, value: Tensor) -> Tensor:
    """Return silu(gate) value."""
    return F.silu(gate) * value


def _infer_sizes(
    zxbcdt: Tensor, conv1d_weight: Tensor, D: Tensor, headdim: int | None, ngroups: int
) -> tuple[int, int, int, int]:
    """Check the shapes and return (nheads, headdim, dstate, d_mlp); the gated MLP beside the scan has d_mlp outputs."""
    for name, t in {"zxbcdt": zxbcdt, "conv1d_weight": conv1d_weight, "D": D}.items():
        check_float(name, t)
    check_shape("zxbcdt", zxbcdt, ("batch", "seqlen", "channels"))
    if 0 in zxbcdt.shape[1:]:
        raise ValueError(f"zxbcdt: got shape {tuple(zxbcdt.shape)}, expected no empty dimension but the first")
    check_shape("conv1d_weight", conv1d_weight, ("channels", "width"))
    if headdim is not None and (isinstance(headdim, bool) or not isinstance(headdim, int | torch.SymInt)):
        raise TypeError(f"headdim: got {type(headdim).__name__}, expected an int or None")
    if D.dim() == 1 and headdim is None:
        raise ValueError(f"headdim: got None, expected the head dim with D of shape {tuple(D.shape)}")
    check_shape("D", D, ("nheads",) if D.dim() == 1 else ("nheads", "headdim" if headdim is None else headdim))
    nheads, headdim = D.shape[0], D.shape[1] if headdim is None else headdim
    if nheads * headdim < 1:
        raise ValueError(f"D: got shape {tuple(D.shape)} and head dim {headdim}, expected at least 1 of each")
    check_groups("ngroups", ngroups, nheads)
    dim, (channels, width) = nheads * headdim, conv1d_weight.shape
    if channels <= dim or (channels - dim) % (2 * ngroups) or width < 1:
        raise ValueError(
            f"conv1d_weight: got {tuple(conv1d_weight.shape)}, expected (nheads headdim + 2 ngroups dstate, width)"
            f", here ({dim} + {2 * ngroups} dstate, width)"
        )
    mlp_channels = zxbcdt.shape[-1] - dim - channels - nheads
    if mlp_channels < 0 or mlp_channels % 2:
        raise ValueError(
            f"zxbcdt: got {zxbcdt.shape[-1]} channels, expected 2 nheads headdim + 2 ngroups dstate + nheads ="
            f" {dim + channels + nheads}, or an even number more for a gated MLP beside the scan"
        )
    return nheads, headdim, (channels - dim) // (2 * ngroups), mlp_channels // 2


def _check_output(
    zxbcdt: Tensor,
    inner: int,
    dim: int,
    rmsnorm_weight: Tensor | None,
    rmsnorm_eps: float,
    outproj_weight: Tensor | None,
    outproj_bias: Tensor | None,
) -> None:
    """Check the parameters of the norm and of the output projection.

    Args:
        inner: the number of channels that the projection reads.
        dim: the number of channels of the scan's output, which the norm reads.
    """
    if not isinstance(rmsnorm_eps, float | int) or not 0 <= rmsnorm_eps < math.inf:
        raise ValueError(f"rmsnorm_eps: got {rmsnorm_eps!r}, expected a finite number that is not negative")
    if rmsnorm_weight is not None:
        check_float("rmsnorm_weight", rmsnorm_weight)
        check_shape("rmsnorm_weight", rmsnorm_weight, (dim,))
    if outproj_weight is None:
        if outproj_bias is not None:
            raise ValueError("outproj_bias: got a tensor, expected None without outproj_weight")
        return
    check_float("outproj_weight", outproj_weight)
    check_shape("outproj_weight", outproj_weight, ("out_dim", inner))
    if outproj_bias is not None:
        check_float("outproj_bias", outproj_bias)
        check_shape("outproj_bias", outproj_bias, (outproj_weight.shape[0],))
    if autocast_dtype(zxbcdt.device.type):
        return
    for name, t in {"outproj_weight": outproj_weight, "outproj_bias": outproj_bias}.items():
        if t is not None and t.dtype != zxbcdt.dtype:
            raise TypeError(f"{name}: got dtype {t.dtype}, expected that of zxbcdt, {zxbcdt.dtype}")


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a Mamba-2 layer after its input projection.

    The function stands in for ``mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined``. Its steps are:

    1. Split the channels of zxbcdt, in this order, into the input of a gated MLP (2 d_mlp channels, usually 0), z, x,
       B, C and dt.
    2. Apply a causal depthwise convolution and its activation to x, B and C.
    3. Compute the scan of :func:`mamba_chunk_scan_combined`, with softplus of dt and the skip connection D.
    4. Multiply by silu(z), before or after an RMSNorm if rmsnorm_weight is given.
    5. Prepend silu(a) b of the gated MLP, where a and b are the halves of its channels.
    6. Apply the output projection, if outproj_weight is given.

    The backward recomputes the convolution, the gates and the norm.

    Args:
        zxbcdt: (batch, seqlen, 2 d_mlp + 2 dim + 2 ngroups dstate + nheads), with dim = nheads headdim.
        conv1d_weight: (dim + 2 ngroups dstate, width).
        conv1d_bias: (dim + 2 ngroups dstate,) or None.
        dt_bias, A: (nheads,).
        D: (nheads,), with headdim given, or (nheads, headdim).
        chunk_size, initial_states, dt_limit, return_final_states: as for :func:`mamba_chunk_scan_combined`.
        seq_idx: as for :func:`mamba_chunk_scan_combined`; the convolution too leaves out steps of other sequences.
        activation: the activation of the convolution, "silu" (also called "swish") or None.
        rmsnorm_weight: (dim,), or None for no norm. Each of the ngroups groups of channels is normalized by itself.
        rmsnorm_eps: the epsilon of the norm.
        outproj_weight: (out_dim, d_mlp + dim), or None for no projection.
        outproj_bias: (out_dim,) or None.
        headdim: the head dim, which D may have instead.
        ngroups: the number of groups of heads that share B and C.
        norm_before_gate: compute RMSNorm(y) silu(z) rather than RMSNorm(y silu(z)).

    Returns:
        out (batch, seqlen, out_dim or d_mlp + dim) in the dtype of zxbcdt, or in that of autocast after a projection;
        with return_final_states also the state after the last step, (batch, nheads, headdim, dstate).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    nheads, headdim, dstate, d_mlp = _infer_sizes(zxbcdt, conv1d_weight, D, headdim, ngroups)
    dim, channels = nheads * headdim, conv1d_weight.shape[0]
    for name, t, shape in (
        ("conv1d_bias", conv1d_bias, (channels,)), ("dt_bias", dt_bias, (nheads,)), ("A", A, (nheads,)),
    ):  # fmt: skip
        if t is not None or name != "conv1d_bias":
            check_float(name, t)
            check_shape(name, t, shape)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, allowed are {', '.join(map(repr, ACTIVATIONS))}")
    check_dt_limit(dt_limit)
    if seq_idx is not None:
        check_sequence_ids(seq_idx, zxbcdt, "zxbcdt")
    _check_output(zxbcdt, d_mlp + dim, dim, rmsnorm_weight, rmsnorm_eps, outproj_weight, outproj_bias)
    parameters = {
        "conv1d_weight": conv1d_weight, "conv1d_bias": conv1d_bias, "dt_bias": dt_bias, "A": A, "D": D,
        "initial_states": initial_states, "rmsnorm_weight": rmsnorm_weight, "outproj_weight": outproj_weight,
        "outproj_bias": outproj_bias,
    }  # fmt: skip
    check_devices(zxbcdt, parameters, "zxbcdt")
    mlp, z, xBC, dt = zxbcdt.split((2 * d_mlp, dim, channels, nheads), -1)
    with without_autocast(zxbcdt.device.type):
        xBC = recomputed(lambda t: _convolve_and_activate(t, conv1d_weight, conv1d_bias, seq_idx, activation), xBC)
        x, B, C = xBC.split((dim, ngroups * dstate, ngroups * dstate), -1)
        heads, groups = (nheads, headdim), (ngroups, dstate)
        result = mamba_chunk_scan_combined(
            x.unflatten(-1, heads), dt, A, B.unflatten(-1, groups), C.unflatten(-1, groups), chunk_size, D,
            z.unflatten(-1, heads) if rmsnorm_weight is None else None, dt_bias, initial_states, seq_idx,
            dt_softplus=True, dt_limit=dt_limit, return_final_states=return_final_states,
        )  # fmt: skip
        y = (result[0] if isinstance(result, tuple) else result).flatten(-2)
        if rmsnorm_weight is not None:
            norm = functools.partial(
                _gated_norm, weight=rmsnorm_weight, eps=rmsnorm_eps, ngroups=ngroups, norm_before_gate=norm_before_gate
            )
            y = recomputed(norm, y, z)
        if d_mlp:
            y = torch.cat((recomputed(_gated_mlp, *mlp.chunk(2, -1)), y), -1)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return (y, result[1]) if isinstance(result, tuple) else y
