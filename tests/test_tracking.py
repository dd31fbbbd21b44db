"""Where the numbers of each step go."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import torch.nn.functional as F

import slangvi
from helpers.optimizer_runs import CLASSES, N, backward, make, model_and_data, train
from slangvi.tracking import scalars, track


class Writer:
    """What TensorBoard's writer looks like from here."""

    def __init__(self):
        self.seen = []

    def add_scalar(self, name, value, step):
        self.seen.append((name, value, step))


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_tells_numbers_to_a_writer(name):
    kind, options = CLASSES[name]
    model, x, y = model_and_data()
    opt, writer = kind(model, num_data=N, lr=0.05, **options), Writer()
    track(opt, writer)
    for _ in range(2):
        opt.step(lambda: backward(F.cross_entropy(model(x), y)))
    told = {key: value for key, value, step in writer.seen if step == 2}
    assert {step for _, _, step in writer.seen} == {1, 2}
    assert all(type(value) is float and math.isfinite(value) for value in told.values())
    assert told["slangvi/lr"] == 0.05
    assert told["slangvi/num_rows"] == 12
    assert told["slangvi/loss"] == pytest.approx(opt.info.loss)
    if math.isnan(opt.kl()):  # dropout: known up to a constant only
        assert told["slangvi/penalty"] == pytest.approx(opt.info.penalty)
        assert not {"slangvi/kl", "slangvi/elbo"} & told.keys()
    else:
        assert told["slangvi/elbo"] == pytest.approx(opt.info.elbo.value)
        assert told["slangvi/kl"] == pytest.approx(opt.kl())


def test_what_is_not_known_and_what_is_no_number_stays_out():
    model, x, y = model_and_data()
    opt = train(make(model), x, y, steps=1)
    told = scalars(opt.info)
    assert math.isnan(opt.info.loss)
    assert not {"loss", "elbo", "spectrum", "leading", "step"} & told.keys()
    assert told["captured"] == pytest.approx(opt.info.captured)


def test_a_function_gets_all_numbers_of_a_step_at_once():
    model, x, y = model_and_data()
    opt, seen = make(model), []
    track(opt, lambda numbers, step: seen.append((step, numbers)), prefix="")
    train(opt, x, y, steps=3)
    assert [step for step, _ in seen] == [1, 2, 3]
    assert all({"lr", "kl", "captured"} <= numbers.keys() for _, numbers in seen)


def test_only_some_steps_are_sent():
    model, x, y = model_and_data()
    opt, seen = make(model), []
    track(opt, lambda numbers, step: seen.append(step), every=3)
    train(opt, x, y, steps=7)
    assert seen == [1, 4, 7]


def test_a_removed_handle_sends_nothing():
    model, x, y = model_and_data()
    opt, seen = make(model), []
    handle = track(opt, lambda numbers, step: seen.append(step))
    train(opt, x, y, steps=1)
    handle.remove()
    train(opt, x, y, steps=1)
    assert seen == [1]


def test_skipped_steps_send_nothing():
    model, x, y = model_and_data()
    opt, seen = make(model, max_bad_batches=1), []
    track(opt, lambda numbers, step: seen.append((step, numbers["slangvi/skipped"])))
    for scale in (1.0, math.inf, 1.0):
        opt.step(lambda scale=scale: backward(scale * F.cross_entropy(model(x), y)))
    assert seen == [(1, 0.0), (2, 1.0)]


def test_going_back_one_step_sends_the_next_one_again():
    model, x, y = model_and_data()
    opt, seen = make(model), []
    slangvi.track(opt, lambda numbers, step: seen.append(step))
    train(opt, x, y, steps=1)
    saved = opt.state_dict()
    train(opt, x, y, steps=1)
    opt.load_state_dict(saved)
    train(opt, x, y, steps=2)
    assert seen == [1, 2, 2, 3]


def test_a_step_the_scaler_skips_sends_nothing():
    model, x, y = model_and_data(dtype=torch.float32)
    opt, seen = make(model), []
    track(opt, lambda numbers, step: seen.append(step))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt.train()
    scaler.scale(F.cross_entropy(model(x), y) * math.inf).backward()
    scaler.step(opt)
    assert seen == []


def test_groups_have_rates_of_their_own():
    model, x, y = model_and_data()
    opt, seen = (
        make(model, params=[{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}]),
        [],
    )
    track(opt, lambda numbers, step: seen.append(numbers))
    train(opt, x, y, steps=1)
    assert (seen[0]["slangvi/lr/0"], seen[0]["slangvi/lr/1"]) == (0.02, 0.1)


def test_a_logger_gets_one_line_per_step(caplog, capsys):
    model, x, y = model_and_data()
    opt = make(model)
    track(opt, logging.getLogger("mine"))
    with caplog.at_level(logging.WARNING, "mine"):
        train(opt, x, y, steps=1)
    with caplog.at_level(logging.INFO, "mine"):
        train(opt, x, y, steps=1)
    (record,) = caplog.records
    assert record.getMessage().startswith("step 2: slangvi/lr 0.1, slangvi/captured ")
    assert capsys.readouterr() == ("", "")


def test_a_meter_that_is_handed_in_shows_short_names():
    class Meter:
        def set_postfix(self, numbers):
            self.shown = numbers

    model, x, y = model_and_data()
    opt, meter = make(model), Meter()
    track(opt, meter)
    train(opt, x, y, steps=1)
    assert meter.shown["step"] == 1
    assert meter.shown["lr"] == "0.1"


def test_tensorboard_writes_a_file_that_can_be_read(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed: make loops")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, x, y = model_and_data()
    opt = make(model)
    with tensorboard.SummaryWriter(tmp_path) as writer:
        track(opt, writer)
        train(opt, x, y, steps=3)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("slangvi/kl")] == [1, 2, 3]
    assert events.Scalars("slangvi/kl")[-1].value == pytest.approx(opt.kl(), rel=1e-5)


def test_impossible_arguments_are_named():
    model, _, _ = model_and_data()
    opt = make(model)
    with pytest.raises(TypeError, match=r"to must be a writer with add_scalar.*got str"):
        track(opt, "runs")
    with pytest.raises(TypeError, match="optimizer must be one of slangvi's, got Adam"):
        track(torch.optim.Adam(model.parameters()), print)
    with pytest.raises(ValueError, match="every"):
        track(opt, print, every=0)
    with pytest.raises(TypeError, match="prefix must be a string, got int"):
        track(opt, print, prefix=1)


def test_the_public_name_is_the_function():
    assert slangvi.track is track
