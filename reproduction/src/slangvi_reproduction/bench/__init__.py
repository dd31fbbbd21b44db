"""Benchmarks: what `slangvi bench NAME` measures, and the page it is shown on.

`BENCHES` is the table. A benchmark is a row in it and a module of this package, in which `rows(settings, rates)`
measures and returns rows, `notes(rows)` says in sentences what they show, `TITLE` and `ABOUT` head its section of the
page, and `REPEATS` is how often a time is taken unless --repeats says otherwise.
"""

from __future__ import annotations

__all__ = ["BENCHES"]

# Name, which is also the module's, and the line that --help shows; nothing heavy is imported for it.
BENCHES = {
    "step": "One step of the paper's network against its peers.",
    "layers": "Convolution and attention, both engines.",
    "scale": "Time and memory as the network and the rank grow.",
    "replicas": "A hundred small runs, in lockstep and one by one.",
}
