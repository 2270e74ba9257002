"""The compilation of the kernels that a model needs, before the first request comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tfla._util.warm_calls import Warmup, compiles, measured
from tfla.nn.decode import Decoder
from tfla.nn.model import LanguageModel, ModelState
from tfla.nn.validation import check_int, check_model


@torch.no_grad()
def warmup(
    model: LanguageModel,
    *,
    prompts: Sequence[int] = (1, 1024),
    batches: Sequence[int] = (1,),
    states_every: int | None = None,
    capacity: int | None = None,
    pool: int | None = None,
) -> Warmup:
    """Compile what prefills and decoding steps of a model need, by calls with arbitrary tokens.

    Triton compiles a kernel for each set of head dims, dtypes and options at the first call, which takes seconds, and
    keeps it on the disk for later processes. Kernels of other lengths are mostly the same; segments are chosen by
    length, so that the lengths should be typical ones. On a CPU there is nothing to compile, and no call is made.

    Args:
        model: the model, on its device and in its dtype.
        prompts: numbers of tokens of prompts, which are read one at a time.
        batches: numbers of sequences that decode together.
        states_every: the same argument of :meth:`LanguageModel.prefill`, if the server calls it.
        capacity: the same argument of :class:`Decoder`, for models with attention.
        pool: for a server whose states are rows of a pool, the number of its rows. Prompts are then read into a row of
            it, alone and packed, and steps are those of a :class:`Decoder` with ``batches``. None is no pool.

    Returns:
        what was compiled, and how long the calls took.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what was given and what is allowed.
    """
    check_model(model)
    for name, values in (("prompts", prompts), ("batches", batches)):
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise TypeError(f"{name}: got {type(values).__name__}, expected a sequence of ints")
        for value in values:
            check_int(name, value, 1)
    for name, size in (("states_every", states_every), ("capacity", capacity), ("pool", pool)):
        if size is not None:
            check_int(name, size, 1)
    device = model.embedding.weight.device
    if not compiles(device):
        return Warmup(device.type, ())
    states = None if pool is None else model.initial_state(pool, capacity=capacity)
    prefills = [_prefill(model, T, states_every, states) for T in prompts]
    calls = [measured(f"a prompt of {T} tokens", call, device) for T, call in zip(prompts, prefills, strict=True)]
    if states is not None:
        calls += [measured(f"a packed prompt of {T} tokens", _packed(model, T, states), device) for T in prompts]
    calls += [measured(f"a step of {B} sequences", _steps(model, B, capacity, states), device) for B in batches]
    return Warmup(device.type, tuple(calls))


def _prefill(model: LanguageModel, T: int, states_every: int | None, pool: ModelState | None) -> Callable[[], object]:
    """Return a call that reads a prompt of T tokens, which with a pool is padding that has no row."""
    ids, padding = _tokens(model, 1, T)
    options = {} if pool is None else {"state": pool, "state_indices": padding}
    if states_every is None:
        return lambda: model.logits(model.hidden(ids, return_state=True, **options)[0][:, -1])  # type: ignore[arg-type]
    return lambda: model.logits(model.prefill(ids, states_every=states_every, **options)[0][:, -1])  # type: ignore[arg-type]


def _packed(model: LanguageModel, T: int, pool: ModelState) -> Callable[[], object]:
    """Return a call that reads a packed prompt of T tokens, padding that has no row of the pool."""
    ids, padding = _tokens(model, 1, T)
    offsets = torch.tensor([0, T], device=ids.device)
    return lambda: model.hidden(ids, pool, cu_seqlens=offsets, state_indices=padding, return_state=True)


def _steps(model: LanguageModel, B: int, capacity: int | None, pool: ModelState | None) -> Callable[[], object]:
    """Return a call that makes a decoder and one step of B sequences; the capture of its graph compiles."""
    ids, padding = _tokens(model, B)
    if pool is not None:
        return lambda: Decoder(model, pool, batches=[B]).step(ids, padding)
    return lambda: Decoder(model, model.initial_state(B), capacity=capacity).step(ids)


def _tokens(model: LanguageModel, *shape: int) -> tuple[Tensor, Tensor]:
    """Return tokens of a shape, the first size of which is that of the batch, and a row -1 for each sequence."""
    device = model.embedding.weight.device
    ids = torch.zeros(*shape, dtype=torch.int64, device=device)
    return ids, torch.full(shape[:1], -1, dtype=torch.int64, device=device)
