"""The click group. Heavy imports stay inside the commands, so that --help answers at once."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import click

from slangvi._version import __version__
from slangvi.cli._common import check_new, guarded, progress_bars, require
from slangvi.cli.bench import bench
from slangvi.cli.data import data
from slangvi.cli.fit import fit
from slangvi.cli.predict import predict
from slangvi.cli.report import report
from slangvi.cli.reproduce import reproduce

__all__ = ["app"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="slangvi")
def app() -> None:
    """Honest uncertainty for any PyTorch network."""


app.add_command(bench)
app.add_command(data)
app.add_command(fit)
app.add_command(predict)
app.add_command(report)
app.add_command(reproduce)


@app.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("demo.png"),
    show_default=True,
    help="Where the picture goes.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of data, initial weights and draws.")
@click.option("--quick", is_flag=True, help="A twentieth of the training, to see that it runs.")
@guarded
def demo(out: Path, seed: int, quick: bool) -> None:
    """Train SLANG and Adam on a noisy curve and on patients' data; print a table, write a picture."""
    if not out.parent.is_dir():
        raise click.BadParameter(f"folder {out.parent} does not exist. Make it first.", param_hint="--out")
    check_new(out, force=True)
    require("demo", matplotlib="plot", sklearn="sklearn")
    from rich.console import Console
    from rich.table import Table

    from slangvi.experiments import demo as experiment

    console = Console()
    start = perf_counter()
    with progress_bars(console) as progress:
        result = experiment.run(seed, progress, quick)
    table = Table("data", "method", "accuracy", "NLL (nats)", "calibration error", title="On held-out data")
    for row in result.rows:
        table.add_row(row.data, row.method, row.score, f"{row.nll:.3f}", f"{row.calibration:.3f}")
    console.print(table)
    experiment.plot(result, out)
    console.print(f"Picture: {out}   ({perf_counter() - start:.0f} s)", highlight=False)
