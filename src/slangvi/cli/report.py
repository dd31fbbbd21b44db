"""`slangvi report MODEL`: one HTML page that needs no other file."""

from __future__ import annotations

import json as json_text
from pathlib import Path

import click

from slangvi.cli.common import check_new, guarded, require

__all__ = ["report"]

_folder = click.Path(path_type=Path, file_okay=False, exists=True)
_file = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("model", type=_folder, metavar="MODEL")
@click.option("--out", type=_file, metavar="PAGE.html", help="MODEL/report.html, replaced each time, if not given.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option("--quiet", is_flag=True, help="Print nothing.")
@click.option("--json", is_flag=True, help="Print the outcome for programs.")
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
