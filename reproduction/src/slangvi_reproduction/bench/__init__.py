"""Benchmarks: what `slangvi bench NAME` measures, and the page it is shown on.

`BENCHES` is the table. A benchmark is a row in it and a module of this package, in which `rows(settings, rates)`
measures and returns rows, `notes(rows)` says in sentences what they show, `TITLE` and `ABOUT` head its section of the
page, and `REPEATS` is how often a time is taken unless --repeats says otherwise. `load_bench` imports that module.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = ["BENCHES", "load_bench"]

# Name and the line that --help shows; nothing heavy is imported for it.
BENCHES = {
    "step": "One step of the paper's network against its peers.",
    "layers": "Convolution and attention, both engines.",
    "scale": "Time and memory as the network and the rank grow.",
    "networks": "Public networks in a loop of one's own, against AdamW, IVON and EVON.",
    "replicas": "A hundred small runs, in lockstep and one by one.",
}
# Modules that are not called as their benchmark: networks.py holds the networks of other tables.
_MODULES = {"networks": "public_networks"}


def load_bench(name: str) -> ModuleType:
    """Import the module of a benchmark."""
    return import_module(f"{__name__}.{_MODULES.get(name, name)}")
