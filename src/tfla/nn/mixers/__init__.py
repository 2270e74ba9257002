"""The sequence mixers of the blocks, by the names that a config has for them."""

from tfla.nn.layers import SequenceMixer
from tfla.nn.mixers.attention import Attention
from tfla.nn.mixers.delta_net import DeltaNet
from tfla.nn.mixers.gated_delta_net import GatedDeltaNet
from tfla.nn.mixers.gla import GatedLinearAttention
from tfla.nn.mixers.kda import KimiDeltaAttention
from tfla.nn.mixers.mamba2 import Mamba2
from tfla.nn.mixers.mlstm import MLSTM
from tfla.nn.mixers.retnet import Retention

MIXERS: dict[str, type[SequenceMixer]] = {
    "mlstm_exp": MLSTM,
    "mlstm_sig": MLSTM,
    "mamba2": Mamba2,
    "retnet": Retention,
    "gla": GatedLinearAttention,
    "delta_net": DeltaNet,
    "gated_delta_net": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "attention": Attention,
}

__all__ = [
    "MIXERS",
    "MLSTM",
    "Attention",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "Mamba2",
    "Retention",
]
