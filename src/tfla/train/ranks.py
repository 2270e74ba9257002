"""The processes of a run: what each of them computes, what they tell each other, and how they end together.

A process that fails writes its error into the store of the rendezvous, where a thread of every other process reads it.
The same thread notices a process that has died. So all processes end, and each says why, also where a collective of the
training would wait for ever.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tfla._util.errors import UserError, one_line
from tfla.ops.context_parallel.cuts import CONTIGUOUS, Placement
from tfla.train.config import Parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BEAT_SECONDS = 1.0  # between the signs of life of a process
DEAD_SECONDS = 15.0  # without a sign of life; with the grace below less than the 30 s after which torchrun kills all
GRACE_SECONDS = 5.0  # in which a process may report its own error, after another one has failed
LAST_SECONDS = 3.0  # for which process 0 stays, as its store may be the only one; less than the grace
FAILED, BEAT, SAID, READ = "failed", "beat", "said", "read"


class StepsPart(NamedTuple):
    """The part that a process has of the steps of each sequence."""

    rank: int = 0  # of this process among those that share the steps
    parts: int = 1  # the number of these processes
    order: str = CONTIGUOUS

    @property
    def spans(self) -> int:
        """The number of equal spans into which the steps are cut."""
        return self._placement.spans

    def padded(self, steps: int, shortest: int = 1) -> int:
        """Return the least number of steps, at least ``steps``, whose spans are equal and have ``shortest`` or more."""
        return steps if self.parts == 1 else self.spans * max(-(-steps // self.spans), shortest)

    def of(self, x: Tensor) -> Tensor:
        """Return this process's steps of x (B, T)."""
        spans = x.chunk(self.spans, 1)
        own = [spans[position] for position in self._placement.positions]
        return own[0] if len(own) == 1 else torch.cat(own, 1)

    @property
    def _placement(self) -> Placement:
        """The place of the spans over the processes."""
        return Placement(self.rank, self.parts, self.order if self.parts > 1 else CONTIGUOUS, ())


ALL_STEPS = StepsPart()


@dataclass
class Ranks:
    """The processes of a run; without torchrun there is one, and its methods do not communicate.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of processes.
        sizes: the number of processes in each dimension of the mesh.
        coordinates: the place of this process in each dimension.
        mesh: the mesh; None for one process.
        device: the device of this process.
        order: how the steps of a sequence are cut over ``cp``, see :class:`tfla.distributed.ContextParallel`.
        failure: the process that has failed first and its message, once this process has read them.
        last_good: returns a phrase on the checkpoint from which the run would continue, for messages about a failure.
    """

    rank: int = 0
    size: int = 1
    sizes: dict[str, int] = field(default_factory=dict)
    coordinates: dict[str, int] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Any = None
    said: int = 0
    order: str = CONTIGUOUS
    failure: tuple[int, str] | None = None
    last_good: Callable[[], str] | None = None

    @property
    def first(self) -> bool:
        """True on the process that writes the files of the run and its messages."""
        return self.rank == 0

    @property
    def rows(self) -> tuple[int, int]:
        """The index of this process among those with different rows of a batch, and their number."""
        shards = self.sizes.get("dp_shard", 1)
        index = self.coordinates.get("dp_replicate", 0) * shards + self.coordinates.get("dp_shard", 0)
        return index, self.sizes.get("dp_replicate", 1) * shards

    @property
    def steps(self) -> StepsPart:
        """The part of this process of the steps of a sequence."""
        return StepsPart(self.coordinates.get("cp", 0), self.sizes.get("cp", 1), self.order)

    def ask_first(self, make: Callable[[], Any]) -> Any:
        """Return the value that ``make`` returns on the first process, on every process; it must fit into JSON.

        The others wait, however long it takes. If ``make`` raises, the others end with its message.
        """
        if self.size == 1:
            return make()
        self.said += 1
        key = f"{SAID}{self.said}"
        if self.first:
            value = make()
            self.store.set(key, json.dumps(value))
            return value
        while not self.store.check([key]):
            self.raise_failure()
            time.sleep(0.05)
        return json.loads(self.store.get(key))

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of every process, by rank. They are sent by gloo, so that no process waits for its GPU."""
        if self.size == 1:
            return [values]
        local = torch.tensor(values, dtype=torch.float64)
        every = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(every, local)
        return torch.stack(every).tolist()

    def clip_gradients(self, parameters: Iterable[Tensor], clip: float) -> Tensor:
        """Scale the gradients in place so that the norm of all of them is at most ``clip``; return the norm before."""
        if self.size == 1:
            return torch.nn.utils.clip_grad_norm_(parameters, clip)
        from torch.distributed.tensor import DTensor  # its import takes a second

        gradients = [placed_as_its_parameter(p) for p in parameters if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        counted = [x for g, x in zip(gradients, local, strict=True) if _counts(g) and x.numel()]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if counted:
            square += torch.stack([x.double() for x in torch._foreach_norm(counted)]).square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        torch._foreach_mul_(local, (clip / (norm + 1e-6)).clamp(max=1.0).to(torch.float32))
        return norm

    def report(self, message: str) -> bool:
        """Tell the other processes that this one has failed; return whether it is the first to do so."""
        with suppress(RuntimeError):  # the store ends with the process that holds it
            report = json.dumps([self.rank, message])
            return self.store.compare_set(FAILED, "", report).decode() == report
        return True

    def raise_failure(self, seconds: float = 0.0) -> None:
        """Raise the failure of another process as a UserError, if there is one within ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            failure = self.find_failure(self.store)
            if failure is not None and failure[0] != self.rank:
                raise UserError(self.stopped_by(*failure))
            if time.monotonic() >= end:
                return
            time.sleep(0.2)

    def stopped_by(self, other: int, message: str) -> str:
        """Return the message of this process where it ends because of another one."""
        found = f"process {self.rank} stops, because process {other} has failed: {message}"
        last = "" if self.last_good is None else self.last_good()
        return found if not last or last in message else f"{found}; {last}"

    def find_failure(self, store: Any) -> tuple[int, str] | None:
        """Return the process that has failed first and its message, and tell process 0 that this one has read them."""
        if self.failure is None and store.check([FAILED]):
            rank, message = json.loads(store.get(FAILED))
            store.set(f"{READ}{self.rank}", "1")
            self.failure = rank, message
        return self.failure

    def wait_for_readers(self) -> None:
        """Wait, on process 0, until all others have read which process has failed, for LAST_SECONDS at most.

        Process 0 may hold the store, and with it the reason that the others would then not find.
        """
        end = time.monotonic() + LAST_SECONDS
        keys = [f"{READ}{rank}" for rank in range(1, self.size)]
        with suppress(RuntimeError):
            while self.first and time.monotonic() < end and not self.store.check(keys):
                time.sleep(0.05)

    def find_dead(self) -> list[int]:
        """Return the processes that give no sign of life for a few seconds."""
        keys = [f"{BEAT}{rank}" for rank in range(self.size)]
        before = [self.store.get(key) if self.store.check([key]) else b"" for key in keys]
        time.sleep(4 * BEAT_SECONDS)
        after = [self.store.get(key) if self.store.check([key]) else b"" for key in keys]
        return [rank for rank, (a, b) in enumerate(zip(before, after, strict=True)) if a == b and rank != self.rank]


ONE_PROCESS = Ranks()


def placed_as_its_parameter(parameter: Any) -> Tensor:
    """Return the gradient of a parameter, distributed like that; it may be parts of a sum before."""
    gradient: Any = parameter.grad
    if hasattr(gradient, "to_local") and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def _counts(gradient: Tensor) -> bool:
    """Return whether this process counts its part of a gradient; of copies only the first counts."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(gradient, DTensor):
        return True
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(at == 0 for at, p in zip(coordinate, gradient.placements, strict=True) if isinstance(p, Replicate))


def launched_by_torchrun() -> bool:
    """Return whether torchrun, or a launcher with its variables, has started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def number_of_processes() -> int:
    """Return the number of processes of the run that this one belongs to."""
    return int(os.environ["WORLD_SIZE"]) if launched_by_torchrun() else 1


@contextmanager
def join_ranks(parallel: Parallel, device: torch.device) -> Iterator[Ranks]:
    """Connect the processes that torchrun has started, and yield them; end them together.

    Args:
        parallel: how the processes share the run.
        device: the device of the run; with GPUs each process takes that of its rank on its machine.

    Raises:
        UserError: the sizes do not fit the number of processes, a machine has too few GPUs, or another process fails.
    """
    size = number_of_processes()
    sizes = parallel.sizes(size)
    if size == 1:
        yield Ranks(device=device)
        return
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise UserError(
                f"device: got process {local} of this machine, expected at most one for each of its "
                f"{torch.cuda.device_count()} GPUs"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    shared = next(iter(dist.rendezvous("env://")))[0]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep the store when it restarts
    store = dist.PrefixStore(f"tfla{attempt}", shared)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("groups", store), rank=rank, world_size=size,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    from torch.distributed.device_mesh import init_device_mesh

    dimensions = {n: s for n, s in sizes.items() if s > 1 or (n == "dp_shard" and sizes["dp_replicate"] > 1)}
    mesh = init_device_mesh(device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    ranks = Ranks(
        rank, size, sizes, dict(zip(dimensions, coordinate, strict=True)), mesh, device,
        dist.PrefixStore("run", store), order=parallel.cp_order,
    )  # fmt: skip
    watch = _Watch(ranks, dist.PrefixStore(f"tfla{attempt}", shared.clone()))
    watch.start()
    with _exit_when_terminated():
        try:
            yield ranks
            dist.barrier()
        except BaseException as error:
            _end(ranks, error)
    watch.stop()
    dist.destroy_process_group()


@contextmanager
def _exit_when_terminated() -> Iterator[None]:
    """Raise SystemExit at SIGTERM: torchrun sends it when another process has failed, which this one then reports."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(ranks: Ranks, error: BaseException) -> NoReturn:
    """Raise the error of this process, or that of the process that has failed before it.

    The process group is left as it is, since destroying it may wait for processes that are gone.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun kills the process after 30 s at the latest
    message = one_line(error) if isinstance(error, Exception) else type(error).__name__
    try:
        if _may_be_of_others(error):
            with suppress(RuntimeError):
                ranks.raise_failure(2 * BEAT_SECONDS)
                dead = ranks.find_dead()
                if dead:
                    ranks.store.compare_set(FAILED, "", json.dumps([dead[0], "it has died"]))
                    ranks.raise_failure()
        if not ranks.report(message):
            with suppress(RuntimeError):
                ranks.raise_failure()
        raise error
    finally:
        ranks.wait_for_readers()


def end_process_of_group(error: UserError | SystemExit) -> None:
    """End this process at once with the error's message and exit code if it is one of several that have failed.

    Their process group is left as it is. Threads of gloo may still hold tensors of collectives that have failed, and a
    thread that drops one of them while the interpreter ends would abort the process.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return
    code = 1
    if isinstance(error, UserError):
        print(f"tfla: error: {one_line(error)}", file=sys.stderr)
    elif isinstance(error.code, int):
        code = error.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _may_be_of_others(error: BaseException | None) -> bool:
    """Return whether an error, or one that has caused it, may come from the failure of another process."""
    while error is not None:
        if isinstance(error, RuntimeError | SystemExit):  # a collective has failed, or torchrun ends all processes
            return True
        error = error.__cause__
    return False


class _Watch(threading.Thread):
    """A thread that gives signs of life, and ends the process if another one has failed or died.

    Args:
        ranks: the processes.
        store: a connection to the store that no other thread uses.
    """

    def __init__(self, ranks: Ranks, store: Any) -> None:
        super().__init__(name="ranks", daemon=True)
        self.ranks, self.store = ranks, dist.PrefixStore("run", store)
        self.stopped = threading.Event()

    def stop(self) -> None:
        """End the thread."""
        self.stopped.set()
        self.join()

    def run(self) -> None:
        """Watch the next process until one has failed; each is watched by the one before it."""
        try:
            failure = self._watch()
        except RuntimeError as error:  # the store is gone, and with it the process that held it
            failure = 0, f"its store does not answer: {one_line(error)}"
        if failure is not None and not self.stopped.is_set():
            self._end_process(*failure)

    def _watch(self) -> tuple[int, str] | None:
        """Return the number and the error of the process that fails first; None if the thread is stopped."""
        rank, other = self.ranks.rank, (self.ranks.rank + 1) % self.ranks.size
        beat, changed, last = 0, time.monotonic(), b""
        while not self.stopped.wait(BEAT_SECONDS):
            beat += 1
            self.store.set(f"{BEAT}{rank}", str(beat))
            failure = self.ranks.find_failure(self.store)
            if failure is not None:
                return failure
            key = f"{BEAT}{other}"
            now = self.store.get(key) if self.store.check([key]) else b""
            if now != last:
                changed, last = time.monotonic(), now
            elif time.monotonic() - changed > DEAD_SECONDS:
                died = f"it has died, or does not answer for {DEAD_SECONDS:.0f} s"
                self.store.compare_set(FAILED, "", json.dumps([other, died]))
        return None

    def _end_process(self, rank: int, message: str) -> None:
        """End the process with an error, unless its own error ends it before."""
        if self.stopped.wait(GRACE_SECONDS):
            return
        if rank != self.ranks.rank:
            print(f"tfla: error: {self.ranks.stopped_by(rank, message)}", file=sys.stderr, flush=True)
        os._exit(1)
