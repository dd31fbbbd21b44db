"""Rates that are too large: seen in every method, told once or raised, and never seen where there is nothing."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers.optimizer_runs import assert_identical, backward, flat
from slangvi.divergence import EVERY, LOOKS, Watch, step_length, straightness
from slangvi.errors import DivergenceError, DivergenceWarning
from slangvi.params.state import tensors_of
from slangvi.priors import Prior

WINDOW = EVERY * LOOKS
METHODS = {
    "SLANG": (slangvi.SLANG, {"rank": 2}),
    "VOGN": (slangvi.VOGN, {}),
    "OnlineEig": (slangvi.OnlineEig, {"rank": 2}),
    "FullGaussian": (slangvi.FullGaussian, {}),
}


def problem(rows=60):
    """Noisy labels from a line through the plane."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=generator)
    y = (x[:, 0] + torch.randn(rows, generator=generator) > 0).float()
    torch.manual_seed(0)
    return nn.Linear(3, 1), x, y


def make(name, model, **options):
    kind, own = METHODS[name]
    given = {"num_data": 60, "precision_lr": 0.05, "generator": torch.Generator().manual_seed(0), **own}
    return kind(model, **(given | options))


def train(opt, x, y, steps, seed=1):
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        picked = torch.randint(len(x), (12,), generator=source)
        opt.step(lambda p=picked: backward(F.binary_cross_entropy_with_logits(opt.model(x[p])[:, 0], y[p])))
    return opt


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", METHODS)
def test_the_length_of_a_step_is_measured_by_the_posterior(name, momentum):
    model, x, y = problem()
    prior = {"prior_precision": 0.7, "prior_mean": 0.3, "momentum": momentum}
    opt = train(make(name, model.double(), lr=0.2, **prior), x.double(), y.double(), 3)
    before = opt._state
    after = train(opt, x.double(), y.double(), 1, seed=2)._state
    moved, precision = after.loc - before.loc, opt.posterior.precision_matrix
    expected = (moved @ precision @ moved / len(moved)).sqrt()
    found = step_length(before, after, opt._hyper.prior(), 0.2, momentum)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_lengths_of_several_runs_are_those_of_each(generator):
    loc, moved, momentum = torch.randn(3, 4, 7, generator=generator)
    prior = Prior(torch.rand(4, 7, generator=generator), torch.randn(4, 7, generator=generator))
    lr, decay, step = torch.tensor([0.1, 0.2, 0.3, 2.0]), torch.tensor([0.0, 0.9, 0.5, 0.9]), torch.tensor([1, 2, 9, 4])
    column = [x.unsqueeze(1) for x in (lr, decay, step)]
    after = SimpleNamespace(loc=loc - moved, momentum=momentum, step=column[2])
    found = step_length(SimpleNamespace(loc=loc), after, prior, *column[:2])
    for k in range(4):
        alone = SimpleNamespace(loc=loc[k] - moved[k], momentum=momentum[k], step=int(step[k]))
        own = Prior(prior.precision[k], prior.mean[k])
        expected = step_length(SimpleNamespace(loc=loc[k]), alone, own, float(lr[k]), float(decay[k]))
        torch.testing.assert_close(found[k], expected)
    places = torch.randn(LOOKS, 4, 7, generator=generator).cumsum(0)
    torch.testing.assert_close(straightness(places), torch.stack([straightness(places[:, k]) for k in range(4)]))


@pytest.mark.parametrize("name", METHODS)
def test_a_hundred_times_the_usual_rate_is_loud(name):
    """Told once, and training goes on."""
    model, x, y = problem()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(make(name, model, lr=5.0), x, y, 2 * WINDOW)
    messages = [str(one.message) for one in caught if one.category is DivergenceWarning]
    assert len(messages) == 1
    assert messages[0].startswith("step ")
    assert "(lr=5). It is thrown about" in messages[0]
    assert "Lower lr" in messages[0]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", METHODS)
def test_usual_rates_are_not(name):
    model, x, y = problem()
    opt = make(name, model, lr=0.05)
    train(opt, x, y, WINDOW)  # a warning would be an error here
    assert opt._state.step == WINDOW


@pytest.mark.parametrize("skipping", [0, 3])
def test_raising_leaves_the_state_before_and_is_no_bad_batch(skipping):
    model, x, y = problem()
    opt = make("VOGN", model, lr=20.0, on_divergence="raise", max_bad_batches=skipping)
    train(opt, x, y, WINDOW - 1)
    good = {name: value.clone() for name, value in tensors_of(opt._state)}
    with pytest.raises(DivergenceError, match=rf"step {WINDOW}: .* Lower lr.*The state is that of the step before"):
        train(opt, x, y, 1)
    assert opt._state.step == WINDOW - 1
    assert opt.num_skipped == 0
    assert all(torch.equal(good[name], value) for name, value in tensors_of(opt._state))
    assert torch.equal(flat(model), good["loc"])


def test_it_can_be_switched_off_and_changes_no_number():
    runs = []
    for reaction in ("ignore", "warn"):
        model, x, y = problem()
        opt = make("VOGN", model, lr=20.0, on_divergence=reaction)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if reaction == "warn" else "error")
            runs.append(train(opt, x, y, WINDOW + 3))
    assert_identical(*runs)


BUILDERS = {
    "slang": (slangvi.slang.build, {"rank": 2}),
    "mean_field": (slangvi.mean_field.build, {}),
    "online_eig": (slangvi.online_eig.build, {"rank": 2}),
    "full": (slangvi.full.build, {}),
}


def functional(name, steps, **options):
    """The last state of a run by pure functions."""
    model, x, y = problem()
    kind, own = BUILDERS[name]
    vi = kind(slangvi.Bernoulli().of(model), num_data=60, precision_lr=0.05, **own, **options)
    state, source = vi.init(dict(model.named_parameters())), torch.Generator().manual_seed(1)
    for _ in range(steps):
        picked = torch.randint(len(x), (12,), generator=source)
        state, _ = vi.update(state, (x[picked], y[picked, None]), generator=source)
    return state


@pytest.mark.parametrize("name", BUILDERS)
def test_pure_functions_are_as_loud(name):
    with pytest.warns(DivergenceWarning, match=r"step \d+: .*\(lr=5\). It is thrown about.*Lower lr") as caught:
        functional(name, 2 * WINDOW, lr=5.0)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    functional(name, WINDOW, lr=0.05)  # a warning would be an error here


def test_pure_functions_raise_or_say_nothing_and_change_no_number():
    with pytest.raises(DivergenceError, match=f"step {WINDOW}: "):
        functional("mean_field", WINDOW, lr=20.0, on_divergence="raise")
    with pytest.warns(DivergenceWarning):
        loud = functional("mean_field", WINDOW, lr=20.0)
    silent = functional("mean_field", WINDOW, lr=20.0, on_divergence="ignore")
    assert torch.equal(loud.loc, silent.loc)
    with pytest.raises(ValueError, match="on_divergence must be one of 'warn', 'raise', 'ignore', got 'shout'"):
        functional("slang", 0, lr=0.1, on_divergence="shout")


def test_a_copy_half_way_judges_the_next_window():
    model, x, y = problem()
    twin = copy.deepcopy(train(make("VOGN", model, lr=20.0, on_divergence="raise"), x, y, WINDOW // 2))
    train(twin, x, y, WINDOW)
    assert twin._state.step == WINDOW + WINDOW // 2
    with pytest.raises(DivergenceError, match=f"step {2 * WINDOW}: "):
        train(twin, x, y, WINDOW)


def test_a_long_way_straight_on_is_no_divergence():
    """A far start, many examples and few parameters: every step is many standard deviations long, and a good one."""
    torch.manual_seed(0)
    model, x = nn.Linear(2, 1, bias=False), torch.randn(400, 2)
    y = x @ torch.tensor([[300.0], [-200.0]])
    opt = make("FullGaussian", model, num_data=400_000, lr=0.3, on_divergence="raise")
    lengths = []
    for _ in range(WINDOW):
        before = opt._state
        opt.step(lambda: backward(0.5 * F.mse_loss(model(x), y)))
        lengths.append(float(step_length(before, opt._state, opt._hyper.prior(), 0.3, 0.0)))
    assert min(lengths) > 2.0


def states(lengths, places, P=2):
    """Pairs of states whose steps have given lengths, for λ = 0 and γ = 0, and end at given places."""
    for step, (length, place) in enumerate(zip(lengths, places, strict=True), start=1):
        gradient = torch.full((P,), length)
        yield (
            SimpleNamespace(loc=torch.full((P,), place + length)),
            SimpleNamespace(loc=torch.full((P,), place), momentum=gradient, step=step),
        )


def alarmed(watch, pairs, lr=1.0, missing=0):
    """Whether one of the steps raises an alarm."""
    for before, after in pairs:
        if watch.due(after.step) and after.step != missing:
            try:
                watch.look(before, after, FLAT, lr, 0.0)
            except DivergenceError:
                return True
    return False


FLAT = Prior(torch.zeros(2), torch.zeros(2))
TO_AND_FRO = [float(k // EVERY % 2) for k in range(WINDOW)]
STRAIGHT_ON = [float(k) for k in range(WINDOW)]


@pytest.mark.parametrize(
    ("length", "places", "lr", "alarm"),
    [
        (2.0, TO_AND_FRO, 0.5, True),
        (2.0, STRAIGHT_ON, 0.5, False),
        (2.0, STRAIGHT_ON, 1.5, True),
        (0.5, TO_AND_FRO, 0.5, False),
        (0.5, TO_AND_FRO, 1.5, False),
    ],
)
def test_an_alarm_needs_long_steps_to_and_fro_or_at_rates_that_overshoot(length, places, lr, alarm):
    assert alarmed(Watch("raise", "Lower it."), states([length / lr**0.5] * WINDOW, places), lr) is alarm


@pytest.mark.parametrize("short", [LOOKS // 4, LOOKS // 4 + 1])
def test_a_quarter_of_the_steps_may_be_short(short):
    lengths = [0.1 if step <= short * EVERY else 3.0 for step in range(1, WINDOW + 1)]
    assert alarmed(Watch("raise", ""), states(lengths, TO_AND_FRO)) is (short == LOOKS // 4)


def test_nothing_is_read_from_the_device_until_a_window_ends():
    """Tensors without numbers would not let themselves be read."""
    watch, prior = Watch("warn", ""), Prior(torch.ones(5000, device="meta"), torch.zeros(5000, device="meta"))
    like = torch.zeros(5000, device="meta")
    looks = [step for step in range(1, WINDOW) if watch.due(step)]
    assert len(looks) == LOOKS - 1
    for step in looks:
        after = SimpleNamespace(loc=like, momentum=like, step=step)
        watch.look(SimpleNamespace(loc=like), after, prior, 0.1, 0.9)
    assert watch._places.shape[1] <= 1024


def test_a_window_with_a_gap_is_not_judged():
    """After a state of another time was loaded, say."""
    watch = Watch("raise", "")
    assert not alarmed(watch, states([3.0] * WINDOW, TO_AND_FRO), missing=3 * EVERY)
    assert alarmed(watch, states([3.0] * WINDOW, TO_AND_FRO))


def test_straightness_of_a_walk_is_small():
    walk = torch.randn(LOOKS, 500, generator=torch.Generator().manual_seed(0)).cumsum(0)
    assert straightness(walk) == pytest.approx((LOOKS - 1) ** -0.5, rel=0.2)
    assert straightness(torch.zeros(3, 2)) == 0.0


def test_impossible_reactions_are_named():
    with pytest.raises(ValueError, match="on_divergence must be one of 'warn', 'raise', 'ignore', got 'shout'"):
        make("SLANG", nn.Linear(2, 1), on_divergence="shout")


@pytest.mark.parametrize("factor", [1, 1000])
def test_estimators_tell_of_it(factor):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    _, x, y = problem()
    quick = {"hidden_layer_sizes": (), "mc_samples": 1, "max_iter": 100, "rank": 0, "random_state": 0}
    model = slangvi.SLANGRegressor(**quick, learning_rate_init=0.1 * factor, batch_size=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x.numpy(), y.numpy())
    told = [str(one.message) for one in caught if one.category is DivergenceWarning]
    assert len(told) == (factor == 1000)
    assert all("Lower learning_rate_init (it is 100)" in message for message in told)
