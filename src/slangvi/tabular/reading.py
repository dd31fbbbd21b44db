"""CSV files from strangers: a table of text, or a `DataError` that says what is wrong and in which line."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from slangvi.errors import DataError

__all__ = ["MAX_CELLS", "MAX_COLUMNS", "Table", "parse", "read_csv"]

DELIMITERS = (",", ";", "\t")
MAX_COLUMNS, MAX_CELLS = 10_000, 20_000_000
_DECLARED = re.compile(f"sep=([{''.join(DELIMITERS)}])\r?\n")
# Records that are looked at to find the delimiter.
_LOOK = 50
_MAGIC = {
    b"PK\x03\x04": "a zip archive or an Excel workbook; export it as CSV",
    b"\x1f\x8b": "compressed by gzip; unpack it first",
    b"PAR1": "a Parquet file; export it as CSV",
    b"\xff\xfe": "UTF-16 text; save it as CSV in UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as CSV in UTF-8",
}


@dataclass(frozen=True)
class Table:
    """Cells as text without blanks around them, by column, and the line of each row in its file, counted from 1."""

    columns: dict[str, list[str]]
    lines: list[int]

    def __len__(self) -> int:
        return len(self.lines)

    def take(self, rows: Sequence[int]) -> Table:
        """Return a table of some of the rows."""
        columns = {name: [cells[k] for k in rows] for name, cells in self.columns.items()}
        return Table(columns, [self.lines[k] for k in rows])

    def without(self, names: Sequence[str]) -> Table:
        """Return a table of the other columns."""
        return Table({name: cells for name, cells in self.columns.items() if name not in names}, self.lines)


def read_csv(path: Path, max_mb: float = 200.0) -> Table:
    """Read a file with a header line, of at most `max_mb` million bytes.

    A cell takes some 60 bytes, however short it is: for every MB there may be 100,000 of them, and 20 million always.
    """
    limit = int(max_mb * 1e6)
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    if len(content) > limit:
        raise DataError(f"{path} is larger than {max_mb:g} MB. Raise --max-mb, or give fewer rows.")
    return parse(content, str(path), max(MAX_CELLS, int(max_mb * 1e5)))


def parse(content: bytes, name: str = "the file", max_cells: int = MAX_CELLS) -> Table:
    r"""Return the table in the bytes of a CSV file.

    UTF-8 with or without a byte-order mark; commas, semicolons or tabs between cells, found from the first lines or
    declared by a line such as `sep=;`, as for Excel; quotes as in RFC 4180. Nothing in a cell is ever evaluated. Lines
    without anything are left out, and a column without a name is called by its place. A `DataError` names the file.

    Example:
        >>> parse(b"size;price\n1,5;20\n\n3;40\n")
        Table(columns={'size': ['1,5', '3'], 'price': ['20', '40']}, lines=[2, 4])
    """
    text = _text(content, name)
    declared = _DECLARED.match(text)
    delimiter = declared[1] if declared else _delimiter(text)
    reader = _reader(text, delimiter)
    try:
        if declared:
            next(reader)
        header = _header(next(_filled(reader), (0, []))[1], name)
        rows: list[list[str]] = []
        lines: list[int] = []
        for line, cells in _filled(reader):
            if len(cells) != len(header):
                raise DataError(
                    f"{name}, line {line}: {len(cells)} cells, but the header has {len(header)}. Cells are taken to be "
                    f"separated by {delimiter!r}; put quotes around cells that hold it."
                )
            if (len(rows) + 1) * len(header) > max_cells:
                raise DataError(
                    f"{name} has more than {max_cells:,} cells. Raise --max-mb, or give fewer rows or columns."
                )
            rows.append([cell.strip() for cell in cells])
            lines.append(line)
    except csv.Error as error:
        raise DataError(f"{name}, line {reader.line_num}: {error}. Look at the quotes there.") from error
    if not rows:
        raise DataError(f"{name} has no rows below its header.")
    return Table(dict(zip(header, map(list, zip(*rows, strict=True)), strict=True)), lines)


def _text(content: bytes, name: str) -> str:
    for start, kind in _MAGIC.items():
        if content.startswith(start):
            raise DataError(f"{name} is {kind}.")
    if b"\x00" in content:
        raise DataError(f"{name} holds zero bytes, so it is no text. Export it as CSV in UTF-8.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}, line {line}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from error
    if not text.strip():
        raise DataError(f"{name} is empty. The first line must name the columns.")
    return text


def _reader(text: str, delimiter: str) -> Any:
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)


def _filled(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the line that each row ends in and its cells, without blank rows."""
    for cells in reader:
        if len(cells) > 1 or any(cell.strip() for cell in cells):
            yield reader.line_num, cells


def _delimiter(text: str) -> str:
    """Return the delimiter by which most of the first records are as wide as the header, and that makes it widest."""

    def score(delimiter: str) -> tuple[bool, float, int]:
        try:
            widths = [len(cells) for cells in islice(_reader(text, delimiter), _LOOK) if cells]
        except csv.Error:
            return False, 0.0, 0
        width = widths[0] if widths else 0
        return width > 1, sum(w == width for w in widths) / max(1, len(widths)), width

    return max(DELIMITERS, key=score)


def _header(cells: list[str], name: str) -> list[str]:
    if len(cells) > MAX_COLUMNS:
        raise DataError(f"{name} has {len(cells)} columns, and at most {MAX_COLUMNS} are read.")
    header = [cell.strip() or f"column {k}" for k, cell in enumerate(cells, 1)]
    if len(set(header)) < len(header):
        twice = Counter(header).most_common(1)[0][0]
        raise DataError(f"{name} has two columns named {twice!r}. Rename one of them.")
    return header
