"""Hooks that pickled models of version 0.1 carry; without an owner they do nothing."""

from slangvi.rows.recorder import _ForwardHook as _ForwardHook
from slangvi.rows.recorder import _PreHook as _PreHook

__all__: list[str] = []
