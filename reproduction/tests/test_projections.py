"""The tables on the page of projections are those of the results, and the study's steps lower what they should."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.scripts import ROOT, benchmark


@pytest.fixture(scope="module")
def script():
    return benchmark("projections")


def test_the_page_shows_the_results(script):
    record = json.loads(script.PLACE.read_text(encoding="utf-8"))
    page = (ROOT / "docs/projection.md").read_text(encoding="utf-8")
    for name, entry in record["results"].items():
        assert f"{name}:\n\n{script.table(entry)}" in page
    assert script.cost_table(record["milliseconds"]) in page


@pytest.mark.parametrize("name", ["EM", "PX-EM", "Nyström", "Nyström, scaled d", "alternation"])
def test_steps_lower_the_divergence_to_their_target(script, name):
    torch.manual_seed(0)
    U, d = torch.randn(50, 7, 2, dtype=torch.float64), torch.rand(50, 7, dtype=torch.float64) + 0.2
    rows, prior = torch.randn(50, 9, 7, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
    for beta in (0.01, 0.3):
        factor, diag = U, d
        for _ in range(5):
            target = script.Target(factor, diag, beta**0.5 * rows, prior, beta, torch.ones(1, 1, 2).double())
            before = divergence(factor, diag, target.matrix)
            factor, diag = script.PROJECTIONS[name](factor, diag, target)
            assert bool((divergence(factor, diag, target.matrix) <= before + 1e-9).all())


def divergence(U, d, target):
    product = target @ torch.linalg.inv(U @ U.mT + torch.diag_embed(d))
    return 0.5 * (product.diagonal(dim1=-2, dim2=-1).sum(-1) - torch.linalg.slogdet(product)[1] - d.shape[-1])
