"""Who may import whom, what is public, and who may print: read from the source, so new files are held to it too."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys

import pytest

import house
import slangvi
from house import LAYERS

FILES = house.source_files(house.LIBRARY)
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def within(name: str, *packages: str) -> bool:
    """Whether a module is one of these, or inside one of them."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_of(node: ast.AST, package: str) -> set[str]:
    """Every module imported anywhere below a node; `from a import b` is a.b where that is a module of ours, else a."""
    found = set()
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in FILES else base for a in child.names}
        else:
            found |= imports_of(child, package)
    return found


def package_of(name: str) -> str:
    return name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]


IMPORTS = {name: imports_of(tree, package_of(name)) for name, tree in TREES.items()}


def foreign(name: str) -> bool:
    """A third-party module: neither ours nor the standard library's."""
    return not within(name, "slangvi") and name.split(".")[0] not in sys.stdlib_module_names


# Third-party packages that a room may import besides torch; where it is not said, any.
PACKAGES = {
    "linalg": ("triton",),
    "distributions": (),
    "types": (),
    "errors": (),
    "files": (),
    "checks": (),
    "params": (),
}


def room_of(name: str) -> str:
    """The package or module right below slangvi that a module is, or is in; empty for slangvi itself."""
    return name.split(".")[1] if "." in name else ""


def test_every_room_has_its_layer():
    rooms = [room for layer in LAYERS for room in layer]
    assert len(set(rooms)) == len(rooms)
    assert set(rooms) == {room_of(name) for name in FILES} - {"", "_version", "__main__"}


@pytest.mark.parametrize("height", range(len(LAYERS)))
def test_rooms_import_only_from_layers_below(height):
    below = {"", *(room for layer in LAYERS[:height] for room in layer)}
    for name in (name for name in FILES if room_of(name) in LAYERS[height]):
        seen = {room_of(i) for i in IMPORTS[name] if within(i, "slangvi")}
        assert seen <= below | {room_of(name)}, name
        others = {i.split(".")[0] for i in IMPORTS[name] if foreign(i)}
        assert others <= {"torch", *PACKAGES.get(room_of(name), others)}, name


def test_the_library_does_not_know_the_reproduction():
    for name in FILES:
        assert not {i for i in IMPORTS[name] if within(i, "slangvi_reproduction")}, name


def owner_of_private(module: str) -> str | None:
    """The package to which a private module belongs; None for public ones."""
    parts = module.split(".")
    first = next((k for k, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")), None)
    return None if first is None else ".".join(parts[:first])


def test_no_package_imports_a_private_module_of_another():
    for name in FILES:
        owners = {i: owner_of_private(i) for i in IMPORTS[name] if within(i, "slangvi")}
        assert {i for i, owner in owners.items() if owner is not None and not within(name, owner)} == set(), name
        assert owner_of_private(name) != "slangvi" or name == "slangvi._version", "private modules are inside packages"


def test_only_the_command_line_knows_the_command_line():
    for name in FILES:
        if not within(name, "slangvi.cli", "slangvi.__main__"):
            assert {i for i in IMPORTS[name] if within(i, "slangvi.cli", "click", "rich")} == set(), name


def test_optional_packages_are_imported_where_they_are_used():
    """At the top of a file: only what every installation has; others where nothing else imports the files."""
    extras = {"slangvi.cli.": {"click"}, "slangvi.estimators": {"sklearn"}, "slangvi.linalg._programs": {"triton"}}
    for name, tree in TREES.items():
        top = ast.Module([n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef)], [])
        needed = {i.split(".")[0] for i in imports_of(top, package_of(name)) if foreign(i)}
        own = set().union(*(extra for place, extra in extras.items() if name.startswith(place)))
        assert needed <= {"torch", "numpy", "safetensors"} | own, name


def test_only_tables_and_commands_know_the_estimators():
    for name in FILES:
        if not within(name, "slangvi.estimators", "slangvi.tabular", "slangvi.cli"):
            assert {i for i in IMPORTS[name] if within(i, "slangvi.estimators")} == set(), name


def test_imports_have_no_circles():
    """Importing a.b runs a/__init__ too, but only what a module itself imports at its top can close a circle."""
    tops = {
        name: imports_of(ast.Module([n for n in tree.body if not isinstance(n, ast.FunctionDef)], []), package_of(name))
        for name, tree in TREES.items()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join([*path, name])
        if name not in done:
            for other in sorted(tops[name] & set(FILES) - {name}):
                visit(other, (*path, name))
            done.add(name)

    for name in FILES:
        visit(name, ())
    assert done == set(FILES)


# ---- what is public ----


@pytest.mark.parametrize("name", slangvi.__all__)
def test_public_names_resolve_and_explain_themselves(name):
    value = getattr(slangvi, name)
    if name == "__version__":
        assert value.count(".") >= 2
    else:
        assert inspect.getdoc(value)
        assert inspect.ismodule(value) or value.__doc__, "the docstring is inherited"


def test_dir_is_the_public_names():
    assert dir(slangvi) == sorted(slangvi.__all__)
    assert len(set(slangvi.__all__)) == len(slangvi.__all__)


def test_unknown_names_raise_attribute_error():
    with pytest.raises(AttributeError, match="module 'slangvi' has no attribute 'SLANK'"):
        slangvi.SLANK  # noqa: B018
    assert not hasattr(slangvi, "_nothing")


def test_type_checkers_see_the_same_public_names():
    (block,) = (node for node in TREES["slangvi"].body if is_type_checking(node))
    seen = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen | {"__version__"} == set(slangvi.__all__)


def is_private(name: str) -> bool:
    return any(part.startswith("_") for part in name.split("."))


def public_names(tree: ast.Module) -> set[str]:
    """Names a module binds without a leading underscore, other than by plain imports and by registering a rule."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            registered = any("register" in ast.unparse(d) for d in node.decorator_list)
            names |= set() if registered else {node.name}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname == alias.name}
    return {name for name in names if not name.startswith("_")}


def declares(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" for node in tree.body)


@pytest.mark.parametrize("name", FILES)
def test_modules_say_what_is_public(name):
    if not declares(TREES[name]):
        only_registers = within(name, "slangvi.rows.rules")
        assert is_private(name) or only_registers or not public_names(TREES[name])
    else:
        module = importlib.import_module(name)
        assert [x for x in module.__all__ if not hasattr(module, x)] == []


@pytest.mark.parametrize("name", FILES)
def test_modules_explain_themselves(name):
    assert ast.get_docstring(TREES[name]) or name == "slangvi._version"


def test_nothing_prints_outside_the_command_line():
    for name, tree in TREES.items():
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        assert within(name, "slangvi.cli") or "print" not in {call.func.id for call in calls}, name


def test_the_page_that_shows_the_tree_is_not_stale():
    assert house.PAGE.read_text(encoding="utf-8") == house.page(), "run `make pages`."
