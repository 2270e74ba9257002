"""The support of Hugging Face transformers.

`TflaConfig`, `TflaModel` and `TflaForCausalLM` are tfla's language model as a model of transformers, and `TflaCache` is
its cache. They are imported, and registered with the Auto classes, when they are first used or by `register`.
`accelerate` and `restore` switch other models of transformers to tfla's operators and back. `load_xlstm` and
`save_xlstm` convert the weights of xLSTM-7B's layout to models of tfla.nn and back.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from tfla.integrations.transformers.patch import accelerate, restore
from tfla.integrations.transformers.weights import load_xlstm, save_xlstm

if TYPE_CHECKING:
    from tfla.integrations.transformers.cache import TflaCache
    from tfla.integrations.transformers.configuration import TflaConfig
    from tfla.integrations.transformers.modeling import TflaForCausalLM, TflaModel

# Classes whose modules need transformers, which the rest of this package does not import.
LAZY = {"TflaCache": "cache", "TflaConfig": "configuration", "TflaForCausalLM": "modeling", "TflaModel": "modeling"}

__all__ = [
    "TflaCache",
    "TflaConfig",
    "TflaForCausalLM",
    "TflaModel",
    "accelerate",
    "load_xlstm",
    "register",
    "restore",
    "save_xlstm",
]


def register() -> None:
    """Register tfla's model with AutoConfig, AutoModel and AutoModelForCausalLM; a second call has no effect.

    Raises:
        ImportError: transformers is not installed.
    """
    _import("TflaForCausalLM")


def __getattr__(name: str) -> Any:
    """Import a class of this package when it is first used."""
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _import(name)


def _import(name: str) -> Any:
    """Return a class of LAZY."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError('this needs transformers: pip install "tfla[transformers]"')
    return getattr(importlib.import_module(f"{__name__}.{LAZY[name]}"), name)
