"""The target: which task, which rows, which of them are held out."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from slangvi.errors import DataError
from slangvi.tabular.reading import Table
from slangvi.tabular.target import MAX_CLASSES, Target, find_target, held_out


def table(*cells: object) -> Table:
    return Table({"y": list(map(str, cells))}, list(range(2, 2 + len(cells))))


@pytest.mark.parametrize(
    ("cells", "task", "why"),
    [
        (("yes", "no", "no"), "classification", "'y' holds text"),
        ((0.5, 1.5, 0.5), "classification", "'y' has two different values"),
        ((1, 2, 3, 3), "classification", "'y' has 3 different whole numbers"),
        (("1.5", "2.5", "n.b."), "classification", "'y' holds text, such as 'n.b.'"),
        (("1", "2", "2.0", "2.00", "3."), "classification", "'y' has 3 different whole numbers"),
        ((1, 2.5, 3, 3), "regression", "'y' holds numbers, 3 different ones"),
        (tuple(range(11)), "regression", "'y' holds numbers, 11 different ones"),
    ],
)
def test_the_task_is_found_and_said(cells, task, why):
    target, _ = find_target(table(*cells), "y")
    assert (target.task, target.why) == (task, why)


def test_the_task_can_be_given():
    assert find_target(table(1, 2, 3), "y", "regression")[0] == Target("y", "regression", "as --task says")
    classes = find_target(table(10, 9.5, -1, "b", "a"), "y", "classification")[0].classes
    assert classes == ("-1", "9.5", "10", "a", "b")


def test_labels_of_the_same_number_are_one_class_and_codes_are_not():
    target, rows = find_target(table("2.0", "2", "-0", "2", "0", "0", "007", "7", "7", "7.00", "b"), "y")
    assert target.classes == ("0", "2", "007", "7", "b")
    assert target.encode(rows).tolist() == [1, 1, 0, 1, 0, 0, 2, 3, 3, 3, 4]
    with pytest.raises(DataError, match="has 1 different values"):
        find_target(table("1", "1.0"), "y", "regression")


def test_rows_without_a_target_are_left_out():
    target, rows = find_target(table("a", "", "b", "NA"), "y")
    assert rows.lines == [2, 4]
    assert target.encode(rows).tolist() == [0, 1]


def test_words_like_none_are_classes_beside_words_and_missing_beside_numbers():
    target, rows = find_target(table("none", "mild", "severe", "null", "unknown", "NaN", "-"), "y")
    assert target.classes == ("-", "mild", "none", "null", "severe", "unknown")
    assert rows.lines == [2, 3, 4, 5, 6, 8]
    target, rows = find_target(table("none", 1.5, 2, 3.5, "unknown", "-"), "y")
    assert (target.task, rows.lines) == ("regression", [3, 4, 5])


def test_what_cannot_be_predicted_is_refused():
    with pytest.raises(DataError, match=r"no column 'z' for --target\. Columns are 'y'"):
        find_target(table(1), "z")
    with pytest.raises(DataError, match=r"has 1 different values\. There is nothing to predict"):
        find_target(table(1, 1, ""), "y")
    with pytest.raises(DataError, match=f"has {MAX_CLASSES + 1} different values, and at most {MAX_CLASSES}"):
        find_target(table(*(f"c{k}" for k in range(MAX_CLASSES + 1))), "y")
    target, rows = find_target(table(1, "two", 3.5), "y", "regression")
    with pytest.raises(DataError, match="line 3: the target 'y' is 'two', which is no number"):
        target.encode(rows)


def test_a_fifth_of_every_class_is_held_out():
    y = np.array([0] * 50 + [1] * 10 + [2])
    target = Target("y", "classification", "", ("a", "b", "c"))
    train, held = held_out(target, y, seed=0)
    assert np.bincount(y[held], minlength=3).tolist() == [10, 2, 0]
    assert sorted([*train, *held]) == list(range(61))
    assert held_out(target, y, seed=0)[1].tolist() == held.tolist() != held_out(target, y, seed=1)[1].tolist()


def test_a_fifth_of_a_regression_is_held_out():
    train, held = held_out(Target("y", "regression", ""), np.arange(23.0), seed=3)
    assert (len(train), len(held)) == (18, 5)


def test_too_few_rows_are_refused():
    with pytest.raises(DataError, match="9 rows with a target, and at least 10"):
        held_out(Target("y", "regression", ""), np.arange(9.0), 0)
    labels = tuple(map(str, range(10)))
    with pytest.raises(
        DataError, match=r"the 10 classes of 'y' have too few rows to hold any out\. .* --task regression"
    ):
        held_out(Target("y", "classification", "", labels), np.arange(10), 0)


def test_targets_survive_json():
    target = Target("y", "classification", "so", ("a", "b"))
    assert Target.from_json(asdict(target)) == target
    with pytest.raises(ValueError, match="unknown task 'ranking'"):
        Target.from_json({**asdict(target), "task": "ranking"})
