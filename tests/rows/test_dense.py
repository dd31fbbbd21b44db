"""The dense engine: rows through torch.func, in as many pieces as memory asks for."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slangvi.params import ParamSpec
from slangvi.rows import dense
from slangvi.rows.dense import (
    DenseGradients,
    Together,
    batch_size,
    draws_at_once,
    per_example_gradients,
    rows_within,
    slice_batch,
)


def problem(M=4, S=3):
    torch.manual_seed(0)
    params = {"w": torch.randn(3, 2).double(), "b": torch.randn(2).double()}
    batch = {"x": torch.randn(M, 3).double(), "y": torch.randint(2, (M,)), "note": "kept as it is"}

    def log_likelihood(params, batch):
        return -nn.functional.cross_entropy(batch["x"] @ params["w"] + params["b"], batch["y"], reduction="none")

    spec = ParamSpec.of(params)
    thetas = spec.flatten(params) + 0.1 * torch.randn(S, spec.num_params).double()
    rows = []
    for theta in thetas:
        leaf = theta.clone().requires_grad_()
        values = -log_likelihood(spec.unflatten(leaf), batch)
        rows += [torch.autograd.grad(v, leaf, retain_graph=True)[0] for v in values]
    return log_likelihood, spec, thetas, batch, torch.stack(rows)


@pytest.mark.parametrize("limit", [None, 10**9, 1500, 1], ids=["none", "ample", "pieces", "row by row"])
@given(M=st.integers(1, 5), S=st.integers(1, 3))
def test_rows_equal_a_loop_under_any_memory_limit(limit, M, S):
    log_likelihood, spec, thetas, batch, truth = problem(M, S)
    operator = per_example_gradients(log_likelihood, spec, thetas, batch, limit)
    C, W = torch.randn(2, spec.num_params).double(), torch.randn(len(truth), 3).double()
    assert operator.num_rows == len(truth)
    torch.testing.assert_close(operator.sum(), truth.sum(0))
    torch.testing.assert_close(operator.square_sum(), truth.square().sum(0))
    torch.testing.assert_close(operator.gram(), truth @ truth.T)
    torch.testing.assert_close(operator.mm(C), truth @ C.T)
    torch.testing.assert_close(operator.t_mm(W), W.T @ truth)
    onto = torch.randn(3, spec.num_params).double()
    expected = onto + W.T @ truth
    operator.add_t_mm(W, onto)
    torch.testing.assert_close(onto, expected)
    torch.testing.assert_close(operator.form(), truth)


CUTS = {
    "none": [],
    "the end": [8],
    "one": [6],
    "one and the end": [6, 8],
    "several": [1, 2, 7],
    "all": list(range(1, 9)),
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("limit", [None, 1500, 1], ids=["none", "pieces", "row by row"])
def test_segments_between_cuts_make_up_all_columns(limit, cuts):
    log_likelihood, spec, thetas, batch, truth = problem(5, 2)
    operator = per_example_gradients(log_likelihood, spec, thetas, batch, limit)
    C, W = torch.randn(2, spec.num_params).double(), torch.randn(len(truth), 3).double()
    segments = list(operator.segments(cuts))
    assert [place.stop for place, _ in segments] == sorted({*cuts, 8})
    assert [place.start for place, _ in segments] == [0, *(place.stop for place, _ in segments[:-1])]
    onto = torch.zeros(3, spec.num_params).double()
    for place, some in segments:
        part = truth[:, place]
        assert some.height == operator.height == len(truth)
        torch.testing.assert_close(some.form(), part)
        torch.testing.assert_close(some.gram(), part @ part.T)
        torch.testing.assert_close(some.mm(C[:, place]), part @ C[:, place].T)
        torch.testing.assert_close(some.square_sum(), part.square().sum(0))
        some.add_t_mm(W, onto[:, place])
    torch.testing.assert_close(onto, W.T @ truth)


def test_there_is_one_segment_of_unscaled_rows_unless_cuts_are_asked_for():
    operator = DenseGradients.from_rows(torch.randn(4, 3))
    ((place, some),) = operator.segments()
    assert place == slice(0, 3)
    assert some is operator
    assert (operator.scale, operator.height, operator.num_rows, operator.spectrum_route) == (1.0, 4, 4, "auto")


def test_pieces_respect_the_limit():
    log_likelihood, spec, thetas, batch, _ = problem(M=5, S=2)
    seen = []
    row_bytes = spec.num_params * 8
    operator = per_example_gradients(log_likelihood, spec, thetas, batch, memory_limit=3 * 2 * row_bytes)
    for k in range(len(operator._pieces)):
        seen.append(len(operator._rows(k)))
    assert max(seen) <= 2
    assert sum(seen) == 10


def test_rows_within_a_limit():
    assert rows_within(None, 8, 7) == 7
    assert rows_within(1, 8, 7) == 1
    assert rows_within(3 * 8 * 4, 8, 7) == 4


def test_leading_batch_dimensions():
    rows = torch.randn(2, 4, 3)
    operator = DenseGradients.from_rows(rows)
    assert operator.gram().shape == (2, 4, 4)
    torch.testing.assert_close(operator.t_mm(torch.ones(2, 4, 1))[:, 0], rows.sum(1))
    torch.testing.assert_close(operator.sum(), rows.sum(1))
    torch.testing.assert_close(operator.square_sum(), rows.square().sum(1))
    (first, a), (second, b) = operator.segments([2])
    assert (first, second) == (slice(0, 2), slice(2, 3))
    torch.testing.assert_close(torch.cat([a.form(), b.form()], -1), rows)
    torch.testing.assert_close(a.gram() + b.gram(), rows @ rows.mT)


def test_rows_that_fit_are_computed_once_for_all_products_and_segments():
    calls = []

    def rows():
        calls.append(1)
        return torch.eye(3)

    operator = DenseGradients([rows], 3)
    for _, some in operator.segments([1, 2]):
        some.gram()
        some.square_sum()
    assert torch.equal(operator.gram(), torch.eye(3))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (torch.zeros(0, 3), r"\[0\]"),
        ((torch.zeros(2), torch.zeros(3)), r"\[2, 3\]"),
        ("no tensors", "no tensors"),
        (torch.tensor(1.0), r"\[0\]"),
    ],
)
def test_batches_without_a_common_size_are_refused(batch, match):
    with pytest.raises(ValueError, match=match):
        batch_size(batch)


def test_slicing_keeps_what_is_no_tensor():
    batch = {"x": torch.arange(4), "name": "n"}
    part = slice_batch(batch, 1, 3)
    assert part["x"].tolist() == [1, 2]
    assert part["name"] == "n"


def test_random_draws_are_refused_when_rows_are_computed_again():
    _, spec, thetas, batch, _ = problem()

    def noisy(params, batch):
        x = nn.functional.dropout(batch["x"], 0.5)
        return -(x @ params["w"] + params["b"]).square().sum(1)

    assert per_example_gradients(noisy, spec, thetas, batch).sum().isfinite().all()
    with pytest.raises(RuntimeError, match="random"):
        per_example_gradients(noisy, spec, thetas, batch, memory_limit=1).sum()


# ---- several draws in one pass ----


def written_into_a_buffer(params, batch):
    """Weights go into a tensor made here, which vmap over draws refuses and vmap over examples does not."""
    weight = torch.zeros(3, 2).double()
    weight += params["w"]
    return -(batch["x"] @ weight + params["b"]).square().sum(1)


@pytest.mark.parametrize("at_once", [1, 2, 3, 10])
def test_draws_that_share_a_pass_have_the_rows_of_a_loop(at_once, monkeypatch):
    log_likelihood, spec, thetas, batch, truth = problem(M=4, S=3)
    monkeypatch.setattr(dense, "draws_at_once", lambda *given: at_once)
    torch.testing.assert_close(per_example_gradients(log_likelihood, spec, thetas, batch).form(), truth)


def test_sums_over_draws_hold_one_pass_at_a_time():
    thetas, seen = torch.arange(14.0).reshape(7, 2), []

    def spied(theta):
        seen.append(theta)
        return theta.square()

    torch.testing.assert_close(Together().summed(spied, thetas, 3), thetas.square().sum(0))
    assert len(seen) == 3  # two passes of three draws, and one draw left


def test_small_problems_share_passes_and_large_ones_do_not():
    spec, thetas = ParamSpec.of({"w": torch.zeros(100)}), torch.zeros(5, 100)
    small = torch.zeros(10, 3)
    assert draws_at_once(spec, thetas, small) == (8 << 20) // (10 * 400)
    assert draws_at_once(spec, thetas, small, backward_passes=64) == (8 << 20) // (10 * 400 * 64)
    assert draws_at_once(spec, thetas, small, memory_limit=3 * 10 * 400 * 5) == 5
    assert draws_at_once(spec, thetas, small, memory_limit=3 * 10 * 400 * 3) == 1
    assert draws_at_once(spec, thetas, torch.zeros(10, 100_000)) == 1  # activations, not weights, take the room


def test_one_call_serves_all_draws_of_a_small_problem():
    log_likelihood, spec, thetas, batch, _ = problem(M=4, S=3)
    calls = []

    def counted(params, batch):
        calls.append(params)
        return log_likelihood(params, batch)

    per_example_gradients(counted, spec, thetas, batch).form()
    assert len(calls) == 1


def test_what_vmap_cannot_follow_goes_draw_by_draw():
    _, spec, thetas, batch, _ = problem(M=4, S=3)
    together, before = Together(), torch.get_rng_state()
    found = per_example_gradients(written_into_a_buffer, spec, thetas, batch, together=together).form()
    assert not together.possible
    assert torch.equal(torch.get_rng_state(), before)

    def plain(params, batch):
        return -(batch["x"] @ params["w"] + params["b"]).square().sum(1)

    torch.testing.assert_close(found, per_example_gradients(plain, spec, thetas, batch).form())


def test_a_try_that_failed_keeps_no_memory():
    """Torch never gives back what an operator made whose warning became an error."""

    def attention(theta):
        return F.scaled_dot_product_attention(*theta.view(3, 1, 2, 4, 8)).sum()

    def held():
        gc.collect()
        tensors = (x for x in gc.get_objects() if type(x) is torch.Tensor)
        return {id(x) for x in tensors if torch._C._functorch.is_batchedtensor(x)}

    together, thetas = Together(), torch.randn(2, 192, requires_grad=True)
    before, allows = held(), torch._C._functorch._is_vmap_fallback_enabled()
    assert together(attention, thetas, at_once=2).shape == (2,)
    assert not together.possible
    assert torch._C._functorch._is_vmap_fallback_enabled() == allows
    assert held() <= before


def test_a_try_that_failed_leaves_the_random_numbers_as_they_were():
    drawn = []

    def noisy(theta):
        noise = torch.rand(())
        drawn.append(noise)
        torch.zeros(2).add_(theta)
        return theta + noise

    torch.manual_seed(3)
    first = Together()(noisy, torch.zeros(2, 2), at_once=2)
    torch.manual_seed(3)
    torch.testing.assert_close(first[:, 0], torch.rand(2))
    assert len(drawn) == 3


def test_an_exhausted_memory_is_no_verdict_on_the_function():
    together, tries = Together(), []

    def large(theta):
        tries.append(theta.ndim)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("too large")
        return theta

    assert together(large, torch.ones(2, 3), at_once=2).sum() == 6
    assert together.possible is None


def test_errors_of_a_single_draw_are_the_ones_that_are_seen():
    _, spec, thetas, batch, _ = problem(M=4, S=3)
    with pytest.raises(RuntimeError, match=r"mat1|shapes|size"):
        per_example_gradients(lambda p, b: b["x"].T @ p["w"] @ p["w"], spec, thetas, batch).form()
