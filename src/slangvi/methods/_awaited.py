"""Results of a step that may still be running on the device: their fields are filled when one is first looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["Awaited", "awaiting", "close", "settle"]

_WHEN_ASKED = "_fill"
AwaitedT = TypeVar("AwaitedT", bound="Awaited")


class Awaited:
    """Base of dataclasses that may be handed out before their fields are known."""

    if not TYPE_CHECKING:  # to a type checker the fields are there

        def __getattr__(self, name: str) -> Any:
            """Only called for what is not there: wait for it."""
            if _WHEN_ASKED not in self.__dict__ or name.startswith("__"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            settle(self)
            return object.__getattribute__(self, name)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are made of what is known."""
        settle(self)
        return self.__dict__


def awaiting(kind: type[AwaitedT], fill: Callable[[AwaitedT], None], **known: Any) -> AwaitedT:
    """An instance of which only some fields are known.

    Args:
        kind: the dataclass.
        fill: called with the instance when another field is looked at; it writes the missing ones into `__dict__`. If
            it raises, it is called again the next time, unless it has called `close`. It must refer to neither
            the instance nor itself: nobody might ever look, and what hangs on such a cycle, the memory of a step, would
            be held until Python looks for cycles.
        known: the fields that need no waiting.
    """
    made = kind.__new__(kind)
    made.__dict__.update(known, **{_WHEN_ASKED: fill})
    return made


def settle(made: Awaited) -> None:
    """Wait for the fields of an instance, if some are missing."""
    fill = made.__dict__.get(_WHEN_ASKED)
    if fill is not None:
        fill(made)
        close(made)


def close(made: Awaited) -> None:
    """Nothing of an instance is waited for any more."""
    made.__dict__.pop(_WHEN_ASKED, None)
