"""The check that the parts of all processes fit together, on every process before any of them waits for another one.

A process that raises alone leaves the others in a collective. So they first tell each other how many steps they have.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from tfla.ops.context_parallel.cuts import ZIGZAG, Placement
from tfla.ops.context_parallel.exchange import gather

_CHECKED: set[str] = set()  # the groups whose parts on GPUs have been checked


def check_parts(
    placement: Placement,
    group: str,
    x: Tensor,
    cu_seqlens: Tensor | None,
    *,
    name: str = "q",
    equal: bool = False,
    writes: int = 1,
) -> None:
    """Raise, on every process, unless all have the numbers of steps and the offsets that fit together.

    Dense parts of any sizes fit with contiguous order and without lengths; for them nothing is exchanged. On CPUs this
    is one more collective of each call. On GPUs the host would have to wait for it, so that only the first call of a
    group is checked, and none while a CUDA graph is captured.

    Args:
        placement: the order of spans; its lengths count steps.
        group: the name of the process group.
        x: (B, T, ...), this process's part.
        cu_seqlens: the offsets of packed sequences; those on a GPU are not compared.
        name: the name of x in messages.
        equal: dense parts have to be equal too, as those of layers whose tokens have positions.
        writes: how many steps of x are one step.

    Raises:
        ValueError: a process has another number of steps or other offsets.
    """
    if cu_seqlens is None and not equal and not placement.lengths and placement.order != ZIGZAG:
        return
    on_cpu = x.device.type == "cpu"
    if not on_cpu and (group in _CHECKED or torch.cuda.is_current_stream_capturing()):
        return
    numbers = torch.tensor([[x.shape[1] // writes, *_fingerprint(cu_seqlens)]], device=x.device)
    found = gather(numbers, group, placement.size).flatten(0, 1).tolist()
    _check_steps(placement, [steps for steps, *_ in found], name, equal or cu_seqlens is not None)
    if any(offsets != found[0][1:] for _, *offsets in found):
        ends = ", ".join(f"{count} up to {last // writes}" for _, count, last, _ in found)
        raise ValueError(
            f"cu_seqlens: got offsets that differ among the {placement.size} processes of context_parallel ({ends}), "
            "expected those of the whole sequence, the same on each"
        )
    _CHECKED.add(group)


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
