"""Text, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tfla.nn.arguments import SEEDS, check_int, check_vocabulary
from tfla.nn.decode import Decoder, check_graph
from tfla.nn.model import LanguageModel

# Tokens of the prompt that are read at once: bounds the memory of activations, whatever the prompt's length.
PREFILL = 16_384
# Below it float32 has no exact numbers any more, and sampling is taking the likeliest token.
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny


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
        ValueError: the logits of a sequence are not finite, because weights or a state are not. Raised in place of the
            first token; for a later token it is raised in its place on a CPU and, on a GPU, with ``stop_token``.
            Without ``stop_token`` a GPU is not waited for, and the error comes once the host has seen it, at the end of
            the iteration at the latest.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "initial_state"):
        raise TypeError(f"model: got {type(model).__name__}, expected a LanguageModel")
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids: got {ids.dtype if isinstance(ids, Tensor) else type(ids).__name__}, expected int64")
    if ids.dim() != 2 or 0 in ids.shape:
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected (B, T), both at least 1")
    vocab, device = model.config.vocab_size, model.embedding.weight.device
    if ids.device != device:
        raise ValueError(f"ids: got device {ids.device}, expected that of the model, {device}")
    check_vocabulary(ids, vocab)
    check_int("max_new_tokens", max_new_tokens, 1)
    temperature = _number("temperature", temperature, "a finite number of at least 0")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature: got {temperature}, expected a finite number of at least 0")
    if top_k is not None:
        check_int("top_k", top_k, 1)
    if top_p is not None:
        top_p = _number("top_p", top_p, "None or a number above 0 and at most 1")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p: got {top_p}, expected None or a number above 0 and at most 1")
    if stop_token is not None:
        check_int("stop_token", stop_token, 0, vocab - 1)
    if generator is not None:
        _check_generator(generator, device)
    if seed is not None:
        if generator is not None:
            raise ValueError("seed: got it together with generator, expected at most one of them")
        check_int("seed", seed, *SEEDS)
        generator = torch.Generator(ids.device).manual_seed(seed)
    check_graph(cuda_graph, model.config.mixer != "attention", device)
    return _tokens(model, ids, max_new_tokens, temperature, top_k, top_p, generator, stop_token, cuda_graph)


def _number(name: str, value: object, expected: str) -> float:
    """Return a number as a float; a tensor of one number is one, a string and a bool are not."""
    if not isinstance(value, bool | str | bytes) and hasattr(value, "__float__"):
        try:
            return float(value)
        except (
            TypeError,
            ValueError,
            RuntimeError,
            OverflowError,
        ):  # a tensor of several numbers, an int of 400 digits
            pass
    raise TypeError(f"{name}: got {value!r}, expected {expected}")


def _check_generator(generator: object, device: torch.device) -> None:
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: got {type(generator).__name__}, expected a torch.Generator or None")
    if generator.device.type != device.type:
        raise ValueError(f"generator: got device {generator.device}, expected that of the model, {device}")


class FiniteWatch:
    """The check that tokens come from finite logits, which does not wait for a GPU.

    A GPU copies its verdict into memory of the host, where it is read without a synchronization: it is current as soon
    as the token that it belongs to has been read.
    """

    def __init__(self, device: torch.device) -> None:
        self.broken = torch.zeros((), dtype=torch.bool, device=device)
        self.waits = device.type != "cuda"
        self.seen = self.broken if self.waits else torch.zeros((), dtype=torch.bool, pin_memory=True)

    def note(self, finite: Tensor) -> None:
        """Take note of which sequences of a step had finite logits: bool, any shape."""
        self.broken.logical_or_(finite.logical_not().any())
        if not self.waits:
            self.seen.copy_(self.broken, non_blocking=True)

    def check(self, wait: bool) -> None:
        """Raise ValueError where a step is known to have had other logits; ``wait`` for the GPU to know of all."""
        if bool(self.broken if wait else self.seen):
            raise ValueError(
                "logits: got NaN or infinity, expected finite numbers: the model's weights or its state are not finite"
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
    watch = FiniteWatch(ids.device)
    for count in range(1, max_new_tokens + 1):
        new, finite = _pick(logits, temperature, top_k, top_p, generator)
        watch.note(finite | stopped)
        if stop_token is not None:
            new = torch.where(stopped, stop_token, new)
            stopped |= new == stop_token
        last = count == max_new_tokens or (stop_token is not None and bool(stopped.all()))
        # Waiting for the first token costs a synchronization per call; with a stop token the device was waited for.
        watch.check(wait=count == 1 or stop_token is not None)
        yield new
        if last:
            watch.check(wait=True)
            return
        logits = decoder.step(new)


def pick(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw tokens (B,) int64 from logits (B, vocab_size); arguments as in :func:`generate`."""
    return _pick(logits, temperature, top_k, top_p, generator)[0]


def _pick(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draw tokens (B,) int64; return them, and of which rows the largest logit is finite, (B,) bool."""
    top, likeliest = logits.max(-1)  # NaN where any logit is
    finite = top.isfinite()
    if temperature < SMALLEST_TEMPERATURE:
        return likeliest, finite
    # Less the largest, so that no temperature makes infinity of a finite logit.
    ranked, tokens = ((logits - top[:, None]) / temperature).sort(dim=-1, descending=True, stable=True)
    p = ranked[:, : logits.shape[-1] if top_k is None else min(top_k, logits.shape[-1])].softmax(-1)
    if top_p is not None:
        p = p * (p.cumsum(-1) - p < top_p)  # what lies before a token has not reached top_p yet
    p = torch.where(finite[:, None], p, 1.0)  # of NaN a GPU draws nothing, and ends the process
    return tokens.gather(-1, torch.multinomial(p, 1, generator=generator)).squeeze(-1), finite
