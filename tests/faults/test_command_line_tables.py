"""`slangvi fit`, `predict` and `report` with any words and any tables: a known end, and nothing half-written."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from faults.world import unchanged
from helpers.csv_tables import houses, kinds
from slangvi.cli.app import app

GENERATE = [Phase.explicit, Phase.generate]
FITTED = ("model.json", "model.safetensors")
# Names of files and folders that the fixture makes; the others are not there.
PLACES = st.sampled_from(["houses.csv", "kinds.csv", "houses", "kinds", "new", "none.csv", "bad.csv", ".", "-", ""])
WORDS = st.one_of(
    PLACES,
    st.sampled_from(["--target", "--out", "--task", "--exclude", "--rank", "--hidden", "--prior-precision", "--seed"]),
    st.sampled_from(
        ["--device", "--max-mb", "--no-refit", "--force", "--quiet", "--json", "--debug", "--level", "--keep"]
    ),
    st.sampled_from(
        ["price", "=kind", "town", "regression", "cpu", "1", "0", "-1", "1e-9", "nan", "inf", "4,4", "1e400"]
    ),
    st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), max_size=4),
)
STARTS = st.sampled_from(
    [
        ("fit", "houses.csv", "--target", "price", "--out", "new"),
        ("fit", "kinds.csv", "--target", "=kind", "--out", "new"),
        ("fit", "bad.csv", "--target", "a", "--out", "new"),
        ("predict", "houses", "houses.csv", "--out", "pred.csv"),
        ("predict", "kinds", "houses.csv", "--out", "-"),
        ("report", "houses"),
        ("fit",),
        ("predict",),
        ("report",),
    ]
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two tables, a model of each, and a file that is no table."""
    folder = tmp_path_factory.mktemp("words")
    houses(folder / "houses.csv")
    kinds(folder / "kinds.csv")
    (folder / "bad.csv").write_bytes(b'a,b\n"1,\x00\n')
    for data, target in (("houses", "price"), ("kinds", "=kind")):
        words = ["fit", folder / f"{data}.csv", "--target", target, "--out", folder / data, "--quiet"]
        short = ["--epochs", 1, "--hidden", 0, "--rank", 0]
        assert CliRunner().invoke(app, list(map(str, words + short))).exit_code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@settings(max_examples=25, phases=GENERATE)
@given(start=STARTS, words=st.lists(WORDS, max_size=4))
def test_any_words_end_with_a_known_code_and_nothing_half_written(place, start, words):
    before = contents(place)
    short = ["--epochs", "1", "--hidden", "0"] if start[0] == "fit" else []
    with unchanged():
        result = CliRunner().invoke(app, [*start[:1], *short, *start[1:], *words])
    told = result.exception is None or isinstance(result.exception, SystemExit) or "--debug" in words
    assert told, (words, result.exception)
    assert result.exit_code in (0, 1, 2), words
    assert "Traceback" not in result.output
    after = contents(place)
    if result.exit_code:
        assert after == before, words
    made = set(after) - set(before)
    assert not [path for path in made if path.name.startswith(".")], "a temporary file was left"
    for path in made:
        assert path.name not in FITTED or all(path.with_name(name) in after for name in FITTED), path
    for path in made:
        (place / path).unlink()
    for path, content in before.items():  # --force may have replaced some
        (place / path).write_bytes(content)
