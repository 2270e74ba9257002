"""Layers and the language model of the paper (appendix E.2)."""

from tfla.nn.attention import Attention, KeyValues
from tfla.nn.config import ModelConfig
from tfla.nn.decode import Decoder
from tfla.nn.generate import generate
from tfla.nn.layers import GatePreactivation, HeadNorm, SequenceMixer
from tfla.nn.mlstm import MLSTM
from tfla.nn.model import Block, LanguageModel, ModelState, SwiGLU

__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "GatePreactivation",
    "HeadNorm",
    "KeyValues",
    "LanguageModel",
    "MLSTM",
    "ModelConfig",
    "ModelState",
    "SequenceMixer",
    "SwiGLU",
    "generate",
]
