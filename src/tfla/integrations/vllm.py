"""The operators for a server's batch of prefills and decoding steps, with the metadata of vLLM's recurrent layers.

vLLM gives a recurrent layer the tokens of all requests in a row, (tokens, heads, dim): first one token of each request
that decodes, then the prompts or parts of prompts. Its metadata says where sequences begin, which row of the pool has
the state of each, and which of the prompts go on from a state. A layer of a plug-in is then one call here. vLLM itself
is not imported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

import tfla
from tfla.nn.validation import check_int
from tfla.ops.checks import check_float, check_values_of_indices
from tfla.ops.state import State
from tfla.ops.state_pool import PoolRows

__all__ = ["BatchMetadata", "delta_rule", "linear_attention", "mlstm"]


class BatchMetadata(Protocol):
    """The part of vLLM's metadata of a batch that is read; the sequences that decode come first.

    A ``num_decode_tokens`` is read too if there is one: it has to be num_decodes, as a decoding step is one token. In
    place of ``has_initial_states`` there may be ``has_initial_states_p``, with the same meaning, or ``seq_lens``
    (num_decodes + num_prefills,) int, the tokens of each sequence so far: a prefill goes on from its state if they are
    more than its tokens in the batch.
    """

    @property
    def num_decodes(self) -> int:
        """The number of sequences of one token, which are decoding steps."""

    @property
    def num_prefills(self) -> int:
        """The number of the other sequences, which may have any number of tokens."""

    @property
    def query_start_loc(self) -> Tensor:
        """(num_decodes + num_prefills + 1,) int, the offsets of all sequences."""

    @property
    def state_indices_tensor(self) -> Tensor:
        """(num_decodes + num_prefills,) int, the rows of the pool; -1 is padding."""

    @property
    def has_initial_states(self) -> Tensor | None:
        """(num_prefills,) bool, whether a prefill goes on from the state in its row; None is from zero."""


def mlstm(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, pool: State, metadata: BatchMetadata, **options: Any
) -> Tensor:
    """Compute :func:`tfla.mlstm` for the prefills of a batch and :func:`tfla.mlstm_step` for its decoding steps.

    Args:
        q, k: (tokens, Hq, dqk).
        v: (tokens, H, dhv).
        i, f: (tokens, H), pre-activations.
        pool: the states, with a row for each request; the rows of the batch are overwritten.
        metadata: the batch. Tokens after those that it describes are padding, whose outputs are zero.
        options: input_gate and scale, as the operators take them.

    Returns:
        h (tokens, H, dhv) in v's dtype.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    return _compute(tfla.mlstm, tfla.mlstm_step, {"q": q, "k": k, "v": v, "i": i, "f": f}, pool, metadata, options)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, pool: State, metadata: BatchMetadata, log_i: Tensor | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Compute :func:`tfla.linear_attention` and its step, as :func:`mlstm` does.

    Args:
        q, k, v, pool, metadata: as in :func:`mlstm`.
        log_f: (tokens, H) or (tokens, H, dqk), log-gates.
        log_i: (tokens, H), log-gates; None is 0.
        options: normalize and scale.

    Returns:
        h (tokens, H, dhv) in v's dtype.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    tensors = {"q": q, "k": k, "v": v, "log_f": log_f, "log_i": log_i}
    return _compute(tfla.linear_attention, tfla.linear_attention_step, tensors, pool, metadata, options)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, pool: State, metadata: BatchMetadata,
    log_f: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Compute :func:`tfla.delta_rule` and its step, as :func:`mlstm` does.

    Args:
        q, k, v, pool, metadata: as in :func:`mlstm`.
        beta: (tokens, H), write strengths; None is 1.
        log_f: (tokens, H) or (tokens, H, dqk), log-gates; None is no decay.
        options: normalize_qk, scale, and the activations with their parameters.

    Returns:
        h (tokens, H, dhv) in v's dtype.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    tensors = {"q": q, "k": k, "v": v, "beta": beta, "log_f": log_f}
    return _compute(tfla.delta_rule, tfla.delta_rule_step, tensors, pool, metadata, options)


@torch.no_grad()
def _compute(
    operator: Callable[..., Any], step: Callable[..., Any], tensors: Mapping[str, Tensor | None], pool: State,
    metadata: BatchMetadata, options: Mapping[str, Any],
) -> Tensor:  # fmt: skip
    """Compute the decoding steps in place in the pool, then the prefills."""
    if not isinstance(pool, State):
        raise TypeError(f"pool: got {type(pool).__name__}, expected tfla.State")
    v = tensors["v"]
    check_float("v", v)
    assert v is not None
    for name, t in tensors.items():  # before the decoding steps, which overwrite rows
        if isinstance(t, Tensor) and t.shape[:1] != v.shape[:1]:
            raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected the {v.shape[0]} tokens of v first")
    unknown = [name for name in options if name not in _shared_options(operator, step)]
    if unknown:
        raise TypeError(f"{unknown[0]}: got it, expected options of both {operator.__name__} and {step.__name__}")
    _check_metadata(metadata, v)
    decodes, prefills = metadata.num_decodes, metadata.num_prefills
    indices, offsets = metadata.state_indices_tensor, metadata.query_start_loc
    if indices.device.type == "cpu":  # on a GPU the host would wait for their values
        check_values_of_indices(indices, pool.C.shape[0], "metadata.state_indices_tensor")
    h = v.new_zeros(v.shape)
    if decodes:
        own = {name: None if t is None else t[:decodes] for name, t in tensors.items()}
        h[:decodes] = step(**own, state=pool, state_indices=indices[:decodes], **options)[0]
    if prefills:
        # The number of tokens is on the host only where the batch is not padded, so padding is a sequence of its own.
        starts = offsets[decodes:] - decodes
        rest = starts.new_full((1,), v.shape[0] - decodes)
        own = {name: None if t is None else t[None, decodes:] for name, t in tensors.items()}
        rows = indices[decodes:]
        given = _initial_states(metadata)
        PoolRows(rows if given is None else torch.where(given, -1, rows), pool.C.shape[0]).clear(pool)
        if v.shape[0] == decodes:  # all prefills are empty, and the operators take no call without steps
            return h
        found, _ = operator(
            **own, initial_state=pool, state_indices=torch.cat([rows, rows.new_full((1,), -1)]), return_state=True,
            cu_seqlens=torch.cat([starts, rest]), **options,
        )  # fmt: skip
        # Outputs of padding are zero, whatever its tokens hold.
        token = torch.arange(found.shape[1], device=v.device)
        h[decodes:] = torch.where((token < starts[-1])[:, None, None], found[0], 0)
    return h


@functools.cache
def _shared_options(operator: Callable[..., Any], step: Callable[..., Any]) -> frozenset[str]:
    """Return the arguments that an operator and its step both have."""
    return frozenset(inspect.signature(operator).parameters) & frozenset(inspect.signature(step).parameters)


def _initial_states_name(metadata: BatchMetadata) -> str:
    """Return the attribute that says which prefills go on from a state.

    Raises:
        TypeError: there is none.
    """
    names = ("has_initial_states", "has_initial_states_p", "seq_lens")
    found = next((name for name in names if hasattr(metadata, name)), None)
    if found is None:
        raise TypeError(
            f"metadata: got {type(metadata).__name__} without {names[0]}, expected one of {', '.join(names)}"
        )
    return found


def _initial_states(metadata: BatchMetadata) -> Tensor | None:
    """Return which prefills go on from the states in their rows, (num_prefills,) bool; None is none of them."""
    name, decodes = _initial_states_name(metadata), metadata.num_decodes
    given: Tensor | None = getattr(metadata, name)
    if name != "seq_lens" or given is None:
        return given
    offsets = metadata.query_start_loc[decodes:]
    return given[decodes:] > offsets[1:] - offsets[:-1]


def _check_metadata(metadata: BatchMetadata, v: Tensor) -> None:
    """Raise unless a batch's metadata fit each other and v (tokens, H, dhv); values are read on a CPU alone."""
    for name in ("num_decodes", "num_prefills", "state_indices_tensor", "query_start_loc"):
        if not hasattr(metadata, name):
            raise TypeError(f"metadata: got {type(metadata).__name__} without {name}, expected vLLM's metadata")
        if name.startswith("num"):
            check_int(f"metadata.{name}", getattr(metadata, name), 0)
    decodes, prefills = metadata.num_decodes, metadata.num_prefills
    tokens = getattr(metadata, "num_decode_tokens", decodes)
    if tokens != decodes:
        raise ValueError(
            f"metadata.num_decode_tokens: got {tokens}, expected num_decodes, {decodes}: speculative decoding, with "
            "several tokens of a sequence that decodes, is not supported"
        )
    sizes = {"state_indices_tensor": decodes + prefills, "query_start_loc": decodes + prefills + 1}
    name = _initial_states_name(metadata) if prefills else "has_initial_states"
    if prefills and getattr(metadata, name) is not None:
        sizes[name] = decodes + prefills if name == "seq_lens" else prefills
    for name, size in sizes.items():
        x: object = getattr(metadata, name)
        if not isinstance(x, Tensor):
            raise TypeError(f"metadata.{name}: got {type(x).__name__}, expected a tensor")
        dtypes = (torch.bool,) if name.startswith("has_initial") else (torch.int32, torch.int64)
        if x.dtype not in dtypes:
            raise TypeError(f"metadata.{name}: got dtype {x.dtype}, expected {' or '.join(map(str, dtypes))}")
        if x.shape != (size,):
            raise ValueError(f"metadata.{name}: got shape {tuple(x.shape)}, expected ({size},) for its sequences")
        if x.device != v.device:
            raise ValueError(f"metadata.{name}: got device {x.device}, expected that of v, {v.device}")
    if metadata.query_start_loc.device.type == "cpu":
        offsets = metadata.query_start_loc.tolist()
        if offsets[: decodes + 1] != list(range(decodes + 1)):
            raise ValueError(
                f"metadata.query_start_loc: got {offsets}, expected one token for each of the first {decodes} sequences"
            )
        if offsets != sorted(offsets) or offsets[-1] > v.shape[0]:
            raise ValueError(
                f"metadata.query_start_loc: got {offsets}, expected values that never fall, up to {v.shape[0]} tokens"
            )
