"""Chains of HMC on the noisy cubic, the reference: moments of the function, and how well chains agree."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slangvi_reproduction.experiments import _hmc
from slangvi_reproduction.experiments._cells import Arrays, Attempt, Cell
from slangvi_reproduction.experiments._cubic import Moments, outputs
from slangvi_reproduction.experiments._toy_cells import generator_of, problem_of

__all__ = ["compute_chains"]


def compute_chains(cell: Cell, attempt: Attempt) -> Arrays:
    """Chains from draws of the prior: warm up, then keep the function of every few draws on the grid."""
    run = _Chains(cell)
    kept = attempt.restored()
    if kept is not None:
        run.restore(kept)
    while run.done < run.total:
        run.block()
        attempt.tick(run.done, run.total, run.capture)
    return run.result()


class _Chains:
    """The moving parts.

    Args:
        cell: settings.
    """

    def __init__(self, cell: Cell) -> None:
        self.settings, self.problem = cell.settings, problem_of(cell)
        self.generator, self.done = generator_of(cell, "chains"), 0
        self.warmup = int(self.settings["warmup"])
        self.total = self.warmup + int(self.settings["draws"])
        shape = (self.settings["chains"], self.problem.num_params)
        prior = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        self.chains = _hmc.begin(self.problem.log_density, prior / self.problem.prior_precision**0.5)
        self.accepted = torch.zeros(len(prior), dtype=torch.float64)
        self.curves: list[Tensor] = []
        self.densities: list[Tensor] = []

    def block(self) -> None:
        """As many trajectories as lie between two draws that are kept."""
        for _ in range(self.settings["thin"]):
            warming = self.done < self.warmup
            target = self.settings["target"] if warming else None
            settings = (self.settings["longest"], self.generator, target)
            self.chains = _hmc.advance(self.problem.log_density, self.chains, *settings)
            self.done += 1
            self.accepted += 0.0 if warming else self.chains.acceptance
        if self.done > self.warmup:
            self.curves.append(self.problem.unscaled(outputs(self.chains.theta, self.problem.grid)))
            self.densities.append(self.chains.density)

    def result(self) -> Arrays:
        """Moments of all draws and of groups of chains against the others, and how well the chains agree."""
        curves = torch.stack(self.curves, 1)
        groups = curves.chunk(self.settings["groups"])
        others = [torch.cat([*groups[:k], *groups[k + 1 :]]) for k in range(len(groups))]
        found = {
            "mean": _moments(curves).mean.unsqueeze(0),
            "sd": _moments(curves).sd.unsqueeze(0),
            "group_sd": torch.stack([_moments(group).sd for group in groups]),
            "others_sd": torch.stack([_moments(rest).sd for rest in others]),
            "acceptance": self.accepted / (self.total - self.warmup),
            "step_size": self.chains.adaptation.average.exp(),
            "rhat": _hmc.split_rhat(curves),
            "rhat_density": _hmc.split_rhat(torch.stack(self.densities, 1)),
        }
        return {name: value.numpy() for name, value in found.items()}

    def capture(self) -> Arrays:
        """All that the next block depends on."""
        empty = torch.zeros(0, dtype=torch.float64)
        tensors = {"random": self.generator.get_state(), "accepted": self.accepted, **_tensors(self.chains)}
        tensors |= {f"adapt_{name}": value for name, value in _tensors(self.chains.adaptation).items()}
        tensors["curves"] = torch.stack(self.curves) if self.curves else empty
        tensors["densities"] = torch.stack(self.densities) if self.densities else empty
        count = {"done": np.array(self.done), "count": np.array(self.chains.adaptation.count)}
        return {name: value.numpy() for name, value in tensors.items()} | count

    def restore(self, kept: Arrays) -> None:
        """Go back to what `capture` returned."""
        tensors = {name: torch.from_numpy(value) for name, value in kept.items()}
        self.done, self.accepted = int(kept["done"]), tensors["accepted"]
        self.generator.set_state(tensors["random"])
        self.curves, self.densities = list(tensors["curves"]), list(tensors["densities"])
        adaptation = self.chains.adaptation
        new: dict[str, Any] = {name: tensors[f"adapt_{name}"] for name in _tensors(adaptation)}
        adaptation = replace(adaptation, count=int(kept["count"]), **new)
        mine: dict[str, Any] = {name: tensors[name] for name in _tensors(self.chains)}
        self.chains = replace(self.chains, adaptation=adaptation, **mine)


def _moments(curves: Tensor) -> Moments:
    """Over chains and draws, (C, T, G)."""
    flat = curves.flatten(0, 1)
    return Moments(flat.mean(0), flat.std(0))


def _tensors(state: Any) -> dict[str, Tensor]:
    """The tensors of a dataclass by the names of its fields."""
    found = {entry.name: getattr(state, entry.name) for entry in fields(state)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
