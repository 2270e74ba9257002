"""The benchmark of speculative decoding: the same greedy tokens, generated with several drafts."""

from __future__ import annotations

import time
from typing import Literal, get_args

import torch
from torch import Tensor

from tfla.bench.models import random_model
from tfla.measure.problem import Problem, Work
from tfla.nn import LanguageModel, NGram, generate

Draft = Literal["none", "n-gram of 3", "another model", "the model itself"]
DRAFTS: tuple[Draft, ...] = get_args(Draft)
PROMPT = 64  # tokens of a prompt


def text(problem: Problem, draft: Draft, blocks: int = 24, vocab: int = 50_304) -> Work:
    """Return the generation of T greedy tokens of B texts by a model with random weights.

    The row has the tokens per second of all texts after the first token, which leaves out the prompt and the captures
    of CUDA graphs. A draft that is always right, the model itself, and one that hardly ever is, another model with an
    eighth of the width and of the blocks, bound what a draft can do.

    Args:
        problem: its B, T, heads, dtype and device; T is at least 2.
        draft: the source of proposed tokens.
        blocks, vocab: the numbers of blocks and of tokens in the vocabulary.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, problem.dtype))  # weights are created on their device in their dtype
    try:
        model = random_model(problem, "mlstm_exp", blocks, vocab)
        source: LanguageModel | NGram | None = {"none": None, "n-gram of 3": NGram(3)}.get(draft, model)
        if draft == "another model":
            small = Problem(1, 1, max(1, problem.H // 8), problem.dqk, problem.dhv, device=problem.device)
            source = random_model(small, "mlstm_exp", max(1, blocks // 8), vocab)
    finally:
        torch.set_default_dtype(before)
    prompt = torch.randint(0, vocab, (problem.B, PROMPT), generator=torch.Generator().manual_seed(0))

    def run(prompt: Tensor) -> tuple[Tensor, float]:
        """Return the tokens (B, T), and their rate after the first one."""
        found = generate(model, prompt, problem.T, temperature=0, draft=source)
        first = next(found)
        start = time.perf_counter()
        tokens = torch.stack([first, *found], 1)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        return tokens, problem.B * (problem.T - 1) / (time.perf_counter() - start)

    prompt = prompt.to(problem.device)
    rates = [run(prompt)[1] for _ in range(2)]  # the first text compiles
    return Work(lambda prompt: run(prompt)[0], [prompt], {"tokens_per_second": rates[-1]})
