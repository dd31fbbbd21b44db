"""Parts that commands share: checks before work begins, progress bars, and how a command ends."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

__all__ = ["FiniteRange", "check_new", "guarded", "progress_bars", "require"]


class FiniteRange(click.FloatRange):
    """A range of numbers in which neither inf nor nan is one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number that a word stands for."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command end with 0, with 1 and one line on what went wrong, or with 130 when it is interrupted.

    Adds the option --debug, which lets errors through as they are.
    """

    @click.option("--debug", is_flag=True, help="Show where an error comes from.")
    @functools.wraps(command)
    def run(debug: bool, **options: Any) -> None:
        try:
            command(**options)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(130) from None
        except (click.exceptions.ClickException, click.exceptions.Exit):
            raise
        except Exception as error:
            if debug:
                raise
            from slangvi.errors import CheckpointError, DataError, NumericalError

            known = isinstance(error, DataError | CheckpointError | NumericalError | OSError)
            text = str(error) if known else f"{type(error).__name__}: {error} (--debug shows where it comes from)"
            raise click.ClickException(text) from error

    return run


def check_new(path: Path, force: bool) -> None:
    """Refuse, before any work is done, to write over something without `force`, or where nothing can be written.

    Files are put in place by renaming, so that a device or a pipe would be replaced and not written to.
    """
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.exists() and not path.is_file():
        why = f"{path} is no file, such as pred.csv or page.html, but a device, a pipe or a folder."
    elif path.exists() and not force:
        why = f"{path} is there already. Use --force to replace it."
    elif not folder.is_dir():
        why = f"{folder} is a file, so that {path} cannot be in it. Choose another place."
    elif not os.access(folder, os.W_OK | os.X_OK):
        why = f"the folder {folder} cannot be written to. Choose another one, or make it writable."
    else:
        return
    raise click.BadParameter(why, param_hint="--out")


def require(command: str, **extras: str) -> None:
    """Say which extras to install if modules are missing, before any work is done."""
    missing = sorted(extra for module, extra in extras.items() if find_spec(module) is None)
    if missing:
        raise click.ClickException(f"{command} needs more packages: pip install 'slangvi[{','.join(missing)}]'")


@contextmanager
def progress_bars(console: Any) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar per label on a terminal, and elsewhere only the labels."""
    from rich.progress import Progress

    with Progress(console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def advance(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
                if not console.is_terminal:
                    console.print(f"training {label} …", highlight=False)
            bars.update(tasks[label], completed=done)

        yield advance
