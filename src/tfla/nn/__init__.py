"""Layers and the language model of the paper (appendix E.2)."""

from tfla._util.warm_calls import Warmup
from tfla.nn.block import Block, SwiGLU
from tfla.nn.config import ModelConfig
from tfla.nn.decode import Decoder
from tfla.nn.drafts import NGram
from tfla.nn.generate import generate
from tfla.nn.layers import GatePreactivation, HeadNorm, SequenceMixer
from tfla.nn.mixer_state import MixerState
from tfla.nn.mixers import (
    MLSTM,
    Attention,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    Mamba2,
    Retention,
)
from tfla.nn.mixers.key_values import KeyValues
from tfla.nn.model import LanguageModel, ModelState
from tfla.nn.sequences import reverse_sequences
from tfla.nn.stack import MLSTMStack, StackState
from tfla.nn.warmup import warmup

__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatePreactivation",
    "HeadNorm",
    "KeyValues",
    "KimiDeltaAttention",
    "LanguageModel",
    "MLSTM",
    "MLSTMStack",
    "Mamba2",
    "MixerState",
    "ModelConfig",
    "ModelState",
    "NGram",
    "Retention",
    "SequenceMixer",
    "StackState",
    "SwiGLU",
    "Warmup",
    "generate",
    "reverse_sequences",
    "warmup",
]
