"""Every check of torch's own optimizer tests, on every optimizer."""

from __future__ import annotations

import pytest

from correctness.conformance import CHECKS, maker
from helpers.optimizer_runs import CLASSES


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("name", CHECKS)
def test_optimizers_behave_as_torchs(name, kind):
    CHECKS[name](maker(*CLASSES[kind]))
