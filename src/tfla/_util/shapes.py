"""Checks of the shapes of arguments, which PyTorch and JAX share: they read `shape` alone.

Each raises ValueError, whose message names the argument, what was given and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def check_shape(name: str, x: Any, allowed: tuple[int | str, ...]) -> None:
    """Check the shape of an array; a string in ``allowed`` stands for any size and names it in the message."""
    shape = x.shape
    if shape == allowed:  # first, because it is much faster and holds for most
        return
    if len(shape) != len(allowed) or any(isinstance(a, int) and a != n for a, n in zip(allowed, shape, strict=True)):
        # torch.compile formats no symbols; the length of a range, which has a limit, makes constants of them.
        sizes = [str(len(range(a)) if isinstance(a, int) and a < 2**62 else a) for a in allowed]
        raise ValueError(f"{name}: got shape {tuple(shape)}, expected ({', '.join(sizes)})")


def check_input_shapes(q: Any, k: Any, v: Any, gates: dict[str, Any], time: bool) -> None:
    """Check the shapes of the inputs of one call against each other.

    Args:
        q, k, v: (B, T, Hq, dqk), (B, T, Hq, dqk), (B, T, H, dhv), or without T.
        gates: (B, T, H) or (B, H), by name.
        time: whether the inputs have the dimension T.
    """
    lead: tuple[str, ...] = ("B", "T") if time else ("B",)
    check_shape("q", q, (*lead, "H", "dqk"))
    *batch, heads, dqk = q.shape
    check_shape("k", k, (*batch, heads, dqk))
    check_shape("v", v, (*batch, "H", "dhv"))
    if 0 in (*v.shape[1:], *q.shape[1:]):
        raise ValueError(f"v: got shape {tuple(v.shape)} with q {tuple(q.shape)}, expected no empty dimension but B")
    if v.shape[-2] % heads:
        raise ValueError(f"v: got {v.shape[-2]} heads, expected a multiple of the {heads} heads of q and k")
    for name, x in gates.items():
        check_shape(name, x, tuple(v.shape[:-1]))


def state_parts(
    state: Any, sequences: int, q: Any, v: Any, normalize: bool, name: str, array: str
) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield the parts of a state that a call reads: the name for messages, the part and the shape it has to have.

    Args:
        state: the state, with the fields C, n and m.
        sequences: the number of its rows.
        q, v: the inputs, for their dimensions.
        normalize: whether there is a normalizer; else n and m have to be None.
        name: the name of the state as an argument.
        array: what messages call an array.
    """
    heads, dqk, dhv = v.shape[-2], q.shape[-1], v.shape[-1]
    shapes = {"C": (sequences, heads, dqk, dhv), "n": (sequences, heads, dqk), "m": (sequences, heads)}
    for part, shape in shapes.items():
        x = getattr(state, part)
        if part == "C" or normalize:
            yield f"{name}.{part}", x, shape
        elif x is not None:
            raise ValueError(f"{name}.{part}: got {array}, expected None: this form has no normalizer")


def check_mixer_state(
    state: Any, sizes: Sequence[tuple[int, int | None]], has_position: bool, sequences: int | None
) -> None:
    """Check the parts of a recurrent mixer's state beside the recurrence's, in PyTorch and in JAX.

    Args:
        state: a MixerState.
        sizes: for each short convolution how many inputs it keeps, and its channels, None for any number.
        has_position: whether the state has positions.
        sequences: how many the state has, (B,); None where its rows are not those of a batch, and shapes not checked.

    Raises:
        TypeError, ValueError: a part is missing, is one too many, or has another shape.
    """
    if len(state.convolution) != len(sizes):
        raise ValueError(
            f"state.convolution: got {len(state.convolution)} entries, expected {len(sizes)}, one a short convolution"
        )
    if (state.position is not None) != has_position:
        got, wanted = ("None", "numbers") if has_position else ("numbers", "None")
        raise TypeError(f"state.position: got {got}, expected {wanted}")
    if sequences is None:
        return
    for number, (held, (inputs, channels)) in enumerate(zip(state.convolution, sizes, strict=True)):
        expected = sequences, inputs, held.shape[-1] if channels is None else channels
        check_shape(f"state.convolution[{number}]", held, expected)
    if state.position is not None:
        check_shape("state.position", state.position, (sequences,))
