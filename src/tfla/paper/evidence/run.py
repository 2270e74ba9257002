"""The command `tfla experiment` for what models can do: trains the runs that are missing and keeps their results."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from tfla._util import outputs
from tfla._util.device import pick_device
from tfla._util.errors import UserError, notice
from tfla._util.options import check_count, check_range
from tfla.measure.machine import environment
from tfla.paper.evidence.models import MODELS
from tfla.paper.evidence.plans import EXPERIMENTS, SizeName, reads_text, standard_library, with_folder
from tfla.paper.evidence.results import Results, Row
from tfla.paper.evidence.training import Run
from tfla.paper.evidence.worker_pool import train_runs
from tfla.paper.experiments.worker_pool import default_processes
from tfla.train.data import prepare_tokens

MOST, LARGE = 1024, 2**31  # processes, and other numbers


@dataclass(frozen=True)
class EvidenceConfig:
    """Train small models with each mixer on a task, and measure what they can do. The same command continues.

    The size "smoke" takes minutes on a CPU and shows that everything runs; "full" is for a GPU.
    """

    size: SizeName = "smoke"
    """The size of the models and of the runs."""
    folder: Path = Path("runs/experiments")
    """The folder of the results, with a folder for each size."""
    out: Path | None = None
    """The JSON file of the results, which `tfla analyze evidence` reads; None is NAME.json in the folder."""
    device: str = "auto"
    """The device; auto is the GPU if there is one."""
    processes: int | None = None
    """The number of runs at once; None is one a core, up to 16, on a GPU, and half of the cores on a CPU."""
    budget: float | None = None
    """The seconds after which runs that have not ended are given up."""
    models: tuple[str, ...] = ()
    """The models to train; none is all."""
    tasks: int | None = None
    """The number of tasks, such as groups whose products are tracked; None is all of the size."""
    seeds: int | None = None
    """The number of seeds, also more than the size has; None is those of the size, 1 of smoke and 3 of full."""
    lrs: int | None = None
    """The number of learning rates; None is all of the size."""
    steps: int | None = None
    """The number of training steps, instead of that of the size."""
    diverged_again: bool = False
    """Whether runs that diverged are trained again; what is found then replaces their results."""
    text: tuple[Path, ...] = ()
    """Text files, or folders with them, for `length` and `language`; none is Python's standard library."""
    text_suffixes: tuple[str, ...] = (".txt",)
    """Endings of the files that are read from the folders of text."""
    cuda_graph: bool = True
    """Whether training steps on a GPU are replayed from a CUDA graph."""

    def check(self) -> None:
        """Raise UserError where a value is out of range, or the results cannot be written."""
        for name, most in (("processes", MOST), ("tasks", LARGE), ("seeds", LARGE), ("lrs", LARGE), ("steps", LARGE)):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1, most)
        if self.budget is not None:
            check_range("budget", self.budget, 0, with_low=False)
        for model in self.models:
            if model not in MODELS:
                raise UserError(f"models: got {model!r}, allowed are {', '.join(MODELS)}")
        outputs.check_folder("folder", self.folder)
        if self.out is not None:
            outputs.check_file("out", self.out)

    def runs(self, name: str) -> list[Run]:
        """Return the runs of an experiment that the options ask for.

        Raises:
            UserError: the size has fewer tasks or learning rates than the options ask for.
        """
        size = EXPERIMENTS[name].size(self.size)
        for option, asked, there in (("tasks", self.tasks, len(size.tasks)), ("lrs", self.lrs, len(size.lrs))):
            if asked is not None and asked > there:
                raise UserError(f"{option}: got {asked}, expected at most {there} for {name} of size {self.size}")
        size = replace(
            size,
            models=tuple(m for m in size.models if not self.models or m in self.models),
            tasks=size.tasks[: self.tasks],
            seeds=size.seeds if self.seeds is None else tuple(range(self.seeds)),
            lrs=size.lrs[: self.lrs],
            steps=self.steps or size.steps,
        )
        return list(size.runs())


def run(name: str, config: EvidenceConfig) -> tuple[Path, int]:
    """Train the runs of an experiment whose results are missing; return the file, and how many runs failed.

    Raises:
        UserError: there is no such device, the options do not fit, or the file of results is another experiment's.
    """
    config.check()
    device, folder = str(pick_device(config.device)), config.folder / config.size
    runs = config.runs(name)
    head: Row = {
        "experiment": name, "size": config.size,
        "environment": environment(device) | {"python": platform.python_version()},
    }  # fmt: skip
    if reads_text(runs):
        runs, head["text"] = _with_text(runs, config, folder)
    target = config.out or folder / f"{name}.json"
    results = Results(target, head, timed=EXPERIMENTS[name].timed)
    missing = [r for r in runs if r not in results or (config.diverged_again and results.diverged(r))]
    processes = min(config.processes or default_processes(device), max(1, len(missing)))
    print(
        f"{name}, {config.size}: {len(runs)} runs of {runs[0].steps if runs else 0} steps on {device}, "
        f"{len(runs) - len(missing)} of them finished; results in {target}",
        file=sys.stderr,
    )
    failed = 0
    with tqdm(total=len(missing), unit="run", dynamic_ncols=True) as bar:
        for ended, found in train_runs(missing, device, config.cuda_graph, processes, config.budget):
            if isinstance(found, str):
                failed += 1
                notice(f"{ended.model}, seed {ended.seed}, {ended.task}: {found}")
            else:
                results.add(ended, found)
            bar.set_postfix_str(ended.model, refresh=False)
            bar.update()
    results.write()
    left = len(missing) - bar.n + failed
    if left:
        notice(f"{left} runs are not finished; the same command goes on with them")
    return target, failed


def _with_text(runs: list[Run], config: EvidenceConfig, folder: Path) -> tuple[list[Run], Row]:
    """Return the runs with the folder of the text's tokens, and what the text is."""
    data, source = standard_library(), f"Python {platform.python_version()}'s standard library"
    names = [path.resolve().name for path in config.text]
    if names:
        data = replace(data, paths=config.text, suffixes=config.text_suffixes)
    chosen = [names or source, [str(path.resolve()) for path in data.paths], data.suffixes]
    digest = hashlib.sha256(json.dumps(chosen).encode()).hexdigest()
    tokens = folder / f"tokens-{digest[:8]}"  # another folder for other files, also of the same name
    folder.mkdir(parents=True, exist_ok=True)
    text = prepare_tokens(data, tokens)
    found = {"source": names or source, "train_bytes": len(text.train), "heldout_bytes": len(text.heldout)}
    return [with_folder(r, tokens) for r in runs], found
