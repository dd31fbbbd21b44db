"""Following an eigenspace: the best approximation to the tolerance, never a wrong one, and no answer where none is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slangvi.linalg import tracking
from slangvi.linalg.tracking import first_rounds, tracked, tracking_pays

TOLERANCE = 1e-12


def moved(size: int, count: int, share: float, seed: int = 0, batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Matrices (1−β)·QΛQᵀ + β·(random, as large), and the start ΛQ they have moved away from."""
    source = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(*batch, size, count, generator=source, dtype=torch.float64)).Q
    start = Q * torch.linspace(3.0, 1.0, count, dtype=torch.float64).sqrt()
    rows = torch.randn(*batch, size, size, generator=source, dtype=torch.float64) / size**0.5
    return (1 - share) * start @ start.mT + share * rows @ rows.mT, start


def best(K: Tensor, count: int) -> Tensor:
    values, vectors = torch.linalg.eigh(K)
    values, vectors = values[..., -count:], vectors[..., -count:]
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


@settings(max_examples=40)
@given(
    size=st.integers(5, 60),
    count=st.integers(1, 12),
    share=st.sampled_from([1e-5, 1e-3, 0.02, 0.1]),
    batch=st.sampled_from([(), (1,), (4,), (2, 3)]),
    rounds=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_the_error_stays_within_its_bound_and_the_bound_within_reach(size, count, share, batch, rounds, seed):
    count = min(count, size - 1)
    K, start = moved(size, count, share, seed, batch)
    found, exact = tracked(K, K @ start, TOLERANCE, rounds), best(K, count)
    assert len(found.errors) == K.shape[:-2].numel()
    assert found.rows.shape == (*batch, count, size)
    gaps = (found.rows.mT @ found.rows - exact).norm(dim=(-2, -1)).flatten()
    for gap, error, k in zip(gaps.tolist(), found.errors, range(len(gaps)), strict=True):
        largest = float(torch.linalg.eigvalsh(K.reshape(-1, size, size)[k])[-1])
        assert gap <= (1.01 * error + 1e-14) * largest
    if share <= 1e-3:
        assert max(found.errors) <= TOLERANCE
        values = torch.linalg.eigvalsh(found.small)
        torch.testing.assert_close(values, torch.linalg.eigvalsh(K)[..., -count:], rtol=1e-11, atol=0)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_orthonormal_rows_span_the_leading_space(count, batch):
    K, start = moved(40, count, 1e-3, batch=batch)
    found = tracked(K, K @ start, TOLERANCE, 4, orthonormal=True)
    assert max(found.errors) <= TOLERANCE
    eye = torch.eye(count, dtype=torch.float64).expand(*batch, count, count)
    torch.testing.assert_close(found.rows @ found.rows.mT, eye, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.rows.mT @ found.rows @ K @ found.rows.mT @ found.rows, best(K, count))


def test_one_look_is_enough_where_the_first_rounds_are_well_guessed(monkeypatch):
    looks = []
    look = tracking._look
    monkeypatch.setattr(tracking, "_look", lambda *args: looks.append(1) or look(*args))
    for share in (1e-5, 1e-4):
        K, start = moved(50, 4, share)
        assert max(tracked(K, K @ start, TOLERANCE, first_rounds(TOLERANCE, share)).errors) <= TOLERANCE
    assert len(looks) == 2
    K, start = moved(50, 4, 0.005)
    assert max(tracked(K, K @ start, TOLERANCE, 1).errors) <= TOLERANCE
    assert len(looks) == 4  # what was missing is known after the first look


def diagonal(*values: float) -> Tensor:
    return torch.diag(torch.tensor(values, dtype=torch.float64))


def test_a_larger_direction_that_the_start_cannot_see_is_not_missed():
    """The start is exactly invariant: its residual is zero, and products never leave it."""
    K, eye = diagonal(1.0, 2.0, 0.1, 0.0), torch.eye(4, dtype=torch.float64)
    assert tracked(K, K @ eye[:, :1], TOLERANCE, 3).errors == [float("inf")]
    assert tracked(K, K @ eye[:, 1:2], TOLERANCE, 3).errors[0] <= TOLERANCE


@pytest.mark.parametrize("orthonormal", [False, True])
@pytest.mark.parametrize(
    ("K", "start"),
    [
        (diagonal(2.0, 1.0, 0.0), torch.zeros(3, 1, dtype=torch.float64)),
        (diagonal(0.0, 0.0, 0.0), torch.ones(3, 1, dtype=torch.float64)),
        (diagonal(2.0, 0.0, 0.0), torch.eye(3, dtype=torch.float64)[:, :2]),
        (diagonal(2.0, 0.0, 0.0), torch.ones(3, 2, dtype=torch.float64)),
        (diagonal(2.0, 1.0, 1.0), torch.eye(3, dtype=torch.float64)[:, :2]),
        (diagonal(1e200, 1.0, 0.0), torch.ones(3, 1, dtype=torch.float64)),
        (diagonal(1e-200, 0.0, 0.0), torch.ones(3, 1, dtype=torch.float64)),
        (diagonal(float("nan"), 1.0, 0.0), torch.ones(3, 1, dtype=torch.float64)),
    ],
    ids=["zero start", "zero matrix", "rank", "dependent start", "no gap", "huge", "tiny", "nan"],
)
def test_where_there_is_no_answer_none_is_given(K, start, orthonormal):
    assert tracked(K, K @ start, TOLERANCE, 2, orthonormal).errors == [float("inf")]


@pytest.mark.parametrize("orthonormal", [False, True])
@pytest.mark.parametrize("scale", [1e-162, 1e-160, 1e-158, 1e-150, 1e-100, 1e100, 1e150])
@pytest.mark.parametrize("count", [1, 3])
def test_squares_that_leave_the_numbers_certify_nothing(scale, orthonormal, count):
    """There is no gap behind the leading ones, at any scale."""
    source = torch.Generator().manual_seed(0)
    Q, start = (torch.randn(40, 40, generator=source, dtype=torch.float64) for _ in range(2))
    Q = torch.linalg.qr(Q).Q
    values = torch.full((40,), 1e-3, dtype=torch.float64)
    values[: count + 1] = 1.0
    K = scale * (Q * values) @ Q.mT
    for rounds in (1, 2, 5):
        assert tracked(K, K @ start[:, :count], TOLERANCE, rounds, orthonormal).errors[0] > TOLERANCE


def test_those_of_a_batch_that_fail_leave_the_others_alone():
    good, start = moved(30, 3, 1e-3)
    K = torch.stack([good, torch.zeros_like(good), good])
    found = tracked(K, K @ start, TOLERANCE, 3)
    assert [error <= TOLERANCE for error in found.errors] == [True, False, True]
    torch.testing.assert_close(found.rows[2].mT @ found.rows[2], best(good, 3), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("lanes", "size", "count", "pays"),
    [
        (20, 15, 1, True),
        (20, 15, 2, False),  # too small for more than one vector
        (20, 74, 10, True),
        (1, 124, 10, True),
        (1, 15, 1, False),
        (1, 124, 40, False),
        (20, 74, 0, False),
    ],
)
def test_following_is_tried_where_it_is_faster(lanes, size, count, pays):
    assert tracking_pays(lanes, size, count) is pays


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 2.0, float("nan")])
def test_shares_that_say_nothing_give_the_most_rounds(share):
    assert first_rounds(TOLERANCE, share) == 5
