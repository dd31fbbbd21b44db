"""Hooks that pickled models of version 0.1 carry; without an owner they do nothing."""

from typing import Any

from slangvi.rows.recorder import _ForwardHook as _ForwardHook


class _PreHook:
    def __call__(self, *args: Any) -> None:
        pass
