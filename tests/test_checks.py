"""Argument checks: what passes, what comes back, and what each message says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from cases import GPT
from slangvi import checks
from slangvi.methods import slang
from slangvi.types import ParamSpec

NAN, INF = math.nan, math.inf
LIKE = torch.zeros(0, dtype=torch.float64)


@pytest.mark.parametrize(("value", "least"), [(1, 1), (7, 1), (0, 0), (np.int64(3), 1), (10**12, 5), (-2, -3)])
def test_count_passes_whole_numbers(value, least):
    result = checks.count("n", value, least)
    assert result == value
    assert type(result) is int


BAD_COUNTS = [
    (0, 1, ValueError, "n must be ≥ 1, got 0"),
    (-1, 0, ValueError, "n must be ≥ 0, got -1"),
    (True, 1, TypeError, "n must be a whole number ≥ 1, got True"),
    (2.0, 1, TypeError, r"got 2\.0"),
    (NAN, 1, TypeError, "got nan"),
    (INF, 1, TypeError, "got inf"),
    ("3", 1, TypeError, "got '3'"),
    (None, 1, TypeError, "got None"),
    (torch.tensor(3), 1, TypeError, r"got tensor\(3\)"),
]


@pytest.mark.parametrize(("value", "least", "error", "message"), BAD_COUNTS)
def test_count_refuses(value, least, error, message):
    with pytest.raises(error, match=message):
        checks.count("n", value, least)


GOOD_NUMBERS = [
    (0.5, 0.0, 1.0, ""),
    (1, 0.0, INF, ""),
    (0.0, 0.0, 1.0, "low"),
    (1.0, 0.0, 1.0, "high"),
    (0, 0.0, 0.0, "low high"),
    (-3.5, -INF, INF, ""),
    (np.float32(0.25), 0.0, 1.0, ""),
    (torch.tensor(0.25), 0.0, 1.0, ""),
    (torch.tensor([[2]]), 0.0, INF, ""),
]


@pytest.mark.parametrize(("value", "low", "high", "closed"), GOOD_NUMBERS)
def test_number_passes_and_gives_a_float(value, low, high, closed):
    result = checks.number("x", value, low, high, closed)
    assert result == float(value)
    assert type(result) is float


BAD_NUMBERS = [
    (0.0, 0.0, 1.0, "", ValueError, r"x must be finite and in \(0, 1\), got 0\.0"),
    (1.0, 0.0, 1.0, "low", ValueError, r"in \[0, 1\), got 1\.0"),
    (-0.1, 0.0, 1.0, "low high", ValueError, r"in \[0, 1\], got -0\.1"),
    (0.0, 0.0, 1.0, "high", ValueError, r"in \(0, 1\], got 0\.0"),
    (NAN, 0.0, 1.0, "low high", ValueError, "got nan"),
    (INF, 0.0, INF, "low high", ValueError, "got inf"),
    (-INF, -INF, INF, "low high", ValueError, "got -inf"),
    (torch.tensor(NAN), 0.0, 1.0, "", ValueError, "got nan"),
    (True, 0.0, 2.0, "", TypeError, r"x must be a number, got True \(bool\)"),
    (torch.tensor(True), 0.0, 2.0, "", TypeError, "x must be a number, got True"),
    ("0.5", 0.0, 1.0, "", TypeError, r"got '0\.5' \(str\)"),
    (None, 0.0, 1.0, "", TypeError, r"got None \(NoneType\)"),
    (0.5j, 0.0, 1.0, "", TypeError, r"\(complex\)"),
    (torch.tensor(0.5j), 0.0, 1.0, "", TypeError, r"\(Tensor\)"),
    (torch.ones(2), 0.0, 2.0, "", TypeError, r"\(Tensor\)"),
    ([0.5], 0.0, 1.0, "", TypeError, r"\(list\)"),
]


@pytest.mark.parametrize(("value", "low", "high", "closed", "error", "message"), BAD_NUMBERS)
def test_number_refuses(value, low, high, closed, error, message):
    with pytest.raises(error, match=message):
        checks.number("x", value, low, high, closed)


def test_hints_end_the_message():
    for call in (
        lambda: checks.number("x", -1, 0.0, hint="Use 1."),
        lambda: checks.number("x", "a", 0.0, hint="Use 1."),
        lambda: checks.count("x", -1, hint="Use 1."),
        lambda: checks.count("x", "a", hint="Use 1."),
        lambda: checks.rate("x", -1, hint="Use 1."),
    ):
        with pytest.raises((ValueError, TypeError), match=r"\. (Typical.* )?Use 1\.$"):
            call()


@pytest.mark.parametrize(("value", "high"), [(0.1, INF), (5.0, INF), (1.0, 1.0), (torch.tensor(0.5), 1.0)])
def test_rate_passes(value, high):
    assert checks.rate("lr", value, high) == float(value)


@pytest.mark.parametrize(
    ("value", "high", "message"),
    [
        (0.0, INF, r"lr must be finite and in \(0, inf\), got 0\.0\. Typical values lie between 1e-3 and 0\.1\."),
        (-0.1, 1.0, r"in \(0, 1\], got -0\.1"),
        (1.1, 1.0, r"in \(0, 1\], got 1\.1"),
        (INF, INF, "got inf"),
        (NAN, 1.0, "got nan"),
    ],
)
def test_rate_refuses(value, high, message):
    with pytest.raises(ValueError, match=message):
        checks.rate("lr", value, high)


def test_choice_passes_a_known_word_and_lists_the_others():
    assert checks.choice("kind", "b", ("a", "b")) == "b"
    for value in ("c", None, 1, ["a"], torch.ones(2)):
        with pytest.raises(ValueError, match="kind must be one of 'a', 'b', got"):
            checks.choice("kind", value, ("a", "b"))


def test_flag_passes_booleans_only():
    assert checks.flag("fast", True) is True
    assert checks.flag("fast", False) is False
    for value in (1, 0, "yes", None, torch.tensor(True), np.bool_(True)):
        with pytest.raises(TypeError, match="fast must be True or False, got"):
            checks.flag("fast", value)


# ---- one number per parameter ----

SPEC = ParamSpec.of_module(
    nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2))
)  # 0.weight 2, 0.bias 1, 1.weight 2, 1.bias 2


@pytest.mark.parametrize("value", [3, 3.0, torch.tensor(3.0), torch.tensor([3])])
def test_one_number_is_repeated(value):
    result = checks.per_parameter("p", value, SPEC, LIKE)
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
    assert checks.per_parameter("p", value, SPEC, LIKE).tolist() == expected


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
        checks.per_parameter("p", value, SPEC, LIKE)


def test_long_lists_of_names_are_cut():
    spec = ParamSpec.of({f"p{i}": torch.zeros(1) for i in range(9)})
    with pytest.raises(ValueError, match=r"Parameters are: p0, .*p7, …\. Correct"):
        checks.per_parameter("p", {"q": 1.0}, spec, LIKE)


def test_names_of_the_whole_model_are_known_to_a_group_of_it():
    group = ParamSpec.of({"0.bias": torch.zeros(1)})
    value = {"0.bias": 2.0, "1.weight": 3.0, "1.*": 4.0}
    assert checks.per_parameter("p", value, group, LIKE, known=SPEC).tolist() == [2.0]
    with pytest.raises(ValueError, match=r"names '1\.weight', which matches no parameter"):
        checks.per_parameter("p", value, group, LIKE)


@pytest.mark.parametrize("others", [{"*": 1.0}, {"tokens.*": 1.0, "*": 1.0}])
def test_a_tied_tensor_may_be_given_by_either_of_its_names(others):
    spec = ParamSpec.of_module(GPT())
    by_alias = checks.per_parameter("p", {**others, "head.weight": 5.0}, spec, LIKE)
    by_name = checks.per_parameter("p", {**others, "tokens.weight": 5.0}, spec, LIKE)
    assert float(by_name[spec.slices["tokens.weight"]].unique()) == 5.0
    assert torch.equal(by_alias, by_name)


def test_a_tensor_is_copied_and_converted():
    value = torch.arange(1, 8)
    result = checks.per_parameter("p", value, SPEC, LIKE)
    same = torch.arange(1.0, 8.0, dtype=torch.float64)
    copy = checks.per_parameter("p", same, SPEC, LIKE)
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
        checks.per_parameter("p", value, SPEC, LIKE)


def test_any_finite_number_passes_where_the_sign_is_free():
    values = torch.tensor([-1.0, 0, 1, 2, 3, 4, 5], dtype=torch.float64)
    assert torch.equal(checks.per_parameter("mean", values, SPEC, LIKE, positive=False), values)
    assert checks.per_parameter("mean", -2.0, SPEC, LIKE, positive=False).tolist() == [-2.0] * 7
    assert checks.per_parameter("mean", {"*": 0.0}, SPEC, LIKE, positive=False).tolist() == [0.0] * 7
    with pytest.raises(ValueError, match=r"mean must be finite everywhere, got nan at entry 0"):
        checks.per_parameter("mean", values * NAN, SPEC, LIKE, positive=False)


@pytest.mark.parametrize("value", [1e-60, 1e60])
@pytest.mark.parametrize("form", ["number", "dict", "tensor"])
def test_numbers_that_the_dtype_turns_into_zero_or_infinity_are_refused(value, form):
    tensor = torch.full((7,), value, dtype=torch.float64)
    argument = {"number": value, "dict": {"*": value}, "tensor": tensor}[form]
    with pytest.raises(ValueError, match=r"^p must be finite and > 0 in torch\.float32"):
        checks.per_parameter("p", argument, SPEC, torch.zeros(0))


def test_devices_are_named():
    assert checks.device("device", torch.device("cpu")) == torch.device("cpu")
    for wrong in ("", "no such", None, 1.5, b""):
        with pytest.raises(ValueError, match="device must be a device such as 'cpu' or 'cuda:0', got"):
            checks.device("device", wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"device is 'cuda', but torch sees no GPU\. Use 'cpu'"):
        checks.device("device", "cuda")


def test_a_number_for_all_is_held_once_and_a_state_has_its_own():
    params = {"w": torch.zeros(500)}
    spec = ParamSpec.of(params)
    found = checks.per_parameter("prior_precision", 2.0, spec, LIKE)
    assert torch.equal(found, torch.full((500,), 2.0, dtype=torch.float64))
    assert found.untyped_storage().nbytes() == 8
    diag = slang.init(params, 1, 2.0).prec_diag
    assert diag.untyped_storage().nbytes() == 4 * 500
