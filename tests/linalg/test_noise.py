"""Standard normal noise: the same numbers for the same state of the source, whoever fills them in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slangvi.linalg import noise
from slangvi.linalg.noise import fill_normal, standard_normal

LIKE = torch.zeros((), dtype=torch.float64)


@pytest.fixture
def much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is large."""
    monkeypatch.setattr(noise, "MUCH", 2)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_draws_are_those_of_randn(shape, dtype):
    found = standard_normal(shape, torch.zeros((), dtype=dtype), source())
    assert torch.equal(found, torch.randn(shape, dtype=dtype, generator=source()))
    torch.manual_seed(4)
    expected = torch.randn(shape, dtype=dtype)
    torch.manual_seed(4)
    assert torch.equal(standard_normal(shape, torch.zeros((), dtype=dtype)), expected)


def test_only_large_draws_are_split():
    for size, same in ((noise.MUCH - 1, True), (noise.MUCH, False)):
        whole = torch.randn(size, dtype=torch.float64, generator=source())
        assert torch.equal(standard_normal((size,), LIKE, source()), whole) is same


@pytest.mark.parametrize("size", [5, 1003])
def test_large_draws_do_not_depend_on_the_number_of_threads(size, much, threads):
    found = []
    for count in (1, 2, 7):
        torch.set_num_threads(count)
        found.append(standard_normal((size,), LIKE, source()))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_subclasses_are_filled_by_the_thread_that_asks(much, threads, monkeypatch):
    """Torch's tensors without values, for one, cannot be filled by several at a time."""
    torch.set_num_threads(4)
    expected = standard_normal((9,), LIKE, source())
    monkeypatch.setattr(noise, "ThreadPoolExecutor", lambda **options: pytest.fail("threads"))
    drawn = fill_normal(torch.nn.Parameter(torch.zeros(9, dtype=torch.float64), requires_grad=False), source())
    assert torch.equal(drawn, expected)


def test_large_draws_follow_the_source_and_move_it_on(much, global_rng_untouched):
    first = source()
    before = first.get_state()
    a, b = standard_normal((100,), LIKE, first), standard_normal((100,), LIKE, first)
    assert not torch.equal(a, b)
    assert not torch.equal(before, first.get_state())
    assert not torch.equal(a, standard_normal((100,), LIKE, source(1)))
    first.set_state(before)
    assert torch.equal(standard_normal((100,), LIKE, first), a)
    assert torch.equal(standard_normal((100,), LIKE, first), b)


def test_large_draws_follow_the_global_seed_without_a_source(much):
    torch.manual_seed(5)
    first, second = standard_normal((100,), LIKE), standard_normal((100,), LIKE)
    torch.manual_seed(5)
    assert torch.equal(standard_normal((100,), LIKE), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_draws_are_standard_normal_and_independent(dtype, much):
    size = 200_000
    drawn = standard_normal((2, size // 2), torch.zeros((), dtype=dtype), source()).flatten().double()
    error = size**-0.5
    assert abs(float(drawn.mean())) < 4 * error
    assert abs(float(drawn.square().mean()) - 1) < 4 * 2**0.5 * error
    assert abs(float(drawn.pow(3).mean())) < 4 * 15**0.5 * error
    assert abs(float(drawn.pow(4).mean()) - 3) < 4 * 96**0.5 * error
    pieces = torch.stack(drawn.chunk(noise.PIECES))
    products = pieces @ pieces.T / pieces.shape[1]
    off = products - torch.diag(products.diagonal())
    assert float(off.abs().max()) < 4 * noise.PIECES**0.5 * error
    assert abs(float((drawn[1:] * drawn[:-1]).mean())) < 4 * error


def test_noise_is_filled_into_the_tensor_given(much):
    place = torch.empty(3, 50, dtype=torch.float64)
    assert fill_normal(place, source()) is place
    assert torch.equal(place, standard_normal((3, 50), LIKE, source()))


def test_large_draws_work_in_inference_mode_and_whatever_the_default_device(much):
    expected = standard_normal((100,), LIKE, source())
    with torch.inference_mode():
        inside = standard_normal((100,), LIKE, source())
        assert inside.is_inference()
        assert torch.equal(inside, expected)
    with torch.device("meta"):
        elsewhere = standard_normal((100,), LIKE, source())
    assert torch.equal(elsewhere, expected)
