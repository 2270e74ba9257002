"""The module in the folder of a saved model through which transformers finds tfla's classes."""

from __future__ import annotations

from pathlib import Path

from tfla._util.files import write_atomically

MODULE = "tfla_model"
# The entries of config.json that name the classes of the module.
AUTO_MAP = {
    "AutoConfig": f"{MODULE}.TflaConfig",
    "AutoModel": f"{MODULE}.TflaModel",
    "AutoModelForCausalLM": f"{MODULE}.TflaForCausalLM",
}
SOURCE = '''"""The classes of this model, which the package tfla has: pip install "tfla[transformers]"."""

from tfla.integrations.transformers.configuration import TflaConfig
from tfla.integrations.transformers.modeling import TflaForCausalLM, TflaModel

__all__ = ["TflaConfig", "TflaForCausalLM", "TflaModel"]
'''


def write_module(directory: Path) -> None:
    """Write the module into the folder of a saved model."""
    write_atomically(directory / f"{MODULE}.py", lambda path: path.write_text(SOURCE, encoding="utf-8"))
