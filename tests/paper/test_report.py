"""The parts that all sections share: the files of a figure, the command, the report."""

from __future__ import annotations

import csv
import dataclasses
import re
import sys
import types
from pathlib import Path

import pytest

from tfla.cli import COMMANDS, main
from tfla.paper.commands import analyze
from tfla.paper.report_types import Claim, Missing, Options, Table, write
from tfla.paper.sections import SECTIONS, Section
from tfla.paper.style import panels, power_of_two_axis


@dataclasses.dataclass
class Config(Options):
    slope: float = 2.0


def figures(config):
    drawing, [[axes]] = panels()
    rows = [{"x": x, "y <ms>": config.slope * x} for x in (512, 1024)]
    axes.plot([r["x"] for r in rows], [r["y <ms>"] for r in rows])
    power_of_two_axis(axes, [512, 1024], "T")
    caption = "The line rises, 1 < 2.\n\nSee `tfla.mlstm`."
    drawn = write(config, "line", drawing, rows, title="A line", caption=caption, command="tfla analyze lines")
    return [drawn, Missing("gone", "A gap", "no benchmarks/results/gone.json: `tfla bench gpu gone`")]


def claims(config):
    table = Table(["x", "y <ms>"], [["1", "2"], ["2", "4"]])
    return [Claim("Lines rise", "always (Figure 0).", f"by `{config.slope:g}` & more.", "tfla analyze lines", table)]


@pytest.fixture
def lines(monkeypatch):
    module = types.ModuleType("lines")
    module.Config, module.figures, module.claims = Config, figures, claims
    monkeypatch.setitem(sys.modules, "lines", module)
    for name in list(SECTIONS):
        monkeypatch.delitem(SECTIONS, name)
    monkeypatch.setitem(SECTIONS, "lines", Section("lines", "Lines", "lines and gaps"))


@pytest.mark.usefixtures("lines")
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_section_writes_pictures_and_numbers(tmp_path, capsys, kind):
    assert main(["analyze", "lines", "--out", str(tmp_path), "--format", kind, "--slope", "3"]) == 1  # one is missing
    with (tmp_path / "line.csv").open() as file:
        assert list(csv.DictReader(file)) == [{"x": "512", "y <ms>": "1536.0"}, {"x": "1024", "y <ms>": "3072.0"}]
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[kind]
    assert (tmp_path / f"line.{kind}").read_bytes().startswith(start)
    out, err = capsys.readouterr()
    assert "line.csv: A line\n  The line rises, 1 < 2.\n  See `tfla.mlstm`.\n" in out
    assert "not drawn: A gap: no benchmarks/results/gone.json" in err


@pytest.mark.usefixtures("lines")
def test_the_report_holds_everything_and_needs_nothing(tmp_path, capsys):
    assert analyze(["all", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == f"wrote {tmp_path / 'report.html'}: 1 figures\n"
    assert "lines: 1 of 2 figures" in err
    assert err.endswith("not drawn: A gap: no benchmarks/results/gone.json: `tfla bench gpu gone`\n")
    page = (tmp_path / "report.html").read_text()
    assert "<p>The line rises, 1 &lt; 2.</p><p>See <code>tfla.mlstm</code>.</p>" in page
    assert "<code>tfla analyze lines</code>" in page
    assert "<th>Lines rise</th><td><p>always (Figure 0).</p></td><td><p>by <code>2</code> &amp; more.</p>" in page
    assert "<tr><th>x</th><th>y &lt;ms&gt;</th></tr>\n<tr><td>1</td><td>2</td></tr>" in page
    assert "Not drawn: no benchmarks/results/gone.json" in page
    targets = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sum(t.startswith("data:image/png;base64,") for t in targets) == 1
    assert sum(t.startswith("data:text/csv;base64,") for t in targets) == 1
    anchors = [t[1:] for t in targets if not t.startswith("data:")]
    assert anchors == ["line", "gone"]
    assert all(f'id="{a}"' in page for a in anchors)


@pytest.mark.usefixtures("lines")
def test_claims_are_a_page(tmp_path, capsys):
    assert main(["analyze", "claims", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "claims.md").read_text()
    assert page.startswith("# What the paper claims")
    assert page.endswith(
        "## Lines\n\n### Lines rise\n\n**Paper.** always (Figure 0).\n\n**Here.** by `2` & more.\n\n"
        "| x | y <ms> |\n| --- | --- |\n| 1 | 2 |\n| 2 | 4 |\n\nReproduce: `tfla analyze lines`\n"
    )


def test_claims_name_commands_that_exist():
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    for section in SECTIONS.values():
        for claim in section.claims(section.config(results=results)):
            words = claim.command.split()
            assert words[0] in ("tfla", "python")
            assert words[0] != "tfla" or words[1] in COMMANDS
            assert words[:2] != ["tfla", "analyze"] or words[2] in SECTIONS


def test_a_figure_has_numbers(tmp_path):
    with pytest.raises(ValueError, match="rows: got none for empty"):
        write(Options(out=tmp_path), "empty", panels()[0], [], title="", caption="", command="")
    assert not list(tmp_path.iterdir())


def test_help_lists_the_sections(capsys):
    assert main(["analyze", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in (*SECTIONS, "claims", "all"))
    assert main(["analyze", "nothing"]) == 2
