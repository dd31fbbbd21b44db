"""What the tests of replayed passes share: scenes played by an eager and a replaying optimizer, and models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cases
from helpers.captured_steps import assert_agree, draw_and_step, optimizer, pair, problem, relative

ONCE = "backward\\(\\) can be called once for each forward pass"


# Refusing to capture, and saying so, is a way out wherever a graph would not do.
refusable = pytest.mark.filterwarnings("ignore:compile=True replays the step, but not forward and backward")


def limit(reason):
    """A test that shows what compile=True does not promise; it fails as soon as that is put right."""
    return pytest.mark.xfail(strict=True, reason=reason)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def rows_of(opt):
    """The rows collected so far, which are dropped: those of every parameter, one pass after the other."""
    found = []
    for group in opt._rows:
        found += [group.num_rows, *sorted(group.blocks)]
        found += [group.blocks[name].form() * group.scale for name in sorted(group.blocks)]
    opt.discard_gradients()
    return found


def one_pass(opt, x, y, call=None):
    """A pass in a block of its own: what the model said, every p.grad, and the rows."""
    with opt.sampled_params(train=True):
        opt.zero_grad()
        output = (call or opt.model)(x)
        F.cross_entropy(output, y).backward()
    return [output.detach().clone(), *gradients(opt.model), *rows_of(opt)]


def passes(opt, x, y, count=8):
    """Of the first eight 1, 2, 4 and 8 are checked, the third is captured; those up to the 15th are replayed."""
    return [value for _ in range(count) for value in one_pass(opt, x, y)]


def one_step(opt, x, y):
    (drawn,) = draw_and_step(opt, (x, y), draws=1)
    return [drawn, *gradients(opt.model)]


def assert_both_alike(scene, make=problem, own=True, tolerance=1e-6, **options):
    """Play a scene with an eager and a replaying optimizer: all it tells, the states and random numbers agree."""
    *opts, batch = pair(own, make, **options)
    told = []
    for opt in opts:
        torch.manual_seed(5)
        told.append(list(scene(opt, *batch)))
        told[-1].append(torch.get_rng_state() if opt.generator is None else opt.generator.get_state())
    assert_same(*told, tolerance)
    assert_agree(*opts, tolerance)
    return opts[1]


def assert_same(eager, replayed, tolerance=1e-6):
    assert len(eager) == len(replayed)
    for mine, other in zip(eager, replayed, strict=True):
        if isinstance(mine, Tensor) and isinstance(other, Tensor) and mine.is_floating_point():
            assert mine.shape == other.shape
            assert relative(mine.double(), other.double()) <= 10 * tolerance
        elif isinstance(mine, Tensor) and isinstance(other, Tensor):
            assert torch.equal(mine, other)
        else:
            assert type(mine) is type(other)
            assert mine == other


def error_of(play):
    """What is raised, in words."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        play()
    return type(caught.value), str(caught.value)


def seeded(build):
    """A model that is the same whatever was drawn before, and the usual batch."""

    def make():
        torch.manual_seed(0)
        return build(), problem()[1]

    return make


def residual():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), cases.Residual(4), cases.Residual(4), nn.Flatten(), nn.Linear(36, 3))
    return net, (torch.randn(12, 1, 5, 5), torch.arange(12) % 3)


def replaying_on(make, **options):
    model, batch = make()
    return optimizer(model, True, **options), batch


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def twofold():
    """What comes out of the first activation is needed on the way back, and in no rows."""
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Sigmoid(), nn.Linear(16, 3))
