"""The operator over blocks: what `Routes` say is done, and the result is the same whatever they say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases import build
from helpers.captured_gradients import captured
from helpers.fake_gpu_tensor import on_gpu
from reference import loop_gradients
from slangvi.grads import FactoredGradients, RowGroup
from slangvi.grads.blocks import Block, Formed, Outer, Rows, cheapest
from slangvi.params import ParamSpec
from slangvi.types import Routes

SPEC = ParamSpec(("conv.weight", "conv.bias", "head.weight", "table", "unused"), tuple(
    map(torch.Size, ((4, 6), (4,), (3, 5), (7, 2), (2, 2)))
))  # fmt: skip
FACTORED = ("conv.weight", "head.weight")
R, RANK = 6, 2


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def groups() -> list[RowGroup]:
    """Two passes; the first has totals, as autograd gives them, and does not use the table."""
    found = []
    for k in range(2):
        delta, inputs = randn(3, 1, 1, 3), randn(3, 1, 1, 5)
        left = randn(3, 2, 8, 2)
        blocks: dict[str, Block] = {
            "conv.weight": Outer(left, randn(3, 2, 8, 6)),
            "conv.bias": Formed(left.sum(2).flatten(1)),
            "head.weight": Outer(delta, inputs),
        }
        if k:
            blocks["table"] = Rows(torch.randint(7, (3, 4)), randn(3, 4, 2), 7)
        found.append(RowGroup(3, blocks, {}))
    return found


def operator(routes: Routes | None) -> FactoredGradients:
    torch.manual_seed(0)
    return FactoredGradients(SPEC, groups(), RANK, randn(1), routes)


def formed(gradients: FactoredGradients) -> set[str]:
    return {name for name in FACTORED if isinstance(gradients.blocks[name], Formed)}


# The convolution counts less when formed, the head when not.
CHOICES = {
    "auto": (Routes(), {"conv.weight"}),
    "form": (Routes(layers="form"), {"conv.weight", "head.weight"}),
    "factor": (Routes(layers="factor"), set()),
    "too large to form": (Routes(form_bytes=8), set()),
    "form what is too large": (Routes(layers="form", form_bytes=0), {"conv.weight", "head.weight"}),
    "by name": (Routes(layers={"head.weight": "form", "conv.weight": "factor"}), {"head.weight"}),
    "by glob": (Routes(layers={"conv.*": "factor"}), set()),
    "the first that fits": (
        Routes(layers={"*.weight": "form", "conv.weight": "factor"}),
        {"conv.weight", "head.weight"},
    ),
    "auto for the rest": (Routes(layers={"head.*": "form"}), {"conv.weight", "head.weight"}),
    "tiny pieces": (Routes(layers="factor", chunk_bytes=0), set()),
    "randomized": (Routes(spectrum="randomized"), {"conv.weight"}),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_layers_are_formed_as_the_routes_say_and_nothing_else_changes(choice):
    routes, expected = CHOICES[choice]
    gradients, plain = operator(routes), operator(None)
    assert formed(gradients) == expected
    assert gradients.spectrum_route == routes.spectrum
    weights = torch.rand(5, dtype=torch.float64)
    columns, mixture, onto = randn(3, SPEC.num_params), randn(R, 4), randn(4, SPEC.num_params)
    rows = plain.form()
    scale = SPEC.expand(weights.tolist(), rows)
    torch.testing.assert_close(gradients.form(), rows)
    torch.testing.assert_close(gradients.sum(), rows.sum(0))
    torch.testing.assert_close(gradients.square_sum(), rows.square().sum(0))
    torch.testing.assert_close(gradients.gram(), rows @ rows.T)
    torch.testing.assert_close(gradients.gram(weights), (rows * scale) @ rows.T)
    torch.testing.assert_close(gradients.mm(columns), rows @ columns.T)
    torch.testing.assert_close(gradients.t_mm(mixture), mixture.T @ rows)
    torch.testing.assert_close(gradients.t_mm(mixture, onto=onto.clone()), onto + mixture.T @ rows)


def test_pieces_are_handed_down_to_the_blocks():
    gradients = operator(Routes(layers="factor", chunk_bytes=77))
    assert gradients.blocks["conv.weight"].chunk_bytes == 77
    assert gradients.blocks["table"].chunk_bytes == 77
    assert isinstance(gradients.blocks["conv.bias"], Formed)


def test_costs_are_the_sums_of_the_blocks():
    gradients = operator(Routes(layers="factor"))
    counts = [block.costs for block in gradients.blocks.values()]
    assert gradients.costs == (sum(gram for gram, _ in counts), sum(column for _, column in counts))
    assert "unused" not in gradients.blocks


@pytest.mark.parametrize("rank", [0, 1, 50])
@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("R", [2, 60])
def test_forming_is_chosen_when_it_counts_less(R, T, rank):
    """Against the counts themselves: Gram, 2K + 1 products and the squares, for both ways."""
    block = Outer(torch.zeros(R, 1, T, 8), torch.zeros(R, 1, T, 9))
    dense = Formed(torch.zeros(R, 72))
    products = 2 * rank + 1
    factored = R * R * T * T * (8 + 9) + products * R * T * 72
    together = R * T * 72 + dense.costs[0] + products * dense.costs[1]
    assert isinstance(cheapest(block, rank), Formed) is (together < factored)


def test_no_gradient_at_all_is_zero():
    gradients = FactoredGradients(SPEC, [RowGroup(3, {}, {})], RANK, randn(1))
    assert gradients.costs == (0, 0)
    assert gradients.gram().shape == (3, 3)
    assert gradients.mm(randn(2, SPEC.num_params)).shape == (3, 2)
    found = [gradients.gram(), gradients.sum(), gradients.square_sum(), gradients.form(), gradients.t_mm(randn(3, 2))]
    assert not any(bool(x.any()) for x in found)


def test_layers_that_share_a_delta_but_not_the_number_of_inputs_are_told_apart():
    """One δ, inputs shared by two draws in one layer and not in the other."""
    left = randn(4, 1, 1, 3)
    spec = ParamSpec(("w", "v"), (torch.Size((3, 2)), torch.Size((3, 5))))
    blocks = {"w": Outer(left, randn(2, 1, 1, 2)), "v": Outer(left, randn(4, 1, 1, 5))}
    gradients = FactoredGradients(spec, [RowGroup(4, blocks, {})], 1, left, Routes(layers="factor"))
    rows = torch.cat([block.form() for block in blocks.values()], dim=1)
    torch.testing.assert_close(gradients.gram(), rows @ rows.T)


def chain(monkeypatch):
    """Three linear layers with biases that hold the same δ, and how often something is squared."""
    deltas = [randn(6, n) for n in (3, 4, 2)]
    inputs = (randn(3, 5), randn(6, 3), randn(6, 4))  # the first are shared by two draws
    blocks, shapes = {}, {}
    for k, (delta, x) in enumerate(zip(deltas, inputs, strict=True)):
        blocks |= {f"w{k}": Outer(delta[:, None, None], x[:, None, None]), f"b{k}": Formed(delta)}
        shapes |= {f"w{k}": torch.Size((delta.shape[1], x.shape[1])), f"b{k}": torch.Size((delta.shape[1],))}
    squared, real = [], Tensor.square
    monkeypatch.setattr(Tensor, "square", lambda x: squared.append(x.shape) or real(x))
    spec = ParamSpec(tuple(shapes), tuple(shapes.values()))
    rows = torch.cat([block.form() for block in blocks.values()], dim=1)
    return (spec, [RowGroup(6, blocks, {})], 1), rows, squared


def test_a_weight_and_its_bias_square_their_common_delta_once(monkeypatch):
    parts, rows, squared = chain(monkeypatch)
    found = FactoredGradients(*parts, rows, Routes(layers="factor")).square_sum()
    assert len(squared) == 6  # three δ, three inputs
    torch.testing.assert_close(found, (rows * rows).sum(0))


@pytest.mark.parametrize("like", [lambda x: x, on_gpu], ids=["cpu", "gpu"])
def test_many_small_parts_are_added_alike_everywhere(like, monkeypatch):
    parts, rows, _ = chain(monkeypatch)
    gradients, columns = FactoredGradients(*parts, like(rows), Routes(layers="factor")), randn(2, rows.shape[1])
    torch.testing.assert_close(gradients.mm(columns), rows @ columns.T)
    torch.testing.assert_close(gradients.gram(), rows @ rows.T)


@pytest.mark.parametrize("name", ["convnet", "gpt_tied", "embedding_mlp", "lstm"])
@pytest.mark.parametrize("layers", ["form", "factor", {"*.weight": "form"}])
def test_models_have_the_same_gradients_by_every_route(name, layers):
    case = build(name)
    rows = loop_gradients(case)
    gradients = captured(case, routes=Routes(layers=layers, chunk_bytes=100))
    torch.testing.assert_close(gradients.form(), rows, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients.gram(), rows @ rows.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients.square_sum(), rows.square().sum(0), rtol=1e-9, atol=1e-9)
