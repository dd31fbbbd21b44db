"""Keywords that are the fields of a settings object: signatures, docstrings, and what is refused."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields

import pytest

from slangvi.keywords import bind_settings, document_fields, field_docs, init_keywords_of, keywords_of


@dataclass(frozen=True, kw_only=True)
class Base:
    """Base.

    Args:
        size: of the whole,
            in entries.
        rate: old words.
    """

    size: int
    rate: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    """Derived.

    Args:
        rate: new words.
        place: given by position.
    """

    rate: float = 0.2
    place: str = field(default="here", kw_only=False)


@keywords_of(Derived)
def build(x, **options):
    """Build.

    Args:
        x: data.
        options: settings,
            as follows.

    Returns:
        The settings.
    """
    return bind_settings("build", Derived, **options)


def test_docs_of_a_field_are_those_of_the_last_class_that_speaks_of_it():
    assert field_docs(Derived) == {
        "size": "of the whole,\n    in entries.",
        "rate": "new words.",
        "place": "given by position.",
    }


def test_the_signature_shows_every_field_with_its_default():
    found = inspect.signature(build).parameters
    assert {name: p.default for name, p in found.items()} == {
        "x": inspect.Parameter.empty,
        "place": "here",
        "size": inspect.Parameter.empty,
        "rate": 0.2,
    }
    assert found["rate"].kind is inspect.Parameter.KEYWORD_ONLY


def test_the_docstring_has_the_fields_in_place_of_the_options():
    lines = inspect.getdoc(build).split("\n")
    start = lines.index("    x: data.")
    assert lines[start + 1 : start + 5] == [
        "    place: given by position.",
        "    size: of the whole,",
        "        in entries.",
        "    rate: new words.",
    ]
    assert lines[start + 6] == "Returns:"


def test_calls_are_those_of_the_settings():
    assert build(None, size=3) == Derived(size=3)
    with pytest.raises(TypeError, match=r"^build\(\) got an unexpected keyword argument 'weight'"):
        build(None, size=3, weight=1)
    with pytest.raises(TypeError, match=r"^build\(\) missing a required argument: 'size'"):
        build(None)


class Documented:
    def __init_subclass__(cls) -> None:
        document_fields(cls)


class Thing(Documented):
    """A thing.

    Args:
        model: anything.
        options: settings.
    """

    @init_keywords_of(Derived)
    def __init__(self, model, *args, **options):
        self.settings = Derived(*args, **options)


class Heir(Thing):
    """An heir.

    Args:
        options: of its own.
    """


def test_classes_show_and_document_the_fields():
    assert list(inspect.signature(Thing).parameters) == ["model", "place", "size", "rate"]
    assert "    rate: new words." in inspect.getdoc(Thing)
    assert "options" not in Thing.__doc__
    assert Thing(None, "there", size=1).settings == Derived("there", size=1)
    assert inspect.signature(Heir) == inspect.signature(Thing)
    assert "options: of its own." in Heir.__doc__, "only the class that says what it takes is documented"


def test_without_docstrings_nothing_fails():
    """As under python -OO."""

    @keywords_of(Derived)
    def bare(x, **options):
        return Derived(**options)

    assert bare.__doc__ is None
    assert {item.name for item in fields(Derived)} < set(inspect.signature(bare).parameters)
