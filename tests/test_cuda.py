"""The same promises on a GPU; skipped where there is none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

import slangvi
from cases import CASES, RANDOM_CASES, build
from helpers.captured_gradients import rows_of
from helpers.replica_problems import regression
from reference import loop_gradients
from slangvi import replicas
from slangvi.params import ParamSpec
from slangvi.rows import FactoredGradients, GradientRecorder

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # autograd's thread makes its context late
]


def to_cuda(case):
    case.model.cuda()
    case.args = tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, case.args)
    inner = case.losses
    case.losses = lambda out: inner(tree_map(lambda x: x.cpu(), out))
    return case


@pytest.mark.parametrize("name", CASES)
def test_per_example_gradients_equal_the_loop(name):
    case = to_cuda(build(name))
    truth = loop_gradients(case)
    spec = ParamSpec.of_module(case.model)
    capture = GradientRecorder(case.model, spec, torch.float64)
    with capture.recording():
        case.losses(case.model(*case.args)).sum().backward()
    operator = FactoredGradients(spec, capture.collect(), truth)
    rows = rows_of(operator)
    torch.testing.assert_close(rows, truth, rtol=1e-9, atol=1e-9)
    (gram,) = [some.gram() for _, some in operator.segments()]
    torch.testing.assert_close(gram, truth @ truth.T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", RANDOM_CASES)
def test_rows_under_dropout_add_up(name):
    case = to_cuda(build(name))
    spec = ParamSpec.of_module(case.model)
    capture = GradientRecorder(case.model, spec, torch.float64)
    with capture.recording():
        case.losses(case.model(*case.args)).sum().backward()
    operator = FactoredGradients(spec, capture.collect(), torch.empty(0).double().cuda())
    rows = rows_of(operator)
    torch.testing.assert_close(rows.sum(0), operator.sum(), rtol=1e-9, atol=1e-9)


def run(device, moved_late=False, steps=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(10, 4).double(), torch.arange(10) % 3
    if not moved_late:
        model.to(device)
    opt = slangvi.SLANG(model, num_data=30, rank=3, lr=0.1, init_precision=1e12, **options)
    if moved_late:
        model.to(device)
    x, y = x.to(device), y.to(device)
    for _ in range(steps):
        with opt.sampled_params(train=True):
            F.cross_entropy(model(x), y).backward()
        opt.step()
    return opt


@pytest.mark.parametrize("moved_late", [False, True])
def test_the_optimizer_agrees_with_the_cpu(moved_late):
    """A huge initial precision makes draws equal the mean, so that different random streams do not matter."""
    cpu, gpu = run("cpu"), run("cuda", moved_late)
    torch.testing.assert_close(gpu.posterior.mean.cpu(), cpu.posterior.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gpu.posterior.prec_diag.cpu(), cpu.posterior.prec_diag, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("projection", ["eig", "em"])
@pytest.mark.parametrize("curvature", ["ef", "ggn"])
def test_curvatures_and_projections_agree_with_the_cpu(curvature, projection):
    options = {"curvature": curvature, "projection": projection, "likelihood": "categorical", "steps": 40}
    cpu, gpu = (run(device, precision_warmup=False, precision_lr=1e-3, **options) for device in ("cpu", "cuda"))
    torch.testing.assert_close(gpu.posterior.mean.cpu(), cpu.posterior.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gpu.posterior.prec_diag.cpu(), cpu.posterior.prec_diag, rtol=1e-6, atol=1e-6)


def test_generators_and_resume_on_the_gpu():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).cuda()
    x, y = torch.randn(10, 4).cuda(), (torch.arange(10) % 3).cuda()
    opt = slangvi.SLANG(model, num_data=30, rank=2, lr=0.1, generator=torch.Generator("cuda").manual_seed(0))

    def train(opt, steps):
        for _ in range(steps):
            with opt.sampled_params(train=True), torch.autocast("cuda", torch.bfloat16):
                F.cross_entropy(opt.model(x), y).backward()
            opt.step()
        return opt

    before = torch.cuda.get_rng_state()
    train(opt, 2)
    assert torch.equal(before, torch.cuda.get_rng_state())
    twin = copy.deepcopy(opt)
    assert torch.equal(train(opt, 2).posterior.mean, train(twin, 2).posterior.mean)
    wrong = slangvi.SLANG(nn.Linear(1, 1).cuda(), num_data=1, generator=torch.Generator())
    with pytest.raises(ValueError, match="generator is on cpu"), wrong.sampled_params():
        pass


def test_replicas_on_the_gpu_are_what_they_are_elsewhere_and_alone():
    """CPU generators: as on the CPU. CUDA generators: as a single run on the GPU. One generator: any draws."""
    problem = regression(torch.float64)
    index = torch.randint(30, (4, 5))

    def run(device, generators, problem, counts=(5, 5, 3, 5)):
        moved = copy.copy(problem)
        moved.data = tuple(x.to(device) for x in problem.data)
        moved.starts = [{name: value.to(device) for name, value in start.items()} for start in problem.starts]
        runs = moved.runs()
        state = runs.init(moved.starts)
        for _ in range(5):
            state, info = runs.update(state, moved.batch(index), generators, counts)
        assert info.failures == ()
        return runs, state

    _, cpu = run("cpu", replicas.streams(range(4)), problem)
    _, gpu = run("cuda", replicas.streams(range(4)), problem)
    assert gpu.loc.is_cuda
    torch.testing.assert_close(gpu.loc.cpu(), cpu.loc, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gpu.prec_diag.cpu(), cpu.prec_diag, rtol=1e-9, atol=1e-9)
    runs, state = run("cuda", replicas.streams(range(4), "cuda"), problem)
    for k, size in enumerate((5, 5, 3, 5)):
        vi, generator = problem.alone(k), torch.Generator("cuda").manual_seed(k)
        single = vi.init({name: value.cuda() for name, value in problem.starts[k].items()})
        batch = tuple(x[k, :size].cuda() for x in problem.batch(index))
        for _ in range(5):
            single, _ = vi.update(single, batch, generator=generator)
        torch.testing.assert_close(runs.replica(state, k).loc, single.loc, rtol=1e-9, atol=1e-9)
    _, state = run("cuda", torch.Generator("cuda").manual_seed(0), problem)
    assert state.step.tolist() == [5] * 4


def test_prediction_and_functional_api_on_the_gpu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).cuda()
    x, y = torch.randn(10, 4).cuda(), (torch.arange(10) % 3).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    vi = slangvi.slang.build(slangvi.Categorical().of(model), num_data=30, rank=2, lr=0.1, mc_samples=2, model=model)
    state = vi.init(dict(model.named_parameters()))
    for _ in range(3):
        state, _ = vi.update(state, (x, y), generator=generator)
    probs = slangvi.predictive_samples(model, vi.posterior(state), x, 8, generator=generator, batch_size=3)
    assert probs.device.type == "cuda"
    torch.testing.assert_close(probs.sum(-1), torch.ones(8, 10, device="cuda"))
