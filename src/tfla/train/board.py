"""Event files for TensorBoard."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class Board:
    """Appends scalars to a new event file in a folder.

    Unlike ``torch.utils.tensorboard`` it has no thread of its own, so a full disk is an error where something is
    written, not a traceback from elsewhere.

    Args:
        directory: made if needed; TensorBoard reads all event files in it as one run.
        step: where the run goes on; TensorBoard drops what other files have beyond it.
    """

    def __init__(self, directory: Path, step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() / 1e9:.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = open(directory / name, "wb")  # noqa: SIM115 - closed by close()
        self.records = RecordWriter(self.file)
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._append(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Append values of a step; they survive the process from here on."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _append(self, event: Event) -> None:
        self.records.write(event.SerializeToString())
        self.file.flush()
