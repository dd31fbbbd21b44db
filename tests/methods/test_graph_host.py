"""What the host works out for captured steps, against the formulas it stands for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slangvi.linalg import factorize
from slangvi.methods import _graph_host
from slangvi.methods._graph_host import Sent, flaws, reach, root_of
from slangvi.methods._launched import Numbers


@pytest.fixture
def sent(monkeypatch):
    """For rank 3, in memory that need not be page-locked."""
    monkeypatch.setattr(_graph_host, "pinned", lambda size: torch.zeros(size, dtype=torch.float64))
    return Sent(3)


def test_rates_arrive_with_all_that_follows_from_them(sent):
    numbers = Numbers(0.1, 0.3, 0.7)
    sent.rates(numbers, weight=5.0)
    here = sent.received(torch.device("cpu"))
    assert sent.numbers == numbers
    assert here.numbers.tolist() == list(numbers)
    assert (float(here.keep), float(here.gain)) == (0.7, 1.5)
    assert [float(root) for root in here.roots] == pytest.approx([0.7**0.5, 1.5**0.5, (0.7 * 1.5) ** 0.5], rel=1e-15)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_rates_at_the_ends_have_roots(sent, rate):
    sent.rates(Numbers(0.1, rate, 1.0), weight=4.0)
    assert [float(root) for root in sent.received(torch.device("cpu")).roots] == [math.sqrt(1 - rate), 2 * rate, 0.0]


def test_the_root_of_a_precision_arrives_as_the_precision_has_it(sent, generator):
    precision = factorize(torch.randn(3, 9, generator=generator).double(), torch.full((9,), 0.5).double())
    sent.root(*root_of(precision.gram.numpy()))
    here = sent.received(torch.device("cpu"))
    torch.testing.assert_close(here.damping, precision.damping)
    turns = here.spectrum[1]
    torch.testing.assert_close(turns * (here.spectrum[0].square() - 1) @ turns.mT, precision.gram)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("rank", "by_torch"), [(1, []), (8, []), (25, []), (26, [1]), (40, [1])])
def test_a_root_is_one_whatever_the_rank_and_takes_one_thread(rank, by_torch, generator, monkeypatch):
    threads, eigh = [], torch.linalg.eigh

    def counted(matrix):
        threads.append(torch.get_num_threads())
        return eigh(matrix)

    rows = torch.randn(rank, 2 * rank, generator=generator).double()
    gram = rows @ rows.mT
    monkeypatch.setattr(torch.linalg, "eigh", counted)
    roots, turns = map(torch.from_numpy, root_of(gram.numpy()))
    assert threads == by_torch
    torch.testing.assert_close(turns * roots.square() @ turns.mT, gram + torch.eye(rank).double())
    torch.testing.assert_close(turns.mT @ turns, torch.eye(rank).double())


def test_a_root_of_what_is_not_finite_can_be_sent(sent):
    sent.root(*root_of(np.full((3, 3), np.nan)))
    assert sent.memory.isfinite().all()


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_never_moves_further_than_its_reach(seed):
    generator = torch.Generator().manual_seed(seed)
    factor, rows = torch.randn(2, 6, generator=generator).double(), torch.randn(4, 6, generator=generator).double()
    diag, pull, momentum = 0.1 + torch.rand(3, 6, generator=generator).double()
    numbers = Numbers(0.3, 0.2, 0.5)
    total, push = float(factor.square().sum()), 7.0 * math.sqrt(4 * float(rows.square().sum()))
    moved = 0.3 * factorize(factor, diag).solve((7.0 * rows.sum(0) + momentum) / 0.5 + pull)
    bound = reach(numbers, push, total, float(pull.norm()), float(momentum.norm()), float(diag.min()))
    assert float(moved.norm()) <= bound < math.inf


@pytest.mark.parametrize("where", [0, 1, 2])
def test_flaws_of_what_is_not_finite_are_not_small(where):
    numbers = [np.eye(2), np.zeros(2), np.eye(2)]
    numbers[where].flat[0] = np.nan
    assert flaws(np.eye(2), np.zeros(2), np.eye(2)) == (0.0, 0.0)
    assert not all(flaw <= 1e-6 for flaw in flaws(*numbers))
