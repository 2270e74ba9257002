"""The support of the xLSTM in Hugging Face transformers.

`accelerate` and `restore` switch its models to tfla's operator and back. `load_xlstm` and `save_xlstm` convert its
weights to models of tfla.nn and back.
"""

from tfla.integrations.transformers.patch import accelerate, restore
from tfla.integrations.transformers.weights import load_xlstm, save_xlstm

__all__ = ["accelerate", "load_xlstm", "restore", "save_xlstm"]
