"""`slangvi reproduce NAME`: a command for each experiment of the table; others list them and write the page."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slangvi_reproduction.experiments import EXPERIMENTS, module_name

if TYPE_CHECKING:
    from rich.console import Console

    from slangvi_reproduction.experiments.results import Row
    from slangvi_reproduction.experiments.runner import Status

__all__ = ["reproduce"]

RESULTS, QUICK, DOCS = Path("reproduction/results"), Path("reproduction/results/quick"), Path("docs")
# Experiments whose tables can be extended: their runs need no more of each other than the tables hold.
EXTENDED = ("mnist", "images")
_folder = click.Path(path_type=Path, file_okay=False)
_existing = click.Path(path_type=Path, file_okay=False, exists=True)


class _Suggesting(click.Group):
    """A group that suggests the nearest name."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], self.list_commands(ctx), n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx) from error


@click.group(cls=_Suggesting)
def reproduce() -> None:
    """Run the paper's experiments again."""


def _command(name: str) -> click.Command:
    """The command of one experiment; all have the same options, but for `EXTENDED`."""

    @click.option("--quick", is_flag=True, help=f"Few splits and epochs, to see that it runs; kept in {QUICK}.")
    @click.option("--datasets", default="", metavar="A,B", help="Only these data sets.")
    @click.option("--methods", default="", metavar="A,B", help="Only these methods.")
    @click.option("--epochs", type=click.IntRange(1), help="Instead of the paper's number.")
    @click.option("--splits", type=click.IntRange(1), help="So many splits (or seeds) instead of all.")
    @click.option("--seed", type=int, default=0, show_default=True, help="Of minibatches and draws.")
    @click.option("--data", type=_existing, help="Folder of the data; SLANGVI_DATA if not given.")
    @click.option(
        "--out",
        type=_folder,
        help=f"Folder of the results; {RESULTS}, or {QUICK} when the run is not full, if not given.",
    )
    @click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
    @click.option("--jobs", type=click.IntRange(1), help="Processes; if not given, one for each core, or one on a GPU.")
    @click.option("--force", is_flag=True, help="Compute again what is finished.")
    def command(**options: Any) -> None:
        _run(name, **options)

    if name in EXTENDED:
        says = "Do not compute again what the tables hold with the same settings."
        command = click.option("--extend", is_flag=True, help=says)(command)
    return click.command(name, help=EXPERIMENTS[name])(command)


for _name in EXPERIMENTS:
    reproduce.add_command(_command(_name))


@reproduce.command("list")
def list_() -> None:
    """Name the experiments."""
    width = max(map(len, EXPERIMENTS))
    for name, about in EXPERIMENTS.items():
        click.echo(f"{name:<{width}}  {about}")


@reproduce.command()
@click.option("--results", type=_existing, default=RESULTS, show_default=True, help="Where the results are.")
@click.option("--docs", type=_existing, default=DOCS, show_default=True, help="Where the page and its pictures go.")
def report(results: Path, docs: Path) -> None:
    """Write docs/results.md, its pictures, and the tables of docs/which-method.md from the results."""
    from slangvi_reproduction.experiments.report import write

    try:
        for path in write(results, docs):
            click.echo(path)
    except (ValueError, OSError, ImportError) as error:
        raise click.ClickException(str(error)) from error


def _run(name: str, data: Path | None, **options: Any) -> None:
    from importlib import import_module
    from time import perf_counter

    from rich.console import Console

    from slangvi.errors import DataError
    from slangvi_reproduction.experiments.runner import CellsFailed

    module = import_module(module_name(name))
    settings = _settings(name, module, **options)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a table cut to 80 columns cannot be read in a log
    start = perf_counter()
    try:
        with _data_from(data), _progress(console) as progress:
            outcome = module.run(settings, progress)
    except KeyboardInterrupt as error:
        console.print(f"Interrupted. {error}", highlight=False, soft_wrap=True)
        raise click.exceptions.Exit(130) from None
    except (ValueError, OSError, DataError, CellsFailed) as error:
        raise click.ClickException(str(error)) from error
    _show(console, name, outcome.rows)
    for path in outcome.files:
        console.print(f"Results: {path}", highlight=False, soft_wrap=True)
    console.print(f"{perf_counter() - start:.0f} s", highlight=False)


def _settings(
    name: str, module: Any, datasets: str, methods: str, out: Path | None, jobs: int | None, **others: Any
) -> Any:
    """What was typed, checked before any work is done."""
    import torch

    from slangvi_reproduction.experiments.settings import Settings, choose

    besides = [option for option in ("force", "quick", "epochs", "splits", "seed") if others[option]]
    if others.get("extend") and besides:
        raise click.UsageError(f"--extend is for tables of the experiment's own settings. Leave out --{besides[0]}.")
    if others["device"] == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("--device cuda: torch sees no GPU. Use --device cpu, or install torch with CUDA.")
    chosen: dict[str, Any] = {}
    for kind, text, known in (("dataset", datasets, module.DATASETS), ("method", methods, module.METHODS)):
        names = [word.strip() for word in text.split(",") if word.strip()]
        try:
            chosen[f"{kind}s"] = choose(kind, names, known) if names else ()
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint=f"--{kind}s") from error
    short = others["quick"] or others["epochs"] or others["splits"]
    return Settings(
        out=out or (QUICK if short else RESULTS),
        jobs=jobs or (1 if str(others["device"]).startswith("cuda") else os.cpu_count() or 1),
        command=_typed(name),
        **chosen,
        **others,
    )


def _typed(name: str) -> str:
    """The command as one would type it to make everything anew; without folders, which decide nothing."""
    context = click.get_current_context()
    words = ["slangvi", "reproduce", name]
    for key, value in context.params.items():
        given = context.get_parameter_source(key) is click.core.ParameterSource.COMMANDLINE
        if given and key not in ("data", "out", "extend"):
            words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    return " ".join(words)


@contextmanager
def _data_from(folder: Path | None) -> Iterator[None]:
    """Point the cache of data to a folder; processes that are started see it too."""
    before = os.environ.get("SLANGVI_DATA")
    if folder is not None:
        os.environ["SLANGVI_DATA"] = str(folder)
    try:
        yield
    finally:
        if folder is not None:
            os.environ.pop("SLANGVI_DATA")
            os.environ |= {} if before is None else {"SLANGVI_DATA": before}


def _show(console: Console, name: str, rows: Sequence[Row]) -> None:
    """A line for each data set and method, a column for each metric."""
    from rich.table import Table

    from slangvi_reproduction.experiments.pages import METRICS

    metrics = list(dict.fromkeys(row.metric for row in rows))
    table = Table("data", "method", *(METRICS[metric] for metric in metrics), "n", title=EXPERIMENTS[name])
    found = {row[:3]: row for row in rows}
    for dataset, method in dict.fromkeys((row.dataset, row.method) for row in rows):
        line = [found[dataset, metric, method] for metric in metrics]
        cells = [f"{row.mean:.4g} ± {row.standard_error:.2g}" if row.n > 1 else f"{row.mean:.4g}" for row in line]
        table.add_row(dataset, method, *cells, str(line[0].n))
    console.print(table)


# ---- progress ----


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[Status], None]]:
    """Bars on a terminal, a line for each finished cell elsewhere."""
    if not console.is_terminal:
        yield lambda status: _line(console, status)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description:<28}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, transient=True) as bars:
        whole = bars.add_task("all", total=1.0, note="")
        running: dict[str, Any] = {}

        def show(status: Status) -> None:
            left = "" if status.seconds_left is None else f", {_duration(status.seconds_left)} left"
            note = f"{status.finished} of {status.cells} cells{left}"
            bars.update(whole, completed=status.share, note=note)
            if status.event == "started":
                running[status.label] = bars.add_task(status.label, total=None, note="")
            elif status.event == "advanced":
                bars.update(
                    running[status.label],
                    completed=status.done,
                    total=status.steps,
                    note=f"{100 * status.done / status.steps:.0f} %",
                )
            elif status.label in running:
                bars.remove_task(running.pop(status.label))

        yield show


def _line(console: Console, status: Status) -> None:
    if status.event in ("finished", "failed"):
        left = "" if status.seconds_left is None else f", about {_duration(status.seconds_left)} left"
        time = f" in {_duration(status.seconds)}" if status.event == "finished" else ""
        text = f"{status.label}: {status.event}{time} ({status.finished} of {status.cells} cells{left})"
        console.print(text, highlight=False)
    elif status.event == "kept":
        console.print(f"{status.label}: finished before", highlight=False)


def _duration(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> _duration(4.2), _duration(75), _duration(5000)
        ('4 s', '1 min 15 s', '1 h 23 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
