"""Networks that do not fit into memory are refused before training; all others are let through."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from slangvi.errors import DataError
from slangvi.tabular import fitting as size
from slangvi.tabular.fitting import Settings, fit
from slangvi.tabular.reading import parse


def test_what_does_not_fit_is_refused_and_what_fits_is_not(monkeypatch):
    monkeypatch.setattr(size, "memory_of", lambda device: 10**9)
    size.check_size([20, 1000, 1000, 1], 4, "cpu")
    match = r"of 16,092,001 weights .* rank 4 takes \d\.\d GiB to train, and this machine has 953\.7 MiB\. Choose"
    with pytest.raises(DataError, match=match):
        size.check_size([20, 4000, 4000, 1], 4, "cpu")


def test_rank_and_sizes_are_planned_with(monkeypatch):
    planned = []

    def plan(model, batch, rank, mc_samples):
        planned.append((sum(p.numel() for p in model.parameters()), batch.shape, rank, mc_samples))
        return SimpleNamespace(peak=2 * 10**9)

    monkeypatch.setattr(size, "memory_of", lambda device: 10**9)
    monkeypatch.setattr(size, "estimate_memory", plan)
    with pytest.raises(DataError, match=r"posterior of rank 200 takes 1\.9 GiB to train, and the GPU has 953\.7 MiB"):
        size.check_size([20, 1000, 1000, 1], 200, "cuda")
    assert planned == [(1_023_001, (32, 20), 200, 4)]


@pytest.mark.parametrize("there", [None, 1])
def test_small_networks_and_silent_systems_pass(there, monkeypatch):
    monkeypatch.setattr(size, "memory_of", lambda device: there)
    monkeypatch.setattr(size, "estimate_memory", lambda *args: pytest.fail("nothing to plan"))
    size.check_size([20, 50, 1] if there else [20, 9000, 9000, 1], 4, "cpu")


def test_the_memory_of_machine_and_gpu(monkeypatch):
    found = size.memory_of("cpu")
    assert found is None or found > 10**8
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"total_memory": 7})())
    assert size.memory_of("cuda") == 7
    monkeypatch.delattr(os, "sysconf", raising=False)
    assert size.memory_of("cpu") is None


def test_a_fit_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setattr(size, "memory_of", lambda device: 10**6)
    table = parse(("x,y\n" + "".join(f"{k * k % 17 + 0.5},{k / 3}\n" for k in range(60))).encode())
    trained = []
    with pytest.raises(DataError, match="narrower --hidden"):
        fit(table, Settings(target="y", hidden=(1200, 1200)), lambda *args: trained.append(args))
    assert not trained
