"""Everybody else: a table of methods that take a training step on the same problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slangvi.params import ParamSpec
from slangvi_reproduction.bench._measure import BASELINE, FLOOR, Contender, Step
from slangvi_reproduction.bench.networks import Problem

__all__ = ["PEERS", "Peer", "contenders", "sampled_loop"]


def backward(problem: Problem) -> Step:
    """One pass forward and back over M·S examples, nothing else."""
    model, (x, y) = problem.model(), problem.repeated

    def step() -> None:
        model.zero_grad()
        problem.loss(model(x), y).backward()

    return step


def adam(problem: Problem, **options: Any) -> Step:
    """Adam on M·S examples: as many through the network as a step with S draws."""
    model, (x, y) = problem.model(), problem.repeated
    opt = torch.optim.Adam(model.parameters(), **options)

    def step() -> None:
        opt.zero_grad(set_to_none=not options.get("capturable", False))
        problem.loss(model(x), y).backward()
        opt.step()

    return step


def adam_graph(problem: Problem) -> Step:  # pragma: no cover
    """The fused step captured once and replayed: what Adam costs when the host costs nothing."""
    step = adam(problem, fused=True, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return partial(_replay, graph, step)


def _replay(graph: Any, kept: Step) -> None:  # pragma: no cover
    """The graph works on the memory of model and optimizer, which live as long as the step that made them is kept."""
    graph.replay()


def sampled_loop(opt: Any, model: nn.Module, problem: Problem) -> Step:
    """The loop that IVON and SLANG share: S draws, one backward pass each."""

    def step() -> None:
        for _ in range(problem.draws):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                problem.loss(model(problem.x), problem.y).backward()
        opt.step()

    return step


def ivon(problem: Problem) -> Step:
    """IVON in the loop of its own documentation."""
    model = problem.model()
    return sampled_loop(import_module("ivon").IVON(model.parameters(), lr=0.1, ess=problem.num_data), model, problem)


def bayes_by_backprop(problem: Problem) -> Step:
    """A mean-field Gaussian by the reparameterisation trick, all draws in one vmap, trained with Adam."""
    model = problem.model()
    spec = ParamSpec.of_module(model)
    loc = spec.flatten(dict(model.named_parameters())).detach().requires_grad_()
    rho = torch.full_like(loc, -3.0).requires_grad_()
    opt = torch.optim.Adam([loc, rho], lr=1e-3)

    def loss(theta: Tensor) -> Tensor:
        return problem.loss(torch.func.functional_call(model, spec.unflatten(theta), (problem.x,)), problem.y)

    def step() -> None:
        opt.zero_grad()
        scale = F.softplus(rho)
        draws = loc + scale * torch.randn(problem.draws, len(loc), device=loc.device)
        kl = 0.5 * (scale.square() + loc.square() - 1).sum() - scale.log().sum()
        (torch.func.vmap(loss)(draws).mean() + kl / problem.num_data).backward()
        opt.step()

    return step


def pyro(problem: Problem, rank: int) -> Step:
    """Pyro's low-rank plus diagonal covariance, its ELBO with S particles, trained with Adam."""
    library, infer = import_module("pyro"), import_module("pyro.infer")
    model = problem.model()
    spec = ParamSpec.of_module(model)
    prior = library.distributions.Normal(problem.x.new_zeros(spec.num_params, dtype=torch.float32), 1.0).to_event(1)

    def joint() -> None:
        theta = spec.unflatten(library.sample("theta", prior))
        loss = problem.loss(torch.func.functional_call(model, theta, (problem.x,)), problem.y)
        library.factor("likelihood", -problem.num_data * loss)

    # Parameters in the guide and not in Pyro's global store: several ranks live in one process.
    local = partial(library.settings.context, module_local_params=True)
    with local():
        guide = infer.autoguide.AutoLowRankMultivariateNormal(joint, init_scale=0.1, rank=rank)
        elbo = infer.Trace_ELBO(num_particles=problem.draws)(joint, guide)
        elbo()
    opt = torch.optim.Adam(guide.parameters(), lr=1e-3)

    def step() -> None:
        opt.zero_grad()
        with local():
            elbo().backward()
        opt.step()

    return step


@dataclass(frozen=True)
class _OneBatch:
    """What laplace-torch needs of a loader, without the cost of collating."""

    dataset: Tensor
    batch: tuple[Tensor, Tensor]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.batch

    def __len__(self) -> int:
        return 1


def laplace(problem: Problem, subset_of_weights: str, hessian_structure: str) -> Step:
    """laplace-torch fitted to M·S examples around a trained network, by BackPACK where it can be chosen."""
    library, curvature = import_module("laplace"), import_module("laplace.curvature")
    choice = {} if hessian_structure == "lowrank" else {"backend": curvature.BackPackGGN}
    options = {"subset_of_weights": subset_of_weights, "hessian_structure": hessian_structure}
    fitted = library.Laplace(problem.model(), "classification", **options, **choice)
    return partial(fitted.fit, _OneBatch(problem.repeated[0], problem.repeated))


@dataclass(frozen=True)
class Peer:
    """One row of the table.

    Args:
        name: of the contender.
        make: problem → step; with the rank as second argument if `ranked`.
        note: what a step is, where that needs saying.
        cuda: runs on a GPU only.
        ranked: has a rank, and so a row for each.
    """

    name: str
    make: Callable[..., Step]
    note: str = ""
    cuda: bool = False
    ranked: bool = False


_FIT = "a fit to a trained network"
PEERS = (
    Peer(FLOOR, backward, "no update"),
    Peer(BASELINE, adam),
    Peer("adam, fused", partial(adam, fused=True), cuda=True),
    Peer("adam, fused, CUDA graph", adam_graph, cuda=True),
    Peer("ivon", ivon),
    Peer("bayes by backprop", bayes_by_backprop),
    Peer("pyro low-rank", pyro, ranked=True),
    Peer("laplace, diagonal", partial(laplace, subset_of_weights="all", hessian_structure="diag"), _FIT),
    Peer("laplace, last layer", partial(laplace, subset_of_weights="last_layer", hessian_structure="full"), _FIT),
    Peer("laplace, low-rank", partial(laplace, subset_of_weights="all", hessian_structure="lowrank"), _FIT),
)


def contenders(problem: Problem, device: str, ranks: Sequence[int] = (), names: Sequence[str] = ()) -> list[Contender]:
    """The rows of the table that run on a device, or those of the given names; ranked ones once for each rank."""
    found = []
    for peer in PEERS:
        if (peer.name in names or not names) and (device == "cuda" or not peer.cuda):
            for rank in ranks if peer.ranked else (None,):
                make = partial(peer.make, problem) if rank is None else partial(peer.make, problem, rank)
                labels = {} if rank is None else {"L": rank}
                found.append(Contender(peer.name, make, labels, peer=True, note=peer.note))
    return found
