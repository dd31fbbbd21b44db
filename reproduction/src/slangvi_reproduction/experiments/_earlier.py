"""A table that was made before, perhaps elsewhere: what a run does not compute stays in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slangvi.environment import PLATFORM
from slangvi_reproduction.experiments._cells import Cell
from slangvi_reproduction.experiments.results import Posterior, Row, read_about, read_posteriors, read_table

__all__ = ["Earlier", "known_cells", "label_of"]

# They say where and how much was computed, not what.
_ELSEWHERE = ("device", "quick")


def label_of(line: Mapping[str, Any]) -> str:
    """The cell behind a line that names its data set and its method."""
    return f"{line['dataset']} {line['method']}"


def known_cells(about: Path, common: Mapping[str, Any], planned: Iterable[Cell]) -> dict[str, Mapping[str, Any]]:
    """Cells that earlier results tell of, made with the settings they are planned with: what is told of each, by label.

    Args:
        about: the JSON of the earlier results; without one nothing is known.
        common: settings that all cells share now.
        planned: all cells of the experiment.
    """
    told, prints = _Told(about), _prints(planned)
    made = told.fingerprints(common, prints)
    return {label: facts for label, facts in told.cells.items() if made[label] and made[label] == prints.get(label)}


class Earlier:
    """The results an experiment finds in its folder, of which the cells may be gone, as in a clone of the repository.

    Lines of cells that are neither chosen nor kept here are carried over, if they were made with the same settings;
    otherwise they would be lost, and the run is refused before it begins.

    Args:
        about: the JSON of the earlier results; without one nothing is carried over.
        common: settings that all cells share now.
        planned: all cells of the experiment.
        here: those that are chosen or kept beside the results.
    """

    def __init__(self, about: Path, common: Mapping[str, Any], planned: Iterable[Cell], here: Iterable[Cell]) -> None:
        self._about = about
        told, prints = _Told(about), _prints(planned)
        mine = {cell.label for cell in _with_needs(here)}
        self._places = {label: place for place, label in enumerate(prints)}
        # Settings that are no longer searched go with what was chosen from them.
        mine |= {label for label in set(told.cells) - set(prints) if _owner(label) in map(_owner, mine)}
        self.cells = {label: facts for label, facts in told.cells.items() if label not in mine}
        made = told.fingerprints(common, prints)
        other = [label for label in self.cells if made[label] is None or made[label] != prints.get(label)]
        if other:
            raise ValueError(
                f"{about} has {len(other)} cells of other settings that were not chosen and are not kept beside it "
                f"({min(other)}, ...): they would be lost. Choose another folder with --out, or leave out --datasets "
                "and --methods."
            )

    def forget(self, cells: Iterable[Cell]) -> None:
        """Drop what is known better now, by whoever computed it."""
        for cell in cells:
            self.cells.pop(cell.label, None)

    def lines(
        self, path: Path, header: Sequence[str], label: Callable[[Mapping[str, str]], str | None]
    ) -> list[tuple[str, ...]]:
        """Lines of an earlier table that are carried over; `label` tells the cell of a line."""
        if not self.cells:
            return []
        if not path.is_file():
            raise ValueError(
                f"{path} is missing, though {self._about.name} beside it tells of {len(self.cells)} cells that only it "
                "has. Bring it back, or remove the JSON too; what was computed now is kept."
            )
        return [tuple(line.values()) for line in read_table(path, header) if label(line) in self.cells]

    def merged(
        self,
        path: Path,
        header: Sequence[str],
        lines: Iterable[Sequence[Any]],
        label: Callable[[Mapping[str, Any]], str] = label_of,
        by: Sequence[str] = ("metric",),
    ) -> list[Sequence[Any]]:
        """Lines that are carried over and new ones, in the order of a table that is made at once.

        Args:
            path: of the table.
            header: its columns.
            lines: new ones.
            label: tells the cell of a line.
            by: columns that lines are ordered by, where there are such, before they are ordered as cells are planned.
        """
        both: list[Sequence[Any]] = [*self.lines(path, header, label), *lines]
        named = [(dict(zip(header, line, strict=True)), line) for line in both]
        seen = {column: list(dict.fromkeys(line.get(column) for line, _ in named)) for column in by}

        def place(entry: tuple[dict[str, Any], Sequence[Any]]) -> tuple[int, ...]:
            found = entry[0]
            return *(seen[column].index(found.get(column)) for column in by), self._places[label(found)]

        return [line for _, line in sorted(named, key=place)]

    def rows(self, path: Path, rows: Iterable[Row], **order: Any) -> list[Row]:
        """The same for a table of metrics."""
        return [Row.read(line) for line in self.merged(path, Row._fields, rows, **order)]

    def posteriors(self, path: Path) -> dict[str, Posterior]:
        """Gaussians of cells that are carried over, by "dataset/method"."""
        found = read_posteriors(path) if self.cells and path.is_file() else {}
        return {name: q for name, q in found.items() if name.replace("/", " ", 1) in self.cells}


class _Told:
    """What the JSON of earlier results tells of its cells; nothing where there is none."""

    def __init__(self, about: Path) -> None:
        told: Mapping[str, Any] = read_about(about) if about.is_file() else {"settings": {}}
        # Cells that do not say where they were computed are of the run that told of them.
        place = {name: told[name] for name in PLATFORM if name in told}
        self.settings: Mapping[str, Any] = told["settings"]
        self.cells: dict[str, dict[str, Any]] = {name: place | facts for name, facts in told.get("cells", {}).items()}

    def fingerprints(self, common: Mapping[str, Any], prints: Mapping[str, str]) -> dict[str, str | None]:
        """Of all cells; where they are not told, as at first, cells are judged by what all of them share."""
        same = _what(self.settings) == _what(common)
        return {
            label: facts.get("fingerprint", prints.get(label) if same else None) for label, facts in self.cells.items()
        }


def _prints(planned: Iterable[Cell]) -> dict[str, str]:
    """Fingerprints by label, of cells and then of those they need."""
    cells = list(planned)
    return {cell.label: cell.fingerprint for cell in (*cells, *_with_needs(cells))}


def _with_needs(cells: Iterable[Cell]) -> Iterator[Cell]:
    for cell in cells:
        yield cell
        yield from cell.needs


def _owner(label: str) -> str:
    """Data set and method, without setting or seed."""
    return label.partition("-")[0]


def _what(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _ELSEWHERE}
