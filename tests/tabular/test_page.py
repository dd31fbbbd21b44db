"""The report: all that should be on it is, and nothing from the data becomes HTML."""

from __future__ import annotations

import csv
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from helpers.csv_tables import EVIL, fitted, houses, kinds
from slangvi.errors import DataError
from slangvi.tabular.page import page


class Seen(HTMLParser):
    """Tags, their attributes and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def classification(tmp_path_factory):
    return fitted(kinds(tmp_path_factory.mktemp("page") / f"{EVIL.replace('/', '')}.csv"), "=kind")


@pytest.fixture(scope="module")
def text(classification):
    return page(classification)


def test_nothing_from_the_data_becomes_html(text):
    seen = Seen(text)
    assert "script" not in seen.tags
    assert EVIL in seen.text
    assert "&amp;amp;" in text
    assert all(
        name in ("class", "alt", "src", "lang", "charset", "name", "content", "http-equiv")
        for name, _ in seen.attributes
    )


def test_the_page_needs_no_other_file(text):
    seen = Seen(text)
    sources = [value for name, value in seen.attributes if name in ("src", "href")]
    assert len(sources) == 4
    assert all(value.startswith("data:image/png;base64,") for value in sources)
    assert "link" not in seen.tags


def test_classes_have_a_confusion_and_regressions_have_intervals(text, tmp_path):
    assert "Confusion" in Seen(text).text
    assert "=cmd()" in Seen(text).text
    regression = fitted(houses(tmp_path / "houses.csv"), "price")
    seen = Seen(page(regression))
    for word in ("Intervals", "Residuals", "Posterior spectrum", "Most uncertain rows", "it is 'x' in every row"):
        assert word in seen.text
    assert seen.tags.count("img") == 5


def test_the_diagnosis_of_the_posterior_is_on_the_page_with_warnings_first(tmp_path):
    model = fitted(houses(tmp_path / "houses.csv"), "price", epochs=30)
    told, seen = model.record["diagnosis"], Seen(page(model)).text
    assert {"rank", "shrinkage", "parameters", "gradient noise", "layers"} <= {x["name"] for x in told["findings"]}
    assert told["summary"][0].startswith("SLANGRegressor after ")
    assert all(sentence in seen for sentence in told["summary"])
    assert all(finding["sentence"] in seen and finding["remedy"] in seen for finding in told["findings"])
    assert all(cell in seen for row in told["table"] for cell in row)
    assert [row[0] for row in told["table"]] == ["layer", "0.weight", "0.bias", "2.weight", "2.bias"]
    told["findings"].append({"level": "warning", "name": "last", "sentence": "it is last.", "remedy": "Go on."})
    assert page(model).index("it is last.") < page(model).index(told["findings"][0]["sentence"])


def test_models_that_were_never_diagnosed_have_a_page_without_it(text, classification):
    record = {name: value for name, value in classification.record.items() if name != "diagnosis"}
    assert "Diagnosis" in text
    assert "Diagnosis" not in page(replace(classification, record=record))


def test_words_in_tables_stay_words_on_a_phone(text):
    """Cells may break anywhere, so without a least width a narrow window gives text a letter a line."""
    assert "td:not(.n),th:not(.n){min-width:" in text


def test_long_numbers_are_rounded_and_whole_ones_are_not(tmp_path):
    path = tmp_path / "long.csv"
    lines = [f"{k / 7},{20260000 + (k * k) % 31},{k / 3}" for k in range(30)]
    path.write_text("\n".join(["x,day,y", *lines]) + "\n", encoding="utf-8")
    text = page(fitted(path, "y"))
    shown = [row["cells"] for row in fitted(path, "y").record["most_uncertain"]]
    long = next(cells for cells in shown if len(cells["x"]) > 10)
    assert f"{long['x']}</td>" not in text
    assert f'<td class="n">{float(long["x"]):.4g}</td>' in text
    assert f'<td class="n">{long["day"]}</td>' in text


def test_predictions_have_the_digits_of_their_standard_deviation(tmp_path):
    """Years, say: 2024 for every row would hide what was predicted."""
    data = tmp_path / "years.csv"
    data.write_text("\n".join(["a,y", *(f"{k % 7},{2024 + 0.01 * (k % 7)}" for k in range(40))]), encoding="utf-8")
    model = fitted(data, "y")
    row = model.record["most_uncertain"][0]
    before = f'<td class="n">{row["line"]}</td><td class="n">{row["target"]}</td><td class="n">'
    shown = page(model).partition(before)[2].partition("<")[0]
    assert abs(float(shown) - row["mean"]) < 1e-2 * row["std"]


def test_many_classes_are_told_by_their_commonest_confusions(tmp_path):
    path = tmp_path / "many.csv"
    path.write_text("x,y\n" + "".join(f"{k % 7},c{k % 21}\n" for k in range(105)), encoding="utf-8")
    assert "Commonest confusions" in page(fitted(path, "y", rank=0, hidden=()))


def test_a_record_that_makes_no_sense_is_refused(classification):
    spoilt = replace(classification, record={**classification.record, "held_out": {"target": []}})
    with pytest.raises(DataError, match="the record of the model cannot be understood"):
        page(spoilt)


BREAKING = [
    "</title><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "<!-- -->",
    "{{7*7}}",
    "&lt;script&gt;",
    "\u202egpj.exe",
    "javascript:alert(1)",
]


@pytest.mark.parametrize("evil", BREAKING)
def test_names_of_all_kinds_stay_text(evil, tmp_path):
    """As the target, an input, a level, a label, a column that is dropped or excluded, and the file itself."""
    path = tmp_path / "data.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([evil, f"in {evil}", f"same {evil}", f"left {evil}", "x"])
        writer.writerows([[evil if k % 2 else "b", [evil, "c"][k % 3 == 0], evil, k, k / 7] for k in range(30)])
    model = fitted(path, evil, exclude=(f"left {evil}",), rank=0, hidden=())
    model.record.update(data=f"{evil}.csv")
    text = page(model)
    seen = Seen(text)
    assert seen.text.count(evil) >= 6
    assert not {"script", "svg", "iframe", "a", "link", "form"} & set(seen.tags)
    assert seen.tags.count("img") == 4
    assert not [name for name, _ in seen.attributes if name.startswith("on") or name in ("href", "style")]
    policies = [value for name, value in seen.attributes if name == "content"]
    assert any(value.startswith("default-src 'none'; img-src data:;") for value in policies)
