"""What torch's own optimizer tests ask of every optimizer, as checks of ours: one function per row.

Ported by meaning from PyTorch's test/test_optim.py (OptimizerInfo). Each takes `make(**options)`, which returns an
optimizer with a fresh model and generator, and raises AssertionError.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from helpers.optimizer_runs import N, assert_identical, flat
from slangvi.params.state import tensors_of

Make = Callable[..., Any]
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 3
CHECKS: dict[str, Callable[[Make], None]] = {}


def check(function: Callable[[Make], None]) -> Callable[[Make], None]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def maker(kind: type, given: dict[str, Any]) -> Make:
    def make(seed: int = 1, params: Callable[[nn.Module], Any] = lambda model: None, **options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        generator = torch.Generator().manual_seed(seed)
        return kind(model, params(model), **({"num_data": N, "generator": generator} | given | options))

    return make


def train(opt: Any, steps: int = 2) -> Any:
    for _ in range(steps):
        opt.step(lambda: closure(opt))
    return opt


def closure(opt: Any) -> torch.Tensor:
    opt.zero_grad()
    loss = F.cross_entropy(opt.model(X), Y)
    loss.backward()
    return loss


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]


@check
def param_groups(make: Make) -> None:
    """groups take their own rate, defaults fill the rest, and every group lists its parameters."""
    opt = make(params=groups)
    assert [group["lr"] for group in opt.param_groups] == [0.01, opt.defaults["lr"]]
    assert all(set(opt.defaults) <= set(group) for group in opt.param_groups)
    assert [len(group["params"]) for group in opt.param_groups] == [2, 2]
    train(opt)


@check
def named_parameters(make: Make) -> None:
    """`model.named_parameters()` may be given in place of `model.parameters()`."""
    named, plain = make(params=lambda m: list(m.named_parameters())), make(params=lambda m: list(m.parameters()))
    assert_identical(train(named), train(plain))
    assert named.param_groups[0]["param_names"][0] == "0.weight"


@check
def groups_equal_to_one(make: Make) -> None:
    """two groups that agree are one group."""
    split = make(params=lambda m: [{"params": m[0].parameters()}, {"params": m[2].parameters()}])
    assert_identical(train(split), train(make()))


@check
def add_param_group(make: Make) -> None:
    """parameters added between steps take part from then on, and one that is there already is refused."""
    opt = train(make(params=lambda m: list(m[2].parameters())))
    before = opt.model[0].weight.detach().clone()
    opt.add_param_group({"params": list(opt.model[0].parameters())})
    train(opt)
    assert not torch.equal(opt.model[0].weight, before)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        opt.add_param_group({"params": [opt.model[0].weight]})
    assert len(opt.param_groups) == 2


@check
def errors_of_all_optimizers(make: Make) -> None:
    """no parameters, a single tensor, things that are no tensors, duplicates and negative rates are refused."""
    for params, error, match in [
        (lambda m: [], ValueError, "nothing to infer|empty"),
        (lambda m: m[0].weight, TypeError, "single tensor"),
        (lambda m: [1.0], TypeError, "can only optimize Tensors"),
        (lambda m: [m[0].weight * 2], ValueError, "leaf"),
        (lambda m: [{"params": [m[0].weight]}, {"params": [m[0].weight]}], ValueError, "more than one"),
    ]:
        with pytest.raises(error, match=match):
            make(params=params)
    with pytest.raises(ValueError, match="lr must"):
        make(lr=-0.1)


@check
def state_dict_round_trip(make: Make) -> None:
    """a `state_dict` goes through `torch.save` and `weights_only=True`, and the run goes on to the last bit."""
    opt, buffer = train(make(params=groups)), io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    other = make(seed=5, params=groups)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert_identical(train(other), train(opt))


@check
def state_dict_is_deterministic(make: Make) -> None:
    """asking twice gives the same, and loading one's own changes nothing."""
    opt = train(make())
    first, second = copy.deepcopy(opt.state_dict()), opt.state_dict()
    assert first["param_groups"] == second["param_groups"]
    pairs = [(first["slangvi"]["tensors"][k], v) for k, v in second["slangvi"]["tensors"].items()]
    assert pairs
    assert all(torch.equal(a, b) for a, b in pairs)
    before = flat(opt.model).clone()
    opt.load_state_dict(second)
    assert torch.equal(flat(opt.model), before)


@check
def state_dict_between_named_and_unnamed(make: Make) -> None:
    """a run with named parameters is taken up by one without, and back."""
    named, plain = make(params=lambda m: list(m.named_parameters())), make(params=lambda m: list(m.parameters()))
    train(named)
    plain.load_state_dict(named.state_dict())
    assert torch.equal(flat(plain.model), flat(named.model))
    named.load_state_dict(train(plain).state_dict())
    assert torch.equal(flat(plain.model), flat(named.model))


@check
def state_dict_hooks(make: Make) -> None:
    """hooks of `state_dict` and `load_state_dict` fire once each, see all that is saved, and may replace it."""
    opt, other, seen = train(make()), make(), []
    opt.register_state_dict_pre_hook(lambda o: seen.append("saving"))
    opt.register_state_dict_post_hook(lambda o, s: seen.append("saved") or {**s, "note": sorted(s)})
    other.register_load_state_dict_pre_hook(lambda o, s: seen.append("loading " + " ".join(s.pop("note"))))
    other.register_load_state_dict_pre_hook(lambda o, s: {k: v for k, v in s.items() if k != "junk"})
    other.register_load_state_dict_post_hook(lambda o: seen.append(torch.equal(flat(o.model), flat(opt.model))))
    saved = opt.state_dict()
    other.load_state_dict(saved)
    assert seen == ["saving", "saved", "loading param_groups slangvi state", True]
    assert "note" in saved
    assert_identical(other, opt)


@check
def step_hooks(make: Make) -> None:
    """hooks before and after a step fire around it, also those of the class, and can be removed."""
    opt, seen = make(), []
    before = opt.register_step_pre_hook(lambda o, args, kwargs: seen.append("before"))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append("after"))
    handle = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append("class"))
    try:
        train(opt, 1)
    finally:
        handle.remove()
    assert seen == ["before", "after", "class"]
    before.remove()
    train(opt, 1)
    assert seen[3:] == ["after"]


@check
def deepcopy_and_pickle(make: Make) -> None:
    """copies have all public attributes and go on as the original does."""
    opt = train(make(params=groups))
    twins = [copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))]
    for twin in twins:
        public = {name for name in vars(opt) if not name.startswith("_")}
        assert public <= {name for name in vars(twin) if not name.startswith("_")} | {"info"}
        train(twin)
    train(opt)
    for twin in twins:
        assert_identical(twin, opt)


@check
def schedulers(make: Make) -> None:
    """schedulers of every family set the rate that the next step uses, one after another or chained."""
    table: list[Callable[[Any], Any]] = [
        lambda o: lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
        lr_scheduler.ConstantLR,
        lr_scheduler.LinearLR,
        lr_scheduler.PolynomialLR,
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
        lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8, cycle_momentum=False),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)], [2]),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)]),
    ]
    for build in table:
        opt, manual = make(), make()
        scheduler = build(opt)
        for _ in range(3):
            manual.param_groups[0]["lr"] = opt.param_groups[0]["lr"]
            train(opt, 1)
            train(manual, 1)
            scheduler.step()
        assert torch.equal(flat(opt.model), flat(manual.model))


@check
def plateau(make: Make) -> None:
    """`ReduceLROnPlateau` lowers the rate when the loss stops falling."""
    opt = make()
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    rate = opt.param_groups[0]["lr"]
    for _ in range(3):
        train(opt, 1)
        scheduler.step(1.0)
    assert opt.param_groups[0]["lr"] < rate


@check
def tensor_rates(make: Make) -> None:
    """a rate may be a tensor of one number."""
    opt, plain = make(), make()
    opt.param_groups[0]["lr"] = torch.tensor(0.02)
    plain.param_groups[0]["lr"] = float(torch.tensor(0.02))
    assert_identical(train(opt), train(plain))


@check
def closures(make: Make) -> None:
    """`step(closure)` returns the loss, runs with gradients on whatever the mode, and `step()` returns None."""
    opt = make()
    with torch.no_grad():
        loss = opt.step(lambda: closure(opt))
    assert loss.ndim == 0
    assert bool(loss > 0)
    with opt.sampled_params(train=True):
        closure(opt)
    assert opt.step() is None


@check
def zero_grad(make: Make) -> None:
    """`zero_grad` sets gradients to None, or to zero in the same tensors when asked."""
    opt = train(make())
    tensors = [p.grad for p in opt.model.parameters()]
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is g and not g.any() for p, g in zip(opt.model.parameters(), tensors, strict=True))
    opt.zero_grad()
    assert all(p.grad is None for p in opt.model.parameters())


@check
def step_without_gradients(make: Make) -> None:
    """a step that was given nothing says so and changes nothing."""
    opt = train(make())
    before = flat(opt.model).clone()
    with pytest.raises(RuntimeError, match="found no gradients"):
        opt.step()
    assert torch.equal(flat(opt.model), before)


@check
def unknown_flags(make: Make) -> None:
    """`foreach`, `fused`, `capturable`, `differentiable` and `maximize` are refused, not ignored."""
    for flag in ("foreach", "fused", "capturable", "differentiable", "maximize"):
        with pytest.raises(TypeError, match=flag):
            make(**{flag: True})


@check
def dtypes(make: Make) -> None:
    """float32, float64 and bfloat16 are trained in float32 or better; complex parameters are refused by name."""
    opt = make()
    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(opt.model).to(dtype)
        other = type(opt)(model, num_data=N, generator=torch.Generator())
        other.step(lambda m=model: backward(F.cross_entropy(m(X.to(dtype)).float(), Y)))  # noqa: B023
        assert {value.dtype for _, value in tensors_of(other._state)} == {torch.float32}
    module = nn.ParameterDict({"z": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    with pytest.raises(TypeError, match=r"z.*complex64"):
        type(opt)(module, num_data=N)


def backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss


@check
def layouts(make: Make) -> None:
    """parameters that are not contiguous are trained as those that are."""
    opt, plain = make(), make()
    weight = opt.model[0].weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    torch.testing.assert_close(flat(train(opt).model), flat(train(plain).model))


@torch.no_grad()
def loss_at_the_mean(opt: Any) -> float:
    return float(F.cross_entropy(opt.model(X), Y))


@check
def losses_fall(make: Make) -> None:
    """thirty steps lower the loss at the mean, with and without a scheduler."""
    for scheduled in (False, True):
        opt = make()
        scheduler = lr_scheduler.ExponentialLR(opt, 0.99) if scheduled else None
        start = loss_at_the_mean(opt)
        for _ in range(30):
            train(opt, 1)
            if scheduler is not None:
                scheduler.step()
        assert loss_at_the_mean(opt) < start


@check
def representation(make: Make) -> None:
    """`repr` names the class and the rate of every group."""
    opt = make(params=groups)
    text = repr(opt)
    assert text.startswith(type(opt).__name__)
    assert text.count("    lr: ") == 2


@check
def no_cycles_are_left(make: Make) -> None:
    """an optimizer that is no longer held goes away with its state."""
    opt = train(make())
    seen = weakref.ref(opt)
    del opt
    gc.collect()
    assert seen() is None
