"""Bytes that torch's CPU allocator gave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def allocated(run: Callable[[], Any]) -> int:
    """Most bytes given out by the allocator at once, those that kernels take for themselves included."""
    with torch.autograd.profiler.profile(profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
