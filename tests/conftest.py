"""What every test shares: one thread, a fixed global seed, one hypothesis profile, one run of the demo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

if TYPE_CHECKING:
    from click.testing import Result

    from slangvi.cli import _demo_training as demo

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
def three_threads() -> Iterator[None]:
    """For tests of code that takes fewer."""
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def within_sigmas(sample: Tensor, expected: Tensor, sigmas: float = 4.0) -> bool:
    """Whether the mean over the first dimension lies within that many standard errors of its expectation."""
    error = sample.std(0) / len(sample) ** 0.5
    return bool(((sample.mean(0) - expected).abs() <= sigmas * error + 1e-12).all())


@pytest.fixture(name="within_sigmas")
def _within_sigmas() -> Callable[..., bool]:
    return within_sigmas


@dataclass
class QuickDemo:
    """One `slangvi demo --quick`: what it computed, reported, printed and drew."""

    result: demo.DemoResult
    progress: list[tuple[str, int, int]]
    arguments: tuple[int, bool]
    cli: Result
    picture: Path


@pytest.fixture(scope="session")
def quick_demo(tmp_path_factory: pytest.TempPathFactory) -> QuickDemo:
    """The command is run once, for real; the tests of the training and of the command line look at different ends."""
    from click.testing import CliRunner

    from slangvi.cli import _demo_training as demo
    from slangvi.cli.app import app

    picture = tmp_path_factory.mktemp("demo") / "demo.png"
    results: list[demo.DemoResult] = []
    calls: list[tuple[str, int, int]] = []
    arguments: list[tuple[int, bool]] = []

    def spy(seed: int, progress: demo.Progress, quick: bool) -> demo.DemoResult:
        arguments.append((seed, quick))

        def report(label: str, done: int, total: int) -> None:
            calls.append((label, done, total))
            progress(label, done, total)

        results.append(real_run(seed, report, quick))
        return results[-1]

    real_run = demo.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "run", spy)
        cli = CliRunner().invoke(app, ["demo", "--quick", "--seed", "3", "--out", str(picture)])
    assert len(results) == 1, cli.output
    return QuickDemo(results[0], calls, arguments[0], cli, picture)
