"""The page docs/performance.md: written from the results, never by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slangvi_reproduction.bench import BENCHES, load_bench, plots, step
from slangvi_reproduction.bench.limits import bytes_of, operations_of
from slangvi_reproduction.bench.own import COMPILED, FUNCTIONAL
from slangvi_reproduction.bench.record import Record, left_out, load, table

__all__ = ["load_all", "page", "write"]

HEAD = """\
<!-- Written by `slangvi bench report` from reproduction/benchmarks/results. Edit _performance_notes.md instead. -->

# Performance

Every number on this page was measured by `slangvi bench NAME` and is kept with its environment in
`reproduction/benchmarks/results/`. A time is the median over repeats of one whole step; all contenders live in one
process and take turns, so that whatever else the machine does hits them alike. *× Adam* is relative to Adam on a batch
of $M \\cdot S$ examples, as many as $S$ draws push through the network. *Peak MB* is everything a contender holds at
the worst moment of a step besides the data: parameters, state, activations, temporaries. On a CPU that is the sum of
live tensors, on a GPU what the allocator handed out. *Extra MB* is the part beyond a plain forward and backward pass.
*Share of the limit* is explained [at the end](#the-physical-limit).
"""

LIMIT = """\
## The physical limit

A step must do at least some arithmetic and move at least some bytes. Both are counted from the sizes of the layers;
`slangvi_reproduction/bench/limits.py` says what is counted, phase by phase: matrix products with the gradients held as
factors, the first layer's inputs shared by all draws, and every vector of length $P$ read or written once between two
reductions. Divided by what the same machine was measured to reach in one large float32 matrix product and in one large
copy, the larger of the two times is a floor for the step. The share of the limit is this floor over the measured time.
"""

NOTES = """\
```{include} _performance_notes.md
```
"""


def load_all(folder: Path) -> list[Record]:
    """All results in a folder, in the order of the table of benchmarks."""
    records = [load(path) for path in sorted(folder.glob("*.json"))]
    for record in records:
        if "--quick" in record.environment["command"]:
            raise ValueError(
                f"{record.bench}-{record.label}.json comes from a --quick run, whose numbers mean nothing."
            )
    return sorted(records, key=lambda record: list(BENCHES).index(record.bench))


def write(results: Path, docs: Path) -> list[Path]:
    """Write the page and its pictures into a folder of documentation, and return their paths."""
    records = load_all(results)
    written = [docs / "performance.md"]
    written[0].write_text(page(records), encoding="utf-8")
    for record in records:
        written.append(docs / "images" / _image(record))
        plots.picture(record, written[-1])
    return written


def page(records: Sequence[Record]) -> str:
    """The text of the page."""
    parts = [HEAD]
    for name in BENCHES:
        module = load_bench(name)
        parts.append(f"## {module.TITLE}\n\n{module.ABOUT}")
        mine = [record for record in records if record.bench == name]
        parts += [_section(record) for record in mine] or [f"Not measured yet: `slangvi bench {name}`.\n"]
    parts += [LIMIT, *(_limit(record) for record in records if record.bench == "step"), NOTES]
    return "\n".join(parts)


def _image(record: Record) -> str:
    return f"bench-{record.bench}-{record.label}.png"


def _section(record: Record) -> str:
    """One record: where it was measured, picture, table, and what there is to say."""
    said = [*load_bench(record.bench).notes(record.rows), *left_out(record.rows)]
    picture = f"```{{image}} images/{_image(record)}\n:alt: The table below as a picture.\n```\n"
    parts = [f"### {_device(record)}\n", _environment(record), picture, _markdown(*table(record.rows))]
    return "\n".join([*parts, *(f"- {line}" for line in said), *([""] if said else [])])


def _device(record: Record) -> str:
    title = record.bench.capitalize()
    return f"{title} on {record.environment['device']}"


def _environment(record: Record) -> str:
    about = record.environment
    peers = "".join(f", {name} {version}" for name, version in about["peers"].items())
    return (
        f"`{about['command']}` on {about['date']}: {about['seconds']:.0f} s, {about['threads']} threads, "
        f"Python {about['python']}, torch {about['torch']}, slangvi {about['slangvi']}{peers}.\n"
    )


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table with numbers to the right."""
    numeric = [all(not line[k] or line[k][0] in "0123456789-" for line in lines) for k in range(len(header))]
    rule = ["---:" if right else "---" for right in numeric]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)) + "\n"


def _limit(record: Record) -> str:
    """Counts, floor and share for the functional step at each rank."""
    rates = record.rates
    intro = (
        f"On {record.environment['device']} a product reached {rates.flops / 1e12:.3g} TFLOP/s and a copy "
        f"{rates.bytes / 1e9:.0f} GB/s. For the network of the first table:\n"
    )
    header = ["contender", "L", "operations (10⁹)", "bytes (10⁶)", "floor, ms", "measured, ms", "share"]
    lines = []
    for row in record.rows:
        if row.name in (FUNCTIONAL, COMPILED) and row.milliseconds is not None and row.share is not None:
            shape = step.FULL.shape(int(row.settings["L"]))
            work, moved = sum(operations_of(shape).values()), sum(bytes_of(shape).values())
            floor = row.share * row.milliseconds
            numbers = [f"{x:.3g}" for x in (work / 1e9, moved / 1e6, floor, row.milliseconds)]
            lines.append([row.name, str(row.settings["L"]), *numbers, f"{100 * row.share:.1f} %"])
    return intro + "\n" + _markdown(header, lines)
