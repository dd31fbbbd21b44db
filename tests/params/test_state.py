"""The guard that names the parameter that is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from slangvi import NumericalError
from slangvi.params import ParamSpec
from slangvi.params.state import require_finite

SPEC = ParamSpec.of({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(())})


@pytest.mark.parametrize("vectors", [(torch.zeros(6),), (torch.zeros(6), torch.full((2, 4, 6), 1e38))])
def test_finite_vectors_pass(vectors):
    assert require_finite("the mean", 1, SPEC, "Lower lr.", *vectors) is None


NOT_FINITE = [
    (6, [(2, math.nan)], "b", 1, 3),
    (6, [(5, math.inf)], "c", 1, 1),
    (6, [(0, -math.inf), (1, math.nan), (4, math.nan)], "a", 2, 2),
]


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize(("size", "places", "name", "count", "total"), NOT_FINITE)
def test_the_first_parameter_that_is_not_finite_is_named(lead, size, places, name, count, total):
    vector = torch.zeros(*lead, size)
    for place, value in places:
        vector.view(-1, size)[-1, place] = value
    message = (
        rf"^step 7: gradient of parameter '{name}' is not finite \({count} of {total} entries\)\. "
        r"The state is unchanged\. Lower lr\.$"
    )
    with pytest.raises(NumericalError, match=message):
        require_finite("gradient", 7, SPEC, "Lower lr.", torch.zeros(6), vector)


@pytest.mark.parametrize(("place", "member"), [((1, 0, 2), "1, 0"), ((0, 2, 5), "0, 2")])
def test_in_a_batch_the_first_member_that_is_not_finite_is_named_too(place, member):
    vectors, factor = torch.zeros(2, 3, 6), torch.zeros(2, 3, 4, 6)
    factor[(*place[:2], 1, place[2])] = math.nan
    name = "b" if place[2] < 5 else "c"
    message = (
        rf"step 7: gradient of parameter '{name}' is not finite \(1 of \d entries\) in member {member} of the batch"
    )
    with pytest.raises(NumericalError, match=message):
        require_finite("gradient", 7, SPEC, "Lower lr.", vectors, factor)
