"""Data that are awkward but possible."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import slangvi
from helpers.optimizer_runs import CLASSES, assert_same, backward, flat, make, model_and_data, train

AWKWARD = {
    "one class": (torch.randn(12, 4), torch.zeros(12, dtype=torch.long)),
    "a constant column": (torch.cat([torch.ones(12, 1) * 7, torch.randn(12, 3)], 1), torch.arange(12) % 3),
    "repeated columns": (torch.randn(12, 1).expand(12, 4).contiguous(), torch.arange(12) % 3),
    "one example": (torch.randn(1, 4), torch.tensor([2])),
    "identical examples": (torch.randn(1, 4).expand(12, 4).contiguous(), torch.zeros(12, dtype=torch.long)),
    "zeros": (torch.zeros(12, 4), torch.arange(12) % 3),
    "denormals": (torch.randn(12, 4) * 1e-40, torch.arange(12) % 3),
    "large": (torch.randn(12, 4) * 1e6, torch.arange(12) % 3),
}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_data_are_learnt_from(name, kind):
    x, y = AWKWARD[name]
    model, _, _ = model_and_data(dtype=torch.float32)
    build, options = CLASSES[kind]
    opt = build(model, num_data=len(x), generator=torch.Generator().manual_seed(0), **options)
    train(opt, x, y, steps=5)
    assert bool(torch.isfinite(flat(model)).all())
    assert bool((opt.posterior.variance > 0).all()) or kind == "MCDropout"
    assert bool(torch.isfinite(opt.posterior.variance).all())


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("size", [1, 2, 12])
def test_batches_of_any_size_are_steps(size, kind):
    model, x, y = model_and_data()
    build, options = CLASSES[kind]
    rank = {"rank": 5} if "rank" in options else {}
    opt = build(model, num_data=12, generator=torch.Generator().manual_seed(0), **(options | rank))
    train(opt, x[:size], y[:size])
    assert opt.info.step == 3


def test_a_loss_that_is_not_reduced_is_torchs_error_and_leaves_the_mean():
    model, x, y = model_and_data()
    opt = make(model)
    before = flat(model)
    with pytest.raises(RuntimeError, match="scalar outputs"):
        opt.step(lambda: backward(F.cross_entropy(model(x), y, reduction="none")))
    assert torch.equal(flat(model), before)
    assert opt._state.step == 0


def test_ignored_targets_are_examples_without_gradient():
    """Twelve examples of which four are ignored weigh as eight of a smaller data set."""
    (first, x, y), (second, _, _) = model_and_data(), model_and_data()
    hidden = y.clone()
    hidden[::3] = -100
    kept = hidden != -100
    whole, part = make(first, num_data=60, loss_reduction="sum"), make(second, num_data=40, loss_reduction="sum")
    for _ in range(2):
        whole.step(lambda: backward(F.cross_entropy(first(x), hidden, reduction="sum")))
        part.step(lambda: backward(F.cross_entropy(second(x[kept]), y[kept], reduction="sum")))
    assert_same(whole, part)


class Endless(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for k in range(12):
            yield torch.randn(4, generator=generator).double(), k % 3


def test_data_without_a_length_are_trained_on():
    model, _, _ = model_and_data()
    opt = make(model)
    for x, y in DataLoader(Endless(), batch_size=5):
        train(opt, x, y, steps=1, draws=1)
    assert opt._state.step == 3


def test_worker_processes_do_no_harm():
    """Workers are forked with the optimizer in memory, and do not move its source of draws."""
    (model, x, y), (other, _, _) = model_and_data(), model_and_data()
    opt, plain = make(model), make(other)
    generator = torch.Generator().manual_seed(3)
    for a, b in DataLoader(TensorDataset(x, y), batch_size=6, num_workers=1, generator=generator):
        train(opt, a, b, steps=1)
    for k in (0, 6):
        train(plain, x[k : k + 6], y[k : k + 6], steps=1)
    assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize("prior", [1e-12, 1e12])
@pytest.mark.parametrize("kind", [k for k in CLASSES if k != "MCDropout"])
def test_priors_of_any_size_are_finite(kind, prior):
    model, x, y = model_and_data(dtype=torch.float32)
    build, options = CLASSES[kind]
    opt = build(model, num_data=40, prior_precision=prior, generator=torch.Generator().manual_seed(0), **options)
    train(opt, x, y)
    assert bool(torch.isfinite(opt.posterior.variance).all())


def test_targets_of_one_class_have_a_likelihood():
    logits = torch.randn(4, 1)
    assert nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long)) == 0
    assert not slangvi.Categorical().log_prob(logits, torch.zeros(4, dtype=torch.long)).any()
