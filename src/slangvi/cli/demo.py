"""`slangvi demo`: train on bundled data, print a table, write a picture."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import click

from slangvi.cli.common import check_new, guarded, progress_bars, require

__all__ = ["demo"]


@click.command()
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

    from slangvi.cli import _demo_training as training

    console = Console()
    start = perf_counter()
    with progress_bars(console) as progress:
        result = training.run(seed, progress, quick)
    table = Table("data", "method", "accuracy", "NLL (nats)", "calibration error", title="On held-out data")
    for row in result.rows:
        table.add_row(row.data, row.method, row.score, f"{row.nll:.3f}", f"{row.calibration:.3f}")
    console.print(table)
    training.plot(result, out)
    console.print(f"Picture: {out}   ({perf_counter() - start:.0f} s)", highlight=False)
