"""What a model's call says and hands to no layer: which tokens are padding, and that a cache is wanted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PARAMETERS = ("input_ids", "inputs_embeds", "cache_params", "use_cache")  # of xLSTMModel.forward, in order


class PaddingHooks:
    """Carries the attention mask of a model's forward pass to its cells, past everything between.

    A padded token leaves the state as it is. Where no gradients are kept, every position behind a token shows that
    token's output, so that ``generate`` finds the last token's in the last position whichever side is padded.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None  # (B, T) bool, True at tokens, of the forward pass that runs
        self.running = False  # whether a forward pass runs
        self._read: dict[int, int] = {}  # by cell: positions it has had, where the model goes in pieces
        self._hooks: list[Any] = []

    def attach(self, backbone: nn.Module) -> None:
        """Listen to the backbone's calls."""
        self._hooks = [
            backbone.register_forward_pre_hook(self._before, with_kwargs=True),
            backbone.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def detach(self, backbone: nn.Module) -> None:
        """Stop listening."""
        for hook in self._hooks:
            hook.remove()
        for block in backbone.blocks:  # type: ignore[union-attr]
            if isinstance(checkpoint := getattr(block, "_gradient_checkpointing_func", None), MaskedCheckpoint):
                block._gradient_checkpointing_func = checkpoint.original

    @contextmanager
    def of(self, mask: Tensor | None) -> Iterator[None]:
        """Inside, that mask is the one that cells see."""
        before, self.mask = self.mask, mask
        try:
            yield
        finally:
            self.mask = before

    def mask_gates(self, cell: nn.Module, i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """i and f (B, T, heads) with padded tokens that write nothing and forget nothing."""
        if self.mask is None:
            return i, f
        mask, steps = self.mask, i.shape[1]
        if steps < mask.shape[1]:
            start = self._read.get(id(cell), 0)
            self._read[id(cell)] = start + steps
            mask = mask[:, start : start + steps]
        padded = ~mask[..., None].to(i.device)  # blocks may be on several
        return i.masked_fill(padded, -torch.inf), f.masked_fill(padded, torch.inf)

    def _before(self, backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        given = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        inputs = given.get("input_ids")
        inputs = given.get("inputs_embeds") if inputs is None else inputs
        if inputs is None:
            return (), given  # the model says what is missing
        self._read.clear()
        self.running = True
        self.mask = _select_new_tokens(given.get("attention_mask"), *inputs.shape[:2])
        if self.mask is not None:
            for block in backbone.blocks:
                checkpoint = getattr(block, "_gradient_checkpointing_func", None)
                if checkpoint is not None and not isinstance(checkpoint, MaskedCheckpoint):
                    block._gradient_checkpointing_func = MaskedCheckpoint(checkpoint, self)
        if given.get("cache_params") is None and _creates_cache(backbone, inputs.shape[1], given.get("use_cache")):
            given["cache_params"] = _make_cache(backbone, inputs)
        return (), given

    def _after(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        mask, self.mask, self.running = self.mask, None, False
        if mask is None or output is None or torch.is_grad_enabled():  # None: the forward pass has failed
            return output
        filled = _repeat_last_outputs(output[0], mask)
        if isinstance(output, tuple):
            return (filled, *output[1:])
        output.last_hidden_state = filled
        return output


class MaskedCheckpoint:
    """A block's gradient checkpointing, which runs the block again in the backward: with the mask it had."""

    def __init__(self, original: Callable[..., Any], padding: PaddingHooks) -> None:
        self.original, self.padding = original, padding

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        return self.original(functools.partial(self._masked, run, self.padding.mask), *args)

    def _masked(self, run: Callable[..., Any], mask: Tensor | None, *args: Any) -> Any:
        with self.padding.of(mask):
            return run(*args)


def _select_new_tokens(mask: Tensor | None, batch: int, steps: int) -> Tensor | None:
    """The part of an attention mask, of old and new tokens, that belongs to the new ones, as bool."""
    if mask is None:
        return None
    if mask.dim() != 2 or len(mask) != batch or mask.shape[1] < steps:
        raise ValueError(f"attention_mask: got shape {tuple(mask.shape)}, expected ({batch}, {steps} or more)")
    return mask[:, mask.shape[1] - steps :].bool()


def _repeat_last_outputs(x: Tensor, mask: Tensor) -> Tensor:
    """x (B, T, D) with the output of a row's last token in place of what is behind it."""
    positions = torch.arange(x.shape[1], device=x.device)
    last = torch.where(mask.to(x.device), positions, 0).cummax(1).values
    return x.gather(1, last[..., None].expand_as(x))


def _creates_cache(backbone: Any, steps: int, use_cache: bool | None) -> bool:
    """Whether the model, in eval mode, makes itself a cache: where it is told to, or reads the tokens in pieces."""
    wanted = backbone.config.use_cache if use_cache is None else use_cache
    return not backbone.training and bool(wanted or steps > backbone.config.max_inference_chunksize)


def _make_cache(backbone: Any, inputs: Tensor) -> object:
    """A cache in the dtype that the config has for states; the model's own would be in that of the weights.

    For what it reads in pieces, the model makes its own without device and dtype: on the CPU, in bfloat16.
    """
    from transformers.models.xlstm.modeling_xlstm import xLSTMCache

    config, weight = backbone.config, backbone.embeddings.weight
    dtype = weight.dtype if weight.dtype == torch.float64 else getattr(torch, config.inference_state_dtype)
    return xLSTMCache(config, len(inputs), device=str(inputs.device), dtype=dtype)
