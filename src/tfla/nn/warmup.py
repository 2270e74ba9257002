"""The compilation of the kernels that a model needs, before the first request comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tfla._util.warm_calls import Warmup, compiles, measured
from tfla.nn.decode import Decoder
from tfla.nn.model import LanguageModel
from tfla.nn.validation import check_int, check_model


@torch.no_grad()
def warmup(
    model: LanguageModel,
    *,
    prompts: Sequence[int] = (1, 1024),
    batches: Sequence[int] = (1,),
    states_every: int | None = None,
    capacity: int | None = None,
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
    if states_every is not None:
        check_int("states_every", states_every, 1)
    device = model.embedding.weight.device
    if not compiles(device):
        return Warmup(device.type, ())
    calls = [measured(f"a prompt of {T} tokens", _prefill(model, T, states_every), device) for T in prompts]
    calls += [measured(f"a step of {B} sequences", _steps(model, B, capacity), device) for B in batches]
    return Warmup(device.type, tuple(calls))


def _prefill(model: LanguageModel, T: int, states_every: int | None) -> Callable[[], object]:
    """Return a call that reads a prompt of T tokens."""
    ids = torch.zeros(1, T, dtype=torch.int64, device=model.embedding.weight.device)
    if states_every is None:
        return lambda: model.logits(model.hidden(ids, return_state=True)[0][:, -1])
    return lambda: model.logits(model.prefill(ids, states_every=states_every)[0][:, -1])


def _steps(model: LanguageModel, B: int, capacity: int | None) -> Callable[[], object]:
    """Return a call that makes a decoder and one step of B sequences; the capture of its graph compiles."""
    ids = torch.zeros(B, dtype=torch.int64, device=model.embedding.weight.device)
    return lambda: Decoder(model, model.initial_state(B), capacity=capacity).step(ids)
