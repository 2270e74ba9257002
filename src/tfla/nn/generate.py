"""Sampling of tokens from a language model, one token per sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tfla.nn.decode import Decoder, check_cuda_graph
from tfla.nn.drafts import NGram, check_draft
from tfla.nn.model import LanguageModel
from tfla.nn.sampling import Sampling, prefill
from tfla.nn.speculate import speculate
from tfla.nn.validation import (
    SEEDS,
    check_ids,
    check_int,
    check_model,
    check_vocabulary,
    check_whole_prompts,
    is_sharded,
)
from tfla.ops.checks import LONGEST_STEPS

# The largest number of tokens for which caches of attention have room from the start, as CUDA graphs need.
LARGEST_CACHE = 65_536


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
    draft: LanguageModel | NGram | None = None,
    draft_tokens: int = 4,
) -> Iterator[Tensor]:
    """Continue prompts: return an iterator over the new tokens of all sequences, one (B,) int64 tensor per step.

    The prompt goes through :meth:`LanguageModel.hidden`, each new token through a :class:`Decoder`. The memory of an
    mLSTM depends on the length of neither the prompt nor the text. No gradients are recorded.

    Args:
        model: the model, on the device of ids.
        ids: (B, T) int64 prompts of equal length, T >= 1.
        max_new_tokens: the largest number of tokens to yield, at least 1.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample among the k likeliest tokens; None samples among all.
        top_p: sample among the likeliest of these tokens that together reach this probability; None keeps all.
        seed: seed of a new random generator. None uses ``generator``, or torch's global one.
        generator: a random generator on the model's device, in place of a seed.
        stop_token: a sequence that yields this token repeats it from then on; the iteration ends once all sequences
            have yielded it.
        cuda_graph: whether to capture decoding in a CUDA graph; None captures where possible, for recurrent mixers on a
            GPU.
        draft: the source of proposed tokens in speculative decoding, several of which the model accepts or replaces in
            one call. It is a smaller model with the same vocabulary on the same device, or :class:`NGram`, which looks
            the last tokens up in the text so far. With temperature 0 the tokens are those of decoding without a draft,
            unless logits differ by rounding alone. With another temperature their distribution is the same, but a seed
            gives other tokens.
        draft_tokens: the number of tokens proposed at a time, from 1 to 31. A model as draft has this number of copies
            of the states of its recurrent mixers, and two more.

    Returns:
        an iterator over tensors (B,) int64 on the model's device.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what was given and what is allowed. The
            call itself raises it, before the iteration starts.
        ValueError: the logits of a sequence are not finite, because weights or a state are not. The error takes the
            place of the token. Only on a GPU without ``stop_token``, where the host does not wait for the GPU, it may
            come later for all tokens but the first, and at the latest at the end of the iteration.
    """
    check_model(model)
    check_whole_prompts(model)
    check_ids(ids, "(B, T)", 2)
    if 0 in ids.shape:
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
    check_int("draft_tokens", draft_tokens, 1, LONGEST_STEPS - 1)
    attention = "attention" in model.config.mixer_counts
    total = ids.shape[1] + max_new_tokens
    if draft is not None:
        check_draft(draft, model)
        if is_sharded(model) or is_sharded(draft):
            raise ValueError("draft: got one with a model whose parameters FSDP2 shards, expected None")
        check_cuda_graph(cuda_graph, True, device)
        sampling = Sampling(temperature, top_k, top_p, generator)
        return speculate(model, draft, ids, max_new_tokens, draft_tokens, sampling, stop_token, cuda_graph)
    capacity = total if attention and device.type == "cuda" and total <= LARGEST_CACHE else None
    check_cuda_graph(cuda_graph, not attention or capacity is not None, device)
    return _tokens(
        model, ids, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator,
        stop_token=stop_token, cuda_graph=cuda_graph, capacity=capacity,
    )  # fmt: skip


@torch.no_grad()
def _tokens(
    model: LanguageModel,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
    stop_token: int | None,
    cuda_graph: bool | None,
    capacity: int | None,
) -> Iterator[Tensor]:
    """Yield the tokens of :func:`generate` without a draft, whose arguments have been checked."""
    logits, state = prefill(model, ids)
    decoder = Decoder(model, state, cuda_graph=cuda_graph, capacity=capacity)
    del state
    stopped = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    finite_check = FiniteCheck(ids.device)
    for count in range(1, max_new_tokens + 1):
        new, finite = _sample(logits, temperature, top_k, top_p, generator)
        finite_check.record(finite | stopped)
        if stop_token is not None:
            new = torch.where(stopped, stop_token, new)
            stopped |= new == stop_token
        last = count == max_new_tokens or (stop_token is not None and bool(stopped.all()))
        # The first token costs one synchronization per call; with a stop token each step has synchronized already.
        finite_check.check(wait=count == 1 or stop_token is not None)
        yield new
        if last:
            finite_check.check(wait=True)
            return
        logits = decoder.step(new)


def sample_tokens(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw tokens (B,) int64 from logits (B, vocab_size); the other arguments are those of :func:`generate`."""
    return _sample(logits, temperature, top_k, top_p, generator)[0]


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draw tokens, (B,) int64; also return whether the logits of each row are finite, (B,) bool."""
    return Sampling(temperature, top_k, top_p, generator).draw(logits)


class FiniteCheck:
    """A check that all logits are finite, without a synchronization with a GPU.

    The GPU keeps a flag, which it copies into pinned memory of the host after each step. The host reads this copy
    without waiting. Once the host has read the token of a step, the copy includes that step.

    Args:
        device: device of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        self.flag = torch.zeros((), dtype=torch.bool, device=device)
        self.on_host = device.type != "cuda"
        self.host_flag = self.flag if self.on_host else torch.zeros((), dtype=torch.bool, pin_memory=True)

    def record(self, finite: Tensor) -> None:
        """Record which sequences of a step have finite logits: bool, any shape."""
        self.flag.logical_or_(finite.logical_not().any())
        if not self.on_host:
            self.host_flag.copy_(self.flag, non_blocking=True)

    def check(self, wait: bool) -> None:
        """Raise ValueError if logits of a step were not finite; with ``wait`` the host waits for all steps before."""
        if bool(self.flag if wait else self.host_flag):
            raise ValueError(
                "logits: got NaN or infinity, expected finite numbers: the model's weights or its state are not finite"
            )


def _number(name: str, value: object, expected: str) -> float:
    """Return a number, or a tensor of one number, as a float; raise TypeError for others, even strings and bools."""
    if not isinstance(value, bool | str | bytes) and hasattr(value, "__float__"):
        try:
            return float(value)
        # A tensor of several numbers, or an int of 400 digits.
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise TypeError(f"{name}: got {value!r}, expected {expected}")


def _check_generator(generator: object, device: torch.device) -> None:
    """Raise unless ``generator`` is a random generator for ``device``."""
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: got {type(generator).__name__}, expected a torch.Generator or None")
    if generator.device.type != device.type:
        raise ValueError(f"generator: got device {generator.device}, expected that of the model, {device}")
