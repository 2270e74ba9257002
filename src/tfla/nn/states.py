"""The check that a state belongs to a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tfla.nn.arguments import kind_of
from tfla.ops.state import State

if TYPE_CHECKING:
    from tfla.nn.attention import KeyValues
    from tfla.nn.model import LanguageModel


def check_entries(state: object, blocks: int) -> None:
    """Raise unless state has an entry for each block."""
    if not isinstance(state, tuple | list) or hasattr(state, "_fields"):  # a NamedTuple is the state of one block
        raise TypeError(f"state: got {type(state).__name__}, expected a tuple with one entry a block")
    if len(state) != blocks:
        raise ValueError(f"state: got {len(state)} entries, expected one for each of the {blocks} blocks")


def check_model_state(model: LanguageModel, state: object, name: str = "state") -> int:
    """Raise unless state is one of this model, apart from its values; return of how many sequences it is.

    Raises:
        TypeError, ValueError: the message names the first part that differs, what it is and what is expected.
    """
    check_entries(state, len(model.blocks))
    batch: int | None = None
    for number, (given, wanted) in enumerate(zip(state, model.initial_state(1, "meta"), strict=True)):  # type: ignore[call-overload]
        batch = _check_block(f"{name}[{number}]", given, wanted, batch, model.embedding.weight)
    assert batch is not None
    return batch


def _check_block(at: str, given: object, wanted: State | KeyValues, batch: int | None, weight: Tensor) -> int:
    if type(given) is not type(wanted):
        raise TypeError(f"{at}: got {type(given).__name__}, expected {type(wanted).__name__}")
    for part in ("C", "n", "m") if isinstance(wanted, State) else ("k", "v"):
        x, like = getattr(given, part), getattr(wanted, part)
        if like is None:
            if x is not None:
                raise TypeError(f"{at}.{part}: got {kind_of(x)}, expected None: mLSTMsig has no normalizer")
            continue
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{at}.{part}: got {kind_of(x)}, expected a float tensor")
        if x.device != weight.device:
            raise ValueError(f"{at}.{part}: got device {x.device}, expected that of the model, {weight.device}")
        batch = len(x) if batch is None and x.dim() else batch
        # Keys and values of attention are of any number of tokens.
        shape = (batch, *like.shape[1:]) if isinstance(wanted, State) else (batch, *x.shape[1:2], *like.shape[2:])
        if x.shape != shape:
            raise ValueError(f"{at}.{part}: got shape {tuple(x.shape)}, expected {shape}")
    assert batch is not None
    return batch
