"""`slangvi predict MODEL NEW.csv --out PRED.csv`: predictions that say how sure they are."""

from __future__ import annotations

import json as json_text
from pathlib import Path

import click

from slangvi.cli.common import FiniteRange, check_new, guarded, require

__all__ = ["predict"]

_file = click.Path(path_type=Path, dir_okay=False, exists=True)
_folder = click.Path(path_type=Path, file_okay=False, exists=True)
_out = click.Path(path_type=Path, dir_okay=False, allow_dash=True)


@click.command()
@click.argument("model", type=_folder, metavar="MODEL")
@click.argument("data", type=_file, metavar="NEW.csv")
@click.option("--out", type=_out, required=True, metavar="PRED.csv", help="Where predictions go; - prints them.")
@click.option("--level", type=FiniteRange(0, 1, True, True), default=0.9, show_default=True, help="Of intervals.")
@click.option(
    "--keep", multiple=True, metavar="COLUMN", help="Copy this column of NEW.csv; may be given several times."
)
@click.option("--max-mb", type=FiniteRange(0, min_open=True), default=200.0, show_default=True, help="Largest file.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option("--quiet", is_flag=True, help="Print nothing but predictions.")
@click.option("--json", is_flag=True, help="Print the outcome for programs.")
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
