"""Text, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tfla.nn.decode import Decoder
from tfla.nn.model import LanguageModel

# Tokens of the prompt that are read at once: bounds the memory of activations, whatever the prompt's length.
PREFILL = 16_384


def generate(
    model: LanguageModel,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    stop_token: int | None = None,
    cuda_graph: bool | None = None,
) -> Iterator[Tensor]:
    """Continue prompts; yields the new tokens of all sequences, one (B,) int64 tensor at a time.

    The prompt is read through :meth:`LanguageModel.hidden`, then every token through a :class:`Decoder`: with an mLSTM,
    memory does not grow with the length of either. No gradients are kept.

    Args:
        model: the model; its device is that of ids.
        ids: (B, T) int64 prompts of equal length, T >= 1.
        max_new_tokens: how many tokens to yield at most, at least 1.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample among the k likeliest tokens only; None: among all.
        top_p: of these, sample among the likeliest ones that together reach this probability; None: among all.
        seed: of a fresh random generator: same seed, same text. None uses ``generator``, or torch's global one.
        generator: on the model's device; instead of a seed.
        stop_token: a sequence that yields it repeats it from then on; the iterator ends once all sequences did.
        cuda_graph: whether decoding is captured in a CUDA graph; None: where it can be, an mLSTM on a GPU.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed. Raised by
            the call itself, not by the first token.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids: got {ids.dtype if isinstance(ids, Tensor) else type(ids).__name__}, expected int64")
    if ids.dim() != 2 or 0 in ids.shape:
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected (B, T), both at least 1")
    vocab = model.config.vocab_size
    _check_int("max_new_tokens", max_new_tokens, 1)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature: got {temperature}, expected a finite number of at least 0")
    if top_k is not None:
        _check_int("top_k", top_k, 1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p}, expected None or a number above 0 and at most 1")
    if stop_token is not None:
        _check_int("stop_token", stop_token, 0, vocab - 1)
    if seed is not None:
        if generator is not None:
            raise ValueError("seed: got it together with generator, expected at most one of them")
        generator = torch.Generator(ids.device).manual_seed(seed)
    return _tokens(model, ids, max_new_tokens, temperature, top_k, top_p, generator, stop_token, cuda_graph)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
    if value < low or (high is not None and value > high):
        raise ValueError(
            f"{name}: got {value}, expected at least {low}" + ("" if high is None else f" and at most {high}")
        )


@torch.no_grad()
def _tokens(
    model: LanguageModel,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
    stop_token: int | None,
    cuda_graph: bool | None,
) -> Iterator[Tensor]:
    state = model.initial_state(len(ids))
    for piece in ids.split(PREFILL, 1):
        hidden, state = model.hidden(piece, state, return_state=True)
    logits = model.logits(hidden[:, -1])
    decoder = Decoder(model, state, cuda_graph=cuda_graph)
    del state, hidden
    stopped = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for count in range(1, max_new_tokens + 1):
        new = pick(logits, temperature, top_k, top_p, generator)
        if stop_token is not None:
            new = torch.where(stopped, stop_token, new)
            stopped |= new == stop_token
        yield new
        if count == max_new_tokens or (stop_token is not None and bool(stopped.all())):
            return
        logits = decoder.step(new)


def pick(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Tokens (B,) int64 from logits (B, vocab_size); arguments as in :func:`generate`."""
    if temperature == 0:
        return logits.argmax(-1)
    ranked, tokens = (logits / temperature).sort(dim=-1, descending=True, stable=True)
    p = ranked[:, :top_k].softmax(-1)
    if top_p is not None:
        p = p * (p.cumsum(-1) - p < top_p)  # what lies before a token has not reached top_p yet
    return tokens.gather(-1, torch.multinomial(p, 1, generator=generator)).squeeze(-1)
