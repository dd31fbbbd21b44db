"""What one must know to repeat a run: command, machine, versions. Kept beside every number that was measured."""

from __future__ import annotations

import platform
import re
import time
from pathlib import Path
from typing import Any

import torch

from slangvi import __version__

__all__ = ["PLATFORM", "cpu_name", "device_name", "environment", "platform_facts"]

# Names of the facts that numbers depend on.
PLATFORM = ("device", "python", "torch")


def environment(command: str, device: str, seconds: float) -> dict[str, Any]:
    """Return command, device, threads, versions, date, and the seconds a run took."""
    return {
        "command": command,
        "device_type": device,
        **platform_facts(device),
        "threads": torch.get_num_threads(),
        "slangvi": __version__,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
    }


def platform_facts(device: str) -> dict[str, str]:
    """Return what a number was computed on: device, Python, torch."""
    return dict(zip(PLATFORM, (device_name(device), platform.python_version(), torch.__version__), strict=True))


def device_name(device: str) -> str:
    """Return the device by its makers' name, for "cpu", "cuda" or the like."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()


def cpu_name(listing: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor by its makers' name where the system tells it."""
    text = listing.read_text(encoding="utf-8") if listing.is_file() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.M)
    return found[1].strip() if found else platform.processor() or "cpu"
