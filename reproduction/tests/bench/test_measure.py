"""Turns are taken, medians are medians, memory is what is alive, and excuses are for others."""

from __future__ import annotations

import weakref
from typing import ClassVar

import pytest
import torch

from slangvi_reproduction.bench import _measure
from slangvi_reproduction.bench._measure import BASELINE, FLOOR, Contender, compare, measure, median_seconds, peak_bytes
from slangvi_reproduction.bench.record import Row, Settings

MEGABYTE = 250_000  # floats


@pytest.fixture
def clock(monkeypatch):
    """A clock that only steps advance."""
    now = [0.0]
    monkeypatch.setattr(_measure.time, "perf_counter", lambda: now[0])
    return now


def test_repeats_take_turns_and_the_median_is_kept(clock, monkeypatch):
    monkeypatch.setattr(_measure, "SAMPLE_SECONDS", 0.0)
    order, durations = [], {0: [9, 1, 2, 30], 1: [9, 5, 5, 5]}

    def step(key):
        order.append(key)
        clock[0] += durations[key].pop(0)

    found = median_seconds({key: lambda key=key: step(key) for key in durations}, Settings(repeats=3))
    assert order == [0, 1] * 4
    assert found == {0: 2, 1: 5}


def test_short_steps_are_timed_several_at_once(clock):
    def step():
        calls.append(None)
        clock[0] += 0.003

    calls: list[None] = []
    found = median_seconds({0: step}, Settings(repeats=2))
    assert found[0] == pytest.approx(0.003)
    assert len(calls) == 1 + 2 * (1 + 34)  # 34 · 3 ms is the first multiple beyond 100 ms; one more is not timed


def test_peak_counts_state_and_a_warm_step_but_not_its_building():
    def make():
        state = torch.ones(3 * MEGABYTE) * torch.ones(3 * MEGABYTE) + torch.ones(3 * MEGABYTE)
        return lambda: state[:MEGABYTE] * 2

    assert peak_bytes(make, "cpu") == 4 * 4 * MEGABYTE


def test_rows_come_in_order_with_time_and_memory(monkeypatch):
    monkeypatch.setattr(_measure, "SAMPLE_SECONDS", 0.0)
    said = []
    weight = lambda n: lambda: lambda: torch.ones(n * MEGABYTE).sum()  # noqa: E731
    entries = [Contender("one", weight(1), {"L": 4}, note="small"), Contender("two", weight(2))]
    one, two = measure(entries, Settings(repeats=2, say=said.append))
    assert (one.name, one.settings, one.note) == ("one", {"L": 4}, "small")
    assert (one.peak_mb, two.peak_mb) == (pytest.approx(1, abs=1e-3), pytest.approx(2, abs=1e-3))
    assert min(one.milliseconds, two.milliseconds) > 0
    assert said == ["one L=4", "two"]


@pytest.mark.parametrize(("together", "most"), [(True, 2), (False, 1)])
def test_contenders_that_do_not_fit_side_by_side_live_one_after_the_other(together, most):
    class Held:
        """A step that counts its kind."""

        alive: ClassVar[weakref.WeakSet[Held]] = weakref.WeakSet()
        seen: ClassVar[list[int]] = []

        def __init__(self) -> None:
            self.alive.add(self)

        def __call__(self) -> None:
            self.seen.append(len(self.alive))

    rows = measure([Contender("one", Held), Contender("two", Held)], Settings(repeats=1), together)
    assert [row.name for row in rows] == ["one", "two"]
    assert max(Held.seen[-2:]) == most


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ModuleNotFoundError("No module named 'ivon'", name="ivon"),
            "ivon is not installed (see reproduction/README.md)",
        ),
        (ModuleNotFoundError("Could not import"), "ModuleNotFoundError: Could not import"),
        (torch.OutOfMemoryError("tried to allocate"), "out of memory"),
        (TypeError("first line\n second line"), "TypeError: first line second line"),
    ],
)
def test_a_peer_that_fails_is_left_out_with_a_reason(error, reason):
    def fail():
        raise error

    failed, fine = measure([Contender("peer", fail, peer=True), Contender("fine", lambda: int)], Settings(repeats=1))
    assert (failed.skipped, failed.milliseconds, failed.peak_mb) == (reason, None, None)
    assert fine.milliseconds is not None


def test_an_error_of_our_own_is_no_excuse():
    def fail():
        raise TypeError("ours")

    with pytest.raises(TypeError, match="ours"):
        measure([Contender("slang", fail)], Settings(repeats=1))


def test_ratios_are_to_adam_and_extra_memory_is_beyond_a_backward_pass():
    rows = [
        Row(FLOOR, milliseconds=1.0, peak_mb=10.0),
        Row(BASELINE, milliseconds=2.0, peak_mb=12.0),
        Row("slang", milliseconds=5.0, peak_mb=40.0),
        Row("pyro", skipped="missing"),
    ]
    assert [row.ratio for row in compare(rows)] == [0.5, 1.0, 2.5, None]
    assert [row.extra_mb for row in compare(rows)] == [0.0, 2.0, 30.0, None]
    (alone,) = compare(rows[2:3])
    assert (alone.ratio, alone.extra_mb) == (None, None)
