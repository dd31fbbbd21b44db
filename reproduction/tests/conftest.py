"""What every test shares: one thread, a fixed global seed, one hypothesis profile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "slangvi",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("slangvi")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Tests that draw from the global source draw the same each time, in any order."""
    torch.manual_seed(20181203)


@pytest.fixture
def global_rng_untouched(_seeded: None) -> Iterator[None]:
    """For tests that bring their own generator: torch's global one must not have moved when they end."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before), "the global random state moved although a generator was given"


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)
