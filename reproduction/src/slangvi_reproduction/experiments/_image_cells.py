"""One network on images with one setting: training in stages, measured along the way; and the choice of a setting."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slangvi.errors import NumericalError
from slangvi_reproduction.data import Images, load_fashion_mnist, load_mnist
from slangvi_reproduction.experiments._cells import Arrays, Attempt, Cell, read
from slangvi_reproduction.experiments._image_learners import IMAGE_LEARNERS
from slangvi_reproduction.experiments._image_letters import letters
from slangvi_reproduction.experiments._image_networks import CLASSES, network
from slangvi_reproduction.experiments._image_scores import (
    METRICS,
    STRANGER_METRICS,
    Predicted,
    predict,
    scores,
    strangeness,
    turned,
)
from slangvi_reproduction.experiments._learners import Learner
from slangvi_reproduction.experiments._lockstep import seed_of, trace_steps
from slangvi_reproduction.experiments._task import Task, categorical

__all__ = ["LOADERS", "Pictures", "chosen_setting", "compute_final", "compute_tuning", "load"]

LOADERS: dict[str, Callable[[str], Images]] = {"mnist": load_mnist, "fashion_mnist": load_fashion_mnist}


class Pictures(NamedTuple):
    """All images on a device.

    Args:
        x_train: (60000, 1, 28, 28).
        y_train: (60000,).
        x_test: (10000, 1, 28, 28).
        y_test: (10000,).
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    def part(self, name: str, count: int) -> tuple[Tensor, Tensor]:
        """So many images of "tuning", "train", "validation" (the last training images), or "test"."""
        if name == "test":
            return self.x_test[:count], self.y_test[:count]
        if name == "validation":
            return self.x_train[-count:], self.y_train[-count:]
        return self.x_train[:count], self.y_train[:count]


@lru_cache(maxsize=1)
def load(data: str, device: str) -> Pictures:
    """Read once in a process, as many cells look at them."""
    train, test = (LOADERS[data](part) for part in ("train", "test"))
    return Pictures(*(value.to(device) for value in (train.x.unsqueeze(1), train.y, test.x.unsqueeze(1), test.y)))


# ---- what cells do ----


def compute_tuning(cell: Cell, attempt: Attempt) -> Arrays:
    """Train with one setting on the first images, and measure on those held out."""
    run = _Run(cell.settings, attempt, "validation")
    run.train()
    return run.result()


def compute_final(cell: Cell, attempt: Attempt) -> Arrays:
    """Train with the setting that was best on the validation images, and test."""
    by = cell.settings.get("chosen_by", METRICS[0])
    tried = [read(need.path(attempt.folder)).arrays for need in cell.needs]
    found = [(float(arrays[by][0]), float(arrays[METRICS[1]][0])) for arrays in tried]
    images = cell.settings.get("ties_of_images", 0) if by == METRICS[0] else 0
    number = chosen_setting(found, images) if found else 0
    run = _Run({**cell.settings, **cell.settings["grid"][number]}, attempt, "test")
    run.train()
    result = run.result() | {"choice": np.array(number)}
    result["probs"] = run.seen.probs.cpu().numpy().astype(np.float32)
    return result | (run.shifted() if "degrees" in cell.settings and not run.lost else {})


def chosen_setting(values: Sequence[tuple[float, float]], images: int = 0) -> int:
    """The lowest by what is chosen by, and of several by NLL; runs that were lost have NaN and are never chosen.

    Args:
        values: what is chosen by, and NLL, of every setting.
        images: how many errors in percent were counted on; all within one standard error of the lowest are then alike.

    Example:
        >>> chosen_setting([(float("nan"), float("nan")), (2.5, 0.1), (1.9, 0.3), (1.9, 0.2)])
        3
        >>> chosen_setting([(1.31, 0.3), (1.35, 0.2), (1.5, 0.1)], images=10_000)  # √(0.0131 · 0.9869 / 10⁴) = 0.11 %
        1
    """
    ranked = np.nan_to_num(np.array(values), nan=np.inf)
    lowest = float(ranked[:, 0].min())
    spread = math.sqrt(lowest * (100.0 - lowest) / images) if images and math.isfinite(lowest) else 0.0
    alike = np.flatnonzero(ranked[:, 0] <= lowest + spread)
    return int(alike[ranked[alike, 1].argmin()])


class _Run:
    """The moving parts.

    Args:
        settings: all that decides the result.
        attempt: where progress is told and checkpoints are kept.
        held: what is measured on, "validation" or "test".
    """

    def __init__(self, settings: Mapping[str, Any], attempt: Attempt, held: str) -> None:
        _make_room(settings["device"])
        self.settings, self.attempt, self.held = settings, attempt, held
        self.data, self.batch = load(settings["data"], settings["device"]), int(settings["batch"])
        self.generator = torch.Generator(settings["device"]).manual_seed(self._seed("training"))
        self.model = network(settings).to(settings["device"])
        self.stages: list[tuple[str, int]] = [(part, int(epochs)) for part, epochs in settings["stages"]]
        self.epochs = sum(epochs for _, epochs in self.stages)
        self.steps = sum(epochs * (settings["num_images"][part] // self.batch) for part, epochs in self.stages)
        self.marks = trace_steps(self.epochs, settings["trace_points"])
        self.epoch, self.lost = 0, False
        # Steps in all and in this epoch, and the random state from which the order of its images is drawn.
        self.done, self.within, self.shuffle = 0, 0, self.generator.get_state()
        self.trace: list[list[float]] = []
        self.seen = Predicted(torch.zeros(0, CLASSES), torch.zeros(0))
        self.learner: Learner

    def train(self) -> None:
        """All stages, from where an earlier attempt stopped; a run that meets NaN or Inf ends there."""
        learned = self._restored()
        last = 0
        for part, epochs in self.stages:
            last += epochs
            if self.epoch < last or last == self.epochs:  # the last stage is entered even when nothing is left of it
                self.learner = self._learner(part)
                if learned:  # what was learned goes on with more examples: only N and the minibatches change
                    self.learner.restore(learned)
                self._stage(part, last)
                learned = self.learner.arrays()

    def _restored(self) -> Arrays:
        kept = self.attempt.restored() or {}
        if kept:
            self.epoch, self.lost = int(kept["at_epoch"]), bool(kept["lost"])
            self.done, self.within = int(kept["done"]), int(kept["within"])
            self.trace = kept["trace"].tolist()
            self.shuffle = torch.from_numpy(kept["shuffle"])
            self.generator.set_state(torch.from_numpy(kept["random"]))
        return kept

    def _stage(self, part: str, last: int) -> None:
        while self.epoch < last and not self.lost:
            try:
                self._advance(part)
            except NumericalError:
                self.lost = True
            self.epoch, self.within = self.epoch + 1, 0
            self._tick()

    def _tick(self) -> None:
        self.attempt.tick(self.done, self.steps, self._capture)

    def _advance(self, part: str) -> None:
        """One epoch of shuffled minibatches, or what is left of it; images that do not fill one are left out."""
        x, y = self._part(part)
        for index in self._order(len(y)).split(self.batch)[self.within :]:
            self.learner.step(x[index].unsqueeze(0), y[index].unsqueeze(0))
            self.done, self.within = self.done + 1, self.within + 1
            if self.within < len(y) // self.batch:  # the last is told with the epoch
                self._tick()
        if self.epoch + 1 in self.marks:
            seen = self._measured(self._draws(self.settings["trace_draws"]))
            self.trace.append([self.epoch + 1, seen[METRICS[0]], seen[METRICS[1]]])

    def _order(self, size: int) -> Tensor:
        """The images of this epoch; the same again when it was begun before."""
        source = self.generator
        if self.within == 0:
            self.shuffle = source.get_state()
        else:
            source = torch.Generator(source.device)
            source.set_state(self.shuffle)
        return torch.randperm(size, generator=source, device=source.device)[: size // self.batch * self.batch]

    def result(self) -> Arrays:
        """The metrics at the end, and two of them along the way; NaN where the run was lost."""
        measured = dict.fromkeys(METRICS, float("nan"))
        if not self.lost:
            if settle := getattr(self.learner, "settle", None):
                settle(self._part(self.stages[-1][0])[0])
            try:
                measured = self._measured(self._draws(self.settings["draws"]))
            except NumericalError:  # the last step is looked at here for the first time
                self.lost = True
        if self.lost:
            self.seen = Predicted(torch.zeros(0, CLASSES), torch.zeros(0))  # not those of an earlier look
        trace = np.array(self.trace).reshape(-1, 3)
        return {name: np.array([value]) for name, value in measured.items()} | {
            "trace_epochs": trace[:, 0],
            "trace_error_percent": trace[:, 1],
            "trace_nll": trace[:, 2],
        }

    def _measured(self, draws: int) -> dict[str, float]:
        """On what is held out; the predictions are kept."""
        x, y = self._part(self.held)
        with self._own_draws():
            self.seen = predict(self.model, self.learner, x, draws)
        if not bool(self.seen.probs.isfinite().all()):
            raise NumericalError("the predictions are not finite.")
        return scores(self.seen.probs, y)

    def shifted(self) -> Arrays:
        """The metrics on turned images, (angles, 4), and how well strangers are told, (kinds of them, 4)."""
        x, y = self._part(self.held)
        draws, found, told = self._draws(self.settings["draws"]), [], []
        for degrees in self.settings["degrees"]:
            self._tick()
            with self._own_draws():
                found.append(
                    list(scores(predict(self.model, self.learner, turned(x, degrees), draws).probs, y).values())
                )
        for name in self.settings["strangers"]:
            with self._own_draws():
                there = predict(self.model, self.learner, strangers(name, len(y)).to(x.device), draws)
            told.append([strangeness(self.seen, there)[metric] for metric in STRANGER_METRICS])
        return {"turned": np.array(found), "strangers": np.array(told)}

    def _draws(self, wanted: int) -> int:
        """No more than the method has different ones."""
        return min(wanted, int(self.settings.get("distinct", wanted)))

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """So that training does not depend on how often one looks."""
        state = self.generator.get_state()
        self.generator.manual_seed(self._seed(f"look {self.epoch}"))
        try:
            yield
        finally:
            self.generator.set_state(state)

    def _capture(self) -> Arrays:
        """All that the next epoch depends on."""
        place = {"at_epoch": self.epoch, "lost": self.lost, "done": self.done, "within": self.within}
        random = {"random": self.generator.get_state().numpy(), "shuffle": self.shuffle.numpy()}
        kept = {name: np.array(value) for name, value in place.items()} | random
        return self.learner.arrays() | kept | {"trace": np.array(self.trace).reshape(-1, 3)}

    def _part(self, name: str) -> tuple[Tensor, Tensor]:
        return self.data.part(name, int(self.settings["num_images"][name]))

    def _learner(self, part: str) -> Learner:
        """A learner of as many examples as the part has."""
        device, settings = self.settings["device"], self.settings
        one = torch.ones(1, device=device)
        task = Task(
            self.model,
            self._starts,
            torch.tensor([settings["num_images"][part]]),
            one,
            np.exp(2 * settings["neg_log_sigma"]) * one,
            self.batch,
            self.steps,
            settings,
            self.generator,
            categorical,
        )
        return IMAGE_LEARNERS[settings["learner"]](task)

    def _starts(self, member: int) -> dict[str, Tensor]:
        """Torch's own initial weights, the same for all methods and settings."""
        fresh = network(self.settings, self._seed(f"start {member}") % 2**31).to(self.settings["device"])
        return {name: value.detach().unsqueeze(0) for name, value in fresh.named_parameters()}

    def _seed(self, what: str) -> int:
        return seed_of(self.settings["seed"], self.settings["data"], what)


def strangers(name: str, count: int) -> Tensor:
    """Images of another kind, (n, 1, 28, 28): the test images of another set, or letters."""
    if name == "letters":
        return letters(count, torch.Generator().manual_seed(0)).unsqueeze(1)
    return LOADERS[name]("test").x[:count].unsqueeze(1)


def _make_room(device: str) -> None:
    """Graphs of earlier cells hold memory until they are collected."""
    if str(device).startswith("cuda"):  # pragma: no cover
        gc.collect()
        torch.cuda.empty_cache()
