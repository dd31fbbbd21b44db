"""One thread for a while, and as many as before afterwards."""

from __future__ import annotations

import pytest
import torch

from slangvi.linalg.threads import one_thread


@pytest.mark.usefixtures("three_threads")
def test_the_number_of_threads_comes_back():
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_it_comes_back_after_an_error():
    with pytest.raises(ValueError, match="within"), one_thread():
        raise ValueError("within")
    assert torch.get_num_threads() == 3
