"""All draws in one pass: the same gradients as draw by draw, where it is possible, and a clean way back where not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import slangvi
from cases import CASES, build
from slangvi.grads import FactoredGradients, GradientCapture, Outer, Rows, batched
from slangvi.grads.batched import BatchedPass
from slangvi.likelihoods import Categorical
from slangvi.methods import gather
from slangvi.methods.gather import with_aliases
from slangvi.params import ParamSpec

FAST = [
    "mlp", "convnet", "conv1d", "conv3d", "residual_groupnorm", "reused_module", "dict_input", "multi_output",
    "embedding_mlp", "sequence_norms", "norms_without_positions",
]  # fmt: skip


def problem(name: str, draws: int = 3):
    case = build(name)
    spec = ParamSpec.of_module(case.model)
    generator = torch.Generator().manual_seed(0)
    mean = spec.flatten({k: v.detach() for k, v in case.model.named_parameters()})
    thetas = mean + 0.1 * torch.randn(draws, len(mean), generator=generator, dtype=torch.float64)

    def log_likelihood(params, batch) -> Tensor:
        return -case.losses(torch.func.functional_call(case.model, dict(params), batch))

    return case, spec, thetas, log_likelihood


def draw_by_draw(case, spec, thetas, log_likelihood):
    capture = GradientCapture(case.model, spec, torch.float64, leaf_totals=False)
    groups = []
    for theta in thetas:
        params = {k: v.detach().requires_grad_() for k, v in spec.unflatten(theta).items()}
        with capture.recording():
            values = log_likelihood(params, case.args)
            grads = torch.autograd.grad(-values.sum(), list(params.values()))
        groups += capture.collect(params, dict(zip(params, grads, strict=True)), 5)
    return FactoredGradients(spec, groups, 2, thetas)


@pytest.mark.parametrize("name", FAST)
def test_one_pass_equals_draw_by_draw(name):
    case, spec, thetas, log_likelihood = problem(name)
    slow = draw_by_draw(case, spec, thetas, log_likelihood)
    batched = BatchedPass(case.model, spec, log_likelihood)
    assert batched.possible
    group, values = batched.gather(thetas, case.args)
    fast = FactoredGradients(spec, [group], 2, thetas)
    close = {"rtol": 1e-9, "atol": 1e-10}
    expected = torch.stack([log_likelihood(spec.unflatten(theta), case.args) for theta in thetas])
    torch.testing.assert_close(values, expected.detach(), **close)
    torch.testing.assert_close(fast.sum(), slow.sum(), **close)
    torch.testing.assert_close(fast.square_sum(), slow.square_sum(), **close)
    torch.testing.assert_close(fast.gram(), slow.gram(), **close)
    C = torch.randn(3, spec.num_params, dtype=torch.float64)
    torch.testing.assert_close(fast.mm(C), slow.mm(C), **close)
    W = torch.randn(15, 2, dtype=torch.float64)
    torch.testing.assert_close(fast.t_mm(W), slow.t_mm(W), **close)
    assert not any(m._forward_hooks and len(m._forward_hooks) > 1 for m in case.model.modules())


def test_data_shared_by_all_draws_is_held_once():
    case, spec, thetas, log_likelihood = problem("mlp")
    group, _ = BatchedPass(case.model, spec, log_likelihood).gather(thetas, case.args)
    assert group.blocks["0.weight"].copies == 3
    assert group.blocks["2.weight"].copies == 1


@pytest.mark.parametrize("name", ["lstm", "transformer_encoder", "raw_parameter", "batchnorm_eval"])
def test_layers_without_rules_rule_it_out(name):
    case, spec, _, log_likelihood = problem(name)
    assert not BatchedPass(case.model, spec, log_likelihood).possible


@pytest.mark.parametrize("name", CASES)
def test_the_functional_method_is_the_same_with_and_without_it(name, monkeypatch):
    case, _spec, _, log_likelihood = problem(name)
    params = {k: v.detach().clone() for k, v in case.model.named_parameters()}
    states, used = [], []
    original = BatchedPass.gather
    monkeypatch.setattr(BatchedPass, "gather", lambda self, *a: used.append(1) or original(self, *a))
    for allowed in (True, False):
        if not allowed:
            monkeypatch.setattr(gather, "_agreeing", lambda *a: None)
        vi = slangvi.slang.build(log_likelihood, num_data=40, rank=2, lr=0.1, mc_samples=2, model=case.model)
        state, generator = vi.init(params), torch.Generator().manual_seed(0)
        for _ in range(3):
            state, _ = vi.update(state, case.args, generator=generator)
        states.append(state)
    torch.testing.assert_close(states[0].loc, states[1].loc, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(states[0].prec_diag, states[1].prec_diag, rtol=1e-8, atol=1e-9)
    if name in FAST:
        assert len(used) == 3


def test_a_model_vmap_cannot_follow_goes_draw_by_draw():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            y = self.layer(x)
            return y if float(y.detach().sum()) > -1e9 else -y

    torch.manual_seed(0)
    model = Branching().double()
    batch = (torch.randn(4, 3).double(), torch.randn(4, 1).double())
    vi = slangvi.slang.build(slangvi.Gaussian().of(model), num_data=9, rank=1, lr=0.1, mc_samples=2, model=model)
    dense = slangvi.slang.build(
        lambda p, b: slangvi.Gaussian().log_prob(b[0] @ p["layer.weight"].T + p["layer.bias"], b[1]),
        num_data=9, rank=1, lr=0.1, mc_samples=2,
    )  # fmt: skip
    states = []
    for method in (vi, dense):
        state, generator = method.init(dict(model.named_parameters())), torch.Generator().manual_seed(0)
        for _ in range(3):
            state, _ = method.update(state, batch, generator=generator)
        states.append(state)
    torch.testing.assert_close(states[0].loc, states[1].loc, rtol=1e-9, atol=1e-10)


def gaussian_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, torch.randn(6, 3).double(), torch.randn(6, 1).double()


def test_a_penalty_that_grows_in_later_is_found_out():
    model, x, y = gaussian_data()
    weight = [0.0]

    def log_likelihood(params, batch):
        penalty = weight[0] * params["0.weight"].square().sum()
        return slangvi.Gaussian().of(model)(params, batch) - penalty

    vi = slangvi.slang.build(log_likelihood, num_data=9, rank=1, lr=0.01, mc_samples=2, model=model)
    state, generator = vi.init(dict(model.named_parameters())), torch.Generator().manual_seed(0)

    def steps(count):
        nonlocal state
        for _ in range(count):
            state, _ = vi.update(state, (x, y), generator=generator)

    steps(3)
    weight[0] = 1.0
    with pytest.raises(slangvi.UnsupportedModuleError, match=r"'0.weight'"):
        steps(2)


def test_batches_may_hold_anything_and_layers_may_be_called_by_keyword():
    class ByKeyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            return self.layer(input=x)

    torch.manual_seed(0)
    model = ByKeyword().double()
    batch = {"x": torch.randn(4, 3).double(), "y": torch.randn(4, 1).double(), "ids": {1, 2}, "note": None}

    def log_likelihood(params, batch):
        outputs = torch.func.functional_call(model, dict(params), (batch["x"],))
        return slangvi.Gaussian().log_prob(outputs, batch["y"])

    states = []
    for engine in ("factored", "dense"):
        vi = slangvi.slang.build(log_likelihood, num_data=9, rank=1, lr=0.1, mc_samples=2, model=model, engine=engine)
        state, generator = vi.init(dict(model.named_parameters())), torch.Generator().manual_seed(0)
        for _ in range(3):
            state, _ = vi.update(state, batch, generator=generator)
        states.append(state)
    torch.testing.assert_close(states[0].loc, states[1].loc, rtol=1e-9, atol=1e-10)


def test_a_pass_that_fails_later_goes_draw_by_draw(monkeypatch):
    model, x, y = gaussian_data()
    vi = slangvi.slang.build(slangvi.Gaussian().of(model), num_data=9, rank=1, lr=0.1, mc_samples=2, model=model)
    state = vi.init(dict(model.named_parameters()))
    for _ in range(2):
        state, _ = vi.update(state, (x, y))

    def broken(self, *arguments):
        raise IndexError("another path")

    monkeypatch.setattr(BatchedPass, "gather", broken)
    state, _ = vi.update(state, (x, y))
    assert state.step == 3


class Forking(nn.Module):
    """The path depends on a switch: which of two layers of one shape, whether one is left out, or called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(3, 3) for _ in range(3))
        self.path = "left"

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.path == "positions":
            return self.left(x.unsqueeze(1).expand(-1, 4, -1)).sum(1) + 0 * self.right(x)
        if self.path == "left":
            return self.left(x) + 0 * self.right(x)
        if self.path == "right":
            return self.right(x) + 0 * self.left(x)
        return self.left(self.left(x)) + self.right(x) if self.path == "twice" else self.left(x)


OTHER_PATHS = {
    "right": "'right' was called out of turn or with other sizes: the model has taken another path",
    "twice": "'left' was called out of turn",
    "skipped": "appears to not have been used",
    "positions": "'left' was called .* with other sizes",
}


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_another_path_is_noticed_although_calls_are_remembered(path):
    torch.manual_seed(0)
    model = Forking().double()
    spec, batch = ParamSpec.of_module(model), (torch.randn(4, 3).double(), torch.randn(4, 3).double())
    thetas = spec.flatten({k: v.detach() for k, v in model.named_parameters()}).expand(2, -1)
    fast = BatchedPass(model, spec, slangvi.Gaussian().of(model))
    fast.gather(thetas, batch)
    remembered = list(fast.calls or [])
    model.path = path
    with pytest.raises(RuntimeError, match=OTHER_PATHS[path]):
        fast.gather(thetas, batch)
    assert fast.calls == remembered
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_another_path_goes_draw_by_draw_and_is_right(path):
    """The third step uses the remembered calls; a second run that never remembers gives the same."""
    states = []
    for allowed in (True, False):
        torch.manual_seed(0)
        model = Forking().double()
        batch = (torch.randn(4, 3).double(), torch.randn(4, 3).double())
        vi = slangvi.slang.build(
            slangvi.Gaussian().of(model), num_data=9, rank=1, lr=0.1, mc_samples=2, model=model, verify=allowed
        )
        state, generator = vi.init(dict(model.named_parameters())), torch.Generator().manual_seed(0)
        for step in range(4):
            model.path = path if step == 2 else "left"
            state, _ = vi.update(state, batch, generator=generator)
        states.append(state)
    torch.testing.assert_close(states[0].loc, states[1].loc, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(states[0].prec_diag, states[1].prec_diag, rtol=1e-9, atol=1e-10)


def test_a_model_that_does_not_agree_is_asked_again_ever_more_rarely(monkeypatch):
    """Dropout draws other masks each time; looking costs a pass, so it is not done at every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    batch = (torch.randn(4, 3).double(), torch.randn(4, 1).double())
    used, original = [], BatchedPass.gather
    monkeypatch.setattr(BatchedPass, "gather", lambda self, *a: used.append(state.step + 1) or original(self, *a))
    vi = slangvi.slang.build(slangvi.Gaussian().of(model), num_data=9, rank=1, lr=0.01, mc_samples=2, model=model)
    state = vi.init(dict(model.named_parameters()))
    for _ in range(9):
        state, _ = vi.update(state, batch)
    assert used == [1, 2, 4, 8]


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("name", ["mlp", "convnet", "reused_module"])
def test_many_problems_at_once_equal_one_by_one(name, weighed):
    """Two problems with draws and data of their own; what all examples of a problem share comes along."""
    case, spec, thetas, log_likelihood = problem(name, draws=4)
    thetas = thetas.unflatten(0, (2, 2))
    data = tuple(torch.stack([x, x.flip(0)]) for x in case.args)
    weights = torch.rand(2, case.num_examples, dtype=torch.float64) if weighed else None

    def scaled(params, batch) -> Tensor:
        *args, scale = batch
        return scale * log_likelihood(params, tuple(args))

    shared = torch.tensor([1.0, 3.0], dtype=torch.float64)
    together = BatchedPass(case.model, spec, scaled)
    tensors, values = together.gather_replicas(thetas, (*data, shared), weights)
    half = len(tensors) // 2
    for k in range(2):
        group, table = BatchedPass(case.model, spec, scaled).gather(thetas[k], (*(x[k] for x in data), shared[k]))
        expected = FactoredGradients(spec, [group], 2, thetas).form()
        if weights is not None:
            expected = expected * weights[k].repeat(2)[:, None]
        found = together.rows([x[k] for x in tensors[:half]], [x[k] for x in tensors[half:]])
        torch.testing.assert_close(FactoredGradients(spec, [found], 2, thetas).form(), expected, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(values[k], table, rtol=1e-9, atol=1e-10)


def agreement(monkeypatch, answers=None):
    """Steps at which a network was asked for all draws at once, and what it was compared with the last time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    batch = (torch.randn(4, 3).double(), torch.randn(4, 1).double())
    vi = slangvi.slang.build(slangvi.Gaussian().of(model), num_data=9, rank=1, lr=0.01, mc_samples=2, model=model)
    state, asked, compared, original = vi.init(dict(model.named_parameters())), [], [], gather._agreeing

    def agreeing(*given):
        asked.append(state.step + 1)
        compared[:] = given
        return original(*given) if (answers or {}).get(state.step + 1, True) else None

    monkeypatch.setattr(gather, "_agreeing", agreeing)
    for _ in range(12):
        state, _ = vi.update(state, batch)
    return asked, lambda groups: original(*compared[:3], groups), compared[3]


def test_one_draw_that_agrees_is_enough(monkeypatch):
    """Where a unit's input is zero up to rounding, a draw may fall on either side of a kink."""
    asked, agrees, groups = agreement(monkeypatch)
    assert asked == [1, 2, 4, 8]
    spoilt = [replace(g, totals={name: 1.1 * total for name, total in g.totals.items()}) for g in groups]
    assert agrees(groups)
    assert agrees([spoilt[0], groups[1]])
    assert agrees([groups[0], spoilt[1]])
    assert not agrees(spoilt)
    assert not agrees(groups[:1])


def test_a_model_that_has_agreed_before_is_asked_again_at_once(monkeypatch):
    asked, _, _ = agreement(monkeypatch, {4: False, 5: False})
    assert asked == [1, 2, 4, 5, 6, 8]


def test_a_model_that_no_longer_agrees_is_left_alone_after_a_few_tries(monkeypatch):
    asked, _, _ = agreement(monkeypatch, dict.fromkeys(range(4, 13), False))
    assert asked == [1, 2, 4, 5, 6, 7, 8]


def test_inputs_and_output_gradients_are_used_up():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    spec = ParamSpec.of_module(model)
    run = BatchedPass(model, spec, Categorical().of(model))
    batch, thetas = (torch.randn(5, 3), torch.randint(2, (5,))), torch.randn(2, spec.num_params)
    run.gather(thetas, batch)
    inputs = [torch.randn(2, 5, 3), torch.randn(2, 5, 4)]
    deltas = [torch.randn(2, 5, 4), torch.randn(2, 5, 2)]
    expected = [(delta.flatten(0, 1).mT @ x.flatten(0, 1)).flatten() for x, delta in zip(inputs, deltas, strict=True)]
    group = run.rows(inputs, deltas)
    assert not inputs
    assert not deltas
    for name, total in zip(("0.weight", "2.weight"), expected, strict=True):
        torch.testing.assert_close(group.blocks[name].sum(), total)


def test_layers_with_few_parameters_go_first(monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    spec, order = ParamSpec.of_module(model), []
    run = BatchedPass(model, spec, Categorical().of(model))
    made = run._blocks
    monkeypatch.setattr(run, "_blocks", lambda name, x, delta: order.append(name) or made(name, x, delta))
    run.gather(torch.randn(2, spec.num_params), (torch.randn(5, 1, 4, 4), torch.randint(2, (5,))))
    assert order == ["1", "4", "0"]


def test_uses_of_one_tensor_are_added_in_the_order_of_their_calls(monkeypatch):
    """Whichever of the layers comes first, the sum is rounded as it always was."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 6, bias=False))
    model[-1].weight = model[0].weight
    spec = ParamSpec.of_module(model)
    run = BatchedPass(model, with_aliases(spec, model), Categorical().of(model))
    seen = []
    monkeypatch.setattr(batched, "add", lambda uses: seen.append([type(use) for use in uses]) or uses[0])
    monkeypatch.setattr(run, "_size", lambda turn: -turn)
    run.gather(torch.randn(2, spec.num_params), (torch.randint(6, (5, 1)), torch.randint(6, (5,))))
    assert [Rows, Outer] in seen
