"""The table on the page of priors is that of the results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("continual", ROOT / "reproduction/benchmarks/continual.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_results(script):
    record = json.loads(script.PLACE.read_text(encoding="utf-8"))
    assert script.markdown(record["results"]) in (ROOT / "docs/continual.md").read_text(encoding="utf-8")


def test_settings_are_chosen_by_the_search_alone(script):
    found = {script.key_of(("split", "EWC", k, script.SEARCH)): {"accuracy": k == 2} for k in range(5)}
    found |= {script.key_of(("split", "EWC", 0, seed)): {"accuracy": 1.0} for seed in script.SEEDS}
    assert script.best_of(found, "split", "EWC") == 2


@pytest.mark.parametrize("method", ["fine-tuning", "EWC", "mean-field prior", "SLANG, rank 8"])
def test_every_method_learns_task_after_task(script, method, monkeypatch):
    """Two tasks of a few images that are easily told apart."""
    import torch

    def tasks_of(name, seed):
        y = torch.arange(40) % 2
        images = [(2.0 * y[:, None] - 1) * torch.linspace(0, 1, 784).roll(100 * k) for k in range(2)]
        return [script.Task(x, y, x, y, [2 * k, 2 * k + 1]) for k, x in enumerate(images)]

    monkeypatch.setattr(script, "tasks_of", tasks_of)
    monkeypatch.setattr(script, "BATCH", 10)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    found = script.run(("split", method, 0, 0))
    assert found["learning"] > 0.9
    assert found["accuracy"] == pytest.approx(found["learning"] - found["forgetting"] / 2, abs=0.5)
    assert 0 <= found["forgetting"] <= 1
