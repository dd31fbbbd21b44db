"""The section of docs/results.md on networks with convolutions: tables and pictures from the experiment's files."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from slangvi_reproduction.experiments import pages
from slangvi_reproduction.experiments._image_scores import METRICS, STRANGER_METRICS
from slangvi_reproduction.experiments._image_tables import method_of
from slangvi_reproduction.experiments._image_tuning import Tuning, chosen
from slangvi_reproduction.experiments.results import read_table

__all__ = ["COLUMNS", "NAME", "STRANGER_COLUMNS", "TUNING", "TURNED_COLUMNS", "section", "verdicts"]

NAME = "images"
_KEY = ("data", "network", "method", "seed")
COLUMNS = (*_KEY, *METRICS, "epochs")
TURNED_COLUMNS = (*_KEY, "degrees", *METRICS)
STRANGER_COLUMNS = (*_KEY, "strangers", *STRANGER_METRICS)
TUNING = Tuning(_KEY[:3], lambda cell: (cell.settings["data"], cell.settings["network"], method_of(cell)))
NETWORKS = {"lenet": "LeNet-5", "resnet": "residual network with GroupNorm"}
SETS = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "letters": "letters"}
COLORS = {
    "slang_8": "#2171b5",
    "map": "#969696",
    "ivon": "#31a354",
    "bbb": "#d7301f",
    "mc_dropout": "#fc8d59",
    "ensemble_5": "#525252",
    "laplace": "#756bb1",
}
ABOUT = """\
Past the paper, which had no convolutions: LeNet-5 with rectified units and a small residual network with GroupNorm, by
SLANG with L = 8 and by its rivals; 20 epochs, but 10 of the residual network on MNIST. After 10 epochs on Fashion-MNIST
the residual network's NLL was 0.238 by SLANG and 0.235 by `map`. Each method has six settings to choose from by
validation NLL: three learning rates that fall along half a cosine and two priors, or for SLANG two rates and three
temperatures T of a cold posterior, likelihood and prior to the power 1/T. The grids were placed after a search on the
validation images of Fashion-MNIST: some fifty runs of SLANG, which led to a precision that starts high and learns
slowly, and a dozen of the rivals, which moved their rates upwards. Not all grids have the best setting in their middle:
the tables of settings below show which rates and temperatures were chosen. An ensemble and Laplace's approximation for
the last layer take over the setting of `map`. IVON is its authors' own package. Predictions average 64 draws. Numbers
are means of three seeds ± their standard error.

The trained networks also see test images that are turned, and strangers: the test images of the other set, and letters
A to J drawn for this purpose. *AUROC* is how often a stranger is more uncertain than a test image, *FPR95* the share of
strangers that pass where 95 % of the test images do; both by predictive entropy and by mutual information.
"""
Line = Mapping[str, str]


def section(results: Path, docs: Path) -> tuple[str, list[Path]]:
    """The part of the page about this experiment, and the pictures it wrote."""
    lines = read_table(results / f"{NAME}.csv", COLUMNS)
    turned = read_table(results / f"{NAME}-turned.csv", TURNED_COLUMNS)
    strangers = read_table(results / f"{NAME}-strangers.csv", STRANGER_COLUMNS)
    tried = read_table(results / f"{NAME}-tuning.csv", TUNING.columns)
    parts, pictures = [ABOUT, pages.made_by(results / f"{NAME}.json", "seeds")], list[Path]()
    parts += [f"- {line}" for line in verdicts(lines)] + [""]
    for data, network in dict.fromkeys((line["data"], line["network"]) for line in lines):
        here = [_by(table, "data", "network").get((data, network), []) for table in (lines, turned, strangers, tried)]
        picture = docs / "images" / f"results-{NAME}-{data}-{network}.png"
        _draw_turned(here[1], picture)
        parts += [f"### {SETS[data]}, {NETWORKS[network]}\n", _table(here[0]), _strangers(here[2])]
        parts.append(pages.image(picture, "Error, NLL and ECE against the angle by which images are turned."))
        parts += ["Settings that were chosen:\n", chosen(here[3])]
        pictures.append(picture)
    return "\n".join(parts), pictures


def _values(lines: Sequence[Line], name: str) -> list[float]:
    return [float(line[name]) for line in lines]


def _mean(lines: Sequence[Line], name: str) -> float:
    return statistics.fmean(_values(lines, name))


def _by(lines: Sequence[Line], *names: str) -> dict[tuple[str, ...], list[Line]]:
    """Lines that share some columns, in their order."""
    found: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(line[name] for name in names), []).append(line)
    return found


def _table(lines: Sequence[Line]) -> str:
    cells = [
        [
            method,
            str(len(mine)),
            *(pages.mean_number(_values(mine, m), u) for m, u in zip(METRICS, (0.01, 1e-4, 1e-4, 1e-4), strict=True)),
        ]
        for (method,), mine in _by(lines, "method").items()
    ]
    return pages.markdown(["method", "runs", *(pages.METRICS[name] for name in METRICS)], cells)


def _strangers(lines: Sequence[Line]) -> str:
    cells = [
        [f"{SETS[kind]}, {method}", *(pages.number(_mean(mine, name), None, 1e-4) for name in STRANGER_METRICS)]
        for (kind, method), mine in sorted(_by(lines, "strangers", "method").items(), key=lambda pair: pair[0][0])
    ]
    header = ["strangers, method", "AUROC, entropy", "FPR95", "AUROC, information", "FPR95"]
    return pages.markdown(header, cells)


def verdicts(lines: Sequence[Line]) -> list[str]:
    """Whether SLANG's NLL is below that of MAP and of IVON, for every data set and network."""
    found = []
    for (data, network), mine in _by(lines, "data", "network").items():
        nll = {method: _values(each, "test_nll") for (method,), each in _by(mine, "method").items()}
        for rival in ("map", "ivon"):
            if {"slang_8", rival} <= set(nll):
                said = "below" if statistics.fmean(nll["slang_8"]) < statistics.fmean(nll[rival]) else "not below"
                ours, theirs = (pages.mean_number(nll[method], 1e-4) for method in ("slang_8", rival))
                where = f"{SETS[data]}, {NETWORKS[network]}"
                found.append(f"{where}: the NLL of slang_8, {ours}, is {said} that of {rival}, {theirs}.")
    return found


def _draw_turned(lines: Sequence[Line], path: Path) -> None:
    drawn = pages.figure(10.8, 3.4)
    for axes, name in zip(drawn.subplots(1, 3), METRICS[:3], strict=True):
        for (method,), mine in _by(lines, "method").items():
            points = _by(mine, "degrees")
            angles = [float(degrees) for (degrees,) in points]
            axes.plot(
                angles, [_mean(each, name) for each in points.values()], color=COLORS[method], lw=1.3, label=method
            )
        axes.set(xlabel="degrees", ylabel=pages.METRICS[name])
        axes.grid(alpha=0.3)
    drawn.axes[0].legend(fontsize=7)
    pages.save(drawn, path)
