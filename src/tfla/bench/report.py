"""The command `tfla bench report`, which writes docs/performance.md and its figures from stored results."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from tfla._util import outputs
from tfla._util.errors import UserError
from tfla._util.files import write_atomically
from tfla.bench import cpu_report, gpu_report, jax_report, page_tables, stored, summary
from tfla.bench.results import check_cpu_result, check_folder, default_folder, read

INTRO = """# Performance

Generated from `benchmarks/results/` by `tfla bench report`; each section says what measured it, where and
when. Tables are folded: a click on the line below a figure opens them.
"""


@dataclass
class Report:
    """Options of `tfla bench report`."""

    results: Path = field(default_factory=default_folder)
    """Folder of stored measurements."""
    out: Path = Path("docs/performance.md")
    """The page."""
    images: Path | None = None
    """Folder of the figures; None: img beside the page."""
    readme: Path | None = None
    """README whose tables of speed are renewed, too; None: no README."""


def run(config: Report) -> None:
    """Write the page from every result: a summary, the CPU's, then those of GPUs in the order of the suites.

    The marked tables of other pages in the same folder are renewed, too.

    Raises:
        UserError: there is no result to report, a file is broken, or the page or its figures cannot be written.
    """
    images = config.images or config.out.parent / "img"
    outputs.check_file("out", config.out)
    outputs.check_folder("images", images)
    if config.readme is not None and not config.readme.is_file():
        raise UserError(f"readme: got {str(config.readme)!r}, expected a file that is there")
    check_folder(config.results)
    found = {path: read(path) for path in sorted(config.results.glob("*.json"))}
    on_cpus = {p: r for p, r in found.items() if isinstance(r.get("environment"), dict) and "cpu" in r["environment"]}
    for path, result in on_cpus.items():
        check_cpu_result(path, result)
    on_gpus = stored.load(config.results, complete=True)
    if not on_cpus and not on_gpus:
        raise UserError(
            f"results: there are none in {config.results}; `tfla bench cpu --out {config.results}/cpu.json` makes one"
        )
    sections = [summary.summary(on_gpus)] if on_gpus else []
    sections += [cpu_report.section(result) for result in on_cpus.values()]
    sections += [gpu_report.METHOD] if on_gpus else []
    for stem, result in on_gpus.items():
        from tfla.bench.figures import draw

        image = images / f"{stem}.png"
        drawn = draw(result, image)
        link = Path(os.path.relpath(image, config.out.parent)).as_posix() if drawn else None
        sections.append(gpu_report.section(result, link))
    from_jax = {path.stem: result for path, result in found.items() if result.get("kind") == "jax"}
    sections += [jax_report.section(result, stem) for stem, result in from_jax.items()]
    config.out.parent.mkdir(parents=True, exist_ok=True)
    whole = "\n\n".join([INTRO.rstrip(), *sections]) + "\n"
    write_atomically(config.out, lambda path: path.write_text(whole, encoding="utf-8"))
    print(f"wrote {config.out}")
    beside = [page for page in sorted(config.out.parent.glob("*.md")) if page != config.out]
    for page in (*beside, *([config.readme] if config.readme is not None else [])):
        text = page.read_text(encoding="utf-8")
        if page_tables.MARK.search(text):
            try:
                renewed = page_tables.renew(text, on_gpus | from_jax)
            except KeyError as error:  # a suite, an implementation or a measurement
                raise UserError(
                    f"{page}: the results have nothing of {error.args[0]!r}, which its tables show"
                ) from error
            page.write_text(renewed, encoding="utf-8")
            print(f"wrote {page}")
