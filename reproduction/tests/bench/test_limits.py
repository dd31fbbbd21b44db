"""The counts agree with torch's own counter on the products they stand for, and with counting by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slangvi_reproduction.bench.limits import Rates, Shape, bytes_of, least_seconds, operations_of
from slangvi_reproduction.bench.networks import mlp

PAPER = Shape((784, 400, 400, 10), batch=200, draws=4, rank=8)


def counted(work) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_parameters_are_the_networks():
    assert PAPER.num_params == sum(p.numel() for p in mlp(PAPER.sizes).parameters())


def test_passes_cost_what_torch_counts():
    shape = Shape((7, 5, 4, 3), batch=6, draws=1, rank=2)
    model, x = mlp(shape.sizes), torch.randn(6, 7)
    found = operations_of(shape)
    assert found["forward"] == counted(lambda: model(x))
    # One backward pass is the way back and one weight gradient; the sum of squares is as much again.
    both = counted(lambda: model(x).sum().backward())
    assert found["forward"] + found["backward"] + found["gradient sum and squares"] // 2 == both


def test_inputs_are_shared_by_the_draws_in_the_first_layer_only():
    one, four = (operations_of(Shape((7, 5, 3), batch=6, draws=s, rank=2)) for s in (1, 4))
    assert four["forward"] == 4 * one["forward"]
    assert four["gradient sum and squares"] == 4 * 6 * 7 * 5 + 4 * (4 * 6) * 5 * 3
    assert four["products with U and the eigenvectors"] == 2 * four["gradient sum and squares"]


def test_eigenpairs_go_the_cheaper_way():
    few, many = (operations_of(Shape((7, 5), batch=m, draws=1, rank=1)) for m in (2, 1000))
    assert few["leading eigenpairs"] == 2**2 * (7 + 5)
    assert many["leading eigenpairs"] == many["products with U and the eigenvectors"]


def test_work_on_the_factor_is_counted_as_the_products_it_is():
    shape = Shape((7, 5), batch=6, draws=3, rank=2)
    P, L, S = shape.num_params, shape.rank, shape.draws
    U, z, small = torch.randn(L, P), torch.randn(S, P), torch.randn(L, L)
    draws = counted(lambda: (z @ U.T) @ U)
    # Grams are symmetric, so two of them cost one full product; then U⁺, the solve, and two sums of squares (4LP).
    rest = counted(lambda: (U @ U.T, small @ U, (z[:1] @ U.T) @ U))
    assert operations_of(shape)["draws"] == draws
    assert operations_of(shape)["U⁺, its factorisation, the solve"] == rest + 4 * L * P


def test_bytes_by_hand():
    shape = Shape((3, 2, 1), batch=5, draws=2, rank=4)
    P = 3 * 2 + 2 + 2 * 1 + 1
    assert bytes_of(shape) == {
        "U and U⁺": 4 * 6 * 4 * P,
        "draws": 4 * 2 * (3 * P - 6),
        "d, μ and m": 4 * 11 * P,
        "activations": 4 * 6 * ((5 * 3 + 10 * 2) + (10 * 2 + 10 * 1)),
    }


@pytest.mark.parametrize("count", [operations_of, bytes_of])
def test_large_networks_cost_in_proportion_to_their_size(count):
    small, large = (sum(count(Shape((w, w, w), batch=4, draws=2, rank=8)).values()) for w in (3000, 6000))
    assert large / small == pytest.approx(4, rel=0.02)


def test_the_slower_of_arithmetic_and_memory_sets_the_limit():
    work, moved = sum(operations_of(PAPER).values()), sum(bytes_of(PAPER).values())
    assert least_seconds(PAPER, Rates(flops=work / 3, bytes=moved)) == pytest.approx(3)
    assert least_seconds(PAPER, Rates(flops=work, bytes=moved / 5)) == pytest.approx(5)
