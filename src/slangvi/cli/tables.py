"""`slangvi fit`, `predict` and `report`: a network with a posterior from a table, its predictions, and a page on it."""

from __future__ import annotations

import json as json_text
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from slangvi.cli.common import FiniteRange, check_new, guarded, progress_bars, require

if TYPE_CHECKING:
    from rich.console import Console

    from slangvi.tabular.model import Model
    from slangvi.tabular.schema import Schema
    from slangvi.tabular.target import Target

__all__ = ["fit", "predict", "report"]

_file = click.Path(path_type=Path, dir_okay=False, exists=True)
_folder = click.Path(path_type=Path, file_okay=False, exists=True)
_new_file = click.Path(path_type=Path, dir_okay=False, allow_dash=True)
_page = click.Path(path_type=Path, dir_okay=False)
_new_folder = click.Path(path_type=Path, file_okay=False)
_max_mb = click.option(
    "--max-mb", type=FiniteRange(0, min_open=True), default=200.0, show_default=True, help="Largest file."
)
_force = click.option("--force", is_flag=True, help="Replace what is there.")
_json = click.option("--json", is_flag=True, help="Print the outcome for programs.")
_WORDS = {"nll": "NLL (nats)", "rmse": "RMSE", "accuracy": "accuracy", "ece": "calibration error"}


@click.command()
@click.argument("data", type=_file, metavar="DATA.csv")
@click.option("--target", required=True, metavar="COLUMN", help="What is to be predicted.")
@click.option("--out", type=_new_folder, required=True, metavar="MODEL", help="Folder for the model.")
@click.option("--task", type=click.Choice(["classification", "regression"]), help="Found from the target if not given.")
@click.option("--exclude", multiple=True, metavar="COLUMN", help="Do not use this column; may be given several times.")
@click.option(
    "--rank", type=click.IntRange(0, 1000), default=4, show_default=True, help="Of the posterior's precision."
)
@click.option("--epochs", type=click.IntRange(1), default=100, show_default=True, help="Passes over the rows.")
@click.option("--hidden", default="50", show_default=True, metavar="N,N", help="Hidden layers; 0 is a linear model.")
@click.option("--prior-precision", type=FiniteRange(0, min_open=True), default=1.0, show_default=True)
@click.option(
    "--temperature",
    type=FiniteRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Below 1 every row counts for more, and the posterior is narrower.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of split, weights and draws.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@_max_mb
@click.option("--no-refit", is_flag=True, help="Keep the model of four fifths of the rows, whose scores are printed.")
@_force
@click.option("--quiet", is_flag=True, help="Print nothing.")
@_json
@guarded
def fit(data: Path, out: Path, max_mb: float, force: bool, quiet: bool, json: bool, **options: Any) -> None:
    """Learn from a table; hold out a fifth of it to see how good the predictions are."""
    options |= {"hidden": _hidden(options["hidden"]), "refit": not options.pop("no_refit")}
    check_new(out / "model.json", force)
    require("fit", sklearn="sklearn")
    import torch
    from rich.console import Console

    from slangvi.environment import environment
    from slangvi.tabular.fitting import Settings
    from slangvi.tabular.fitting import fit as fitted
    from slangvi.tabular.model import save
    from slangvi.tabular.reading import read_csv

    if options["device"] == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("--device cuda: torch sees no GPU. Use --device cpu, or install torch with CUDA.")
    start, console = perf_counter(), Console(soft_wrap=True)
    table = read_csv(data, max_mb)
    silent = quiet or json
    bars = nullcontext(lambda label, done, total: None) if silent else progress_bars(console)
    with bars as progress:
        model = fitted(table, Settings(**options), progress, None if silent else partial(_show_found, console))
    seconds = perf_counter() - start
    # Only the name of the file is kept: where it lies is nobody else's business.
    model.record.update(data=data.name, environment=environment("slangvi fit", options["device"], seconds))
    save(model, out)
    if json:
        click.echo(json_text.dumps(_outcome(model, out), indent=2))
    elif not quiet:
        _show(console, model, out)


@click.command()
@click.argument("model", type=_folder, metavar="MODEL")
@click.argument("data", type=_file, metavar="NEW.csv")
@click.option("--out", type=_new_file, required=True, metavar="PRED.csv", help="Where predictions go; - prints them.")
@click.option("--level", type=FiniteRange(0, 1, True, True), default=0.9, show_default=True, help="Of intervals.")
@click.option(
    "--keep", multiple=True, metavar="COLUMN", help="Copy this column of NEW.csv; may be given several times."
)
@_max_mb
@_force
@click.option("--quiet", is_flag=True, help="Print nothing but predictions.")
@_json
@guarded
def predict(
    model: Path,
    data: Path,
    out: Path,
    level: float,
    keep: tuple[str, ...],
    max_mb: float,
    force: bool,
    quiet: bool,
    json: bool,
) -> None:
    """Predict the rows of a table with the columns that the model was fitted with."""
    to_terminal = str(out) == "-"
    if to_terminal and json:
        raise click.UsageError("--json and --out - both print to standard output. Give a file for --out.")
    if not to_terminal:
        check_new(out, force)
    require("predict", sklearn="sklearn")
    from slangvi.files import put
    from slangvi.tabular.model import load
    from slangvi.tabular.output import csv_text
    from slangvi.tabular.reading import read_csv

    fitted, table = load(model), read_csv(data, max_mb)
    text = csv_text(fitted, table, level, keep)
    if to_terminal:
        click.echo(text, nl=False)
    else:
        put(out, lambda file: file.write(text.encode()))
    unusual = fitted.schema.unusual(table)
    if json:
        counts = {name: found.cells for name, found in unusual.items()}
        outcome = {"out": str(out), "rows": len(table), "task": fitted.target.task, "unusual": counts}
        click.echo(json_text.dumps(outcome, indent=2))
    elif not quiet:
        for name, (count, what) in unusual.items():
            many = f"all {count}" if 1 < count == len(table) else f"{count} of {len(table)}"
            click.echo(f"{name!r}: {many} cells {what}", err=True)
        if not to_terminal:
            click.echo(f"Predictions: {out}, {len(table)} rows", err=True)


@click.command()
@click.argument("model", type=_folder, metavar="MODEL")
@click.option("--out", type=_page, metavar="PAGE.html", help="MODEL/report.html, replaced each time, if not given.")
@_force
@click.option("--quiet", is_flag=True, help="Print nothing.")
@_json
@guarded
def report(model: Path, out: Path | None, force: bool, quiet: bool, json: bool) -> None:
    """Write a page on a model: scores, calibration, residuals, the posterior, the most uncertain rows."""
    path = out or model / "report.html"
    check_new(path, force or out is None)
    require("report", matplotlib="plot", sklearn="sklearn")
    from slangvi.files import put
    from slangvi.tabular.model import load
    from slangvi.tabular.page import page

    text = page(load(model))
    put(path, lambda file: file.write(text.encode()))
    if json:
        click.echo(json_text.dumps({"out": str(path), "bytes": len(text.encode())}))
    elif not quiet:
        click.echo(f"Report: {path}")


def _hidden(text: str) -> tuple[int, ...]:
    """Return the widths that a word such as 64,32 stands for."""
    try:
        widths = tuple(int(word) for word in text.split(","))
    except ValueError:
        widths = (-1,)
    if widths == (0,):
        return ()
    if min(widths) < 1 or max(widths) > 10_000 or len(widths) > 100:
        told = repr(text if len(text) <= 40 else f"{text[:40]}…")
        raise click.BadParameter(f"{told} should be widths such as 50 or 64,32, or 0.", param_hint="--hidden")
    return widths


def _outcome(model: Model, out: Path) -> dict[str, Any]:
    """Return what --json prints."""
    target, schema = model.target, model.schema
    keys = ("rows", "without_target", "left_out", "held_out_rows", "scores", "settings", "environment")
    return {
        "model": str(out),
        **{"task": target.task, "why": target.why, "target": target.name, "classes": list(target.classes)},
        "columns": {column.name: column.kind for column in schema.columns},
        **{"dropped": schema.dropped, "notes": schema.notes},
        **{key: model.record[key] for key in keys},
    }


def _show_found(console: Console, target: Target, schema: Schema, rows: int, left_out: dict[str, int]) -> None:
    """Print task and columns, before minutes of training are spent on a wrong guess."""
    kinds = [column.kind for column in schema.columns]
    classes = f", {target.outputs} classes" if target.classes else ""
    lines = [
        f"Task: {target.task}{classes} ({target.why})",
        f"Inputs: {kinds.count('numeric')} numeric and {kinds.count('categorical')} categorical columns, "
        f"{schema.features} numbers a row, {rows} rows",
    ]
    if left_out:
        cells = ", ".join(f"{count} {repr(cell) if cell else 'empty'}" for cell, count in left_out.items())
        lines.append(f"  {sum(left_out.values())} rows without a target are left out: {cells}")
    lines += [f"  {name!r} dropped: {why}" for name, why in schema.dropped.items()]
    lines += [f"  {name!r} kept: {note}" for name, note in schema.notes.items()]
    console.print("\n".join(lines), highlight=False, markup=False)
    console.file.flush()  # into a pipe or a log, too


def _show(console: Console, model: Model, out: Path) -> None:
    from rich.table import Table

    from slangvi.tabular.cells import readable

    record, scores = model.record, model.record["scores"]
    baseline = "mean alone" if model.target.task == "regression" else "class frequencies"
    grid = Table("", *(_WORDS[name] for name in scores["model"]), title=f"On {record['held_out_rows']} held-out rows")
    for label, row in (("SLANG", scores["model"]), (baseline, scores["baseline"])):
        grid.add_row(label, *(readable(value) for value in row.values()))
    console.print(grid)
    fitted = "all rows" if record["settings"]["refit"] else "the other four fifths"
    line = f"Model: {out}, fitted on {fitted}   ({record['environment']['seconds']:.0f} s)"
    console.print(line, highlight=False, markup=False)
