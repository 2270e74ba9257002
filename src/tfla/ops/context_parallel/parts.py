"""The check that the parts of all processes fit together, on every process before any of them waits for another one.

A process that raises alone leaves the others in a collective. So they first tell each other how many steps they have,
and whether one of them cannot go on.
"""

from __future__ import annotations

import functools
import zlib

import torch
from torch import Tensor

from tfla.ops.context_parallel import exchange
from tfla.ops.context_parallel.cuts import ZIGZAG, Placement
from tfla.ops.context_parallel.told_numbers import RefusedError, exchange_numbers, owe_error
from tfla.ops.transforms import local_part, needs_dispatcher

_MET: set[str] = set()  # the groups that have had a call on GPUs
_CHECKED: set[str] = set()  # those that have had one whose parts must fit together
_PACKED: set[str] = set()  # those that have had packed sequences, whose later calls are compared on the device
MISMATCH = (
    "context_parallel: the processes of a call have steps, cu_seqlens, orders or lengths that do not fit together, or "
    "one of them has refused its arguments"
)


def check_parts(
    placement: Placement,
    group: str,
    x: Tensor,
    cu_seqlens: Tensor | None,
    *,
    name: str = "q",
    equal: bool = False,
    writes: int = 1,
    refused: bool = False,
) -> None:
    """Raise, on every process, unless all have the numbers of steps, the offsets and the layout that fit together.

    Dense parts of any sizes fit with contiguous order and without lengths; the other processes are told even so that
    they are dense. On CPUs this is one more collective of each call. On GPUs the host would have to wait for it, so
    that only the first call of a group and the first one whose parts have to fit are checked, and none while a CUDA
    graph is captured. After the first call with packed sequences, of which each one has other offsets, the device
    compares the numbers of each later call before anything else is exchanged; where they do not fit, a device-side
    assertion of every process fails.

    Args:
        placement: the order of spans; its lengths count steps.
        group: the name of the process group.
        x: (B, T, ...), this process's part.
        cu_seqlens: the offsets of packed sequences; those on a GPU are not compared.
        name: the name of x in messages.
        equal: dense parts have to be equal too, as those of layers whose tokens have positions.
        writes: how many steps of x are one step.
        refused: this process tells the others that it raises an error of its own, and returns.

    Raises:
        ValueError: a process has another number of steps, other offsets or another layout, or was refused.
    """
    fits = cu_seqlens is None and not equal and not placement.lengths and placement.order != ZIGZAG
    on_device = not _host_waits(x) and group in _PACKED
    if not _host_waits(x) and not on_device and group in (_MET if fits else _CHECKED):
        return
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    steps = x.shape[1] // writes if x.dim() > 1 else 0
    own = [int(refused), steps, _layout(placement), *_fingerprint(cu_seqlens)]
    if on_device:
        _compare_on_device(own, placement, group, x.device, equal or cu_seqlens is not None)
        return
    try:
        found = exchange_numbers(own, x.device, group, placement.size)
    except RefusedError as error:
        wrong = error.ranks
    else:
        wrong = [rank for rank, (error, *_) in enumerate(found) if error]
    if refused:
        return
    if wrong:
        raise ValueError(
            f"context_parallel: got arguments that process {' and '.join(map(str, wrong))} of {placement.size} "
            "refuses, with an error that names them, expected valid ones on each"
        )
    if any(layout != found[0][2] for _, _, layout, *_ in found):
        raise ValueError(
            f"context_parallel: got orders or lengths that differ among its {placement.size} processes, here "
            f"order={placement.order!r} and lengths={placement.lengths or None}, expected the same on each"
        )
    if any(offsets != found[0][3:] for _, _, _, *offsets in found) and not all(count for *_, count, _, _ in found):
        _raise_offsets(found, placement, writes)
    _check_steps(placement, [steps for _, steps, *_ in found], name, equal or cu_seqlens is not None)
    if any(offsets != found[0][3:] for _, _, _, *offsets in found):
        _raise_offsets(found, placement, writes)
    _MET.add(group)
    if not fits:
        _CHECKED.add(group)
    if cu_seqlens is not None:
        _PACKED.add(group)


def _host_waits(x: Tensor) -> bool:
    """Return whether the host waits for the numbers of other processes in each call."""
    return x.device.type == "cpu"


@functools.lru_cache(maxsize=64)
def _on_host(numbers: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return numbers on the CPU."""
    return torch.tensor(numbers)


def _on_device(device: torch.device, numbers: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return numbers on a device, without a wait of the host.

    Each call copies them: a copy that is kept would belong to the stream and the memory pool of the call that made it.
    """
    return _on_host(numbers).to(device, non_blocking=True)


def _compare_on_device(own: list[int], placement: Placement, group: str, device: torch.device, equal: bool) -> None:
    """Compare the numbers of all processes without a wait of the host: the device asserts that they fit.

    Args:
        own: the numbers of this process, of which the first one says that it refuses its arguments.
        placement, group: as in :func:`check_parts`.
        device: the device that the exchange of this call runs on.
        equal: whether the numbers of steps have to be equal, or those of the lengths.
    """
    refused, steps, *others = own
    if not equal and not placement.lengths:
        steps = 0
    of_ranks = [
        sum(placement.lengths[p] for p in placement.positions_of(rank)) if placement.lengths else steps
        for rank in range(placement.size)
    ]
    expected = _on_device(device, tuple((0, number, *others) for number in of_ranks))
    found = exchange.gather(_on_device(device, ((refused, steps, *others),)), group, placement.size).flatten(0, 1)
    if not refused:
        torch._assert_async((found == expected).all(), MISMATCH)


def tell_refusal(
    placement: Placement,
    group: str,
    tensors: tuple[object, ...],
    cu_seqlens: Tensor | None,
) -> None:
    """Tell the other processes, which are in :func:`check_parts`, that this one raises.

    Args:
        placement: the order of spans.
        group: the name of the process group.
        tensors: the arguments of the call, of which any may be wrong.
        cu_seqlens: the offsets of packed sequences.
    """
    given = tuple(local_part(x) for x in tensors if isinstance(x, Tensor))
    if not given or needs_dispatcher(given):
        owe_error()
        return
    try:
        first = next((x for x in given if x.device.type != "cpu"), given[0])  # of a device that the group serves
        check_parts(placement, group, first, cu_seqlens, refused=True)
    except RuntimeError:  # of a device that the group does not know; the own error says more
        owe_error()


def _raise_offsets(found: list[list[int]], placement: Placement, writes: int) -> None:
    """Raise the error of offsets that differ."""
    ends = ", ".join(f"{count} up to {last // writes}" if count else "none" for *_, count, last, _ in found)
    raise ValueError(
        f"cu_seqlens: got offsets that differ among the {placement.size} processes of context_parallel ({ends}), "
        "expected those of the whole sequence, the same on each"
    )


def _layout(placement: Placement) -> int:
    """Return a checksum of the order and the lengths."""
    return zlib.crc32(repr((placement.order, placement.lengths)).encode())


def _fingerprint(cu_seqlens: Tensor | None) -> tuple[int, int, int]:
    """Return how many offsets there are, the last one, and a checksum of all."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.device.type != "cpu" or not cu_seqlens.numel():
        return 0, 0, 0
    offsets = cu_seqlens.flatten().tolist()
    return len(offsets), int(offsets[-1]), zlib.crc32(repr(offsets).encode())


def _check_steps(placement: Placement, found: list[int], name: str, equal: bool) -> None:
    """Raise unless the numbers of steps of all processes fit the order and the lengths."""
    size, lengths = placement.size, placement.lengths
    got = f"{name}: got {', '.join(map(str, found))} steps on the {size} processes of context_parallel, expected"
    if lengths:
        expected = [sum(lengths[p] for p in placement.positions_of(rank)) for rank in range(size)]
        if found != expected:
            raise ValueError(f"{got} {', '.join(map(str, expected))}, by its lengths {lengths}")
    elif equal and len(set(found)) > 1:
        of_all = f"those of all {placement.spans} spans in the order of time"
        told = of_all if placement.order == ZIGZAG else tuple(found)
        raise ValueError(
            f"{got} as many on each: for parts of other sizes pass "
            f"tfla.distributed.ContextParallel(group, order={placement.order!r}, lengths=...), here {told}"
        )
    elif placement.order == ZIGZAG and len({T % 2 for T in found}) > 1:
        raise ValueError(f"{got} even numbers with order {ZIGZAG!r} and no lengths")
