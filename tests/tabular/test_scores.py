"""Scores of held-out rows, as they are kept and as they are shown."""

from __future__ import annotations

import numpy as np
import torch

from helpers.csv_tables import fitted, kinds
from slangvi import metrics
from slangvi.tabular.cells import readable
from slangvi.tabular.fitting import Settings, fit, score
from slangvi.tabular.model import Classes
from slangvi.tabular.reading import parse


def test_scores_of_tiny_targets_are_not_shown_as_zero():
    lines = [f"{k % 7},{k * 1e-15}" for k in range(40)]
    model = fit(parse("\n".join(["a,y", *lines]).encode()), Settings("y", epochs=1, hidden=()), lambda *a: None)
    for scores in model.record["scores"].values():
        assert 1e-15 < float(readable(scores["rmse"])) < 1e-13


def test_a_calibration_error_of_rounding_alone_is_none(tmp_path):
    model = fitted(kinds(tmp_path / "kinds.csv"), "=kind")
    y = np.array([0] * 3 + [1] * 7)
    sure = Classes(np.tile([0.3, 0.7, 0.0], (10, 1)), np.zeros(10), np.zeros(10))
    assert 0 < metrics.ece(torch.from_numpy(sure.probs), torch.from_numpy(y)) < 1e-12
    assert score(model, np.zeros((10, 1)), y, sure, y)["model"]["ece"] == 0.0
