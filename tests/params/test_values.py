"""Numbers, dicts of names or globs, and tensors as one number per parameter entry."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cases import GPT
from slangvi.methods import slang
from slangvi.params import ParamSpec
from slangvi.params.values import per_parameter

NAN, INF = math.nan, math.inf
LIKE = torch.zeros(0, dtype=torch.float64)
# 0.weight 2, 0.bias 1, 1.weight 2, 1.bias 2
SPEC = ParamSpec.of_module(nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2)))


@pytest.mark.parametrize("value", [3, 3.0, torch.tensor(3.0), torch.tensor([3])])
def test_one_number_is_repeated(value):
    result = per_parameter("p", value, SPEC, LIKE)
    assert result.tolist() == [3.0] * 7
    assert result.dtype is torch.float64


PATTERNS = [
    ({"*": 2.0}, [2] * 7),
    ({"*.weight": 1.0, "*.bias": 2.0}, [1, 1, 2, 1, 1, 2, 2]),
    ({"*": 1.0, "0.bias": 5.0}, [1, 1, 5, 1, 1, 1, 1]),
    ({"0.*": 1.0, "*.bias": 2.0, "*": 3.0}, [1, 1, 1, 3, 3, 2, 2]),
    ({"*.bias": 2.0, "0.*": 1.0, "*": 3.0}, [1, 1, 2, 3, 3, 2, 2]),
    ({"[01].weight": 4, "?.bias": torch.tensor(6.0)}, [4, 4, 6, 4, 4, 6, 6]),
]


@pytest.mark.parametrize(("value", "expected"), PATTERNS)
def test_globs_are_tried_in_order_and_an_exact_name_wins(value, expected):
    assert per_parameter("p", value, SPEC, LIKE).tolist() == expected


BAD_PATTERNS = [
    ({"*": 1.0, "2.weight": 1.0}, ValueError, r"p names '2\.weight', which matches no parameter.*0\.weight, 0\.bias"),
    ({"*": 1.0, "x*": 1.0}, ValueError, r"p names 'x\*', which matches no parameter"),
    ({"0.*": 1.0}, ValueError, r"p has no entry for parameter '1\.weight'.*\['0\.\*'\].*\"\*\" for all others"),
    ({}, ValueError, r"p has no entry for parameter '0\.weight'"),
    ({"*": 0.0}, ValueError, r"p\['\*'\] must be finite and in \(0, inf\), got 0\.0"),
    ({"*": NAN}, ValueError, "got nan"),
    ({"*": "1"}, TypeError, r"p\['\*'\] must be a number"),
    ({"*": True}, TypeError, r"p\['\*'\] must be a number"),
]


@pytest.mark.parametrize(("value", "error", "message"), BAD_PATTERNS)
def test_patterns_that_cannot_be_meant_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        per_parameter("p", value, SPEC, LIKE)


def test_long_lists_of_names_are_cut():
    spec = ParamSpec.of({f"p{i}": torch.zeros(1) for i in range(9)})
    with pytest.raises(ValueError, match=r"Parameters are: p0, .*p7, …\. Correct"):
        per_parameter("p", {"q": 1.0}, spec, LIKE)


def test_names_of_the_whole_model_are_known_to_a_group_of_it():
    group = ParamSpec.of({"0.bias": torch.zeros(1)})
    value = {"0.bias": 2.0, "1.weight": 3.0, "1.*": 4.0}
    assert per_parameter("p", value, group, LIKE, known=SPEC).tolist() == [2.0]
    with pytest.raises(ValueError, match=r"names '1\.weight', which matches no parameter"):
        per_parameter("p", value, group, LIKE)


@pytest.mark.parametrize("others", [{"*": 1.0}, {"tokens.*": 1.0, "*": 1.0}])
def test_a_tied_tensor_may_be_given_by_either_of_its_names(others):
    spec = ParamSpec.of_module(GPT())
    by_alias = per_parameter("p", {**others, "head.weight": 5.0}, spec, LIKE)
    by_name = per_parameter("p", {**others, "tokens.weight": 5.0}, spec, LIKE)
    assert float(by_name[spec.slices["tokens.weight"]].unique()) == 5.0
    assert torch.equal(by_alias, by_name)


def test_a_tensor_is_copied_and_converted():
    value = torch.arange(1, 8)
    result = per_parameter("p", value, SPEC, LIKE)
    same = torch.arange(1.0, 8.0, dtype=torch.float64)
    copy = per_parameter("p", same, SPEC, LIKE)
    same.zero_()
    assert result.dtype is torch.float64
    assert result.tolist() == copy.tolist() == [1, 2, 3, 4, 5, 6, 7]


BAD_TENSORS = [
    (torch.ones(6), ValueError, r"p must be .* a tensor of shape \(7,\).*got shape \(6,\)"),
    (torch.ones(7, 1), ValueError, r"got shape \(7, 1\)"),
    (torch.ones(0), ValueError, r"got shape \(0,\)"),
    (torch.ones(7, dtype=torch.bool), TypeError, r"p must hold real numbers, got dtype torch\.bool"),
    (torch.ones(7, dtype=torch.complex64), TypeError, r"must hold real numbers, got dtype torch\.complex64"),
    (torch.tensor([1.0, 1, 0, 1, 1, 1, 1]), ValueError, r"p must be finite and > 0 everywhere, got 0\.0 at entry 2"),
    (torch.tensor([1.0, 1, 1, -2, 1, 1, 1]), ValueError, r"got -2\.0 at entry 3"),
    (torch.tensor([NAN, 1, 0, 1, 1, 1, 1]), ValueError, r"got nan at entry 0"),
    (torch.tensor([1.0, 1, 1, 1, 1, 1, INF]), ValueError, r"got inf at entry 6"),
]


@pytest.mark.parametrize(("value", "error", "message"), BAD_TENSORS)
def test_tensors_that_cannot_be_meant_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        per_parameter("p", value, SPEC, LIKE)


def test_any_finite_number_passes_where_the_sign_is_free():
    values = torch.tensor([-1.0, 0, 1, 2, 3, 4, 5], dtype=torch.float64)
    assert torch.equal(per_parameter("mean", values, SPEC, LIKE, positive=False), values)
    assert per_parameter("mean", -2.0, SPEC, LIKE, positive=False).tolist() == [-2.0] * 7
    assert per_parameter("mean", {"*": 0.0}, SPEC, LIKE, positive=False).tolist() == [0.0] * 7
    with pytest.raises(ValueError, match=r"mean must be finite everywhere, got nan at entry 0"):
        per_parameter("mean", values * NAN, SPEC, LIKE, positive=False)


@pytest.mark.parametrize("value", [1e-60, 1e60])
@pytest.mark.parametrize("form", ["number", "dict", "tensor"])
def test_numbers_that_the_dtype_turns_into_zero_or_infinity_are_refused(value, form):
    tensor = torch.full((7,), value, dtype=torch.float64)
    argument = {"number": value, "dict": {"*": value}, "tensor": tensor}[form]
    with pytest.raises(ValueError, match=r"^p must be finite and > 0 in torch\.float32"):
        per_parameter("p", argument, SPEC, torch.zeros(0))


def test_a_number_for_all_is_held_once_and_a_state_has_its_own():
    params = {"w": torch.zeros(500)}
    spec = ParamSpec.of(params)
    found = per_parameter("prior_precision", 2.0, spec, LIKE)
    assert torch.equal(found, torch.full((500,), 2.0, dtype=torch.float64))
    assert found.untyped_storage().nbytes() == 8
    diag = slang.init(params, 1, 2.0).prec_diag
    assert diag.untyped_storage().nbytes() == 4 * 500
