"""The hooks that hand the arguments of a model's call to its cells: which tokens are padding, and the cache.

transformers passes neither the ``attention_mask`` nor the dtype of a new cache on to the layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

PARAMETERS = ("input_ids", "inputs_embeds", "cache_params", "use_cache")  # the first ones of xLSTMModel.forward
# The attributes that have the checkpointing function of a module: that of transformers, and of PyTorch's wrapper.
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


class PaddingHooks:
    """The forward hooks of one model, which hand the attention mask of its call to its cells.

    A padded token leaves the state as it is. In calls without gradients the padding after a row's last token gets the
    output of that token, because ``generate`` reads the last position, whichever side is padded.

    Attributes:
        mask: the mask (B, T) of the running forward pass, bool and True at tokens, or None without padding.
        in_forward: whether a forward pass of the model is running.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.in_forward = False
        # By id of a cell: how many tokens it has read, where the model reads its input in several slices.
        self._tokens_read: dict[int, int] = {}
        self._hooks: list[Any] = []

    def attach(self, backbone: nn.Module) -> None:
        """Register the hooks on the backbone."""
        self._hooks = [
            backbone.register_forward_pre_hook(self._before, with_kwargs=True),
            backbone.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def detach(self, backbone: nn.Module) -> None:
        """Remove the hooks from the backbone, and the wrappers of the gradient checkpointing in it."""
        for hook in self._hooks:
            hook.remove()
        for module, name, checkpoint in _checkpoints(backbone):
            if isinstance(checkpoint, MaskedCheckpoint):
                setattr(module, name, checkpoint.original)

    @contextmanager
    def use_mask(self, mask: Tensor | None) -> Iterator[None]:
        """Set the mask of the cells within a context."""
        previous, self.mask = self.mask, mask
        try:
            yield
        finally:
            self.mask = previous

    def mask_gates(self, cell: nn.Module, i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return i and f (B, T, heads) with closed input gates and open forget gates at padded tokens."""
        if self.mask is None:
            return i, f
        mask, steps = self.mask, i.shape[1]
        if steps < mask.shape[1]:
            start = self._tokens_read.get(id(cell), 0)
            self._tokens_read[id(cell)] = start + steps
            mask = mask[:, start : start + steps]
        padded = ~mask[..., None].to(i.device)  # the blocks may be on several devices
        return i.masked_fill(padded, -torch.inf), f.masked_fill(padded, torch.inf)

    def _before(self, backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Read the mask from the arguments of the call, and add a cache where the model would create one."""
        arguments = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        inputs = arguments.get("input_ids")
        inputs = arguments.get("inputs_embeds") if inputs is None else inputs
        if inputs is None:
            return (), arguments  # the model raises the error
        self._tokens_read.clear()
        self.in_forward = True
        self.mask = select_new_tokens(arguments.get("attention_mask"), *inputs.shape[:2])
        for module, name, checkpoint in _checkpoints(backbone) if torch.is_grad_enabled() else ():
            if not isinstance(checkpoint, MaskedCheckpoint):
                setattr(module, name, MaskedCheckpoint(checkpoint, self))
        has_cache = arguments.get("cache_params") is not None
        if not has_cache and _creates_cache(backbone, inputs.shape[1], arguments.get("use_cache")):
            arguments["cache_params"] = _make_cache(backbone, inputs)
        return (), arguments

    def _after(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Clear the mask, and in calls without gradients give padded positions the output of the last token."""
        mask, self.mask, self.in_forward = self.mask, None, False
        if mask is None or output is None or torch.is_grad_enabled():  # without output the forward pass has failed
            return output
        filled = repeat_last_outputs(output[0], mask)
        if isinstance(output, tuple):
            return (filled, *output[1:])
        output.last_hidden_state = filled
        return output


class MaskedCheckpoint:
    """A wrapper of a module's gradient checkpointing.

    The backward computes the module a second time, and the wrapper gives it the mask and the state of the first time.

    Args:
        original: the checkpointing function of the module.
        padding: the hooks of the model.
    """

    def __init__(self, original: Callable[..., Any], padding: PaddingHooks) -> None:
        self.original, self.padding = original, padding

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the module's function `run` with checkpointing."""
        # The model writes the new state over the tensors of the old one, which the backward reads again.
        args = tuple(arg if isinstance(arg, Tensor) else tree_map_only(Tensor, Tensor.clone, arg) for arg in args)
        return self.original(functools.partial(self._run_with_mask, run, self.padding.mask), *args, **kwargs)

    def _run_with_mask(self, run: Callable[..., Any], mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Call the module's function with the mask of its first call."""
        if torch.compiler.is_compiling():  # a graph keeps the mask that it reads, and may not set it in a checkpoint
            return run(*args, **kwargs)
        with self.padding.use_mask(mask):
            return run(*args, **kwargs)


def _checkpoints(backbone: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return the modules in the backbone that have a checkpointing function, with its attribute and the function."""
    return [
        (module, name, vars(module)[name])
        for module in backbone.modules()
        for name in CHECKPOINTS
        if vars(module).get(name) is not None
    ]


def select_new_tokens(mask: Tensor | None, batch: int, steps: int) -> Tensor | None:
    """Return the last `steps` columns of an attention mask, as bool; the earlier ones belong to tokens of the cache."""
    if mask is None:
        return None
    if mask.dim() != 2 or len(mask) != batch or mask.shape[1] < steps:
        raise ValueError(f"attention_mask: got shape {tuple(mask.shape)}, expected ({batch}, {steps} or more)")
    return mask[:, mask.shape[1] - steps :].bool()


def repeat_last_outputs(x: Tensor, mask: Tensor) -> Tensor:
    """Return x (B, T, D) where padded positions have the output of the last token before them."""
    positions = torch.arange(x.shape[1], device=x.device)
    last = torch.where(mask.to(x.device), positions, 0).cummax(1).values
    return x.gather(1, last[..., None].expand_as(x))


def _creates_cache(backbone: Any, steps: int, use_cache: bool | None) -> bool:
    """Return whether the model would create a cache.

    In eval mode it does so with `use_cache`, and for more tokens than it reads in one slice.
    """
    use_cache = backbone.config.use_cache if use_cache is None else use_cache
    return not backbone.training and bool(use_cache or steps > backbone.config.max_inference_chunksize)


def _make_cache(backbone: Any, inputs: Tensor) -> object:
    """Return an empty cache whose states have the config's ``inference_state_dtype``.

    The cache that the model would create has the dtype of the weights or, for an input that it reads in several slices,
    is in bfloat16 on the CPU.
    """
    from transformers.models.xlstm.modeling_xlstm import xLSTMCache

    config, weight = backbone.config, backbone.embeddings.weight
    dtype = weight.dtype if weight.dtype == torch.float64 else getattr(torch, config.inference_state_dtype)
    return xLSTMCache(config, len(inputs), device=str(inputs.device), dtype=dtype)
