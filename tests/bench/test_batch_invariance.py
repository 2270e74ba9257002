"""`tfla bench invariance` at small size."""

from __future__ import annotations

import pytest

pytest.importorskip("tyro")

from tfla._util.errors import UserError
from tfla.bench import batch_invariance
from tfla.bench.batch_invariance import InvarianceBench
from tfla.bench.commands import bench


@pytest.mark.parametrize("mixer", ["mamba2", "attention"])
def test_rows_say_what_the_option_costs_and_that_nothing_changes(
    mixer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(batch_invariance, "run", lambda config, run=batch_invariance.run: found.extend(run(config)))
    args = ["--mixer", mixer, "--d-model", "64", "--num-blocks", "1", "--vocab-size", "50", "--length", "20"]
    assert bench(["invariance", *args, "--batches", "1", "12", "--repeats", "1"]) == 0
    assert [(row["name"], row["B"], row["T"]) for row in found] == [
        ("prefill", 1, 20), ("prefill", 8, 20), ("decoding", 1, 1), ("decoding", 12, 1), ("training", 1, 20),
        ("training", 8, 20),
    ]  # fmt: skip
    assert all(row["plain"] > 0 and row["invariant"] > 0 and row["changed"][1] == 0 for row in found)
    assert found[3]["changed"][0] > 0
    assert f"{found[3]['changed'][0]} of 12, with the option 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "value"), [("mixer", "lstm"), ("d_model", 100), ("batches", ()), ("device", "tpu"), ("length", 0)]
)
def test_options_are_checked(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{field}: got"):
        InvarianceBench(**{field: value}).check()  # type: ignore[arg-type]
