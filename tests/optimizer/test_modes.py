"""train() and eval(): blocks for loops that have no place for a `with`."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers.optimizer_runs import CLASSES, N, assert_identical, backward, flat, make, model_and_data, train
from slangvi.params.state import tensors_of


@pytest.mark.parametrize("name", CLASSES)
def test_train_and_step_do_what_a_block_does(name):
    kind, options = CLASSES[name]
    pair = []
    for style in ("block", "mode"):
        model, x, y = model_and_data()
        opt = kind(model, num_data=N, **options, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            opt.zero_grad()
            if style == "mode":
                opt.train()
                F.cross_entropy(model(x), y).backward()
            else:
                with opt.sampled_params(train=True):
                    F.cross_entropy(model(x), y).backward()
            opt.step()
        pair.append(opt)
    assert_identical(*pair)


def test_every_train_begins_another_draw_and_keeps_the_gradients():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    blocks, modes = make(first), make(second)
    for a, b in zip(x.split(4), y.split(4), strict=True):
        with blocks.sampled_params(train=True):
            F.cross_entropy(first(a), b).backward()
        modes.train()
        F.cross_entropy(second(a), b).backward()
    blocks.step()
    modes.step()
    assert modes.info.num_rows == 12
    assert_identical(blocks, modes)


def test_eval_puts_the_mean_back_and_may_be_called_at_any_time():
    model, x, y = model_and_data()
    opt = make(model)
    mean = flat(model)
    opt.eval()
    opt.train()
    assert not torch.equal(flat(model), mean)
    F.cross_entropy(model(x), y).backward()
    opt.eval()
    opt.eval()
    assert torch.equal(flat(model), mean)
    assert opt.has_gradients
    opt.step()
    assert opt.info.num_rows == 12


def test_train_inside_a_block_with_gradients_changes_nothing():
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    plain, asked = make(first), make(second)

    def closure(opt, ask):
        if ask:
            opt.train()
        loss = backward(F.cross_entropy(opt.model(x), y))
        if ask:
            opt.eval()
        return loss

    plain.step(lambda: closure(plain, False))
    asked.step(lambda: closure(asked, True))
    assert_identical(plain, asked)


def test_a_closure_goes_on_after_train():
    model, x, y = model_and_data()
    opt = make(model, mc_samples=2)
    opt.train()
    opt.step(lambda: backward(F.cross_entropy(model(x), y)))
    assert opt.info.num_rows == 24


def test_blocks_and_modes_do_not_mix():
    model, _, _ = model_and_data()
    opt = make(model)
    opt.train()
    with (
        pytest.raises(RuntimeError, match=r"nested.*train\(\) began that block; eval\(\) ends it"),
        opt.sampled_params(),
    ):
        pass
    with pytest.raises(RuntimeError, match=r"needs the mean.*Call opt.eval\(\) first"):
        opt.state_dict()
    opt.eval()
    with opt.sampled_params(), pytest.raises(RuntimeError, match="nested"):
        opt.train()
    opt.state_dict()


def test_discarding_ends_the_block():
    model, x, y = model_and_data()
    opt = make(model)
    mean = flat(model)
    opt.train()
    F.cross_entropy(model(x), y).backward()
    opt.discard_gradients()
    assert not opt.has_gradients
    assert torch.equal(flat(model), mean)


def test_a_scaler_that_skips_leaves_state_and_weights():
    model, x, y = model_and_data(dtype=torch.float32)
    opt = train(make(model), x, y, steps=2)
    before, weights, info = [value.clone() for _, value in tensors_of(opt._state)], flat(model), opt.info
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt.zero_grad()
    opt.train()
    scaler.scale(F.cross_entropy(model(x), y) * math.inf).backward()
    scaler.step(opt)
    scaler.update()
    assert opt._state.step == 2
    assert opt.info is info
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, tensors_of(opt._state), strict=True))
    assert torch.equal(flat(model), weights)
    assert not opt.has_gradients
    assert scaler.get_scale() == 512.0
    opt.zero_grad()
    opt.train()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(opt)
    assert opt._state.step == 3


# ---- gradients that nobody collected


def test_a_micro_batch_outside_blocks_is_told_of_once():
    model, x, y = model_and_data()
    opt = make(model)

    def half_lost():
        F.cross_entropy(model(x[:6]), y[:6]).backward()
        with opt.sampled_params(train=True):
            F.cross_entropy(model(x[6:]), y[6:]).backward()
        opt.step()

    with pytest.warns(UserWarning, match="ran outside sampled_params since the last step") as record:
        half_lost()
    assert len(record) == 1
    half_lost()
    assert opt.info.num_rows == 6


def test_gradients_that_were_zeroed_were_not_meant():
    model, x, y = model_and_data()
    opt = make(model)
    F.cross_entropy(model(x), y).backward()
    train(opt, x, y, steps=2)
    torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    with opt.sampled_params(train=True):
        F.cross_entropy(model(x), y).backward()
    opt.step()  # a warning would be an error here
    assert opt.info.step == 3


def test_another_optimizers_step_in_between_does_no_harm():
    """Rows are made of what the layers saw in forward, whatever becomes of other weights."""
    found = []
    for rate in (10.0, 0.0):
        model, x, y = model_and_data()
        head = slangvi.SLANG(
            model, model[2].parameters(), num_data=N, rank=2, generator=torch.Generator().manual_seed(0)
        )
        body = torch.optim.SGD(model[0].parameters(), lr=rate)
        head.train()
        F.cross_entropy(model(x), y).backward()
        body.step()
        head.step()
        found.append(head.posterior)
    assert torch.equal(found[0].mean, found[1].mean)
    assert torch.equal(found[0].variance, found[1].variance)


# ---- models under torch.compile


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_compiled_models_take_the_same_steps(name, when):
    kind, options = CLASSES[name]
    pair = []
    for compiled in (False, True):
        model, x, y = model_and_data()
        called = model
        if compiled and when == "in place":
            model.compile(backend="eager")
        elif compiled:
            called = torch.compile(model, backend="eager")
        with torch.no_grad():
            called(x)  # code that was compiled before there were hooks
        given = called if when == "before" else model
        opt = kind(given, num_data=N, **options, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            opt.zero_grad()
            opt.train()
            F.cross_entropy(called(x), y).backward()
            opt.step()
        pair.append(opt)
    assert_identical(*pair)
    assert pair[1].posterior.param_spec.names == ("0.weight", "0.bias", "2.weight", "2.bias")


def test_a_compiled_model_predicts_and_is_compiled_outside_blocks():
    model, x, y = model_and_data()
    graphs = []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    opt = train(make(compiled), x, y, steps=1)
    assert graphs == []
    found = slangvi.predictive_samples(compiled, opt.posterior, x, 3, generator=torch.Generator().manual_seed(0))
    plain = slangvi.predictive_samples(model, opt.posterior, x, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found, plain)
    exact = slangvi.linearised_predictive(compiled, opt.posterior, x)
    assert torch.equal(exact.loc, slangvi.linearised_predictive(model, opt.posterior, x).loc)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 1


def test_outputs_with_several_parts_are_predicted_from_their_logits():
    class Parts(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return type("Output", (), {"logits": self.inner(x), "hidden": x})()

    model, x, _ = model_and_data()
    q = make(Parts(model)).posterior
    assert slangvi.predictive_samples(Parts(model), q, x, 3).shape == (3, 12, 3)


@pytest.mark.parametrize("name", ["SLANG", "BBB"])
def test_a_closure_that_does_nothing_leaves_the_batch_out(name):
    model, x, y = model_and_data()
    method, options = CLASSES[name]
    opt = method(model, num_data=N, **options)
    before = {key: value.clone() for key, value in tensors_of(opt._state)}
    assert opt.step(lambda: None) is None
    assert opt._state.step == 0
    assert all(torch.equal(value, before[key]) for key, value in tensors_of(opt._state))
    with pytest.raises(RuntimeError, match="found no gradients"):
        opt.step(lambda: F.cross_entropy(model(x), y))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="found no gradients"):
        opt.step(lambda: None)
    opt.zero_grad()
    opt.step(lambda: backward(F.cross_entropy(model(x), y)))
    assert opt._state.step == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["train", "block", "closure"])
def test_a_compiled_loop_is_refused(way):
    model, x, y = model_and_data()
    opt = make(model)
    before = flat(model)

    def loop():
        if way == "train":
            opt.train()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        elif way == "block":
            with opt.sampled_params(train=True):
                F.cross_entropy(model(x), y).backward()
            opt.step()
        else:
            opt.step(lambda: backward(F.cross_entropy(model(x), y)))

    with pytest.raises(RuntimeError, match=r"Compile the model alone, torch\.compile\(model\)"):
        torch.compile(loop, backend="eager")()
    assert torch.equal(flat(model), before)
    loop()
    assert opt.info.step == 1


def test_a_program_may_end_inside_a_block():
    """Torch aborts when weights are written while the interpreter is taken apart."""
    lines = [
        "import torch, slangvi, torch._dynamo",
        "model = torch.nn.Linear(3, 2)",
        "opt = slangvi.SLANG(model, num_data=10)",
        "opt.train()",
        "model(torch.ones(4, 3)).sum().backward()",
        "raise ValueError('in the loop')",
    ]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("ValueError: in the loop")
