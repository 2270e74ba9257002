"""transformers' common tests of models, run on tfla's model.

The tests are no part of the installed package, but of its source distribution:

    pip install pytest parameterized
    pip download --no-deps --no-binary :all: transformers==5.23.0
    python tests/integrations/transformers/common_model_tests.py transformers-5.23.0.tar.gz [options of pytest]

The distribution lacks the tests of generation and export; tests/integrations/transformers/test_tfla_generation.py has
tests of generation. `--layers` names the mixers of the two blocks; the default is `mlstm_exp gated_delta_net`. `--own`
runs the tests on transformers' own Mamba-2 instead, to compare what is skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# Modules that the common tests import and the source distribution lacks.
MISSING = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": (
        'config_common_kwargs = {"return_dict": False, "output_hidden_states": True, "dtype": "float16",\n'
        '                        "chunk_size_feed_forward": 5, "problem_type": "regression"}\n'
    ),
}
CASES = """
import os
import unittest

import torch
from transformers.models.auto import modeling_auto

from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, ids_tensor
from tests.test_training_mixin import TrainingTesterMixin
from tfla.integrations.transformers import TflaConfig, TflaForCausalLM, TflaModel
from transformers import Mamba2Config, Mamba2ForCausalLM, Mamba2Model

OWN = not os.environ["TFLA_LAYERS"]
CONFIG, MODEL, CAUSAL_LM = (
    (Mamba2Config, Mamba2Model, Mamba2ForCausalLM) if OWN else (TflaConfig, TflaModel, TflaForCausalLM)
)
# The tests look classes up by name in the tables of transformers' own models.
modeling_auto.MODEL_MAPPING_NAMES["tfla"] = "TflaModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["tfla"] = "TflaForCausalLM"


class TflaModelTester:
    causal_lm_class = CAUSAL_LM
    batch_size, seq_length, vocab_size, is_training = 3, 9, 99, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 2

    def get_config(self):
        if OWN:
            return Mamba2Config(
                hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=16, n_groups=1, chunk_size=8,
                vocab_size=99, bos_token_id=0, eos_token_id=1, pad_token_id=98,
            )
        layers = os.environ["TFLA_LAYERS"].split()
        mamba = {"mamba_head_dim": 16, "mamba_state_dim": 16} if "mamba2" in layers else {}
        return TflaConfig(
            d_model=32, num_blocks=2, num_heads=2, vocab_size=99, layers=layers,
            bos_token_id=0, eos_token_id=1, pad_token_id=98, **mamba,
        )

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids} | ({} if OWN else {"attention_mask": torch.ones_like(ids)})


class TflaModelTest(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, unittest.TestCase):
    all_model_classes = (MODEL, CAUSAL_LM)
    has_attentions = False
    test_can_init_all_missing_weights_before_2023 = True  # which is read where a file names no year of a copyright

    def setUp(self):
        self.model_tester = TflaModelTester()
        self.config_tester = ConfigTester(
            self, config_class=CONFIG, vocab_size=99,
            common_properties=["hidden_size", "num_hidden_layers"] if OWN else None,
        )

    def test_config(self):
        self.config_tester.run_common_tests()
"""


def main() -> int:
    """Run the tests and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the source distribution of transformers")
    parser.add_argument("--layers", nargs="+", default=["mlstm_exp", "gated_delta_net"])
    parser.add_argument("--own", action="store_true")
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder) / "tests"
        tests.mkdir()
        with tarfile.open(arguments.source) as archive:
            for member in archive.getmembers():
                path = Path(member.name)
                if member.isfile() and path.parts[1:-1] == ("tests",):
                    (tests / path.name).write_bytes(archive.extractfile(member).read())  # type: ignore[union-attr]
        (tests / "__init__.py").touch()
        for name, text in (MISSING | {"test_modeling_tfla.py": CASES}).items():
            path = tests / name
            path.parent.mkdir(exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--disable-warnings", *options]
        variables = os.environ | {"TFLA_LAYERS": "" if arguments.own else " ".join(arguments.layers)}
        variables["OMP_NUM_THREADS"] = "1"  # two threads that wait for each other take up to twenty times as long
        return subprocess.run([*command, "tests/test_modeling_tfla.py"], cwd=folder, env=variables).returncode


if __name__ == "__main__":
    raise SystemExit(main())
