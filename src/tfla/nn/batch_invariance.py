"""Functions whose results for a row do not depend on the other rows of the batch, not even in the last bit.

Three things make a result depend on the batch: libraries choose the kernel of a matrix product by the number of rows;
PyTorch's vectorized functions on a CPU compute the last elements of a tensor, and elements with strides, by other
polynomials; and the recurrences and attention choose their blocks by the number of sequences. docs/numerics.md says
more. Here products have a fixed number of rows, activations consist of functions that are the same for all elements,
and sequences are computed one after another where a batch of them would be computed differently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.backends.base import packed_bounds
from tfla.ops.activations import sigmoid, silu, softplus
from tfla.ops.autocast import autocast_dtype
from tfla.ops.state import State
from tfla.ops.state_pool import PoolRows, without_padding

CPU_ROWS = 16  # rows of one product: with fewer prefills take longer, with more the decoding of single sequences
GPU_ROWS = 128  # the same on a GPU: up to a tile of tensor cores a product takes as long as reading the weights
ALIGNED = 8  # rows have a multiple of so many elements: MKL adds up in another order in rows that are not aligned
ONE_SEGMENT = 1 << 29  # steps of a chunk, so that kernels for GPUs cut no sequence into segments

Tensors = Mapping[str, Tensor | None]  # the tensors of an operator by name

__all__ = [
    "linear",
    "make_batch_invariant",
    "sequence_by_sequence",
    "sigmoid",
    "silu",
    "softplus",
    "step_by_sequence",
]


def make_batch_invariant(module: nn.Module) -> None:
    """Make every layer of a module compute each sequence as if it were alone in the batch.

    Layers are those with an attribute ``batch_invariant``. :class:`tfla.nn.LanguageModel` calls it where its config
    says so.
    """
    for layer in module.modules():
        if hasattr(layer, "batch_invariant"):
            setattr(layer, "batch_invariant", True)  # noqa: B010, since modules have attributes of any type


class _LinearInBlocks(torch.autograd.Function):
    """The product x W^T + b over blocks of rows. Gradients are sums over the batch, and computed all at once."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, missing = CPU_ROWS if x.device.type == "cpu" else GPU_ROWS, -x.shape[1] % ALIGNED
        blocks = F.pad(x, (0, missing, 0, -x.shape[0] % rows)).split(rows)
        weight = F.pad(weight, (0, missing)) if missing else weight.contiguous()
        return torch.cat([F.linear(block, weight, bias) for block in blocks])[: x.shape[0]]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.mT @ x, dy.sum(0) if ctx.has_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b for x (..., in), computed as products that all have the same number of rows."""
    low = autocast_dtype(x.device.type)
    if low is not None and x.dtype != torch.float64:
        x, weight, bias = x.to(low), weight.to(low), None if bias is None else bias.to(low)
    flat = x.reshape(-1, x.shape[-1])
    if not flat.shape[0]:
        return F.linear(x, weight, bias)
    y: Tensor = _LinearInBlocks.apply(flat, weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def sequence_by_sequence(
    operator: Callable[..., Any],
    tensors: Tensors,
    *,
    initial_state: State | None,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    return_state: bool = True,
    state_indices: Tensor | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Compute an operator over whole sequences so that no sequence depends on another one.

    On a CPU each sequence is a call of its own. On a GPU the programs of a kernel belong to one sequence each, and only
    the choice of segments depends on the batch: there are none, unless the caller chooses a chunk size.

    Args:
        operator: :func:`tfla.mlstm`, :func:`tfla.linear_attention` or :func:`tfla.delta_rule`.
        tensors: its tensors (B, T, ...) by name.
        initial_state, cu_seqlens, chunk_size: as the operator takes them.
        return_state: whether the rows of a pool are overwritten; the states are returned in any case.
        state_indices: the row of each sequence in ``initial_state``, which is then a pool; None where it is none.
        options: its other options.

    Returns:
        h, the final states or the pool, and with states_every those too.
    """
    v = tensors["v"]
    assert v is not None
    on_cpu = v.device.type == "cpu"
    if state_indices is not None and (on_cpu or not return_state):
        assert initial_state is not None
        options |= {"cu_seqlens": cu_seqlens, "chunk_size": chunk_size}
        return _sequences_of_rows(operator, tensors, initial_state, state_indices, return_state, options)
    options["return_state"] = True
    if not on_cpu or not v.shape[0]:
        if state_indices is not None:
            options["state_indices"] = state_indices
        chunk_size = ONE_SEGMENT if chunk_size is None and not on_cpu else chunk_size
        found: tuple[Any, ...] = operator(
            **tensors, initial_state=initial_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size, **options
        )
        return found
    bounds = [(b, 0, v.shape[1]) for b in range(v.shape[0])]
    if cu_seqlens is not None:
        bounds = [(0, a, b) for a, b in itertools.pairwise(packed_bounds(cu_seqlens, v.shape[1]))]
    hs: list[Tensor] = []
    states: list[list[State]] = []  # of each sequence the final state, and with states_every those in between
    for sequence, (row, start, stop) in enumerate(bounds):
        if start == stop:
            continue
        own = {name: None if t is None else _own(t[row : row + 1, start:stop]) for name, t in tensors.items()}
        before = None if initial_state is None else _row(initial_state, sequence)
        h, *after = operator(**own, initial_state=before, chunk_size=chunk_size, **options)
        hs.append(h)
        states.append(after)
    for sequence, (_, start, stop) in enumerate(bounds):
        if start == stop:  # an empty sequence ends in its initial state
            first = _zero(states[0][0]) if initial_state is None else _row(initial_state, sequence)
            states.insert(sequence, [first])
    return torch.cat(hs, 0 if cu_seqlens is None else 1), *map(_joined, zip(*states, strict=True))


def _sequences_of_rows(
    operator: Callable[..., Any], tensors: Tensors, pool: State, indices: Tensor, writes: bool,
    options: Mapping[str, Any],
) -> tuple[Any, ...]:  # fmt: skip
    """Compute whole sequences whose states are rows of a pool, and overwrite the rows if `writes`."""
    v = tensors["v"]
    assert v is not None
    rows = PoolRows(indices, pool.C.shape[0])
    before = rows.read_state(pool, torch.promote_types(v.dtype, torch.float32))
    h, after, *between = sequence_by_sequence(operator, tensors, initial_state=before, **options)
    if writes:
        rows.write_state(pool, after)
    return h, pool, *between


def step_by_sequence(
    operator: Callable[..., Any],
    tensors: Tensors,
    state: State,
    *,
    lengths: Tensor | None = None,
    in_place: bool = False,
    state_indices: Tensor | None = None,
    **options: Any,
) -> Any:
    """Compute decoding steps so that no sequence depends on another one, on a CPU by a call for each.

    The kernels for GPUs have programs of one sequence, of a size that does not depend on the batch.

    Args:
        operator: one of the operators for steps, such as :func:`tfla.mlstm_step`.
        tensors: its tensors (B, ...) by name.
        state: the state before the steps.
        lengths: (B,) or None, as operators for several steps take them.
        in_place: whether to overwrite C of the state.
        state_indices: (B,), the row of each sequence in ``state``, which is then a pool; None where it is none.
        options: its other options.

    Returns:
        what the operator returns.
    """
    v = tensors["v"]
    assert v is not None
    if v.device.type != "cpu" or v.shape[0] <= 1:
        if lengths is not None:
            options["lengths"] = lengths
        if state_indices is not None:
            options["state_indices"] = state_indices
        return operator(**tensors, state=state, in_place=in_place, **options)
    if state_indices is not None:
        return _step_rows(operator, tensors, state, state_indices, {"lengths": lengths, **options})
    hs: list[Tensor] = []
    states: list[State] = []
    for row in range(v.shape[0]):
        own = {name: None if t is None else _own(t[row : row + 1]) for name, t in tensors.items()}
        if lengths is not None:
            options["lengths"] = lengths[row : row + 1]
        found = operator(**own, state=_row(state, row), **options)
        if isinstance(found, Tensor):
            hs.append(found)
        else:
            hs.append(found[0])
            states.append(found[1])
    h = torch.cat(hs)
    if not states:
        return h
    joined = _joined(states)
    return h, joined._replace(C=state.C.copy_(joined.C)) if in_place else joined


def _step_rows(
    operator: Callable[..., Any], tensors: Tensors, pool: State, indices: Tensor, options: Mapping[str, Any]
) -> Any:
    """Compute steps of sequences whose states are rows of a pool, and overwrite the rows if a state is returned."""
    rows = PoolRows(indices, pool.C.shape[0])
    found = step_by_sequence(operator, tensors, rows.read_state(pool), **options)
    if isinstance(found, Tensor):
        return without_padding(found, indices)
    rows.write_state(pool, found[1])
    return without_padding(found[0], indices), pool


def _own(t: Tensor) -> Tensor:
    """Return a dense copy, whose place in memory is aligned as that of every new tensor is."""
    return t.clone(memory_format=torch.contiguous_format)


def _row(state: State, row: int) -> State:
    """Return a copy of the state of one sequence."""
    return State(*(None if t is None else _own(t[row : row + 1]) for t in state))  # type: ignore[arg-type]


def _zero(like: State) -> State:
    """Return the state before the first step, as zeros like another state."""
    return State(*(None if t is None else torch.zeros_like(t) for t in like))  # type: ignore[arg-type]


def _joined(states: Sequence[State]) -> State:
    """Return one state that holds the states of several sequences."""
    return State(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*states, strict=True)))  # type: ignore[arg-type]
