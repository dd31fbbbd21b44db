"""Rows of a pass of our own: their outer products are the curvature of the likelihood, JᵀHJ, computed densely."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from slangvi import Bernoulli, Categorical, Gaussian, NumericalError, UnsupportedModuleError
from slangvi.likelihoods import Likelihood, curvature_seeds
from slangvi.params import ParamSpec
from slangvi.rows import OwnPass
from slangvi.rows.own_pass import Examples, single_output

K = 5


class Tokens(nn.Module):
    """Three positions with four classes each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(x)).cumsum(1))


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


CASES = {
    "classes": (lambda: mlp(4), lambda: torch.randn(K, 3), Categorical()),
    "two classes": (lambda: mlp(2), lambda: torch.randn(K, 3), Categorical()),
    "several binary outputs": (lambda: mlp(3), lambda: torch.randn(K, 3), Bernoulli()),
    "one binary output": (lambda: nn.Sequential(mlp(1), nn.Flatten(0)), lambda: torch.randn(K, 3), Bernoulli()),
    "several numbers": (lambda: mlp(2), lambda: torch.randn(K, 3), Gaussian(2.5)),
    "tokens": (Tokens, lambda: torch.randint(6, (K, 3)), Categorical()),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)),
        lambda: torch.randn(K, 1, 4, 4),
        Categorical(),
    ),
}


def built(name: str) -> tuple[nn.Module, Tensor, Likelihood]:
    torch.manual_seed(0)
    make, inputs, likelihood = CASES[name]
    model, x = make().double(), inputs()
    return model, x.double() if x.is_floating_point() else x, likelihood


def gauss_newton(model: nn.Module, x: Tensor, likelihood: Likelihood) -> Tensor:
    """Sum of JᵀHJ over the examples, (P, P); H is the Hessian, which does not depend on the targets."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    jacobians = jacrev(lambda p: functional_call(model, p, (x,)))(params)
    outputs = model(x).detach()
    J = torch.cat([jacobians[name].reshape(K, -1, p.numel()) for name, p in params.items()], -1)
    targets = likelihood.sample(outputs)
    total = J.new_zeros(J.shape[-1], J.shape[-1])
    for k in range(K):
        one = torch.autograd.functional.hessian(
            lambda f, k=k: -likelihood.log_prob(f[None], targets[k : k + 1]).sum(), outputs[k]
        )
        size = outputs[k].numel()
        total += J[k].mT @ one.reshape(size, size) @ J[k]
    return total


def formed(model: nn.Module, x: Tensor, source: OwnPass, most: int = 1000, generator=None) -> tuple[Tensor, float]:
    """All rows, (Q·K, P), and the spread."""
    params, spec = dict(model.named_parameters()), ParamSpec.of_module(model)
    blocks, columns, spread = source.rows(
        lambda repeats: model(torch.cat([x] * repeats)), params, model(x), most, torch.float64, generator
    )
    rows = torch.zeros(K * columns, spec.num_params, dtype=torch.float64)
    for name, block in blocks.items():
        rows[:, spec.slices[name]] = block.form()
    return rows, spread


@pytest.mark.parametrize("most", [1000, 2 * K, 1], ids=["at once", "two at a time", "one at a time"])
@pytest.mark.parametrize("name", CASES)
def test_outer_products_of_rows_are_the_gauss_newton_matrix(name, most):
    model, x, likelihood = built(name)
    source = OwnPass(partial(curvature_seeds, likelihood, "ggn"))
    for _ in range(2):  # the number of columns is known the second time
        rows, spread = formed(model, x, source, most)
        torch.testing.assert_close(rows.mT @ rows, gauss_newton(model, x, likelihood))
    seeds = likelihood.hessian_root(model(x).detach())
    assert spread == pytest.approx(float(seeds.square().sum()) / K)


@pytest.mark.parametrize("name", CASES)
def test_drawn_targets_give_the_same_matrix_in_expectation(name):
    model, x, likelihood = built(name)
    source, generator = (
        OwnPass(partial(curvature_seeds, likelihood, "fisher"), verify=False, draws=lambda shape: True),
        torch.Generator(),
    )
    generator.manual_seed(0)
    found = [formed(model, x, source, generator=generator)[0] for _ in range(600)]
    each = torch.stack([rows.mT @ rows for rows in found])
    error = each.mean(0) - gauss_newton(model, x, likelihood)
    # Entries are means of 600 draws; five standard errors, and a floor for entries that never vary.
    assert bool((error.abs() <= 5 * each.std(0) / 600**0.5 + 1e-9).all())
    assert formed(model, x, source)[0].shape[0] == K, "one row for each example, whatever the number of classes"


def test_a_model_with_dropout_gets_columns_of_the_outputs_that_it_had():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, 3)).double()
    x, asked = torch.randn(K, 3, dtype=torch.float64), []

    def seeds(outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        asked.append(outputs.clone())
        return Categorical().hessian_root(outputs)

    formed(model, x, OwnPass(seeds, verify=False))
    repetitions = asked[-1].unflatten(0, (2, K))
    assert not torch.allclose(repetitions[0], repetitions[1])


def test_outputs_that_are_not_finite_are_refused_by_what_they_are():
    model, x, likelihood = built("classes")
    x[2] = torch.nan
    with pytest.raises(NumericalError, match="outputs of the model are not finite"):
        formed(model, x, OwnPass(partial(curvature_seeds, likelihood, "ggn")))


def test_the_number_of_columns_may_change_between_passes():
    source = OwnPass(partial(curvature_seeds, Categorical(), "ggn"))
    for name in ("classes", "two classes", "tokens", "classes"):
        model, x, likelihood = built(name)
        rows, _ = formed(model, x, source)
        torch.testing.assert_close(rows.mT @ rows, gauss_newton(model, x, likelihood))


@given(count=st.integers(1, 6), repeats=st.integers(1, 4), seed=st.integers(0, 9))
def test_examples_are_chosen_and_repeated_wherever_the_batch_is_in_front(count, repeats, seed):
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(count, generator=generator)[: max(1, count // 2)]
    x, table = torch.randn(count, 2, generator=generator), torch.randn(count + 1, generator=generator)
    few = torch.randn(count + len(chosen) + 1, generator=generator)[: len(chosen)]  # as many rows as are chosen
    inputs = ((x, "a word"), {"table": table, "mask": None, "few": few})
    some = Examples.choose(inputs, torch.zeros(count, 3), count, chosen)
    (more, word), named = some.repeated(repeats)
    assert torch.equal(more, torch.cat([x[chosen]] * repeats))
    assert word == "a word"
    assert named["table"] is table
    assert named["mask"] is None
    assert named["few"] is few or len(few) == count


def test_inputs_are_copied_since_loops_write_over_them():
    x = torch.ones(3, 2)
    some = Examples.choose(x, torch.zeros(3, 1), 3, None)
    x.zero_()
    assert torch.equal(some.repeated(1), torch.ones(3, 2))


def test_a_tensor_that_is_no_batch_but_as_long_is_noticed():
    codes, x = torch.randn(K, 2), torch.randn(K, 2)

    def model(x: Tensor, codes: Tensor) -> Tensor:
        return (x @ codes.mT).softmax(-1) @ codes

    some = Examples.choose((x, codes), model(x, codes), K, torch.tensor([1, 3]))
    with pytest.raises(UnsupportedModuleError, match="a tensor that is no batch has as many rows as the batch"):
        some.compare(lambda repeats: model(*some.repeated(repeats)))
    fine = Examples.choose((x, codes[:3]), model(x, codes[:3]), K, torch.tensor([1, 3]))
    fine.compare(lambda repeats: model(*fine.repeated(repeats)))


def test_chance_in_a_model_is_no_reason_to_refuse_it():
    x = torch.randn(K, 2)
    some, found = Examples.choose(x, torch.dropout(x, 0.5, True), K, torch.tensor([0, 1])), []

    def call(repeats: int) -> Tensor:
        found.append(torch.dropout(some.repeated(repeats), 0.5, True))
        return found[-1]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    some.compare(call)
    assert len(found) == 2, "the second call tells chance from other outputs"
    assert not torch.equal(*found)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_output_of_the_likelihood_is_found_in_what_models_return():
    from collections import namedtuple

    f = torch.randn(3, 2, requires_grad=True)
    assert single_output(f, 3) is f
    assert single_output({"loss": f.sum(), "logits": f}, 3) is f
    assert single_output(namedtuple("Output", ["logits", "hidden"])(f, (f, f)), 3) is f
    assert single_output((f, None, torch.ones(3, 2)), 3) is f
    with pytest.raises(UnsupportedModuleError, match="takes one output with 4 examples in front"):
        single_output(f, 4)
    with pytest.raises(UnsupportedModuleError, match="takes one output with 3 examples in front, and the model ret"):
        single_output((f, 2 * f), 3)
