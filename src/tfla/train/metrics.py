"""What a run measures, one JSON object a line, and the same for TensorBoard."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfla.nn.files import write_atomically

if TYPE_CHECKING:
    from tfla.train.board import Board

FILE = "metrics.jsonl"


class Metrics:
    """Appends to ``metrics.jsonl`` in a run's folder.

    Records have ``kind`` "train" (one a step: step, loss in nats per token, lr, grad_norm before clipping,
    max_input_gate, tokens_per_s, elapsed in s) or "eval" (step, loss, perplexity, bits_per_byte, tokens, bytes).

    Args:
        directory: of the run.
        step: where the run goes on; records of later steps, and a line that was cut off, are dropped.
        tensorboard: also write event files into ``tensorboard/``.
    """

    def __init__(self, directory: Path, step: int, tensorboard: bool) -> None:
        path = directory / FILE
        kept = [json.dumps(record) + "\n" for record in read(directory) if record["step"] <= step] if step else []
        write_atomically(path, lambda temporary: temporary.write_text("".join(kept)))
        self.file = open(path, "a")  # noqa: SIM115 - closed by close()
        self.board: Board | None = None
        if tensorboard:
            from tfla.train.board import Board

            self.board = Board(directory / "tensorboard", step)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a record; it survives the process from here on.

        Raises:
            OSError: the disk is full.
        """
        self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self.file.flush()
        if self.board is not None:
            self.board.write(step, {f"{kind}/{name}": value for name, value in values.items() if value is not None})

    def sync(self) -> None:
        """Bring all records to the disk, so that they survive the machine."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the files. All records were written before; a full disk has been reported then."""
        for file in (self.file, self.board):
            if file is not None:
                with suppress(OSError):
                    file.close()


def read(directory: Path) -> list[dict[str, Any]]:
    """All records of a run, in order; a last line that was cut off is left out, and no file is no records."""
    path = directory / FILE
    if not path.exists():
        return []
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records
