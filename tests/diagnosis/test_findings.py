"""A built case for every finding that is not fine, and a healthy one without any."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import slangvi
from slangvi.diagnosis import Diagnosis, Finding, Layer
from slangvi.diagnosis.findings import CHECKS, judge

N = 400


def inputs(size=5, seed=0, count=N):
    return torch.randn(count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def collinear(size=60, decades=1.5, seed=1):
    """Standardised inputs whose principal components differ by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]
    x = (inputs(size, seed) * torch.logspace(0, -decades, size, dtype=torch.float64)) @ rotation
    return x / x.std(0)


def targets(x, noise=1.0):
    generator = torch.Generator().manual_seed(9)
    return x[:, 0] - x[:, 1] + noise * torch.randn(len(x), dtype=x.dtype, generator=generator)


def nll(variance=1.0):
    return lambda outputs, y: F.gaussian_nll_loss(outputs[:, 0], y, torch.full_like(y, variance))


def run(x, y, loss, steps=300, size=64, kind=slangvi.SLANG, model=None, **options):
    """A linear regression after some steps, with its history."""
    torch.manual_seed(4)
    model = nn.Linear(x.shape[1], 1).double() if model is None else model
    given = {"num_data": len(x), "lr": 0.1, "precision_lr": 0.05, "generator": torch.Generator().manual_seed(5)}
    opt = kind(model, **(given | options))
    history, order = slangvi.History(), torch.Generator().manual_seed(6)
    slangvi.track(opt, history)
    for step in range(1, steps + 1):
        rows = torch.randint(len(x), (size,), generator=order)

        def closure(rows=rows, step=step):
            opt.zero_grad()
            value = loss(model(x[rows]), y(step)[rows] if callable(y) else y[rows])
            value.backward()
            return value

        opt.step(closure)
    return opt, history


def changes(report):
    return {finding.name: finding.level for finding in report.findings if finding.level != "ok"}


def test_a_healthy_run_has_nothing_to_note():
    x = inputs()
    y, loss = targets(x, noise=3.0), nll(9.0)
    opt, history = run(x, y, loss, rank=2, steps=600)
    report = slangvi.diagnose(opt, (x, y), loss, history=history)
    assert changes(report) == {}
    names = {"rank", "shrinkage", "start", "moved", "loss", "kl", "parameters", "gradient noise", "layers"}
    assert {finding.name for finding in report.findings} == names
    assert report.warnings == ()


@pytest.fixture(scope="module")
def collinear_case():
    x = collinear()
    return x, targets(x), nll()


@pytest.mark.parametrize("kind", [slangvi.SLANG, slangvi.VOGN, slangvi.OnlineEig])
def test_low_ranks_shrink_sds_on_collinear_inputs(collinear_case, kind):
    x, y, loss = collinear_case
    opt, _ = run(x, y, loss, kind=kind, **({} if kind is slangvi.VOGN else {"rank": 2}))
    report = slangvi.diagnose(opt, (x, y), loss)
    assert report["shrinkage"].level == "warning"
    assert "of which rank" in report["shrinkage"].sentence
    assert f"rank={report.faithful_rank}" in report["shrinkage"].remedy
    assert 1 / 8 < report.shrinkage < 1 / 3  # 3 to 8 times too small
    assert report["rank"].level == "note"


def test_the_rank_that_is_recommended_is_enough(collinear_case):
    x, y, loss = collinear_case
    low = slangvi.diagnose(run(x, y, loss, rank=2)[0], (x, y), loss)
    report = slangvi.diagnose(run(x, y, loss, rank=low.faithful_rank)[0], (x, y), loss)
    assert report["shrinkage"].level == report["rank"].level == "ok"
    assert report.shrinkage > 0.8


def test_whitened_inputs_need_no_high_rank(collinear_case):
    x, y, loss = collinear_case
    white = len(x) ** 0.5 * torch.linalg.svd(x - x.mean(0), full_matrices=False)[0]
    report = slangvi.diagnose(run(white, y, loss, rank=2)[0], (white, y), loss)
    assert report["shrinkage"].level == "ok"


def test_a_batch_that_is_too_small_is_said_to_be(collinear_case):
    x, y, loss = collinear_case
    report = slangvi.diagnose(run(x, y, loss, rank=2, steps=50)[0], (x[:80], y[:80]), loss)
    assert report["shrinkage"].level == "note"
    assert "80 examples do not determine the curvature" in report["shrinkage"].sentence
    assert report.shrinkage is report.faithful_rank is None
    assert "held-out NLL" in report["rank"].remedy  # and no rank is recommended
    assert report.coverage > 3


def test_a_narrow_start_is_not_taken_for_a_low_rank():
    x = inputs()
    y, loss = targets(x), nll()
    opt, _ = run(x, y, loss, rank=2, steps=5, precision_lr=0.01, init_precision=1e5, precision_warmup=False)
    report = slangvi.diagnose(opt, (x, y), loss)
    assert report["shrinkage"].level == "warning"
    assert "although the rank is enough" in report["shrinkage"].sentence


def test_a_precision_that_has_not_heard_of_the_data_is_too_wide():
    x = inputs()
    y, loss = targets(x), nll()
    opt, _ = run(x, y, loss, rank=2, steps=5, lr=1e-4, precision_lr=0.001, precision_warmup=False)
    report = slangvi.diagnose(opt, (x, y), loss)
    assert report["shrinkage"].level == "note"
    assert "not learnt all of it yet" in report["shrinkage"].sentence


def test_a_start_that_is_remembered():
    x = inputs()
    opt, _ = run(x, targets(x), nll(), rank=2, steps=20, precision_lr=0.01, precision_warmup=False)
    report = slangvi.diagnose(opt)
    assert report.start_share == pytest.approx(0.99**20)
    assert report["start"].level == "warning"
    assert "about 81.8% of the starting precision is left" in report["start"].sentence


def test_a_posterior_that_has_not_moved():
    x = inputs()
    opt, _ = run(x, targets(x), nll(), steps=0)
    assert slangvi.diagnose(opt)["moved"] == Finding(
        "warning", "moved", "no step was taken: the posterior is its start.", slangvi.diagnose(opt)["moved"].remedy
    )
    opt.param_groups[0].update(lr=0.0, precision_lr=0.0)
    begun = {name: param.detach().clone() for name, param in opt.model.named_parameters()}
    opt.step(lambda: nll()(opt.model(x), targets(x)).backward())
    report = slangvi.diagnose(opt, start=begun)
    assert report["moved"].level == "warning"
    assert report["moved"].sentence.endswith("are those of the start, and the mean is 0 sds per weight from its start.")


def test_a_loss_that_goes_up_and_a_kl_that_grows():
    x = inputs()
    opt, history = run(x, lambda step: targets(x) + 0.002 * step**2, nll(), rank=2, lr=0.05)
    report = slangvi.diagnose(opt, history=history)
    assert report["loss"].level == "warning"
    assert report["kl"].level == "note"


def test_a_loss_that_still_falls_and_steps_that_are_noise():
    x = inputs(200)
    y, loss = 5 * x[:, 0] + targets(x), nll()
    opt, history = run(x, y, loss, rank=2, steps=150, size=32, lr=0.3)
    report = slangvi.diagnose(opt, (x, y), loss, history=history, draws=2)
    assert report["loss"].level == "note"
    assert report.step_examples == 32
    assert "while the loss still falls" in report["gradient noise"].sentence
    assert report["gradient noise"].level == "note"


def test_draws_that_make_most_of_the_noise():
    x = inputs(20)
    y, loss = targets(x), nll()
    start = {"init_precision": 1e-3, "lr": 1e-6, "precision_lr": 1e-9, "precision_warmup": False}
    opt, _ = run(x, y, loss, rank=2, steps=1, size=N, **start)
    report = slangvi.diagnose(opt, (x, y), loss, draws=8)
    assert report.draw_share > 0.8
    assert report["gradient noise"].level == "note"
    assert "mc_samples" in report["gradient noise"].remedy


@pytest.mark.parametrize(
    ("prior_precision", "level", "words"), [(1e7, "warning", "the prior nearly everywhere"), (1e-3, "note", "hardly")]
)
def test_one_side_that_dominates(prior_precision, level, words):
    x = inputs()
    lr = {"lr": 0.01} if prior_precision > 1 else {}
    options = {"prior_precision": prior_precision, "init_precision": prior_precision} | lr
    report = slangvi.diagnose(run(x, targets(x), nll(), rank=2, **options)[0])
    assert report["parameters"].level == level
    assert words in report["parameters"].sentence


def test_layers_that_are_silent_wide_or_narrow():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.unseen = nn.Linear(5, 1), nn.Linear(5, 1, bias=False)

        def forward(self, x):
            return self.seen(x) + self.unseen(0 * x)

    x = inputs()
    report = slangvi.diagnose(run(x, targets(x), nll(), model=Two().double(), rank=2)[0])
    assert report["layers"].level == "note"
    assert report["layers"].sentence.startswith("unseen.weight: ")
    # The start is wider than the prior, and too few steps were taken to forget it.
    options = {"rank": 2, "init_precision": 0.1, "precision_warmup": False}
    report = slangvi.diagnose(run(x, targets(x), nll(), model=Two().double(), steps=5, **options)[0])
    assert report["layers"].level == "warning"
    assert report["layers"].sentence == "unseen.weight: sds are larger than the prior's."
    report = slangvi.diagnose(run(x * 1e4, targets(x), nll(), rank=2)[0])
    assert report["layers"].level == "warning"
    assert re.fullmatch("weight.*: sds are below a thousandth of the prior's.", report["layers"].sentence)


def test_a_temperature_is_named():
    x = inputs()
    cold = slangvi.diagnose(run(x, targets(x), nll(), rank=2, steps=20, temperature=0.25)[0])
    assert cold["temperature"].level == "note"
    assert "counts 4 times" in cold["temperature"].sentence
    assert "more sure" in cold["temperature"].sentence
    warm = slangvi.diagnose(run(x, targets(x), nll(), rank=2, steps=20, temperature=2.0)[0])
    assert "less sure" in warm["temperature"].sentence


def test_a_number_of_data_that_cannot_be():
    x = inputs()
    opt, _ = run(x, targets(x), nll(), rank=2, steps=0, num_data=10)
    with pytest.warns(UserWarning, match="larger than num_data"):
        opt.step(lambda: nll()(opt.model(x), targets(x)).backward())
    assert slangvi.diagnose(opt)["num_data"].level == "warning"
    opt, _ = run(x, targets(x), nll(), rank=2, steps=20, size=8, num_data=10)
    assert "num_data" not in changes(slangvi.diagnose(opt))
    assert slangvi.diagnose(opt, (x, targets(x)), nll())["num_data"].level == "warning"


def test_batches_that_were_passed_over():
    x = inputs()
    y = lambda step: targets(x) * (math.inf if step % 10 == 3 else 1.0)  # noqa: E731
    opt, _ = run(x, y, nll(), rank=2, steps=30, max_bad_batches=2)
    report = slangvi.diagnose(opt)
    assert (report.skipped, report.step) == (3, 27)
    assert report["skipped"].level == "warning"
    assert "10.0%" in report["skipped"].sentence


def test_a_rank_that_batches_do_not_fill():
    x = inputs(count=1).repeat(N, 1)  # every gradient points the same way
    opt, history = run(x, targets(x), nll(), rank=3, steps=60)
    report = slangvi.diagnose(opt, history=history)
    assert report["rank used"].level == "warning"
    # Rounding may count as a second direction.
    assert re.fullmatch("only [12] of 3 directions are in use, persistently.", report["rank used"].sentence)
    assert slangvi.diagnose(opt)["rank used"].level == "note"


def test_directions_that_do_not_stand_out():
    x = inputs(40)
    opt, _ = run(x, targets(x), nll(), kind=slangvi.OnlineEig, steps=5, size=N, rank=1)
    report = slangvi.diagnose(opt)
    assert report.captured < 0.1
    assert report["rank"].level == "note"
    assert "no direction stands out" in report["rank"].sentence


def test_every_check_has_a_case_here_that_is_not_fine():
    source = Path(__file__).read_text(encoding="utf-8")
    assert {name for name in CHECKS if f'["{name}"].level' not in source} == set()


# ---- whatever the numbers are

number = st.floats(allow_nan=True, allow_infinity=True)
share = st.floats(0.0, 1.0)
count = st.integers(0, 10**9)
layer = st.builds(
    Layer,
    name=st.text("ab.0", min_size=1, max_size=9),
    size=st.integers(1, 10**6),
    **{f.name: st.floats(1e-9, 1e9) for f in fields(Layer) if f.name not in ("name", "size", "start_ratio", "moved")},
    start_ratio=st.none() | st.floats(1e-9, 1e9),
    moved=st.none() | st.floats(0, 1e9),
)
diagnosis = st.builds(
    Diagnosis,
    method=st.just("SLANG"),
    step=count,
    num_params=st.integers(1, 10**9),
    num_data=st.integers(1, 10**9),
    temperature=st.sampled_from([0.1, 1.0, 2.0]),
    rank=st.none() | st.integers(0, 64),
    layers=st.lists(layer, min_size=1, max_size=6).map(tuple),
    kl=number,
    effective_parameters=st.floats(-10, 1e9),
    captured=st.none() | share,
    enough_rank=st.none() | st.integers(0, 64),
    faithful_rank=st.none() | st.integers(0, 64),
    shrinkage=st.none() | st.floats(0, 10),
    coverage=st.none() | number,
    spectrum=st.lists(st.floats(0, 1e6), max_size=4).map(tuple),
    gradient_noise=st.none() | st.floats(0, math.inf),
    draw_share=st.none() | share,
    batch_examples=st.none() | st.integers(1, 10**6),
    step_examples=st.none() | st.integers(1, 10**6),
    start_share=st.none() | share,
    moved=st.none() | st.floats(0, 1e9),
    skipped=count,
    rank_used=st.none() | st.integers(0, 64),
    exceeds_num_data=st.booleans(),
    curves=st.dictionaries(st.sampled_from(["loss", "kl", "rank_used"]), st.lists(number, max_size=20)),
)


@given(diagnosis)
def test_any_numbers_give_sentences_a_table_and_json(found):
    report = replace(found, findings=judge(found))
    assert all(finding.level in ("ok", "note", "warning") for finding in report.findings)
    assert all(bool(finding.remedy) or finding.level == "ok" for finding in report.findings)
    assert len({finding.name for finding in report.findings}) == len(report.findings)
    text = " ".join(str(report).split())
    assert all(finding.sentence in text and finding.remedy in text for finding in report.findings)
    again = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [finding["name"] for finding in again["findings"]] == [finding.name for finding in report.findings]
    assert [each["name"] for each in again["layers"]] == [each.name for each in report.layers]
