"""ParamSpec: where named tensors lie in the flat vector, and which it refuses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cases import GPT, RawParameter
from slangvi.errors import UnsupportedModuleError
from slangvi.params import ParamSpec
from slangvi.params.spec import check_parameter

SHAPES = {"w": (2, 3), "scalar": (), "empty": (0, 4), "b": (5,), "cube": (1, 2, 2), "empty too": (3, 0)}


shapes = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=5)


def spec_of(table: dict[str, tuple[int, ...]]) -> ParamSpec:
    return ParamSpec.of({name: torch.zeros(shape) for name, shape in table.items()})


def test_layout_follows_the_order_of_the_dict():
    spec = spec_of(SHAPES)
    assert spec.names == tuple(SHAPES)
    assert spec.shapes == tuple(torch.Size(shape) for shape in SHAPES.values())
    assert spec.numels == (6, 1, 0, 5, 4, 0)
    assert spec.num_params == 16
    assert [(s.start, s.stop) for s in spec.slices.values()] == [(0, 6), (6, 7), (7, 7), (7, 12), (12, 16), (16, 16)]
    assert spec.canonical == {name: name for name in SHAPES}


@given(shapes=shapes, lead=st.lists(st.integers(1, 3), max_size=2).map(tuple), seed=st.integers(0, 100))
def test_flatten_undoes_unflatten_for_any_shapes_and_leading_dimensions(shapes, lead, seed):
    spec = spec_of({f"p{i}": shape for i, shape in enumerate(shapes)})
    flat = torch.randn(*lead, spec.num_params, generator=torch.Generator().manual_seed(seed))
    parts = spec.unflatten(flat)
    assert {name: part.shape for name, part in parts.items()} == {
        name: (*lead, *shape) for name, shape in zip(spec.names, spec.shapes, strict=True)
    }
    assert torch.equal(spec.flatten(parts), flat)


@given(shapes=shapes, seed=st.integers(0, 100))
def test_unflatten_undoes_flatten(shapes, seed):
    source = torch.Generator().manual_seed(seed)
    params = {f"p{i}": torch.randn(shape, generator=source) for i, shape in enumerate(shapes)}
    spec = ParamSpec.of(params)
    parts = spec.unflatten(spec.flatten(params))
    assert list(parts) == list(params)
    assert all(torch.equal(parts[name], value) for name, value in params.items())


def test_flat_order_is_that_of_parameters_to_vector():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    spec = ParamSpec.of_module(model)
    flat = spec.flatten(dict(model.named_parameters()))
    assert torch.equal(flat, nn.utils.parameters_to_vector(model.parameters()))


def test_unflatten_gives_views():
    spec = spec_of(SHAPES)
    flat = torch.zeros(2, spec.num_params)
    for part in spec.unflatten(flat).values():
        part.fill_(1.0)
    assert torch.equal(flat, torch.ones_like(flat))


def test_flatten_takes_names_not_order_and_ignores_the_rest():
    spec = spec_of({"a": (1,), "b": (2,)})
    flat = spec.flatten({"c": torch.ones(9), "b": torch.tensor([2.0, 3.0]), "a": torch.tensor([1.0])})
    assert flat.tolist() == [1.0, 2.0, 3.0]


def test_flatten_converts_when_asked_and_promotes_when_not():
    params = {"a": torch.ones(1, dtype=torch.float16), "b": torch.ones(2)}
    spec = ParamSpec.of(params)
    assert spec.flatten(params).dtype is torch.float32
    assert spec.flatten(params, torch.float64).dtype is torch.float64


def test_expand_repeats_one_number_per_tensor():
    spec = spec_of({"a": (2,), "none": (0,), "scalar": (), "b": (1, 3)})
    value = spec.expand([1, 2, 3, 4], torch.zeros(0, dtype=torch.float64))
    assert value.dtype is torch.float64
    assert value.tolist() == [1, 1, 3, 4, 4, 4]


def test_specs_compare_by_value():
    assert spec_of(SHAPES) == spec_of(SHAPES)
    assert hash(spec_of(SHAPES)) == hash(spec_of(SHAPES))
    assert spec_of({"a": (1,)}) != spec_of({"a": (2,)})


def test_the_hash_follows_all_that_is_compared():
    """It is computed once and kept; names, shapes and aliases count, and copies agree."""
    spec = spec_of({"a": (1,), "b": (2,)})
    first = hash(spec)
    assert spec._hash == hash(spec) == first
    others = [spec_of({"a": (2,), "b": (1,)}), spec_of({"b": (1,), "a": (2,)}), spec_of({"a": (1,), "c": (2,)})]
    others.append(ParamSpec(spec.names, spec.shapes, (("head", "a"),)))
    assert len({spec, *others}) == 5
    assert {spec: 1}[copy.deepcopy(spec)] == 1
    assert {spec: 1}[pickle.loads(pickle.dumps(spec))] == 1


def test_the_hash_is_not_pickled_since_another_process_has_another():
    spec = spec_of({"a": (1,)})
    spec.__dict__["_hash"] = hash(spec) + 1  # as it would come from there
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec_of({"a": (1,)}))


def test_tied_weights_are_counted_once_and_their_other_names_remembered():
    model = GPT()
    spec = ParamSpec.of_module(model)
    assert spec.names == tuple(name for name, _ in model.named_parameters())
    assert spec.num_params == sum(p.numel() for p in model.parameters())
    assert spec.aliases == (("head.weight", "tokens.weight"),)
    assert spec.canonical["head.weight"] == "tokens.weight"


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    assert ParamSpec.of_module(model).names == ("0.bias", "1.weight", "1.bias")


def test_chosen_parameters_keep_their_order():
    model = RawParameter()
    spec = ParamSpec.of_module(model, [model.shift, model.first.weight])
    assert spec.names == ("shift", "first.weight")
    assert spec.num_params == 25


def test_chosen_parameters_may_come_from_an_iterator_and_by_any_tied_name():
    model = GPT()
    spec = ParamSpec.of_module(model, iter([model.head.weight]))
    assert spec.names == ("tokens.weight",)
    assert spec.aliases == (("head.weight", "tokens.weight"),)


def test_tensors_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"2 tensor\(s\) that are not parameters of the model"):
        ParamSpec.of_module(nn.Linear(2, 3), nn.Linear(2, 3).parameters())


def test_nothing_to_infer_is_refused():
    with pytest.raises(ValueError, match="params is empty"):
        ParamSpec.of({})
    with pytest.raises(ValueError, match="params is empty"):
        ParamSpec.of_module(nn.ReLU())
    with pytest.raises(ValueError, match="params is empty"):
        ParamSpec.of_module(nn.Linear(2, 2).requires_grad_(False))


def _sparse() -> torch.Tensor:
    return torch.eye(2).to_sparse()


REFUSED = {
    "complex": (lambda: torch.zeros(2, dtype=torch.complex64), UnsupportedModuleError, r"complex .*view_as_real"),
    "int": (lambda: torch.zeros(2, dtype=torch.int64), UnsupportedModuleError, r"dtype torch\.int64; only floating"),
    "bool": (lambda: torch.zeros(2, dtype=torch.bool), UnsupportedModuleError, r"dtype torch\.bool; only floating"),
    "sparse": (_sparse, UnsupportedModuleError, r"layout torch\.sparse_coo.*to_dense"),
    "meta": (lambda: torch.zeros(2, device="meta"), UnsupportedModuleError, r"meta device.*to_empty"),
    "lazy": (lambda: nn.LazyLinear(2).weight, UnsupportedModuleError, r"not initialised \(lazy.*forward pass"),
    "list": (lambda: [0.0], TypeError, r"must be a torch\.Tensor, got list"),
    "number": (lambda: 1.0, TypeError, r"must be a torch\.Tensor, got float"),
    "none": (lambda: None, TypeError, r"must be a torch\.Tensor, got NoneType"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_parameters_without_a_posterior_are_refused_by_name(kind):
    build, error, message = REFUSED[kind]
    with pytest.raises(error, match=rf"parameter 'a\.weight' .*{message}"):
        check_parameter("a.weight", build())
    with pytest.raises(error, match=message):
        ParamSpec.of({"fine": torch.zeros(1), "bad": build()})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_real_dense_tensors_are_accepted(dtype):
    assert ParamSpec.of({"a": torch.zeros(2, dtype=dtype)}).num_params == 2


def test_lazy_modules_are_refused_until_they_have_run():
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(UnsupportedModuleError, match="Run one forward pass"):
        ParamSpec.of_module(model)
    model(torch.zeros(1, 3))
    assert ParamSpec.of_module(model).num_params == 8
