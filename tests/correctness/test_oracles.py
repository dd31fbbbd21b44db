"""Every oracle of the table is met, the page says so, and the calibration test can fail."""

from __future__ import annotations

import pytest
import torch

from correctness import calibration, page
from correctness.oracles import CHI_SQUARE, ORACLES


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.name)
def test_the_reference_is_met(oracle):
    assert oracle.measure() <= oracle.tolerance


def test_names_are_unique():
    assert len({oracle.name for oracle in ORACLES}) == len(ORACLES)


def test_the_page_has_every_row_with_an_error_within_its_tolerance():
    written = page.rows(page.PAGE.read_text(encoding="utf-8"))
    expected = [page.cells(oracle) for oracle in ORACLES]
    assert [row[:-1] for row in written] == expected, f"the page is older than the table: {page.REMEDY}"
    assert all(float(row[-1]) <= oracle.tolerance for row, oracle in zip(written, ORACLES, strict=True))


def test_the_page_lists_every_check_of_the_optimizers():
    assert page.checks() in page.PAGE.read_text(encoding="utf-8"), page.REMEDY


def test_calibration_notices_forgotten_correlations():
    """Otherwise uniform ranks would say nothing."""
    assert float(calibration.chi_squares(diagonal=True).max()) > 10 * CHI_SQUARE


def test_calibration_has_the_level_it_says():
    """The sum of squares over nine degrees of freedom exceeds the bound once in ten thousand times three."""
    half = torch.tensor(CHI_SQUARE / 2, dtype=torch.float64)
    assert 1e-5 < 3 * float(torch.special.gammaincc(torch.tensor(4.5).double(), half)) < 2e-4
