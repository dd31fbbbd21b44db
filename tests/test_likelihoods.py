"""Log-likelihoods against torch.distributions, and the inputs they refuse."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn

from slangvi import Bernoulli, Categorical, Gaussian, NumericalError, likelihoods
from slangvi.likelihoods import Likelihood, check_labels, likelihood_named

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
LIKELIHOODS = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": lambda: Gaussian(2.5)}


def example(name: str, shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and targets for `shape` = (M, ...) of targets."""
    if name == "categorical":
        outputs = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
        return outputs, torch.randint(3, shape, generator=generator)
    outputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name == "bernoulli":
        return outputs, torch.randint(2, shape, generator=generator).double()
    return outputs, torch.randn(shape, generator=generator, dtype=torch.float64)


def reference(name: str, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    built = {
        "categorical": lambda: D.Categorical(logits=outputs),
        "bernoulli": lambda: D.Bernoulli(logits=outputs),
        "gaussian": lambda: D.Normal(outputs, 2.5**-0.5),
    }
    return built[name]().log_prob(targets).reshape(len(targets), -1).sum(1)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2, 4), (1,)])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_log_prob_is_that_of_torch_summed_over_each_example(name, shape, generator):
    outputs, targets = example(name, shape, generator)
    value = LIKELIHOODS[name]().log_prob(outputs, targets)
    assert value.shape == shape[:1]
    torch.testing.assert_close(value, reference(name, outputs, targets), **CLOSE)


@pytest.mark.parametrize("shape", [(7,), (3, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_class_log_prob_and_its_gradient_are_those_of_cross_entropy(shape, dtype, size, generator):
    outputs, targets = example("categorical", shape, generator)
    ours, theirs = ((size * outputs).to(dtype).requires_grad_() for _ in range(2))
    value = Categorical().log_prob(ours, targets)
    expected = -F.cross_entropy(theirs.movedim(-1, 1), targets, reduction="none").reshape(shape[0], -1).sum(1)
    torch.testing.assert_close(value, expected)
    value.sum().backward()
    expected.sum().backward()
    # Softmax minus one-hot: absolute, since half precision rounds the softmax.
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [("categorical", [0, 3, -1, 1], [0, 2, 0, 1]), ("bernoulli", [0.0, 1.5, -0.1, 1.0], [0.0, 1.0, 0.0, 1.0])],
)
def test_targets_out_of_range_are_not_finite_where_nothing_can_be_looked_at(name, bad, good, monkeypatch, generator):
    """Inside a graph a check cannot branch, and an index out of range would stop the device for good."""
    outputs, targets = example(name, (4,), generator)
    likelihood = LIKELIHOODS[name]()
    values = likelihood.log_prob(outputs, torch.tensor(good).to(targets.dtype))
    with pytest.raises(ValueError, match="targets must"):
        likelihood.log_prob(outputs, torch.tensor(bad).to(targets.dtype))
    monkeypatch.setattr(likelihoods, "_capturing", lambda values: True)
    found = likelihood.log_prob(outputs, torch.tensor(bad).to(targets.dtype))
    assert found.isfinite().tolist() == [True, False, False, True]
    torch.testing.assert_close(found[[0, 3]], values[[0, 3]], **CLOSE)
    torch.testing.assert_close(likelihood.log_prob(outputs, torch.tensor(good).to(targets.dtype)), values, **CLOSE)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_log_prob_and_its_gradient_work_under_vmap(name, generator):
    outputs, targets = example(name, (6,), generator)
    likelihood = LIKELIHOODS[name]()

    def one(f, y):
        return likelihood.log_prob(f.unsqueeze(0), y.unsqueeze(0)).sum()

    values = torch.func.vmap(one)(outputs, targets)
    grads = torch.func.vmap(torch.func.grad(one))(outputs, targets)
    outputs.requires_grad_()
    whole = likelihood.log_prob(outputs, targets)
    torch.testing.assert_close(values, whole.detach(), **CLOSE)
    torch.testing.assert_close(grads, torch.autograd.grad(whole.sum(), outputs)[0], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("logit", [1e4, -1e4])
def test_extreme_logits_give_finite_values_and_gradients(logit, dtype):
    binary = torch.full((2,), logit, dtype=dtype, requires_grad=True)
    classes = torch.tensor([[logit, 0.0], [logit, 0.0]], dtype=dtype, requires_grad=True)
    for outputs, value in (
        (binary, Bernoulli().log_prob(binary, torch.tensor([0.0, 1.0]))),
        (classes, Categorical().log_prob(classes, torch.tensor([1, 0]))),
    ):
        assert sorted(value.tolist()) == pytest.approx([-1e4, 0.0])
        (grad,) = torch.autograd.grad(value.sum(), outputs)
        assert bool(grad.isfinite().all())


def test_predictives_are_the_links(generator):
    outputs = torch.randn(4, 3, generator=generator)
    torch.testing.assert_close(Categorical().predictive(outputs), outputs.softmax(-1), rtol=0, atol=0)
    torch.testing.assert_close(Bernoulli().predictive(outputs), outputs.sigmoid(), rtol=0, atol=0)
    torch.testing.assert_close(Gaussian().predictive(outputs), outputs, rtol=0, atol=0)


def test_classes_are_not_predicted_across_examples():
    with pytest.raises(ValueError, match=r"outputs must have shape \(M, ..., C\).*got \(4,\).*'bernoulli'"):
        Categorical().predictive(torch.zeros(4))


def test_a_single_class_is_scored_but_not_predicted():
    """Its probability is 1 whatever the logit, which is hardly what was meant."""
    assert Categorical().log_prob(torch.tensor([[3.0]]), torch.tensor([0])).tolist() == [0.0]
    with pytest.raises(ValueError, match=r"at least two outputs, got shape \(4, 1\).*'bernoulli'"):
        Categorical().predictive(torch.zeros(4, 1))


@pytest.mark.parametrize(("name", "outputs"), [("categorical", (4, 2)), ("bernoulli", (4,)), ("gaussian", (4,))])
def test_columns_of_targets_are_not_broadcast(name, outputs):
    targets = torch.zeros(4, 1, dtype=torch.long if name == "categorical" else torch.float32)
    with pytest.raises(ValueError, match=r"targets must have shape \(4,\) to match the outputs, got \(4, 1\)"):
        LIKELIHOODS[name]().log_prob(torch.zeros(outputs), targets)


@pytest.mark.parametrize("name", ["bernoulli", "gaussian"])
def test_rows_of_targets_are_not_broadcast(name):
    with pytest.raises(ValueError, match=r"targets must have shape \(4, 1\) to match the outputs, got \(4,\)"):
        LIKELIHOODS[name]().log_prob(torch.zeros(4, 1), torch.zeros(4))


BAD_LABELS = [
    (torch.tensor([0, 3]), ValueError, r"labels 0…2 \(the model has 3 outputs\), got values from 0 to 3"),
    (torch.tensor([-1, 0]), ValueError, r"got values from -1 to 0"),
    (torch.tensor([-100, 0]), ValueError, r"got values from -100 to 0"),
    (torch.tensor([0.0, 1.0]), TypeError, r"integer class labels, got dtype torch\.float32"),
    (torch.tensor([True, False]), TypeError, r"got dtype torch\.bool"),
    (torch.tensor([0j, 1j]), TypeError, r"got dtype torch\.complex64"),
]


@pytest.mark.parametrize(("labels", "error", "message"), BAD_LABELS)
def test_labels_that_are_not_classes_are_refused(labels, error, message):
    with pytest.raises(error, match=message):
        Categorical().log_prob(torch.zeros(2, 3), labels)
    with pytest.raises(error, match=message):
        check_labels(labels, 3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_labels_of_any_integer_type_are_accepted(dtype):
    outputs = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 0.0]])
    value = Categorical().log_prob(outputs, torch.tensor([2, 0], dtype=dtype))
    torch.testing.assert_close(value, outputs.log_softmax(-1)[[0, 1], [2, 0]], rtol=1e-6, atol=0)


def test_outputs_without_an_example_dimension_are_refused():
    with pytest.raises(ValueError, match=r"outputs must have shape \(M, \.\.\., C\), got \(3,\)"):
        Categorical().log_prob(torch.zeros(3), torch.tensor(1))


@pytest.mark.parametrize("name", ["bernoulli", "gaussian"])
def test_scalars_are_refused_with_a_message(name):
    with pytest.raises(ValueError, match="outputs must have shape"):
        LIKELIHOODS[name]().log_prob(torch.tensor(0.0), torch.tensor(0.0))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_no_examples_give_no_values(name, generator):
    assert LIKELIHOODS[name]().log_prob(*example(name, (0, 2), generator)).shape == (0,)


@pytest.mark.parametrize("value", [-0.1, 1.1, 2.0, math.nan, math.inf])
def test_binary_targets_outside_zero_and_one_are_refused(value):
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 1\]"):
        Bernoulli().log_prob(torch.zeros(2), torch.tensor([0.0, value]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_binary_targets_of_any_type_are_accepted(dtype):
    value = Bernoulli().log_prob(torch.zeros(2), torch.tensor([0, 1]).to(dtype))
    assert value.dtype is torch.float32
    assert value.tolist() == pytest.approx([-math.log(2)] * 2)


def test_soft_binary_targets_weigh_both_outcomes():
    soft = Bernoulli().log_prob(torch.tensor([2.0]), torch.tensor([0.25]))
    hard = Bernoulli().log_prob(torch.tensor([2.0, 2.0]), torch.tensor([1.0, 0.0]))
    assert float(soft) == pytest.approx(float(0.25 * hard[0] + 0.75 * hard[1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_real_targets_that_are_not_finite_are_refused(bad):
    with pytest.raises(NumericalError, match=r"targets hold 1 NaN or Inf\. Clean the data"):
        Gaussian().log_prob(torch.zeros(2, 1), torch.tensor([[0.0], [bad]]))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_noise_precision_must_be_positive(value):
    with pytest.raises(ValueError, match=r"noise_precision must be finite and in \(0, inf\).*1/σ²"):
        Gaussian(value)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods_are_found_by_name(name):
    assert type(likelihood_named(name)) is {"categorical": Categorical, "bernoulli": Bernoulli}.get(name, Gaussian)
    own = LIKELIHOODS[name]()
    assert likelihood_named(own) is own


@pytest.mark.parametrize("value", ["poisson", None, Categorical, 1])
def test_unknown_likelihoods_are_refused(value):
    with pytest.raises(ValueError, match="likelihood must be one of 'categorical', 'bernoulli', 'gaussian', got"):
        likelihood_named(value)


def test_likelihood_of_a_model_is_a_function_of_its_parameters(generator):
    model = nn.Linear(3, 2)
    params = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    x, y = torch.randn(5, 3, generator=generator), torch.tensor([0, 1, 1, 0, 1])
    before = [p.clone() for p in model.parameters()]
    value = Categorical().of(model)(params, (x, y))
    outputs = x @ params["weight"].T + params["bias"]
    torch.testing.assert_close(value, Categorical().log_prob(outputs, y), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_likelihood_must_say_both_what_it_scores_and_what_it_predicts():
    class Half(Likelihood):
        def predictive(self, outputs):
            return outputs

    with pytest.raises(TypeError, match="log_prob"):
        Half()


# ---- curvature


def hessian(likelihood: Likelihood, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of −log p by the outputs of one example."""
    whole = torch.autograd.functional.hessian(lambda f: -likelihood.log_prob(f[None], targets[None]).sum(), outputs)
    return whole.reshape(outputs.numel(), outputs.numel())


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 3, 2)])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_columns_of_the_root_give_the_hessian_of_each_example(name, shape, size, generator):
    likelihood, (outputs, targets) = LIKELIHOODS[name](), example(name, shape, generator)
    root = likelihood.hessian_root(size * outputs)
    assert root.shape[1:] == outputs.shape
    for k in range(len(outputs)):
        columns = root[:, k].reshape(len(root), -1)
        torch.testing.assert_close(columns.mT @ columns, hessian(likelihood, size * outputs[k], targets[k]), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_roots_of_certain_classes_are_finite(dtype):
    outputs = torch.tensor([[0.0, 200.0, -300.0], [1e4, 0.0, 0.0], [-1e4, -1e4, 1e4]], dtype=dtype)
    root = Categorical().hessian_root(outputs)
    assert bool(root.isfinite().all())
    assert float(root.abs().max()) < 1e-4


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_targets_are_drawn_from_the_likelihood(name, generator):
    outputs, _ = example(name, (3,), generator)
    many = outputs.expand(20_000, *outputs.shape).reshape(-1, *outputs.shape[1:])
    found = LIKELIHOODS[name]().sample(many, torch.Generator().manual_seed(1)).reshape(20_000, 3).double()
    built = {
        "categorical": lambda: D.Categorical(logits=outputs),
        "bernoulli": lambda: D.Bernoulli(logits=outputs),
        "gaussian": lambda: D.Normal(outputs, 2.5**-0.5),
    }[name]()
    if name == "categorical":
        for label in range(3):
            share = (found == label).double().mean(0)
            torch.testing.assert_close(share, built.probs[:, label], rtol=0, atol=0.02)
        return
    torch.testing.assert_close(found.mean(0), built.mean, rtol=0, atol=0.03)
    torch.testing.assert_close(found.var(0), built.variance, rtol=0.05, atol=0.01)


def test_what_a_likelihood_does_not_define_is_named():
    class Own(Likelihood):
        def log_prob(self, outputs, targets):
            return -(outputs - targets).abs()

        def predictive(self, outputs):
            return outputs

    with pytest.raises(TypeError, match="Own has no hessian_root, which curvature="):
        Own().hessian_root(torch.zeros(2))
    with pytest.raises(TypeError, match="Own has no sample, which curvature="):
        Own().sample(torch.zeros(2))


def test_a_root_of_another_shape_is_refused():
    class Own(likelihoods.Gaussian):
        def hessian_root(self, outputs):
            return outputs

    with pytest.raises(ValueError, match=r"Own.hessian_root must return \(Q, \*outputs.shape\), got \(4, 2\)"):
        likelihoods.curvature_seeds(Own(), "ggn", torch.zeros(4, 2))


@pytest.mark.parametrize(("likelihood", "shape"), [(Categorical(), (2, 200, 9)), (Gaussian(), (2, 1025))])
def test_too_many_columns_are_refused_with_the_way_that_takes_one(likelihood, shape):
    with pytest.raises(ValueError, match='Use curvature="fisher", which takes one'):
        likelihood.hessian_root(torch.zeros(shape))
