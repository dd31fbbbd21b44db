"""`slangvi data list` and `slangvi data fetch`: what is in the cache, and what is put there."""

from __future__ import annotations

import json as json_text
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from slangvi.cli.common import guarded

if TYPE_CHECKING:
    from slangvi_reproduction.data.remote import File, Progress
    from slangvi_reproduction.data.sets import Row

__all__ = ["data"]

FEW = 4


@click.group()
def data() -> None:
    """Data sets of the experiments: what there is, and fetching it."""


@data.command("list")
@click.option("--json", is_flag=True, help="All of it for programs, with every address and path.")
def list_(json: bool) -> None:
    """List the data sets, and which are in the cache."""
    from slangvi_reproduction.data.remote import cache_root, is_offline

    rows = list(_datasets().values())
    if json:
        found = {"cache": str(cache_root()), "offline": is_offline(), "datasets": list(map(_described, rows))}
        click.echo(json_text.dumps(found, indent=2))
    else:
        _show(rows, str(cache_root()), is_offline())


@data.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Fetch again what is there; it is replaced only by a good copy.")
@guarded
def fetch(names: tuple[str, ...], force: bool) -> None:
    """Put data sets into the cache, or check those that are there; `all` stands for every one."""
    from slangvi.errors import DataError

    failed = False
    with _progress() as (say, progress):
        for label, files in (group for dataset in _named(names) for group in _groups(dataset)):
            try:
                say(f"{label}: {_fetched(files, force, progress)}, verified")
            except DataError as error:
                failed = True
                click.echo(f"Error: {error}", err=True)
    if failed:
        raise click.exceptions.Exit(1)


def _datasets() -> dict[str, Row]:
    """All tables in one."""
    from slangvi_reproduction.data.libsvm import LIBSVM
    from slangvi_reproduction.data.mnist import IMAGES
    from slangvi_reproduction.data.uci import UCI

    return {**LIBSVM, **UCI, **IMAGES}


def _named(names: tuple[str, ...]) -> list[Row]:
    """The data sets, each once."""
    from slangvi_reproduction.data.sets import find

    known = _datasets()
    if "all" in names:
        return list(known.values())
    try:
        return list({dataset.name: dataset for dataset in (find(name, known) for name in names)}.values())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="NAME") from error


def _groups(dataset: Row) -> list[tuple[str, tuple[File, ...]]]:
    """Files with a word for them: each by itself where they are few, all as their folder where nobody reads so many."""
    if len(dataset.files) <= FEW:
        return [(file.path, (file,)) for file in dataset.files]
    folder = dataset.files[0].path.rpartition("/")[0]
    return [(f"{folder}, {len(dataset.files)} files", dataset.files)]


def _fetched(files: tuple[File, ...], force: bool, progress: Progress) -> str:
    """Fetch what is missing, and say what was done; the first failure ends it, as one file is no use without others."""
    from slangvi_reproduction.data.remote import fetch, locate

    states: Counter[str] = Counter()
    size = 0
    for file in files:
        states["in the cache" if locate(file) is not None and not force else "fetched"] += 1
        size += fetch(file, force=force, progress=progress).stat().st_size
    done = next(iter(states)) if len(states) == 1 else ", ".join(f"{count} {state}" for state, count in states.items())
    return f"{done}, {size:,} bytes"


def _cached(files: tuple[File, ...]) -> str:
    """How much is there."""
    from slangvi_reproduction.data.remote import locate

    sizes = [path.stat().st_size for path in map(locate, files) if path is not None]
    if not sizes:
        return "no"
    return f"{sum(sizes):,} bytes" if len(sizes) == len(files) else f"{len(sizes)} of {len(files)}"


def _described(dataset: Row) -> dict[str, Any]:
    from slangvi_reproduction.data.remote import locate

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


def _show(datasets: list[Row], root: str, offline: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a table cut to 80 columns cannot be read in a log
    table = Table("name", "rows", "train", "features", "splits", "files", "from", "cached")
    for dataset in datasets:
        counts = (dataset.num_rows, dataset.num_train, dataset.num_features, dataset.num_splits)
        lines = [(label, str(urlsplit(files[0].urls[0]).hostname), _cached(files)) for label, files in _groups(dataset)]
        cells = ("\n".join(column) for column in zip(*lines, strict=True))
        table.add_row(dataset.name, *(f"{count:,}" for count in counts), *cells)
    console.print(table)
    click.echo(f"Cache: {root}{'   (offline: SLANGVI_OFFLINE is set)' if offline else ''}")


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str], None], Progress]]:
    """A way to say a line, and on a terminal a bar for the file of the moment."""
    from rich import progress
    from rich.console import Console

    console = Console(soft_wrap=True)
    columns = (progress.TextColumn("{task.description:<22}"), progress.BarColumn(), progress.DownloadColumn())
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("", visible=False)

        def advance(path: str, done: int, total: int) -> None:
            bars.update(bar, description=path, completed=done, total=total or done, visible=True)

        yield lambda line: console.print(line, highlight=False, markup=False), advance
