"""Where examples lie in a tensor: taking them out, keeping one alone, and finding the place from a gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slangvi.rows.layout import Layout, fitting_layouts, possible_layouts

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=2)


@given(
    M=st.integers(1, 4),
    each=st.integers(1, 3),
    before=SHAPES,
    after=SHAPES,
    outer=st.booleans(),
    seed=st.integers(0, 9),
)
def test_what_is_taken_is_what_is_kept(M, each, before, after, outer, seed):
    """Taking an example, and setting all others to zero, show the same entries."""
    tensor = torch.randn(*before, M * each, *after, generator=torch.Generator().manual_seed(seed))
    layout = Layout(len(before), outer)
    taken = layout.take(tensor, torch.arange(M), M)
    assert taken.shape == (M, *before, each, *after)
    for example in range(M):
        alone = layout.keep_only(tensor, example, M)
        assert torch.equal(layout.take(alone, torch.tensor([example]), M)[0], taken[example])
        torch.testing.assert_close(alone.sum(), taken[example].sum())
        assert int((alone != 0).sum()) == int((taken[example] != 0).sum())


@given(
    M=st.integers(2, 5),
    each=st.integers(1, 3),
    outer=st.booleans(),
    example=st.integers(0, 1),
    features=st.integers(1, 7),
)
def test_the_layout_of_one_examples_gradient_is_among_those_that_fit(M, each, outer, example, features):
    tensor = torch.rand(M * each, features) + 0.1
    layout = Layout(0, outer if each > 1 else True)
    fitting = fitting_layouts(layout.keep_only(tensor, example, M), example, M)
    assert layout in fitting
    assert set(fitting) <= set(possible_layouts(tensor.shape, M))
    assert not fitting_layouts(tensor, example, M), "a gradient of all examples is no one's"


@pytest.mark.parametrize(("shape", "expected"), [((), []), ((3,), []), ((2, 3), [Layout(0)]), ((3, 0), [])])
def test_shapes_without_room_for_the_batch_have_no_layout(shape, expected):
    assert possible_layouts(shape, 2) == expected
