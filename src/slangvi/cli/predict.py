"""`slangvi predict MODEL NEW.csv --out PRED.csv`: predictions that say how sure they are."""

from __future__ import annotations

import csv
import io
import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slangvi.cli.common import FiniteRange, check_new, guarded, require

if TYPE_CHECKING:
    from slangvi.tabular.model import Model
    from slangvi.tabular.reading import Table

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
    model: Path, data: Path, out: Path, level: float, keep: tuple[str, ...], max_mb: float, force: bool, **how: bool
) -> None:
    """Predict the rows of a table with the columns that the model was fitted with."""
    to_terminal = str(out) == "-"
    if to_terminal and how["json"]:
        raise click.UsageError("--json and --out - both print to standard output. Give a file for --out.")
    if not to_terminal:
        check_new(out, force)
    require("predict", sklearn="sklearn")
    from slangvi.files import put
    from slangvi.tabular.model import load
    from slangvi.tabular.reading import read_csv

    fitted, table = load(model), read_csv(data, max_mb)
    text = _csv_text(fitted, table, level, keep)
    if to_terminal:
        click.echo(text, nl=False)
    else:
        put(out, lambda file: file.write(text.encode()))
    _tell(fitted, table, out, **how)


def _csv_text(model: Model, table: Table, level: float, keep: tuple[str, ...]) -> str:
    """Return the predictions as the text of a CSV file."""
    from slangvi.errors import DataError
    from slangvi.tabular.output import columns, safe

    for name in keep:
        if name not in table.columns:
            raise DataError(f"there is no column {name!r} to keep. Columns are {list(table.columns)[:20]}.")
    kept = list(dict.fromkeys(keep))
    found = columns(model, model.schema.encode(table), level)
    header = [*map(safe, kept), *found]
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise DataError(f"there would be two columns named {twice!r} in the predictions. Rename the one to keep.")
    copied = [list(map(safe, table.columns[name])) for name in kept]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(zip(*copied, *found.values(), strict=True))
    return text.getvalue()


def _tell(model: Model, table: Table, out: Path, quiet: bool, json: bool) -> None:
    unusual = model.schema.unusual(table)
    if json:
        counts = {name: found.cells for name, found in unusual.items()}
        told: dict[str, Any] = {"out": str(out), "rows": len(table), "task": model.target.task, "unusual": counts}
        click.echo(json_text.dumps(told, indent=2))
    elif not quiet:
        for name, (count, what) in unusual.items():
            many = f"all {count}" if 1 < count == len(table) else f"{count} of {len(table)}"
            click.echo(f"{name!r}: {many} cells {what}", err=True)
        if str(out) != "-":
            click.echo(f"Predictions: {out}, {len(table)} rows", err=True)
