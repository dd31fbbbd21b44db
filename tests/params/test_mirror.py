"""A model's parameters as one flat vector: what is written, and which changes from outside are noticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.fake_gpu_tensor import on_gpu
from slangvi.params import ParamSpec
from slangvi.params.mirror import Mirror


def mirrored(half: bool = False) -> tuple[nn.Module, Mirror, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    if half:
        model[1].bfloat16()
    spec = ParamSpec.of_module(model)
    mirror = Mirror(dict(model.named_parameters()), spec)
    loc = torch.randn(spec.num_params)
    mirror.write(loc)
    return model, mirror, loc


@pytest.mark.parametrize("half", [False, True])
def test_what_was_written_is_there_and_no_change(half):
    model, mirror, loc = mirrored(half)
    for param, part in zip(model.parameters(), loc.split(mirror.spec.numels), strict=True):
        assert torch.equal(param.detach().flatten(), part.to(param.dtype))
    assert not mirror.changed(loc)
    # Rounding to half precision is not news.
    assert torch.equal(mirror.read(loc), loc)


CHANGES = {
    "in place": lambda model: nn.init.zeros_(model[0].weight),
    "through data": lambda model: model[1].bias.data.fill_(9.0),
    "other data": lambda model: setattr(model[0].bias, "data", torch.ones(2)),
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed_and_read(change, half):
    model, mirror, loc = mirrored(half)
    before = loc.clone()
    CHANGES[change](model)
    assert mirror.changed(loc)
    read = mirror.read(loc)
    assert torch.equal(loc, before)
    assert not mirror.changed(read)
    changed = (read != loc).nonzero().flatten().tolist()
    assert changed == {"in place": list(range(6)), "through data": [10], "other data": [6, 7]}[change]


def test_a_gpu_is_asked_for_its_numbers_only_when_told_to():
    """Comparing makes it wait; writes that leave a mark are noticed without."""
    model, mirror, loc = mirrored()
    model[1].bias.data.fill_(9.0)
    assert not mirror.changed(on_gpu(loc), contents=False)
    assert mirror.changed(loc, contents=False)  # on a CPU always
    assert mirror.changed(on_gpu(loc))
    with torch.no_grad():
        model[1].bias.mul_(2.0)
    assert mirror.changed(on_gpu(loc), contents=False)
    mirror.write(loc)
    assert not mirror.changed(on_gpu(loc), contents=False)


def test_parameters_that_share_memory_without_being_one_are_refused():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' share their memory"):
        Mirror(dict(model.named_parameters()), ParamSpec.of_module(model))
