"""The xLSTM of Hugging Face transformers as a whole model, on this library's operator and on others'."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from tfla.measure.problem import Problem, Work

Cell = Literal["tfla", "transformers", "mlstm_kernels"]


NAMES = {"q": "query", "k": "key", "v": "value", "i": "igate", "f": "fgate"}  # of inputs, in transformers


class KernelsCell(nn.Module):
    """mlstm_kernels' own module behind the names that transformers has for its arguments, from a zero state.

    With the xlstm package transformers takes that one's layers, which have the names of mlstm_kernels.
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
        # Gates in bfloat16 crash the compiler of its kernels. The state is that of a new cache, zeros: none to read.
        x = {name: given[longer if longer in given else name] for name, longer in NAMES.items()}
        return self.run(**x | {gate: x[gate].float() for gate in "if"})


def model(problem: Problem, cell: Cell, blocks: int = 18, vocab_size: int = 50304, **options: Any) -> Work:
    """A model of random weights: a prefill into a new cache without gradients, with gradients the loss of the tokens.

    Args:
        options: for "mlstm_kernels" the kernel and its chunk_size.
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
