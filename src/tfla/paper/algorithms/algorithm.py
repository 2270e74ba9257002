"""An algorithm by the counts of its parts for one unit of work, and the number of units of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import sympy as sp

from tfla.paper.algorithms import backward, forward, library, traffic
from tfla.paper.algorithms.symbols import (
    B_C,
    CAUSAL,
    DEFAULTS,
    DHV,
    DQK,
    NK,
    NV,
    Direction,
    Gate,
    L,
    Parts,
    S,
    T,
    at_unit_cost,
    matrix_products,
)

NAMES = {"T": T, "L": L, "segment": S, "dqk": DQK, "dhv": DHV, "causal": CAUSAL, "state_bytes": B_C, "nv": NV, "nk": NK}


@dataclass(frozen=True)
class Algorithm:
    """The counts of an algorithm, for one head and one sequence."""

    name: str
    gate: Gate
    direction: Direction
    units: sp.Expr
    """The number of units of a sequence: chunks, tiles or steps."""
    flop_parts: Parts
    """The FLOPs of one unit by part."""
    byte_parts: Parts | None
    """The bytes of one unit by part; None where they are not counted."""

    @property
    def flops_expr(self) -> sp.Expr:
        """Return the FLOPs of a sequence, with the cost of each kind of operation as a symbol."""
        return self.units * sum(self.flop_parts.values(), sp.Integer(0))

    @property
    def bytes_expr(self) -> sp.Expr:
        """Return the bytes of a sequence.

        Raises:
            ValueError: the bytes of this algorithm are not counted.
        """
        if self.byte_parts is None:
            raise ValueError(f"bytes of {self.name}: not counted, caches of a CPU decide")
        return self.units * sum(self.byte_parts.values(), sp.Integer(0))

    def flops(self, **sizes: Any) -> Any:
        """Return the FLOPs of a sequence, counting each operation as one.

        Args:
            sizes: T, L (steps of a chunk or tile), segment, dqk, dhv, causal (1/2), state_bytes (4), nv and nk
                (programs that share a head's state, 1): numbers or arrays.

        Raises:
            TypeError: a size is unknown, or one that the count needs is missing.
        """
        return self._numbers(at_unit_cost, "flops_expr", sizes)

    def matrix_flops(self, **sizes: Any) -> Any:
        """Return the FLOPs of the matrix products of a sequence; the sizes are those of :meth:`flops`."""
        return self._numbers(matrix_products, "flops_expr", sizes)

    def bytes(self, **sizes: Any) -> Any:
        """Return the bytes of a sequence, with 16-bit q, k, v and gates; the sizes are those of :meth:`flops`."""
        return self._numbers(sp.expand, "bytes_expr", sizes)

    def _numbers(self, reduce: Callable[[sp.Expr], sp.Expr], what: str, sizes: dict[str, Any]) -> Any:
        """Evaluate the attribute `what`, reduced by `reduce`, for these sizes."""
        unknown = set(sizes) - set(NAMES)
        if unknown:
            raise TypeError(f"sizes: got {', '.join(sorted(unknown))}, allowed are {', '.join(NAMES)}")
        names, function = _compiled(self.name, self.gate, self.direction, reduce, what)
        values = {str(symbol): value for symbol, value in DEFAULTS.items()}
        values |= {str(NAMES[name]): value for name, value in sizes.items()}
        missing = [name for name, symbol in NAMES.items() if str(symbol) in names and str(symbol) not in values]
        if missing:
            raise TypeError(f"sizes: {', '.join(missing)} missing for {self.name}")
        return function(*(values[name] for name in names))


class _Counts(NamedTuple):
    """The counts of one algorithm: units of a sequence, FLOPs and bytes of a unit by direction."""

    units: sp.Expr
    flops: dict[str, Callable[[Gate], Parts]]
    bytes: dict[str, Callable[[Gate], Parts]]


Counter = Callable[[Gate], Parts]


def _counts(units: sp.Expr, flops: tuple[Counter, Counter], moved: tuple[Counter, ...]) -> _Counts:
    """Return the counts of an algorithm from the functions that count its forward and its backward pass."""
    directions: tuple[Direction, ...] = ("forward", "backward")
    return _Counts(units, dict(zip(directions, flops, strict=True)), dict(zip(directions, moved, strict=False)))


ALGORITHMS = {
    "recurrent": _counts(
        T, (forward.recurrent, backward.recurrent), (traffic.recurrent_forward, traffic.recurrent_backward)
    ),
    "parallel": _counts(
        sp.Integer(1), (forward.parallel, backward.parallel), (traffic.parallel_forward, traffic.parallel_backward)
    ),
    "chunkwise": _counts(
        T / L, (forward.chunkwise, backward.chunkwise), (traffic.chunkwise_forward, traffic.chunkwise_backward)
    ),
    "fused": _counts(
        T / L, (library.fused_forward, library.fused_backward), (traffic.fused_forward, traffic.fused_backward)
    ),
    "segments": _counts(
        T / L,
        (library.segments_forward, library.segments_backward),
        (traffic.segments_forward, traffic.segments_backward),
    ),
    "segmented": _counts(T / L, (library.segmented_forward, library.segmented_backward), ()),
}


@cache
def get(name: str, gate: Gate, direction: Direction = "forward") -> Algorithm:
    """Return an algorithm by its name.

    Raises:
        ValueError: there is no such algorithm, gate or direction.
    """
    for what, got, allowed in (
        ("name", name, tuple(ALGORITHMS)),
        ("gate", gate, ("exp", "sig")),
        ("direction", direction, ("forward", "backward")),
    ):
        if got not in allowed:
            raise ValueError(f"{what}: got {got!r}, allowed are {', '.join(allowed)}")
    counts = ALGORITHMS[name]
    counted = counts.bytes.get(direction)
    return Algorithm(name, gate, direction, counts.units, counts.flops[direction](gate), counted and counted(gate))


@cache
def _compiled(
    name: str, gate: Gate, direction: Direction, reduce: Callable[[sp.Expr], sp.Expr], what: str
) -> tuple[list[str], Callable[..., Any]]:
    """Return a reduced count as a function of numbers or arrays, with the names of its arguments."""
    expr = reduce(getattr(get(name, gate, direction), what))
    symbols = sorted(expr.free_symbols, key=str)
    return [str(s) for s in symbols], sp.lambdify(symbols, expr, "numpy")
