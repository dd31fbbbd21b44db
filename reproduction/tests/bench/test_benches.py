"""The benchmarks run, every contender has its row, and targets are judged as they were set."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from slangvi_reproduction.bench import BENCHES, layers, load_bench, own, peers, public_models, replicas, scale, step
from slangvi_reproduction.bench._measure import BASELINE, FLOOR
from slangvi_reproduction.bench.record import Row, Settings
from slangvi_reproduction.bench.run import environment_of


@pytest.mark.parametrize("name", BENCHES)
def test_every_row_is_measured_or_excused(name, quick_run):
    rows = quick_run(name).rows
    assert BASELINE in {row.name for row in rows}
    for row in rows:
        if row.skipped:
            assert row.name in {*(peer.name for peer in peers.PEERS), "evon", *public_models.problems(True, "cpu")}
            assert row.milliseconds is None
        else:
            assert row.milliseconds > 0
            assert row.peak_mb > 0
            assert row.ratio > 0
            assert row.extra_mb is None if name == "networks" else math.isfinite(row.extra_mb)
            assert (row.share is not None) == (
                name in ("step", "scale") and row.name == own.FUNCTIONAL and "large" not in row.settings.values()
            )
    assert all(0 < row.share < 1 for row in rows if row.share is not None)
    assert all(row.met is None for row in rows), "quick sizes are not judged"


@pytest.mark.parametrize("name", BENCHES)
def test_modules_have_what_the_table_needs(name):
    module = load_bench(name)
    assert module.TITLE
    assert module.ABOUT.endswith(".\n")
    assert module.notes([]) == []
    assert module.REPEATS % 2, "the median of an odd number is a sample"


def test_the_environment_says_how_to_repeat_a_run(quick_run):
    about = quick_run("step").environment
    assert about["command"] == "slangvi bench step --device cpu --repeats 1 --quick"
    assert about["threads"] == 1
    assert {"torch", "python", "slangvi", "peers", "date", "device", "seconds"} <= about.keys()
    assert (
        environment_of("scale", Settings(repeats=3), 1.0)["command"] == "slangvi bench scale --device cpu --repeats 3"
    )


# ---- step ----


def test_step_has_every_peer_and_every_rank(quick_run):
    rows = quick_run("step").rows
    assert {row.name for row in rows} == {peer.name for peer in peers.PEERS if not peer.cuda} | {
        own.FUNCTIONAL,
        own.LOOP,
    }
    assert [row.settings["L"] for row in rows if row.name == own.FUNCTIONAL] == list(step.QUICK.ranks)


def judged(row: Row, device: str, ivon: float = 8.0) -> Row:
    return step.with_goals([Row("ivon", milliseconds=ivon), row], device)[1]


@pytest.mark.parametrize(
    ("row", "device", "target", "met"),
    [
        (Row(own.FUNCTIONAL, {"L": 8}, milliseconds=1.5), "cuda", "✓ ≤ 1.5 ms", True),
        (Row(own.COMPILED, {"L": 32}, milliseconds=2.6), "cuda", "✗ ≤ 2.5 ms", False),
        (Row(own.FUNCTIONAL, {"L": 8}, ratio=5.1), "cpu", "✗ ≤ 5 × Adam", False),
        (Row(own.FUNCTIONAL, {"L": 1}, ratio=2.0, extra_mb=101.0), "cpu", "✓ ≤ 2.5 × Adam, ✗ ≤ 100 MB extra", False),
        (Row(own.FUNCTIONAL, {"L": 1}, ratio=2.0), "cpu", "✓ ≤ 2.5 × Adam, ✗ ≤ 100 MB extra", False),
        (Row(own.LOOP, {"L": 1}, extra_mb=99.0), "cpu", "✓ ≤ 100 MB extra", True),
        (Row(own.LOOP, {"L": 8}, milliseconds=7.9), "cuda", "✓ ≤ IVON", True),
        (Row(own.LOOP, {"L": 8}, milliseconds=8.1), "cuda", "✗ ≤ IVON", False),
        (Row(own.LOOP, {"L": 8}, milliseconds=8.1), "cpu", "", None),
        (Row("adam", milliseconds=8.1), "cuda", "", None),
    ],
)
def test_targets_are_those_of_the_device_and_the_rank(row, device, target, met):
    assert judged(row, device) == replace(row, target=target, met=met)


def test_without_ivon_the_optimizer_cannot_be_judged():
    (row,) = step.with_goals([Row(own.LOOP, {"L": 8}, milliseconds=1.0)], "cuda")
    assert row.met is None


def test_notes_count_targets():
    rows = [Row("a", target="✓ ≤ 2 ms, ✗ ≤ 100 MB extra"), Row("b", target="✓ ≤ IVON"), Row("c")]
    assert step.notes(rows) == ["2 of 3 targets are met."]
    assert step.notes(rows[2:]) == []


# ---- layers ----


def test_layers_compares_the_engines_on_both_networks(quick_run):
    rows = quick_run("layers").rows
    names = [FLOOR, BASELINE, "ivon", own.FUNCTIONAL, layers.DENSE, own.LOOP]
    assert [row.name for row in rows] == names * 2
    assert [row.settings["network"] for row in rows] == ["small residual"] * 6 + ["small transformer"] * 6


def test_full_layers_are_the_networks_they_are_named_for():
    problems = layers.problems(Settings())
    assert {name: tuple(problem.x.shape[1:]) for name, problem in problems.items()} == {
        "ResNet-20": (3, 32, 32),
        "transformer": (64,),
    }


def test_the_factored_engine_is_judged_by_the_dense_ones_memory():
    rows = [
        Row(layers.DENSE, peak_mb=10.0),
        Row(own.FUNCTIONAL, peak_mb=10.0),
        Row(own.LOOP, peak_mb=10.1),
        Row("ivon"),
    ]
    assert [row.met for row in layers.with_goals(rows)] == [None, True, False, None]
    assert [row.met for row in layers.with_goals(rows[1:])] == [None] * 3
    assert layers.notes(layers.with_goals(rows))[0].startswith("1 of 2 rows")


# ---- scale ----


def test_scale_sweeps_both_sizes_and_has_a_large_network(quick_run):
    rows = quick_run("scale").rows
    ours = {kind: [r for r in rows if r.name == own.FUNCTIONAL and r.settings["sweep"] == kind] for kind in ("P", "L")}
    assert [r.settings["P"] for r in ours["P"]] == pytest.approx(scale.QUICK.params, rel=0.05)
    assert tuple(r.settings["L"] for r in ours["L"]) == scale.QUICK.ranks
    assert [r.name for r in rows if r.settings["sweep"] == "large"] == [BASELINE, own.FUNCTIONAL, own.LOOP]
    assert ours["P"][-1].peak_mb > ours["P"][0].peak_mb


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_full_sweeps_cover_what_was_asked(device):
    sweep = scale.FULL[device]
    assert min(sweep.params) == 1e5
    assert max(sweep.params) >= {"cpu": 1e7, "cuda": 1e8}[device]
    assert (min(sweep.ranks), max(sweep.ranks)) == (1, 64)


def test_slopes_are_fitted_to_the_upper_part_only():
    cost = {10**k: max(50.0, 10.0**k / 100) for k in range(2, 8)}  # flat first, then linear
    rows = [Row("slang", {"sweep": "P", "P": p, "L": 8}, milliseconds=c, peak_mb=c**2) for p, c in cost.items()]
    rows += [Row("slang", {"sweep": "L", "P": 9, "L": r}, milliseconds=r**0.5, peak_mb=2.0) for r in (1, 8, 64)]
    rows += [Row("adam", {"sweep": "P", "P": 5, "L": 8}, milliseconds=1.0, peak_mb=1.0)]
    found = scale.slopes(rows)
    assert found == {
        ("slang", "P", "time"): pytest.approx(1),
        ("slang", "P", "memory"): pytest.approx(2),
        ("slang", "L", "time"): pytest.approx(0.5),
        ("slang", "L", "memory"): pytest.approx(0),
    }
    assert scale.notes(rows) == [
        "slang: time grows as P^1.00, peak memory as P^2.00.",
        "slang: time grows as L^0.50, peak memory as L^0.00.",
    ]


# ---- replicas ----


def test_replicas_go_one_by_one_and_in_lockstep(quick_run):
    rows = quick_run("replicas").rows
    ours = [replicas.ALONE, f"{replicas.ALONE}, dense", replicas.LOCKSTEP]
    assert [row.name for row in rows] == [FLOOR, BASELINE, *ours]
    assert replicas.notes(rows)[0].startswith("Lockstep advances all runs")


@pytest.mark.parametrize(("milliseconds", "met"), [(4.0, True), (6.0, False)])
def test_lockstep_is_judged_against_the_best_way_to_go_one_by_one(milliseconds, met):
    rows = [
        Row(f"{replicas.ALONE}, dense", milliseconds=900.0),
        Row(replicas.ALONE, milliseconds=100.0),
        Row(replicas.LOCKSTEP, milliseconds=milliseconds),
    ]
    assert [row.met for row in replicas.with_goals(rows)] == [None, None, met]
    assert [row.met for row in replicas.with_goals(rows[:2])] == [None, None]
