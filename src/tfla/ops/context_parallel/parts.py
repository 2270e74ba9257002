"""The check that the parts of all processes fit together, on every process before any of them waits for another one.

A process that raises alone leaves the others in a collective. So they first tell each other how many steps they have,
and whether one of them cannot go on.
"""

from __future__ import annotations

import zlib
from contextlib import suppress

import torch
from torch import Tensor

from tfla.ops.context_parallel.cuts import ZIGZAG, Placement
from tfla.ops.context_parallel.exchange import gather
from tfla.ops.transforms import needs_dispatcher

_MET: set[str] = set()  # the groups that have had a call on GPUs
_CHECKED: set[str] = set()  # those that have had one whose parts must fit together


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
    graph is captured.

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
    on_cpu = x.device.type == "cpu"
    if not on_cpu and (group in (_MET if fits else _CHECKED) or torch.cuda.is_current_stream_capturing()):
        return
    steps = x.shape[1] // writes if x.dim() > 1 else 0
    numbers = torch.tensor([[refused, steps, _layout(placement), *_fingerprint(cu_seqlens)]], device=x.device)
    found = gather(numbers, group, placement.size).flatten(0, 1).tolist()
    if refused:
        return
    wrong = [str(rank) for rank, (error, *_) in enumerate(found) if error]
    if wrong:
        raise ValueError(
            f"context_parallel: got arguments that process {' and '.join(wrong)} of {placement.size} refuses, with an "
            "error that names them, expected valid ones on each"
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
    given = tuple(x for x in tensors if isinstance(x, Tensor))
    if given and not needs_dispatcher(given):
        with suppress(RuntimeError):  # a device that the group does not know; the own error says more
            check_parts(placement, group, given[0], cu_seqlens, refused=True)


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
