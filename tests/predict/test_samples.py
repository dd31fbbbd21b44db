"""Predictions at draws of the weights: their values, and that nothing else about the model changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import GPT, DictInput, MultiOutput
from helpers.posteriors import posterior_of, seeded
from slangvi import Bernoulli, LowRankPrecisionNormal, functional_samples, predictive_samples
from slangvi.params import ParamSpec


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 2)).double()


X = torch.linspace(-1, 1, 21, dtype=torch.float64).reshape(7, 3)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_result_does_not_depend_on_the_chunk(batch_size, global_rng_untouched):
    with torch.random.fork_rng(devices=[]):
        model = mlp()
    q = posterior_of(model)
    whole = functional_samples(model, q, X, 4, generator=seeded())
    parts = functional_samples(model, q, X, 4, batch_size=batch_size, generator=seeded())
    assert whole.shape == (4, 7, 2)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_each_draw_is_the_model_at_one_draw_of_the_weights():
    model = mlp().eval()
    q = posterior_of(model)
    source = seeded()
    outputs = functional_samples(model, q, X, 3, generator=seeded())
    for draw in outputs:
        params = q.param_spec.unflatten(q.sample(generator=source))
        torch.testing.assert_close(draw, torch.func.functional_call(model, params, (X,)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("likelihood", "link"),
    [
        ("categorical", lambda f: f.softmax(-1)),
        ("bernoulli", torch.sigmoid),
        ("gaussian", lambda f: f),
        (Bernoulli(), torch.sigmoid),
    ],
)
def test_predictive_samples_are_the_functional_ones_behind_the_link(likelihood, link):
    model = mlp()
    q = posterior_of(model)
    outputs = functional_samples(model, q, X, 3, generator=seeded())
    predictions = predictive_samples(model, q, X, 3, likelihood=likelihood, batch_size=2, generator=seeded())
    torch.testing.assert_close(predictions, link(outputs), rtol=1e-12, atol=1e-12)


def test_one_output_for_each_row_is_no_set_of_classes():
    """Softmax over the rows would depend on which rows come together."""
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    with pytest.raises(ValueError, match=r"outputs must have shape \(M, ..., C\)"):
        predictive_samples(model, posterior_of(model), torch.zeros(4, 3))


def test_one_output_is_no_set_of_classes_either():
    """Its softmax is 1 whatever it is."""
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"at least two outputs, got shape \(4, 1\).*'bernoulli'"):
        predictive_samples(model, posterior_of(model), torch.zeros(4, 3))


def test_classes_are_the_default_link():
    model = mlp()
    predictions = predictive_samples(model, posterior_of(model), X, 3)
    torch.testing.assert_close(predictions.sum(-1), torch.ones(3, 7, dtype=torch.float64))


def test_model_runs_in_eval_mode_and_every_module_gets_its_own_mode_back():
    seen = []
    model = mlp().train()
    model[1].eval()
    model[4].register_forward_hook(lambda module, args, out: seen.extend(m.training for m in model.modules()))
    modes = [m.training for m in model.modules()]
    buffers = [b.clone() for b in model.buffers()]
    functional_samples(model, posterior_of(model), X, 2)
    assert seen
    assert not any(seen)
    assert [m.training for m in model.modules()] == modes == [True, True, False, True, True, True]
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))


def test_modes_come_back_when_the_model_raises():
    model = mlp().train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        functional_samples(model, posterior_of(model), torch.zeros(2, 4, dtype=torch.float64))
    assert all(m.training for m in model.modules())


def test_weights_gradients_and_global_randomness_stay(global_rng_untouched):
    with torch.random.fork_rng(devices=[]):
        model = mlp()
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    before = {name: (p, p.clone(), p._version) for name, p in model.named_parameters()}
    outputs = functional_samples(model, posterior_of(model), X, 3, generator=seeded())
    assert not outputs.requires_grad
    for name, p in model.named_parameters():
        same, value, version = before[name]
        assert p is same
        assert torch.equal(p, value)
        assert p._version == version
        assert p.requires_grad
        assert torch.equal(p.grad, torch.full_like(p, 0.5))


def test_draws_follow_the_global_seed_without_a_generator():
    model = mlp()
    q = posterior_of(model)
    torch.manual_seed(0)
    first = functional_samples(model, q, X, 2)
    second = functional_samples(model, q, X, 2)
    torch.manual_seed(0)
    assert torch.equal(functional_samples(model, q, X, 2), first)
    assert not torch.equal(first, second)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, wide: torch.Tensor, deep: torch.Tensor, sign: int = 1) -> torch.Tensor:
        return self.wide(wide) * sign - self.deep(deep)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_tuples_are_positional_and_dicts_are_keyword_arguments(batch_size):
    model = TwoInputs().double()
    q, deep = posterior_of(model), X[:, :2]
    options = {"batch_size": batch_size}
    by_place = functional_samples(model, q, (X, deep), 3, generator=seeded(), **options)
    by_name = functional_samples(model, q, {"deep": deep, "wide": X}, 3, generator=seeded(), **options)
    with_number = functional_samples(model, q, {"deep": deep, "wide": X, "sign": -1}, 3, generator=seeded(), **options)
    assert by_place.shape == (3, 7, 2)
    assert torch.equal(by_place, by_name)
    assert not torch.equal(by_place, with_number)


def test_a_dict_that_is_one_argument_goes_in_a_tuple():
    model = DictInput().double()
    outputs = functional_samples(model, posterior_of(model), ({"wide": X, "deep": X[:, :2]},), 2, batch_size=3)
    assert outputs.shape == (2, 7, 4)


def test_tied_weights_are_drawn_together():
    model = GPT().double()
    ids = torch.arange(8).reshape(2, 4) % 7
    q = posterior_of(model)
    outputs = functional_samples(model, q, ids, 1, generator=seeded())
    draw = q.param_spec.unflatten(q.sample(generator=seeded()))
    twin = GPT(functional_head=True).double()
    twin.load_state_dict({name: draw[name] for name, _ in twin.named_parameters()})
    torch.testing.assert_close(outputs[0], twin(ids).detach(), rtol=1e-10, atol=1e-10)


def test_posterior_over_some_parameters_leaves_the_rest_at_their_values():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    spec = ParamSpec.of_module(model, model[1].parameters())
    hidden = model[0](X).detach()
    outputs = functional_samples(model, posterior_of(model, spec), X, 2, generator=seeded())
    head = functional_samples(model[1], _without_spec(posterior_of(model, spec)), hidden, 2, generator=seeded())
    torch.testing.assert_close(outputs, head, rtol=1e-12, atol=1e-12)


def _without_spec(q: LowRankPrecisionNormal) -> LowRankPrecisionNormal:
    return LowRankPrecisionNormal(q.loc, q.prec_factor, q.prec_diag)


def test_posterior_without_names_is_laid_over_the_trainable_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    q = posterior_of(model)
    named = functional_samples(model, q, X, 2, generator=seeded())
    assert torch.equal(functional_samples(model, _without_spec(q), X, 2, generator=seeded()), named)


def test_half_precision_models_get_half_precision_weights():
    model = nn.Linear(3, 2).to(torch.bfloat16)
    q = LowRankPrecisionNormal(torch.zeros(8), torch.zeros(8, 1), torch.ones(8))
    assert functional_samples(model, q, X.to(torch.bfloat16), 2).dtype is torch.bfloat16


def test_linear_predictions_have_the_analytic_mean_and_covariance(within_sigmas, global_rng_untouched):
    with torch.random.fork_rng(devices=[]):
        model = nn.Linear(3, 1).double()
    q = posterior_of(model)
    outputs = functional_samples(model, q, X[::2], 4_000, generator=seeded())[..., 0]
    design = torch.cat([X[::2], torch.ones(4, 1, dtype=torch.float64)], dim=1)
    mean = design @ q.loc
    centred = outputs - mean
    covariance = design @ torch.linalg.inv(q.precision_matrix) @ design.T
    assert within_sigmas(outputs, mean)
    assert within_sigmas(centred.unsqueeze(-1) * centred.unsqueeze(-2), covariance)


# ---- what is refused ----


def _small() -> LowRankPrecisionNormal:
    return posterior_of(nn.Linear(3, 2).double())


BAD_CALLS = [
    ({"n_samples": 0}, ValueError, "n_samples must be ≥ 1, got 0"),
    ({"n_samples": 2.0}, TypeError, "n_samples must be a whole number"),
    ({"batch_size": 0}, ValueError, "batch_size must be ≥ 1, got 0"),
    ({"x": X[:0]}, ValueError, r"first dimension M ≥ 1.*got first dimensions \[0\]"),
    ({"x": (X, X[:2])}, ValueError, r"got first dimensions \[2, 7\]"),
    ({"x": {}}, ValueError, "it has no tensors"),
    ({"x": torch.tensor(1.0)}, ValueError, "first dimension"),
    ({"posterior": _small().expand((2,))}, ValueError, r"must be a single distribution, got batch shape \(2,\)"),
    ({"model": nn.Linear(4, 2)}, ValueError, r"expects parameter 'weight' of shape \(2, 3\), the model has \(2, 4\)"),
    ({"model": nn.Sequential(nn.Linear(3, 2))}, ValueError, r"expects parameter 'weight' .* the model has none"),
    ({"model": nn.Linear(4, 2), "posterior": _without_spec(_small())}, ValueError, "over 8 .* has 10 trainable ones"),
]


@pytest.mark.parametrize("function", [functional_samples, predictive_samples])
@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_calls_that_cannot_be_meant_are_refused(function, change, error, message):
    arguments = {"model": nn.Linear(3, 2).double(), "posterior": _small(), "x": X} | change
    with pytest.raises(error, match=message):
        function(**arguments)


def test_models_with_several_outputs_are_refused():
    model = MultiOutput().double()
    with pytest.raises(TypeError, match=r"must return one tensor .* got dict\. Wrap it"):
        functional_samples(model, posterior_of(model), torch.zeros(2, 4, dtype=torch.float64))


def test_unknown_likelihoods_are_refused():
    with pytest.raises(ValueError, match="likelihood must be one of"):
        predictive_samples(nn.Linear(3, 2).double(), _small(), X, likelihood="softmax")
