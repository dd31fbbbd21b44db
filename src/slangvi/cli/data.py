"""`slangvi data list` and `slangvi data fetch`: what is in the cache, and what is put there."""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

if TYPE_CHECKING:
    from slangvi.data.libsvm import Dataset

__all__ = ["data"]


@click.group()
def data() -> None:
    """Data sets of the experiments: what there is, and fetching it."""


@data.command("list")
@click.option("--json", is_flag=True, help="All of it for programs, with every address and path.")
def list_(json: bool) -> None:
    """List the data sets, and which are in the cache."""
    from slangvi.data._remote import cache_root, is_offline
    from slangvi.data.libsvm import LIBSVM

    rows = [_row(dataset) for dataset in LIBSVM.values()]
    if json:
        found = {"cache": str(cache_root()), "offline": is_offline(), "datasets": rows}
        click.echo(json_text.dumps(found, indent=2))
    else:
        _show(rows, str(cache_root()), is_offline())


@data.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Fetch again what is there; it is replaced only by a good copy.")
def fetch(names: tuple[str, ...], force: bool) -> None:
    """Put data sets into the cache, or check those that are there; `all` stands for every one."""
    from slangvi.data._remote import fetch, locate
    from slangvi.errors import DataError

    failed = False
    with _progress() as (say, progress):
        for dataset in _named(names):
            for file in dataset.files:
                state = "in the cache" if locate(file) is not None and not force else "fetched"
                try:
                    path = fetch(file, force=force, progress=progress)
                except DataError as error:
                    failed = True
                    click.echo(f"Error: {error}", err=True)
                else:
                    say(f"{file.path}: {state}, {path.stat().st_size:,} bytes, verified")
    if failed:
        raise click.exceptions.Exit(1)


def _named(names: tuple[str, ...]) -> list[Dataset]:
    """The data sets, each once."""
    from slangvi.data.libsvm import LIBSVM, find_libsvm

    if "all" in names:
        return list(LIBSVM.values())
    try:
        return list({dataset.name: dataset for dataset in map(find_libsvm, names)}.values())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="NAME") from error


def _row(dataset: Dataset) -> dict[str, Any]:
    from slangvi.data._remote import locate

    files = []
    for file in dataset.files:
        found = locate(file)
        files.append(
            {
                "path": file.path,
                "urls": file.urls,
                "target": str(file.target),
                "cached": None if found is None else str(found),
                "bytes": None if found is None else found.stat().st_size,
            }
        )
    return {
        "name": dataset.name,
        "rows": dataset.num_rows,
        "train": dataset.num_train,
        "features": dataset.num_features,
        "splits": dataset.num_splits,
        "files": files,
    }


def _show(rows: list[dict[str, Any]], root: str, offline: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a table cut to 80 columns cannot be read in a log
    table = Table("name", "rows", "train", "features", "splits", "files", "from", "cached")
    for row in rows:
        counts = (f"{row[key]:,}" for key in ("rows", "train", "features", "splits"))
        files = row["files"]
        cells = (
            [file["path"] for file in files],
            [urlsplit(file["urls"][0]).hostname for file in files],
            ["no" if file["cached"] is None else f"{file['bytes']:,} bytes" for file in files],
        )
        table.add_row(row["name"], *counts, *("\n".join(map(str, cell)) for cell in cells))
    console.print(table)
    click.echo(f"Cache: {root}{'   (offline: SLANGVI_OFFLINE is set)' if offline else ''}")


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str], None], Callable[[str, int, int], None]]]:
    """A way to say a line, and a bar per file on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(soft_wrap=True)
    columns = (TextColumn("{task.description:<22}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def advance(path: str, done: int, total: int) -> None:
            if path not in tasks:
                tasks[path] = bars.add_task(path)
            bars.update(tasks[path], completed=done, total=total or None)

        yield lambda line: console.print(line, highlight=False, markup=False), advance
