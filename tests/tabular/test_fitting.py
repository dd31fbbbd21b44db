"""From a table to a model: what the check on held-out rows may see."""

from __future__ import annotations

import pytest

from slangvi.tabular.fitting import Settings, fit
from slangvi.tabular.reading import parse


def numbered(without_target: int | None = None) -> bytes:
    """A table sorted by its target, with the number of the row, which would tell it."""
    lines = [f"{k},{k * 7 % 11},{'' if k == without_target else 0.5 * k}" for k in range(1, 41)]
    return "\n".join(["row,a,y", *lines]).encode()


@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize("without_target", [None, 20])
def test_the_number_of_a_row_is_not_used_where_rows_are_left_out(without_target, refit):
    """Held-out rows, and rows without a target, leave gaps in it; without a refit, the model is that of the check."""
    settings = Settings("y", epochs=1, hidden=(), refit=refit)
    made = fit(parse(numbered(without_target)), settings, lambda label, done, total: None)
    assert made.schema.dropped == {"row": "it only counts the rows"}
    assert [column.name for column in made.schema.columns] == ["a"]
