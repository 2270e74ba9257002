"""The table of JAX beside PyTorch, from stored times."""

from __future__ import annotations

from tfla.bench import page_tables
from tfla.bench.jax_report import section


def row(name: str, x: int, seconds: float, **more: object) -> dict[str, object]:
    facts = {"name": name, "form": "exp", "dqk": 128, "dhv": 256, "x": x, "direction": "forward"}
    return facts | {"seconds": seconds, "first_seconds": 9.5, "peak_bytes": 2**29} | more


def test_section() -> None:
    """A row for each implementation and direction, a column for each length, and why others were not timed."""
    result = {
        "environment": {"device": "a GPU", "date": "2026-11-25", "versions": {"jax": "0.11.2", "gone": None}},
        "config": {"repeats": 5, "calls": 20},
        "rows": [
            row("PyTorch", 512, 1e-3), row("JAX", 512, 1.01e-3), row("JAX", 8192, 2e-3),
            {"name": "other", "form": "exp", "dqk": 128, "dhv": 256, "x": 512, "error": "ImportError: no module"},
        ],
    }  # fmt: skip
    mark = "<!-- table: jax -->\n"
    assert page_tables.renew(mark + "\n", {}) == mark + "\n"  # not timed yet
    short = page_tables.renew(mark, {"jax": result})
    assert "| a GPU, 2026-11-25, ms | 128 x 256, 512 steps | 128 x 256, 8,192 steps |" in short
    assert "| JAX | 1.010 / - | 2.000 / - |" in short
    assert "| JAX, times PyTorch | 1.010 / - | - / - |" in short
    assert page_tables.renew(short, {"jax": result}) == short
    assert page_tables.renew(mark, {"jax": {**result, "rows": []}, "jax_peers": result}) == short
    text = section(result)
    assert "a GPU, 2026-11-25; jax 0.11.2." in text
    assert "### JAX beside PyTorch, 65,536 tokens: mLSTMexp\n" in text
    assert "| mLSTMexp 16 x 128 x 256, ms (first call; memory) | T = 512 | T = 8,192 |" in text
    assert "| PyTorch, forward | 1.000 (9.5 s; 0.50 GiB) | - |" in text
    assert "| JAX, forward | 1.010 (9.5 s; 0.50 GiB) | 2.000 (9.5 s; 0.50 GiB) |" in text
    assert "Not timed: other: ImportError: no module." in text
    del result["rows"][0]["first_seconds"], result["rows"][0]["peak_bytes"]  # type: ignore[index]
    assert "| PyTorch, forward | 1.000 (-) | - |" in section(result)  # its process was stopped


def test_section_of_the_delta_rule() -> None:
    """Each model has a table of its own, and a column of the table in docs/jax.md."""
    kda = {"model": "kda", "form": "", "heads": 32, "dhv": 128}
    result = {
        "environment": {"device": "a GPU", "date": "2026-11-26", "versions": {}},
        "config": {"repeats": 5, "calls": 20, "models": ["gdn", "kda"], "budget": 255.0},
        "rows": [
            row("PyTorch", 8192, 1e-3, model="gdn", form="", heads=16, dhv=128), row("JAX", 8192, 2e-3, **kda),
            row("JAX", 8192, 6e-3, **kda | {"direction": "forward + backward"}),
        ],
    }  # fmt: skip
    text = section(result, "jax_delta")
    assert "### JAX beside PyTorch, 65,536 tokens: GDN, KDA\n" in text
    assert "| GDN 16 x 128 x 128, ms (first call; memory) | T = 8,192 |" in text
    assert "| JAX, forward + backward | 6.000 (9.5 s; 0.50 GiB) |" in text
    command = "python -m tfla.bench.jax_times --models gdn kda --repeats 5 --budget 255.0"
    assert f"`{command} --out benchmarks/results/jax_delta.json`" in text
    mark = "<!-- table: jax_delta -->\n"
    assert page_tables.renew(mark, {}) == mark
    short = page_tables.renew(mark, {"jax": result})
    assert "| a GPU, 2026-11-26, ms | GDN 16 x 128 x 128, 8,192 steps | KDA 32 x 128 x 128, 8,192 steps |" in short
    assert "| JAX | - / - | 2.000 / 6.000 |" in short
