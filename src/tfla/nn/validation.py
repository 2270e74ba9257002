"""Checks of arguments; every message names the argument, what was given and what is allowed."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tfla.nn.mixer_state import MixerState
from tfla.ops.checks import check_offsets
from tfla.ops.state import State

if TYPE_CHECKING:
    from tfla.nn.mixers.key_values import KeyValues
    from tfla.nn.model import LanguageModel, ModelState


SEEDS = (-(2**63), 2**64 - 1)  # the range of torch.Generator.manual_seed
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # allowed for weights


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise unless value is an int from low to high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
    if value < low or (high is not None and value > high):
        raise ValueError(
            f"{name}: got {value}, expected at least {low}" + ("" if high is None else f" and at most {high}")
        )


def check_number(name: str, value: object, above: float | None = None) -> None:
    """Raise unless value is a finite int or float, and greater than ``above`` unless that is None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a number")
    if not math.isfinite(value) or (above is not None and value <= above):
        raise ValueError(f"{name}: got {value}, expected a finite number{'' if above is None else f' above {above:g}'}")


def check_ids(ids: object, shape: str, dims: int, name: str = "ids") -> None:
    """Raise unless ids is an integer tensor with ``dims`` dimensions. Its values are not read."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: got {describe(ids)}, expected an int64 tensor")
    if ids.dim() != dims:
        raise ValueError(f"{name}: got shape {tuple(ids.shape)}, expected {shape}")


def check_inputs(
    ids: Tensor, state: object, blocks: int, document_start: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> None:
    """Raise unless the arguments of a model's forward fit together.

    Args:
        ids: (B, T) tokens.
        state: the state of a model, or None.
        blocks: the number of blocks of the model.
        document_start: (B, T) bool, or None.
        cu_seqlens: offsets of packed sequences, or None; their values are not read.
    """
    check_ids(ids, "(B, T)", 2)
    if ids.shape[1] < 1:
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected T of at least 1")
    if state is not None:
        check_num_entries(state, blocks)
    if cu_seqlens is not None:
        check_offsets(cu_seqlens, ids, name="ids")
    check_document_start(document_start, cu_seqlens, ids.shape, "ids")


def check_document_start(document_start: object, cu_seqlens: object, shape: tuple[int, ...], name: str) -> None:
    """Raise unless document_start is None, or a bool tensor of the shape (B, T) of the tokens ``name``, and alone."""
    if document_start is None:
        return
    if cu_seqlens is not None:
        raise ValueError("document_start: got it together with cu_seqlens, expected at most one of them")
    if not isinstance(document_start, Tensor) or document_start.dtype != torch.bool:
        raise TypeError(f"document_start: got {describe(document_start)}, expected a bool tensor")
    if document_start.shape != shape:
        raise ValueError(
            f"document_start: got shape {tuple(document_start.shape)}, expected that of {name}, {tuple(shape)}"
        )


def check_vocabulary(ids: Tensor, vocab_size: int, name: str = "ids") -> None:
    """Raise unless all ids are in the vocabulary. Their values are read, which synchronizes with a GPU."""
    low, high = (int(x) for x in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name}: got tokens from {low} to {high}, expected from 0 to {vocab_size - 1}, the vocabulary"
        )


def embed(embedding: nn.Embedding, ids: Tensor, name: str = "ids") -> Tensor:
    """Return the embeddings of tokens (...): (..., d_model).

    Raises:
        ValueError: the tokens are on another device, or, which is found on a CPU, outside of the vocabulary.
    """
    device = embedding.weight.device
    wrong_device = f"{name}: got device {ids.device}, expected that of the model, {device}"
    if ids.device.type == "meta" != device.type:  # PyTorch takes them, and returns memory that was never written
        raise ValueError(wrong_device)
    try:
        return embedding(ids)
    except IndexError:
        check_vocabulary(ids, embedding.weight.shape[0], name)
        raise
    except RuntimeError as error:
        if ids.device == embedding.weight.device:
            raise
        raise ValueError(wrong_device) from error


def check_weights_dtype(dtype: object) -> None:
    """Raise unless dtype is None or a dtype that weights may have."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: got {dtype!r}, expected a torch.dtype or None")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: got {dtype}, expected one of {', '.join(map(str, DTYPES))}")


def check_model(model: object) -> None:
    """Raise unless model is a language model: a module with a state."""
    if not isinstance(model, nn.Module) or not hasattr(model, "initial_state"):
        raise TypeError(f"model: got {type(model).__name__}, expected a LanguageModel")


def is_sharded(model: object) -> bool:
    """Return whether FSDP2 shards the parameters of a model, of which each call gathers them."""
    return any(base.__name__ == "FSDPModule" for base in type(model).__mro__)  # without an import of FSDP2


def check_whole_prompts(model: nn.Module) -> None:
    """Raise if processes share the steps of what the model reads, so that each would take a prompt for its part."""
    if any(getattr(module, "context_parallel", None) is not None for module in model.modules()):
        raise ValueError(
            "model: got one with context parallelism, expected none: let each process read its steps of the prompt by "
            "model(ids, return_state=True), and continue with a Decoder"
        )


def check_num_entries(state: object, blocks: int) -> None:
    """Raise unless state is a tuple with one entry for each block."""
    if not isinstance(state, tuple | list) or hasattr(state, "_fields"):  # a NamedTuple is the state of one block
        raise TypeError(f"state: got {type(state).__name__}, expected a tuple with one entry a block")
    if len(state) != blocks:
        raise ValueError(f"state: got {len(state)} entries, expected one for each of the {blocks} blocks")


def check_model_state(model: LanguageModel, state: object, name: str = "state") -> int:
    """Return the batch size of a state after a check that its types, shapes and devices are those of the model.

    Raises:
        TypeError, ValueError: the message names the first entry that does not fit, what it is and what is expected.
    """
    batch = _check_entries(model, state, name, None, model.initial_state(1, "meta"))
    assert batch is not None
    return batch


def _check_entries(
    model: LanguageModel, state: object, name: str, batch: int | None, expected: ModelState
) -> int | None:
    """Check the entry of each block but of mixers of users; return the batch size, which is ``batch`` unless None."""
    check_num_entries(state, len(model.blocks))
    for number, (given, like) in enumerate(zip(state, expected, strict=True)):  # type: ignore[call-overload]
        batch = _check_block(f"{name}[{number}]", given, like, batch, model.embedding.weight)
    return batch


# A state of one sequence of each model, whose shapes a decoding step can compare without the host time to make it.
_EXPECTED: weakref.WeakKeyDictionary[nn.Module, ModelState] = weakref.WeakKeyDictionary()


def check_state_of_call(model: LanguageModel, state: object, sequences: int | None) -> None:
    """Raise unless a state fits the model and the sequences of a call, before a block runs or overwrites anything.

    Calls that are traced, and those of models that processes share, are left to the checks of each block: what a
    process holds of such a state has other shapes, or the processes have to raise together.

    Args:
        model: the model.
        state: the state of a model.
        sequences: how many sequences the state has; None for a pool of any number of rows.
    """
    if torch.compiler.is_compiling():
        return
    try:
        if model in _EXPECTED:
            _check_entries(model, state, "state", sequences, _EXPECTED[model])
            return
    except (TypeError, ValueError):  # or the model has been changed
        pass
    if any(getattr(block.mixer, "context_parallel", None) is not None for block in model.blocks):
        return
    if not any(hasattr(weight, "device_mesh") for weight in model.parameters()):
        _EXPECTED[model] = model.initial_state(1, "meta")
        _check_entries(model, state, "state", sequences, _EXPECTED[model])


def _check_block(
    at: str, given: object, expected: State | KeyValues | MixerState, batch: int | None, weight: Tensor
) -> int | None:
    """Raise unless ``given`` fits ``expected`` and the batch size of earlier blocks; return the batch size."""
    if not isinstance(expected, State | MixerState) and type(expected).__name__ != "KeyValues":
        return batch
    if type(given) is not type(expected):
        raise TypeError(f"{at}: got {type(given).__name__}, expected {type(expected).__name__}")
    if isinstance(expected, MixerState) and isinstance(given, MixerState):
        batch = _check_block(f"{at}.recurrence", given.recurrence, expected.recurrence, batch, weight)
        if len(given.convolution) != len(expected.convolution):
            raise ValueError(
                f"{at}.convolution: got {len(given.convolution)} tensors, expected {len(expected.convolution)}"
            )
        for number, (x, like) in enumerate(zip(given.convolution, expected.convolution, strict=True)):
            _check_part(f"{at}.convolution[{number}]", x, (batch, *like.shape[1:]), weight)
        if expected.position is not None:
            _check_part(f"{at}.position", given.position, (batch,), weight, torch.int64)
        return batch
    for part in ("C", "n", "m") if isinstance(expected, State) else ("k", "v"):
        x, like = getattr(given, part), getattr(expected, part)
        if like is None:
            if x is not None:
                raise TypeError(f"{at}.{part}: got {describe(x)}, expected None: this mixer has no normalizer")
            continue
        if isinstance(x, Tensor) and x.dim() and batch is None:
            batch = len(x)
        # Attention's keys and values may have any number of tokens.
        tokens = like.shape[1:2] if isinstance(expected, State) or not isinstance(x, Tensor) else x.shape[1:2]
        _check_part(f"{at}.{part}", x, (batch, *tokens, *like.shape[2:]), weight)
    assert batch is not None
    return batch


def _check_part(
    at: str, x: object, shape: tuple[int | None, ...], weight: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Raise unless x is a tensor of a shape, on a weight's device, of a dtype or, with None, of any float dtype."""
    fits = isinstance(x, Tensor) and (x.is_floating_point() if dtype is None else x.dtype == dtype)
    if not isinstance(x, Tensor) or not fits:
        raise TypeError(f"{at}: got {describe(x)}, expected a {'float' if dtype is None else dtype} tensor")
    if x.device != weight.device:
        raise ValueError(f"{at}: got device {x.device}, expected that of the model, {weight.device}")
    if x.shape != shape:
        raise ValueError(f"{at}: got shape {tuple(x.shape)}, expected {shape}")


def describe(x: object) -> str:
    """Return the phrase with which an error message describes a value of the wrong type."""
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
