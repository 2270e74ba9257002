"""The pool of processes in which implementations are timed, for the process that compares them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

ERROR_WORDS = ("error", "assert", "exception", "fault", "unsupported")


class WorkerDied(Exception):
    """An error: the process ended, or was stopped, before its job was done; the message says how."""


class Worker:
    """A process of :mod:`tfla.bench.worker`. It starts at once and imports its modules while others still run."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tfla.bench.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._stderr, text=True, start_new_session=os.name == "posix",
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Put the lines of the process into the queue, then None."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, job: dict[str, Any], limit: float) -> Iterator[dict[str, Any]]:
        """Yield the rows of one job as they arrive.

        Raises:
            WorkerDied: the process crashed, or the job took longer than ``limit`` seconds and the process was ended.
        """
        assert self._process.stdin is not None
        deadline = time.monotonic() + limit
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerDied(self._ending()) from None
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.stop()
                raise WorkerDied(f"stopped after {limit:.0f} s") from None
            if line is None:
                raise WorkerDied(self._ending())
            row: dict[str, Any] = json.loads(line)
            if row.get("done"):
                return
            yield row

    def _ending(self) -> str:
        """Return the exit status of the process and the line of its stderr that most likely names the error."""
        code = self._process.wait()
        self._stderr.seek(0)
        lines = [x.strip() for x in self._stderr.read().decode(errors="replace").splitlines() if x.strip()]
        telling = [x for x in lines if any(word in x.lower() for word in ERROR_WORDS)]
        said = (telling or lines or ["nothing on stderr"])[-1 if code > 0 else 0]
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the process ended with {name}: {said}"[:300]

    def kill(self) -> None:
        """Kill the process and all processes that it started; a job in another thread then ends with WorkerDied."""
        if self._process.poll() is None:
            if os.name == "posix":  # the process leads a session of its own
                with contextlib.suppress(ProcessLookupError):  # poll is None, too, while another thread waits for it
                    os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()

    def stop(self) -> None:
        """Kill the process, wait for its end and close its files."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._stderr):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class WorkerPool:
    """The workers of a run by name, one for each implementation."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._workers):
            self.dismiss(name)

    def of(self, name: str) -> Worker:
        """Return the worker of an implementation, which is started where there is none."""
        if name not in self._workers:
            self._workers[name] = Worker()
        return self._workers[name]

    def dismiss(self, name: str) -> None:
        """Stop the worker of an implementation, if there is one."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            worker.stop()
