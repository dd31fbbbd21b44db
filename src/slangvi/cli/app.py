"""The click group. Heavy imports stay inside the commands, so that --help answers at once."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import click

from slangvi import __version__
from slangvi.cli.demo import demo
from slangvi.cli.tables import fit, predict, report

__all__ = ["ENTRY_POINTS", "app"]

# Packages add commands by entry points of this group, each a `click.Command`.
ENTRY_POINTS = "slangvi.commands"
# Commands of the package `slangvi-reproduction`, which is not part of the library, and what they do.
REPRODUCTION = {
    "bench": "Measure SLANG against its peers.",
    "data": "Data sets of the experiments: what there is, and fetching it.",
    "reproduce": "Run the paper's experiments again.",
}


class _Extensible(click.Group):
    """A group whose commands may come from other packages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *REPRODUCTION, *_added()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if cmd_name in (added := _added()):
            return _load(added[cmd_name])
        if cmd_name not in REPRODUCTION:
            return None
        where = "in the package slangvi-reproduction: pip install ./reproduction, in a clone of slangvi."
        return _failing(cmd_name, f"{REPRODUCTION[cmd_name]} (not installed)", f"'slangvi {cmd_name}' is {where}")


def _added() -> dict[str, EntryPoint]:
    """Return the commands of installed packages by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _load(point: EntryPoint) -> click.Command:
    """Return the command of another package, or one that says why it cannot be imported."""
    try:
        command: click.Command = point.load()
    except Exception as error:  # whatever the package does when it is imported
        reason = f"'slangvi {point.name}' cannot be imported from {point.value}: {error}"
        return _failing(point.name, "(cannot be imported)", reason)
    return command


def _failing(name: str, about: str, reason: str) -> click.Command:
    """Return a command that ends with a reason, whatever its arguments."""

    @click.command(
        name,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        add_help_option=False,
        short_help=about,
    )
    def command() -> None:
        raise click.ClickException(reason)

    return command


@click.group(cls=_Extensible, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="slangvi")
def app() -> None:
    """Honest uncertainty for any PyTorch network."""


for _command in (demo, fit, predict, report):
    app.add_command(_command)
