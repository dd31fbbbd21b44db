"""The networks have the sizes they are named for, and a problem is the same for everybody."""

from __future__ import annotations

import pytest
import torch

import slangvi
from slangvi_reproduction.bench.networks import Problem, ResNet20, Transformer, images, mlp, mlp_width, tokens, vectors


def size(model) -> int:
    return sum(p.numel() for p in model.parameters())


def test_resnet20_has_its_depth_and_size():
    model = ResNet20()
    assert sum(isinstance(m, torch.nn.Conv2d) for m in model.modules()) + 1 == 20
    assert size(model) == pytest.approx(0.27e6, rel=0.02)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_the_large_transformer_has_the_size_of_gpt2():
    from slangvi_reproduction.bench.scale import LARGE

    with torch.device("meta"):
        model = Transformer(LARGE.vocab, LARGE.width, LARGE.heads, LARGE.depth, LARGE.longest)
    assert 1.24e8 < size(model) < 1.25e8


def test_the_transformer_is_causal():
    torch.manual_seed(0)
    model = Transformer(vocab=11, width=8, heads=2, depth=2, length=6)
    text = torch.randint(11, (2, 6))
    changed = text.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 11
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


@pytest.mark.parametrize("wanted", [1e4, 1e5, 1e7])
def test_widths_give_the_parameters_asked_for(wanted):
    width = mlp_width(wanted, 784, 10)
    with torch.device("meta"):
        got = size(mlp((784, width, width, 10)))
    assert got == pytest.approx(wanted, rel=0.05)


PROBLEMS = {
    "vectors": lambda: vectors(lambda: mlp((4, 3, 2)), batch=5, inputs=4, classes=2, draws=3, device="cpu"),
    "images": lambda: images(lambda: ResNet20(4, 1), batch=5, side=8, draws=3, device="cpu"),
    "tokens": lambda: tokens(lambda: Transformer(9, 8, 2, 1, 6), batch=5, length=6, vocab=9, draws=3, device="cpu"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_the_same_every_time_and_leaves_the_global_randomness_alone(name, global_rng_untouched):
    first, again = PROBLEMS[name](), PROBLEMS[name]()
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.y, again.y)
    for a, b in zip(first.model().parameters(), first.model().parameters(), strict=True):
        assert torch.equal(a, b)
        assert a is not b


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_loss_is_the_mean_over_examples_of_the_likelihood_slang_uses(name):
    problem: Problem = PROBLEMS[name]()
    outputs = problem.model()(problem.x)
    expected = -slangvi.Categorical().log_prob(outputs, problem.y).mean()
    torch.testing.assert_close(problem.loss(outputs, problem.y), expected)
    x, y = problem.repeated
    assert len(x) == len(y) == 3 * 5
    torch.testing.assert_close(problem.loss(problem.model()(x), y), expected)


def test_texts_are_labelled_with_their_next_token():
    problem = PROBLEMS["tokens"]()
    assert torch.equal(problem.x[:, 1:], problem.y[:, :-1])
