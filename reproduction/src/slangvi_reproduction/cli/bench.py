"""`slangvi bench NAME`: a command for each benchmark of the table, and one that writes the page."""

from __future__ import annotations

from pathlib import Path

import click

from slangvi.cli.common import check_new, guarded
from slangvi_reproduction.bench import BENCHES, load_bench

__all__ = ["bench"]

RESULTS, DOCS = Path("reproduction/benchmarks/results"), Path("docs")
_file = click.Path(path_type=Path, dir_okay=False)
_folder = click.Path(path_type=Path, file_okay=False, exists=True)


@click.group()
def bench() -> None:
    """Measure SLANG against its peers."""


def _command(name: str) -> click.Command:
    """The command of one benchmark; all have the same options."""

    @click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
    @click.option("--quick", is_flag=True, help="Tiny sizes, to see that it runs; written only where --out says.")
    @click.option("--repeats", type=click.IntRange(1), help="Samples of each time; more steady, and slower.")
    @click.option("--out", type=_file, help=f"JSON file; {RESULTS}/{name}-<device>.json if not given.")
    @guarded
    def command(device: str, quick: bool, repeats: int | None, out: Path | None) -> None:
        _measure(name, device, quick, repeats, out)

    return click.command(name, help=BENCHES[name])(command)


for _name in BENCHES:
    bench.add_command(_command(_name))


@bench.command()
@click.option("--results", type=_folder, default=RESULTS, show_default=True, help="Where the JSON files are.")
@click.option("--docs", type=_folder, default=DOCS, show_default=True, help="Where the page and its pictures go.")
def report(results: Path, docs: Path) -> None:
    """Write docs/performance.md and its pictures from the results."""
    from slangvi_reproduction.bench.report import write

    try:
        for path in write(results, docs):
            click.echo(path)
    except (ValueError, ImportError) as error:
        raise click.ClickException(str(error)) from error


def _measure(name: str, device: str, quick: bool, repeats: int | None, out: Path | None) -> None:
    import torch
    from rich.console import Console

    from slangvi_reproduction.bench.record import Settings, save
    from slangvi_reproduction.bench.run import run

    if out is not None and not out.parent.is_dir():
        raise click.BadParameter(f"folder {out.parent} does not exist. Make it first.", param_hint="--out")
    if out is not None:
        check_new(out, force=True)
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("--device cuda: torch sees no GPU. Use --device cpu, or install torch with CUDA.")
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a table cut to 80 columns cannot be read in a log
    times = repeats or load_bench(name).REPEATS
    record = run(name, Settings(device, quick, times, lambda line: console.print(f"{line} …", highlight=False)))
    _show(console, record)
    path = out or (None if quick else RESULTS / f"{name}-{record.label}.json")
    if path is not None:
        save(record, path)
        console.print(f"Results: {path}", highlight=False)


def _show(console: object, record: object) -> None:
    """The table, and below it what there is to say."""
    from rich.console import Console
    from rich.table import Table

    from slangvi_reproduction.bench.record import Record, left_out, table

    assert isinstance(console, Console)
    assert isinstance(record, Record)
    about = record.environment
    header, lines = table(record.rows)
    grid = Table(*header, title=f"{about['device']}, {about['threads']} threads, torch {about['torch']}")
    for line in lines:
        grid.add_row(*line)
    console.print(grid)
    for line in [*load_bench(record.bench).notes(record.rows), *left_out(record.rows)]:
        console.print(line, highlight=False)
    console.print(f"{about['seconds']:.0f} s", highlight=False)
