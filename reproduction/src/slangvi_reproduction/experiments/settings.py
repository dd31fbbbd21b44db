"""What the command line chooses for an experiment, and names that must be known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

__all__ = ["Settings", "choose"]


@dataclass(frozen=True)
class Settings:
    """What the command line chooses.

    Args:
        out: folder of the results.
        datasets: names; empty for all of the experiment.
        methods: names; empty for all of the experiment.
        epochs: of every cell; None for the experiment's own number.
        splits: of every data set, or seeds where an experiment repeats one split; None for the experiment's own.
        seed: of minibatches and draws.
        device: "cpu" or "cuda".
        jobs: processes.
        quick: few splits and epochs, to see that it runs.
        force: compute finished cells again.
        extend: leave what the tables in `out` hold, if it was made with the same settings, as it is; on images only.
        command: as it was typed, to be kept with the results.
    """

    out: Path = Path("reproduction/results")
    datasets: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    epochs: int | None = None
    splits: int | None = None
    seed: int = 0
    device: str = "cpu"
    jobs: int = 1
    quick: bool = False
    force: bool = False
    extend: bool = False
    command: str = ""

    @property
    def cells(self) -> Path:
        """Where cells are kept."""
        return self.out / ".cells"


def choose(kind: str, names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Names in the order of the table; all when none is given.

    Args:
        kind: what they are, for the message.
        names: chosen ones.
        known: what may be chosen.

    Example:
        >>> choose("method", ["slang_5", "mf_ef"], ["mf_ef", "slang_1", "slang_5"])
        ('mf_ef', 'slang_5')
        >>> choose("method", ["slang5"], ["mf_ef", "slang_1", "slang_5"])
        Traceback (most recent call last):
        ValueError: unknown method 'slang5'. Did you mean 'slang_5'? Known are mf_ef, slang_1, slang_5.
    """
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown {kind} {name!r}.{hint} Known are {', '.join(known)}.")
    return tuple(name for name in known if name in names or not names)
