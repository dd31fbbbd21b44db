"""Proposals: inside the box, repeatable, better than chance, the same in several processes."""

from __future__ import annotations

import pytest

from slangvi_reproduction.experiments._search import Box, propose, propose_all

pytest.importorskip("optuna")
BOX = Box((-2.0, 1.0), (0.0, 4.0))


def hill(point):
    return -((point[0] + 0.5) ** 2) - 0.1 * (point[1] - 3.0) ** 2


def test_the_first_round_is_random_inside_the_box():
    points = propose(BOX, [], 40, seed=0)
    assert all(-2.0 <= a <= 1.0 and 0.0 <= b <= 4.0 for a, b in points)
    assert max(a for a, _ in points) > 0.5
    assert min(a for a, _ in points) < -1.5
    assert points == propose(BOX, [], 40, seed=0) != propose(BOX, [], 40, seed=1)


def test_later_rounds_climb():
    history = [(point, hill(point)) for point in propose(BOX, [], 5, seed=0)]
    for number in (1, 2):
        points = propose(BOX, history, 2, seed=number)
        assert len(set(points)) == 2
        history += [(point, hill(point)) for point in points]
    best = max(history, key=lambda pair: pair[1])
    assert best in history[5:]
    assert best[1] > -0.15


def test_every_split_has_its_own_search_in_one_process_or_more():
    pairs = [[(point, hill(point)) for point in propose(BOX, [], 4, seed=k)] for k in range(2)]
    alone = propose_all(BOX, pairs, 1, [7, 8])
    assert alone == [propose(BOX, pairs[k], 1, 7 + k) for k in range(2)]
    assert alone[0] != alone[1]
    assert propose_all(BOX, pairs, 1, [7, 8], jobs=2) == alone
