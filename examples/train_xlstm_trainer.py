"""Train an xLSTM of Hugging Face transformers with its Trainer, on tfla.

    pip install "tfla[transformers]" accelerate
    python examples/train_xlstm_trainer.py --text my_texts/ --out runs/xlstm

Reads files as bytes, so that it needs no tokenizer; without --text those of Python's own standard library. What is
saved is an ordinary checkpoint: ``xLSTMForCausalLM.from_pretrained`` loads it, with tfla or without.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed, xLSTMConfig, xLSTMForCausalLM

from tfla.integrations.transformers import accelerate

END = 256  # of a document; bytes are 0 to 255


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of one long row of bytes: all files, one after the other."""

    def __init__(self, files: list[Path], length: int) -> None:
        rows = [torch.tensor([*path.read_bytes(), END], dtype=torch.int64) for path in files]
        self.bytes, self.length = torch.cat(rows), length

    def __len__(self) -> int:
        return len(self.bytes) // self.length

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        window = self.bytes[n * self.length : (n + 1) * self.length]
        return {"input_ids": window, "labels": window}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an xLSTM with transformers' Trainer on tfla.")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of text files")
    parser.add_argument("--glob", default="*.py", help="which of its files")
    parser.add_argument("--out", type=Path, default=Path("runs/xlstm"), help="where checkpoints go")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="bytes of a window")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default="def main(", help="what the trained model continues")
    return parser.parse_args()


def main() -> None:
    given = options()
    files = sorted(given.text.glob(given.glob))
    if not files:
        raise SystemExit(f"--text: {given.text} has no file {given.glob}")
    data = Windows(files, given.length)
    set_seed(given.seed)
    config = xLSTMConfig(
        vocab_size=257, hidden_size=given.hidden_size, num_hidden_layers=given.blocks, num_blocks=given.blocks,
        num_heads=given.heads, bos_token_id=None, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    model = accelerate(xLSTMForCausalLM(config))
    trainer = Trainer(
        model,
        TrainingArguments(
            str(given.out), max_steps=given.steps, per_device_train_batch_size=given.batch, seed=given.seed,
            learning_rate=given.learning_rate, lr_scheduler_type="cosine", warmup_steps=given.steps // 10,
            adam_beta2=0.95, weight_decay=0.1, max_grad_norm=0.5, bf16=torch.cuda.is_available(),
            logging_steps=max(1, given.steps // 20), save_strategy="no", report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=data,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{model.num_parameters():,} parameters, {len(data.bytes):,} bytes of text")
    print(f"bits per byte: {losses[0] / 0.6931:.2f} at first, {losses[-1] / 0.6931:.2f} at last")
    prompt = torch.tensor([list(given.prompt.encode())], device=model.device)
    model.eval()
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=80, do_sample=True, top_p=0.9)
    print(bytes(byte for byte in text[0].tolist() if byte < END).decode(errors="replace"))


if __name__ == "__main__":
    main()
