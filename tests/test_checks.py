"""Argument checks: what passes, what comes back, and what each message says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slangvi import checks

NAN, INF = math.nan, math.inf


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


def test_devices_are_named():
    assert checks.device("device", torch.device("cpu")) == torch.device("cpu")
    for wrong in ("", "no such", None, 1.5, b""):
        with pytest.raises(ValueError, match="device must be a device such as 'cpu' or 'cuda:0', got"):
            checks.device("device", wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"device is 'cuda', but torch sees no GPU\. Use 'cpu'"):
        checks.device("device", "cuda")
