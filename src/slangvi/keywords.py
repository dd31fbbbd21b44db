"""Functions and classes whose keywords are the fields of a settings object, so that both are written once.

A function takes `**options` and makes the settings object of them. Decorated with `keywords_of(Settings)`, it shows the
fields of `Settings` in its signature, to type checkers, and in its docstring, where they take the place of the entry
`options`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["bind_settings", "document_fields", "field_docs", "init_keywords_of", "keywords_of"]

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")
S = TypeVar("S")

_ENTRY = re.compile(r"^    (\w+): ", re.M)
# The entry of a docstring that stands for all fields, with the lines that continue it.
_OPTIONS = re.compile(r"^(?P<indent> *)options: .*\n(?:(?P=indent) +.*\n)*", re.M)


def keywords_of(
    settings: Callable[P, Any],
) -> Callable[[Callable[Concatenate[A, ...], R]], Callable[Concatenate[A, P], R]]:
    """Show the fields of a settings class as keywords of a function that has one argument besides `**options`."""
    return lambda function: _show(function, settings)


def init_keywords_of(
    settings: Callable[P, Any],
) -> Callable[[Callable[Concatenate[A, B, ...], None]], Callable[Concatenate[A, B, P], None]]:
    """Do the same for an `__init__` that has one argument besides `self`; `document_fields` documents the class."""
    return lambda function: _show(function, settings)


def bind_settings(name: str, settings: Callable[P, S], *args: P.args, **options: P.kwargs) -> S:
    """Return the settings object that a call of `name` describes, or raise the `TypeError` of such a function."""
    try:
        inspect.signature(settings).bind(*args, **options)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None
    return settings(*args, **options)


def _show(function: Any, settings: Any) -> Any:
    own = inspect.signature(function)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [parameter for parameter in own.parameters.values() if parameter.kind not in kinds]
    function.__signature__ = own.replace(parameters=[*named, *inspect.signature(settings).parameters.values()])
    function.settings_class = settings
    function.__doc__ = _expanded(function.__doc__, settings)
    return function


def document_fields(kind: type) -> None:
    """Put the fields that a class's own `__init__` takes into the docstring of the class."""
    settings = getattr(vars(kind).get("__init__"), "settings_class", None)
    if settings is not None:
        kind.__doc__ = _expanded(kind.__doc__, settings)


def _expanded(text: str | None, settings: Any) -> str | None:
    """Return a docstring with the entry `options` replaced by those of all fields."""

    def entries(match: re.Match[str]) -> str:
        known = field_docs(settings)
        lines = "\n".join(f"{name}: {known[name]}" for name in inspect.signature(settings).parameters)
        return textwrap.indent(lines, match["indent"]) + "\n"

    return text and _OPTIONS.sub(entries, text, count=1)


def field_docs(settings: Any) -> dict[str, str]:
    """Return what the docstrings of a settings class and its bases say of each field.

    Lines after the first one keep their indentation relative to the name. A class may say anew what a field of a base
    means.
    """
    found: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        text = inspect.cleandoc(vars(kind).get("__doc__") or "")
        section = re.search(r"^Args:\n((?:    .*\n?)+)", text, re.M)
        if section:
            names = _ENTRY.split(section[1])[1:]
            for name, body in zip(names[::2], names[1::2], strict=True):
                found[name] = re.sub(r"\n    ", "\n", body.rstrip())
    return found
