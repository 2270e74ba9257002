"""The xLSTM of Hugging Face transformers: its models on this library's operator, its weights in and out of tfla.nn."""

from tfla.integrations.transformers.patch import accelerate, restore
from tfla.integrations.transformers.weights import load_xlstm, save_xlstm

__all__ = ["accelerate", "load_xlstm", "restore", "save_xlstm"]
