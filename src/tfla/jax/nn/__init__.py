"""Layers and the language model of the paper (appendix E.2), with its mixers, as modules of `flax.nnx`.

They compute what the modules of :mod:`tfla.nn` compute, and load and save the same files.
"""

try:
    import flax.nnx as _nnx  # noqa: F401
except ImportError as error:
    raise ImportError('tfla.jax.nn needs flax: pip install "tfla[jax]"') from error

from tfla.jax.nn.attention import Attention, KeyValues
from tfla.jax.nn.layers import Frozen, GatePreactivation, HeadNorm
from tfla.jax.nn.mixers import DeltaNet, GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention, Mamba2, Retention
from tfla.jax.nn.mlstm import MLSTM
from tfla.jax.nn.model import Block, LanguageModel, SwiGLU
from tfla.jax.nn.recurrent import MixerState

__all__ = [
    "Attention",
    "Block",
    "DeltaNet",
    "Frozen",
    "GatePreactivation",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "HeadNorm",
    "KeyValues",
    "KimiDeltaAttention",
    "LanguageModel",
    "MLSTM",
    "Mamba2",
    "MixerState",
    "Retention",
    "SwiGLU",
]
