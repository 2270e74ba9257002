"""The timing of calls, on a clock that the test moves."""

import pytest

from tfla.measure.timing import FEWEST, Sampling, measure


class FakeClock:
    """Every call takes as long as it says; resting passes time too."""

    def __init__(self):
        self.time, self.rests, self.took = 0.0, [], iter(())

    def now(self):
        return self.time

    def rest(self, seconds):
        self.rests.append(seconds)
        self.time += seconds

    def series(self, call, count):
        took = sum(call() for _ in range(count))
        self.time += took
        return took


def test_median_min_max_of_the_samples_after_the_warm_up():
    clock, took = FakeClock(), iter([9, *[5] * 3, *[0.01, 0.03, 0.02], *[0.25] * 50])
    row = measure(lambda: next(took), clock, Sampling(repeats=3, warmup=3, pause=0.5, patience=100, sustained=1.0))
    assert (row["min"], row["seconds"], row["max"]) == (0.01, 0.02, 0.03)
    assert (row["samples"], row["warmup"], clock.rests) == (3, 3, [0.5] * 3)
    assert row["sustained_calls"] == 50
    assert row["sustained_seconds"] == pytest.approx(0.25)


def test_a_long_call_gets_few_samples_and_says_how_many():
    row = measure(lambda: 2.0, FakeClock(), Sampling(patience=3.0))
    assert (row["samples"], row["warmup"], row["sustained_calls"]) == (FEWEST, 2, 2)


def test_a_sustained_run_lasts_as_long_as_the_slower_of_host_and_device():
    class SlowHost(FakeClock):
        def series(self, call, count):
            took = super().series(call, count)
            self.time += 0.001 * count
            return took

    row = measure(lambda: 0.0001, SlowHost(), Sampling(sustained=1.1))
    assert row["seconds"] == pytest.approx(0.0001)
    assert row["sustained_calls"] == pytest.approx(1000, abs=1)


def test_no_sustained_run_where_none_is_asked_for():
    assert "sustained_seconds" not in measure(lambda: 1.0, FakeClock(), Sampling(sustained=0))
    assert "sustained_seconds" not in measure(lambda: 1.0, FakeClock(), Sampling(), sustained=False)


def test_a_sample_of_calls_in_a_row_is_their_mean():
    clock, took = FakeClock(), iter([9, 9, *[0.1, 0.2, 0.6] * 5])
    row = measure(lambda: next(took), clock, Sampling(repeats=5, warmup=1, pause=0, in_a_row=3, sustained=0))
    assert (row["min"], row["max"]) == pytest.approx((0.3, 0.3))
    assert next(took, None) is None
