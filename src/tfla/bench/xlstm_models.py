"""The benchmark of a whole xLSTM of Hugging Face transformers, with the operators of several libraries."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from tfla.measure.problem import Problem, Work

Cell = Literal["tfla", "transformers", "mlstm_kernels"]


NAMES = {"q": "query", "k": "key", "v": "value", "i": "igate", "f": "fgate"}  # names of the inputs in transformers


class KernelsCell(nn.Module):
    """The module of mlstm_kernels, called with transformers' names of the arguments and a zero state.

    Where the xlstm package is installed, transformers uses its layers, which have the names of mlstm_kernels.
    """

    def __init__(self, kernel: str, chunk_size: int, dtype: str) -> None:
        super().__init__()
        from mlstm_kernels.torch.backend_module import mLSTMBackend, mLSTMBackendConfig

        self.run = mLSTMBackend(
            mLSTMBackendConfig(
                chunkwise_kernel=kernel, sequence_kernel="native_sequence__native", step_kernel="native", mode="train",
                chunk_size=chunk_size, return_last_states=True, autocast_kernel_dtype=dtype,
            )
        )  # fmt: skip

    def forward(self, **given: Any) -> Any:
        """Compute the cell from the arguments of either library."""
        # Gates in bfloat16 crash the compiler of its kernels. The state of a new cache is zero and is not passed on.
        x = {name: given[longer if longer in given else name] for name, longer in NAMES.items()}
        return self.run(**x | {gate: x[gate].float() for gate in "if"})


def model(problem: Problem, cell: Cell, blocks: int = 18, vocab_size: int = 50304, **options: Any) -> Work:
    """Return a call of a model with random weights: with gradients its loss, without a prefill into a new cache.

    Args:
        options: the kernel and chunk_size of "mlstm_kernels".
    """
    from transformers import xLSTMConfig, xLSTMForCausalLM

    from tfla.integrations.transformers import accelerate

    config = xLSTMConfig(
        hidden_size=problem.H * problem.dhv, num_heads=problem.H, qk_dim_factor=problem.dqk / problem.dhv,
        num_hidden_layers=blocks, num_blocks=blocks, vocab_size=vocab_size, mode="train",
    )  # fmt: skip
    with torch.device(problem.device):
        built = xLSTMForCausalLM(config)
    built = built.to(getattr(torch, problem.dtype)).train()
    if cell == "tfla":
        accelerate(built)
    elif cell == "mlstm_kernels":
        for block in built.backbone.blocks:
            block.mlstm_layer.mlstm_backend = KernelsCell(dtype=problem.dtype, **options)
    ids = torch.randint(vocab_size, (problem.B, problem.T), device=problem.device)

    def run(*_: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return built(ids, labels=ids, use_cache=False).loss
        return built(ids, use_cache=True).logits

    return Work(run, list(built.parameters()))
