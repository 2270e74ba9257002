"""Speculative decoding: tokens per second of greedy decoding with several drafts, which all give the same text.

    python examples/speculate.py                                       # tiny models with random weights
    python examples/speculate.py --checkpoint runs/large --draft runs/small --tokens 500

A draft that is always right and one that hardly ever is bound what any draft can do: the model itself, and a model with
other random weights. How often an n-gram is right depends on how much the text repeats itself.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from tfla.nn import LanguageModel, ModelConfig, NGram, generate


def load(checkpoint: str | None, device: str, seed: int, **fields: int) -> LanguageModel:
    """Return the model of a checkpoint, or one with random weights."""
    if checkpoint is not None:
        from pathlib import Path

        from tfla.train.checkpoint import find_model

        return LanguageModel.from_pretrained(find_model(Path(checkpoint)), device, backend=None)
    torch.manual_seed(seed)
    model = LanguageModel(ModelConfig(num_heads=4, vocab_size=256, **fields)).to(device)
    return model.bfloat16() if device == "cuda" else model


def run(model: LanguageModel, prompt: Tensor, tokens: int, draft: LanguageModel | NGram | None) -> tuple[Tensor, float]:
    """Return the text and the tokens per second after the first one, of a second run."""
    for _ in range(2):
        found = generate(model, prompt, tokens, temperature=0, draft=draft)
        first = next(found)
        start = time.perf_counter()
        text = torch.stack([first, *found], 1)
        rate = text[:, 1:].numel() / (time.perf_counter() - start)
    return text, rate


def main(args: list[str] | None = None) -> dict[str, float]:
    """Print the rates and return them by draft."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="a run of tfla train, or a saved model")
    parser.add_argument("--draft", help="the same of a smaller model with the same vocabulary")
    parser.add_argument("--d-model", type=int, default=64, help="width of the model without a checkpoint")
    parser.add_argument("--blocks", type=int, default=2, help="its number of blocks")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(args)
    model = load(options.checkpoint, options.device, 0, d_model=options.d_model, num_blocks=options.blocks)
    small = load(options.draft, options.device, 1, d_model=max(64, options.d_model // 4), num_blocks=1)
    prompt = torch.randint(0, 256, (options.batch, 64), generator=torch.Generator().manual_seed(0)).to(options.device)
    drafts = {"none": None, "n-gram of 3": NGram(3), "another model": small, "the model itself": model}
    rates, texts = {}, {}
    for name, draft in drafts.items():
        texts[name], rates[name] = run(model, prompt, options.tokens, draft)
        same = (texts[name] == texts["none"]).float().mean()
        print(f"draft: {name:18} {rates[name]:10,.0f} tokens/s  {same:.0%} of the tokens as without one")
    return rates


if __name__ == "__main__":
    main()
