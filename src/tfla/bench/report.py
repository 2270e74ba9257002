"""`tfla bench report`: stored results as docs/performance.md and its figures."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tfla.bench import cpu_report, gpu_report, readme, stored

INTRO = """# Performance

Generated from `benchmarks/results/` by `tfla bench report`; each table says what measured it, where and when.
"""


@dataclass
class Report:
    """Options of `tfla bench report`."""

    results: Path = Path("benchmarks/results")
    out: Path = Path("docs/performance.md")
    images: Path | None = None
    """Folder of the figures; None: img beside the page."""
    readme: Path | None = None
    """README whose tables of speed are renewed, too; None: no README."""


def run(config: Report) -> None:
    """Write the page from every result: the CPU's first, then those of GPUs in the order of the suites.

    The tables that pages beside it have marks for are renewed, too.

    Raises:
        FileNotFoundError: there is no result to report.
    """
    found = {path.stem: json.loads(path.read_text()) for path in sorted(config.results.glob("*.json"))}
    if not found:
        raise FileNotFoundError(f"no results in {config.results}: tfla bench cpu --out {config.results}/cpu.json")
    images = config.images or config.out.parent / "img"
    sections = [cpu_report.section(result) for result in found.values() if "cpu" in result.get("environment", {})]
    on_gpus = stored.load(config.results)
    sections += [gpu_report.METHOD] if on_gpus else []
    for stem, result in on_gpus.items():
        from tfla.bench.figures import draw

        image = images / f"{stem}.png"
        drawn = draw(result, image)
        link = Path(os.path.relpath(image, config.out.parent)).as_posix() if drawn else None
        sections.append(gpu_report.section(result, link))
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text("\n\n".join([INTRO.rstrip(), *sections]) + "\n")
    print(f"wrote {config.out}")
    beside = [page for page in sorted(config.out.parent.glob("*.md")) if page != config.out]
    for page in (*beside, *([config.readme] if config.readme is not None else [])):
        text = page.read_text(encoding="utf-8")
        if readme.MARK.search(text):
            page.write_text(readme.renew(text, on_gpus), encoding="utf-8")
            print(f"wrote {page}")
