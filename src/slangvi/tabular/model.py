"""A fitted model and its folder: the posterior as safetensors, all else as JSON, both checked when they are read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slangvi import checkpoint
from slangvi.distributions import LowRankPrecisionNormal
from slangvi.errors import DataError
from slangvi.estimators.network import ACTIVATIONS, mlp, num_weights
from slangvi.files import put
from slangvi.predict import decompose_uncertainty
from slangvi.predict.samples import drawn_in_chunks
from slangvi.tabular.schema import Schema
from slangvi.tabular.target import Target

__all__ = ["ABOUT", "LEVELS", "WEIGHTS", "Classes", "Model", "Network", "Numbers", "load", "save"]

FORMAT, VERSION = "slangvi tabular model", 1
WEIGHTS, ABOUT = "model.safetensors", "model.json"
LEVELS = tuple(k / 10 for k in range(1, 10))
# Bytes that a description may have.
_MOST = 1 << 28
_SAMPLES = 10_000
# Exceptions of JSON, and of a description that has another shape.
_SPOILT = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)

Array = NDArray[Any]


@dataclass(frozen=True)
class Network:
    """The network that the weights are put into, and how it predicts.

    It has D features and C outputs, and predicts with a number of samples of the weights that a seed fixes. Targets are
    trained on as (y − mean)/scale; the standard deviation of the noise is on that scale, and None for classes.
    """

    features: int
    hidden: tuple[int, ...]
    outputs: int
    activation: str
    samples: int
    seed: int
    mean: float = 0.0
    scale: float = 1.0
    noise: float | None = None

    @property
    def sizes(self) -> list[int]:
        """D, widths of the hidden layers, and C."""
        return [self.features, *self.hidden, self.outputs]

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Network:
        """Return the network of a dict from `dataclasses.asdict`, with every value checked."""
        made = cls(**{**plain, "hidden": tuple(plain["hidden"])})
        counts = (*made.sizes, made.samples, made.seed + 1)
        if not all(type(count) is int and count > 0 for count in counts) or made.activation not in ACTIVATIONS:
            raise ValueError("the network has impossible sizes")
        if made.samples > _SAMPLES:
            raise ValueError(f"the network asks for {made.samples} draws")
        if not all(math.isfinite(value) for value in (made.mean, made.scale, made.noise or 0.0)):
            raise ValueError("the network has impossible scales")
        return made


@dataclass(frozen=True)
class Numbers:
    """Mean and standard deviation of new targets, and the share of the variance more data would remove, (n,) each."""

    mean: Array
    std: Array
    epistemic_share: Array

    def interval(self, level: float) -> tuple[Array, Array]:
        """Return the ends of the central interval of a normal distribution."""
        width = float(torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=torch.float64))) * self.std
        return self.mean - width, self.mean + width

    def coverages(self, y: Array) -> list[float]:
        """Return the share of targets (n,) inside the central interval of each of `LEVELS`."""
        places = torch.special.ndtr(torch.from_numpy((y - self.mean) / self.std)).numpy()
        return [float((np.abs(2 * places - 1) <= level).mean()) for level in LEVELS]


@dataclass(frozen=True)
class Classes:
    """Probabilities (n, C), their entropy in nats (n,), and the share of it more data would remove, (n,)."""

    probs: Array
    entropy: Array
    epistemic_share: Array


@dataclass(frozen=True)
class Model:
    """All that predictions and a report need.

    The posterior is on the CPU; the record has settings, metrics, held-out predictions and versions as plain values.
    """

    schema: Schema
    target: Target
    network: Network
    posterior: LowRankPrecisionNormal
    record: dict[str, Any]

    def draws(self, inputs: Array) -> Iterator[Tensor]:
        """Return outputs at draws of the weights, (S, m, C) for chunks of rows (n, D); the same draws for every row."""
        net, x = self.network, torch.from_numpy(inputs)
        module = mlp(net.sizes, net.activation, x.dtype, torch.Generator())  # its own weights are of no use
        return drawn_in_chunks(module, self.posterior, x, net.samples, net.seed)

    def means(self, inputs: Array) -> Iterator[Tensor]:
        """Yield the means of a regression at draws of the weights, (S, m) for chunks of rows."""
        for draws in self.draws(inputs):
            yield draws[..., 0] * self.network.scale + self.network.mean

    @property
    def noise(self) -> float:
        """Standard deviation of a regression's noise, in the units of the target."""
        return (self.network.noise or 0.0) * self.network.scale

    def predict(self, inputs: Array) -> Numbers | Classes:
        """Return predictions for encoded rows (n, D)."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        regression = self.target.task == "regression"
        if regression:
            for means in self.means(inputs):
                found = decompose_uncertainty(means, "gaussian", noise_variance=self.noise**2)
                parts.append((means.mean(0), found.total.sqrt(), found.epistemic / found.total))
        else:
            for draws in self.draws(inputs):
                probs = draws.softmax(-1)
                found = decompose_uncertainty(probs)
                parts.append((probs.mean(0), found.total, found.epistemic / found.total.clamp_min(1e-12)))
        columns = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
        return Numbers(*columns) if regression else Classes(*columns)


def save(model: Model, folder: Path) -> None:
    """Write the folder: the weights first, then the description that knows their checksum.

    A process that dies between the two leaves a folder that is refused, never one that predicts something else.
    """
    weights = folder / WEIGHTS
    checkpoint.save(weights, model.posterior)
    checkpoint.previous_path(weights).unlink(missing_ok=True)
    body = {
        **{name: asdict(getattr(model, name)) for name in ("schema", "target", "network")},
        "record": model.record,
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    about = {"format": FORMAT, "version": VERSION, "sha256": _digest(body), **body}
    text = json.dumps(about, indent=1, allow_nan=False).encode()
    put(folder / ABOUT, lambda file: file.write(text))


def load(folder: Path) -> Model:
    """Read a folder that `save` wrote; nothing in it is executed, and what is no such folder raises a `DataError`."""
    about = _about(folder)
    try:
        schema, target = Schema.from_json(about["schema"]), Target.from_json(about["target"])
        network, record = Network.from_json(about["network"]), dict(about["record"])
        expected, weights = about["weights_sha256"], folder / WEIGHTS
        if (network.features, network.outputs) != (schema.features, target.outputs):
            raise ValueError("the network does not fit the columns")
    except _SPOILT as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from error
    posterior = checkpoint.load(weights)
    if hashlib.sha256(weights.read_bytes()).hexdigest() != expected:
        raise _damaged(folder, f"{WEIGHTS} and {ABOUT} are not of the same fit")
    if not isinstance(posterior, LowRankPrecisionNormal) or posterior.loc.shape != (num_weights(network.sizes),):
        raise _damaged(folder, f"{WEIGHTS} does not fit the network")
    return Model(schema, target, network, posterior, record)


def _about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    try:
        with path.open("rb") as file:
            content = file.read(_MOST + 1)
    except FileNotFoundError as error:
        raise DataError(f"{folder} is no model: it has no {ABOUT}. Give the folder that slangvi fit wrote.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        about = json.loads(content[:_MOST])
        if about["format"] != FORMAT:
            raise ValueError("it is of another format")
        version = about["version"]
        if type(version) is int and version > VERSION:
            raise DataError(f"{path} has version {version}, and this slangvi reads {VERSION}. Upgrade slangvi.")
        body = {key: value for key, value in about.items() if key not in ("format", "version", "sha256")}
        if version != VERSION or about["sha256"] != _digest(body):
            raise ValueError("its checksum is not the one it was written with")
    except _SPOILT as error:
        raise _damaged(folder, f"{ABOUT}: {error}") from error
    return body


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _damaged(folder: Path, why: str) -> DataError:
    return DataError(f"{folder} is damaged, or is no model of slangvi ({why}). Run slangvi fit again.")
