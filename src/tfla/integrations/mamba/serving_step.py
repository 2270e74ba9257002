"""The options that servers give to `selective_state_update`: other rows to write to, several tokens, and speculation.

Their names and meanings are those of the functions of vLLM and of flashinfer. The states of the sequences are copied
from their rows, one step follows the other on the copies, and states go from there to the rows or to the buffer that
get them. The host reads the greatest number of tokens of a sequence alone, and that only where no shape says it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tfla.integrations.mamba.terms import check_devices
from tfla.ops.checks import check_float, check_shape
from tfla.ops.transforms import needs_dispatcher

INTEGERS = (torch.int32, torch.int64)


class Serving(NamedTuple):
    """The options; None and False are what `selective_state_update` does without them."""

    dst_state_batch_indices: Tensor | None
    num_accepted_tokens: Tensor | None
    cu_seqlens: Tensor | None
    disable_state_update: bool
    intermediate_states_buffer: Tensor | None
    intermediate_state_indices: Tensor | None

    def asked(self) -> bool:
        """Return whether one of them is given."""
        return any(option is not None and option is not False for option in self)


# A step of all sequences: it takes the states (N, ...), x, dt, B, C and z of a token of each, and the rows of the
# states, of which -1 is no step; it overwrites the states and returns the outputs.
Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, "Tensor | None", Tensor], Tensor]


def serve(
    step: Step, state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None, rows: Tensor | None,
    options: Serving,
) -> Tensor:  # fmt: skip
    """Compute the steps of all sequences; return the outputs, like x.

    Args:
        step: The step.
        state: The pool of states, which is updated in place.
        x, dt, B, C, z: A token of each sequence, (N, ...), several, (N, T, ...), or packed sequences, (tokens, ...).
        rows: The rows that states are read from, (N,) or (N, columns), of which a negative one is no sequence; None
            takes all rows in order.
        options: The options.
    """
    if isinstance(dt, Tensor) and dt.dim() == x.dim() and state.dim() == 4 and dt.stride(-1) == 0:
        dt = dt[..., 0]  # one number a head, which indexing would expand
    given = {"x": x, "dt": dt, "B": B, "C": C} | ({} if z is None else {"z": z})
    for name, t in given.items():
        check_float(name, t)
        if torch.is_grad_enabled() and (t.requires_grad or state.requires_grad):
            raise ValueError(f"{name}: got gradients, which the options for servers do not have; use torch.no_grad()")
    tensors = options._asdict() | {"state_batch_indices": rows}
    del tensors["disable_state_update"]
    check_devices(state, tensors, "state")
    tokens = _tokens(state, x, options.cu_seqlens, rows, options)
    sequences, most = tokens.at.shape
    _check_buffer(state, sequences, most, options)
    read, written = _rows(state, rows, sequences, options)
    work, out = state[read.clamp(min=0)], torch.zeros_like(x)
    work = work.float() if work.dtype.itemsize == 2 else work  # rounded where it is stored, not from token to token
    flat_out = out.flatten(0, 1) if tokens.of_batch else out
    flat = {name: t.flatten(0, 1) if tokens.of_batch else t for name, t in given.items()}
    own = torch.arange(sequences, device=state.device)
    for j in range(most):
        runs = tokens.exists[:, j] & (read >= 0)
        at = tokens.at[:, j]
        taken = {name: t[at] for name, t in flat.items()}
        runs_of = torch.where(runs, own, -1)
        y = step(work, taken["x"], taken["dt"], taken["B"], taken["C"], taken.get("z"), runs_of)
        _write(flat_out, torch.where(runs, at, -1), y)
        if options.num_accepted_tokens is not None and not options.disable_state_update:
            _write(state, torch.where(runs, written[:, j], -1), work)
        if (buffer := options.intermediate_states_buffer) is not None:
            places = options.intermediate_state_indices
            _write(buffer[:, j], torch.where(runs, own if places is None else places.long(), -1), work)
    if options.num_accepted_tokens is None and not options.disable_state_update:
        some = (tokens.exists[:, 0] if most else own < 0) & (read >= 0)
        _write(state, torch.where(some, written[:, 0], -1), work)
    return out


class _Tokens(NamedTuple):
    """The tokens of each sequence."""

    at: Tensor  # (N, most), the index of each token in the flat inputs
    exists: Tensor  # (N, most) bool
    of_batch: bool  # whether the inputs are (N, T, ...)


def _tokens(
    state: Tensor, x: Tensor, cu_seqlens: Tensor | None, rows: Tensor | None, options: Serving
) -> _Tokens:  # fmt: skip
    """Return the tokens of each sequence."""
    if cu_seqlens is None:
        of_batch = x.dim() == state.dim()
        count, most = x.shape[0], x.shape[1] if of_batch else 1
        at = torch.arange(count * most, device=x.device).view(count, most)
        return _Tokens(at, torch.ones_like(at, dtype=torch.bool), of_batch)
    check_integers("cu_seqlens", cu_seqlens, 1)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    of_shapes = []
    if options.num_accepted_tokens is not None:  # without it the first column counts, whatever the number of tokens
        of_shapes = [t.shape[1] for t in (rows, options.dst_state_batch_indices) if t is not None and t.dim() == 2]
    if (buffer := options.intermediate_states_buffer) is not None:
        of_shapes.append(buffer.shape[1])
    most = min(of_shapes) if of_shapes else int(lengths.max()) if lengths.numel() else 0
    if cu_seqlens.device.type == "cpu" and not needs_dispatcher((cu_seqlens,)):
        _check_offsets(cu_seqlens.tolist(), most, x.shape[0])
    if not x.shape[0]:
        most = 0
    step = torch.arange(most, device=x.device)
    at = (starts[:, None] + step).clamp(max=max(x.shape[0] - 1, 0))
    return _Tokens(at, step < lengths[:, None], False)


def _check_offsets(offsets: list[int], most: int, tokens: int) -> None:
    """Raise unless offsets are those of sequences of at most `most` tokens in a row of `tokens`, or of some of them."""
    if offsets != sorted(offsets) or offsets[:1] != [0] or offsets[-1] > tokens:
        raise ValueError(f"cu_seqlens: got {offsets}, expected values from 0 to {tokens} that never fall")
    longest = max((b - a for a, b in itertools.pairwise(offsets)), default=0)
    if longest > most:
        raise ValueError(
            f"cu_seqlens: got a sequence of {longest} tokens, expected at most {most}: the columns of the indices with "
            "num_accepted_tokens, and the tokens of intermediate_states_buffer"
        )


def check_integers(name: str, t: object, *dims: int) -> None:
    """Raise unless t is an int32 or int64 tensor with one of these numbers of dimensions."""
    if not isinstance(t, Tensor) or t.dtype not in INTEGERS:
        got = f"dtype {t.dtype}" if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{name}: got {got}, expected an int32 or int64 tensor")
    if t.dim() not in dims:
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected {' or '.join(map(str, dims))} dimensions")


def _check_buffer(state: Tensor, sequences: int, most: int, options: Serving) -> None:
    """Raise unless the buffer of states, if there is one, has a state for each token of each sequence."""
    name, buffer = "intermediate_states_buffer", options.intermediate_states_buffer
    places = options.intermediate_state_indices
    if places is not None:
        check_integers("intermediate_state_indices", places, 1)
        check_shape("intermediate_state_indices", places, (sequences,))
    if buffer is None:
        return
    check_float(name, buffer)
    least = sequences if places is None else 0
    if buffer.shape[2:] != state.shape[1:] or buffer.shape[1] < most or buffer.shape[0] < least:
        raise ValueError(
            f"{name}: got shape {tuple(buffer.shape)}, expected (rows, tokens, {', '.join(map(str, state.shape[1:]))}) "
            f"with at least {least} rows and {most} tokens"
        )


def _rows(state: Tensor, rows: Tensor | None, sequences: int, options: Serving) -> tuple[Tensor, Tensor]:
    """Return the row that each sequence reads, (N,), and those that it writes, (N, columns)."""
    accepted = options.num_accepted_tokens
    if rows is None:
        if accepted is not None:
            raise ValueError("num_accepted_tokens: got a tensor without state_batch_indices, which it needs")
        check_shape("state", state, (sequences, *state.shape[1:]))
        rows = torch.arange(sequences, device=state.device)
    found = []
    for name, t in (("state_batch_indices", rows), ("dst_state_batch_indices", options.dst_state_batch_indices)):
        if t is None:
            continue
        check_integers(name, t, 1, 2)
        if t.shape[0] < sequences:
            raise ValueError(f"{name}: got {t.shape[0]} rows, expected one for each of {sequences} sequences")
        on_host = t.device.type == "cpu" and not needs_dispatcher((t,))
        if on_host and t.numel() and t.max() >= state.shape[0]:
            most = state.shape[0] - 1
            raise ValueError(f"{name}: got {int(t.max())}, expected at most {most}, or less than 0 to skip")
        if accepted is not None and t.dim() == 1:
            raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected (N, tokens) with num_accepted_tokens")
        found.append(t[:sequences].view(sequences, -1).long())
    column = torch.zeros(sequences, dtype=torch.long, device=state.device)
    if accepted is not None:
        check_integers("num_accepted_tokens", accepted, 1)
        check_shape("num_accepted_tokens", accepted, (sequences,))
        column = (accepted.long() - 1).clamp(min=0)
    return found[0].gather(1, column[:, None])[:, 0], found[-1]


def _write(to: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write values (N, ...) to rows of a tensor, but those of negative rows; no row is read on the host.

    A value of a negative row is replaced by that of the first other one, so that both write the same.
    """
    if not rows.numel() or not to.shape[0]:
        return
    valid = rows >= 0
    own = torch.arange(len(rows), device=rows.device)
    taken = torch.where(valid, own, valid.to(torch.int8).argmax())
    place = rows[taken].clamp(min=0)
    new = values[taken].to(to.dtype)
    none = (~valid[taken]).view(-1, *[1] * (new.dim() - 1))  # all rows are negative
    to[place] = torch.where(none, to[place], new)
