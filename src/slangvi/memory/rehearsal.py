"""Steps of SLANG on tensors without values: the same calls that a user makes, through either interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from slangvi.errors import UnsupportedModuleError
from slangvi.memory.ledger import Ledger
from slangvi.memory.weightless import weightless, without_memory
from slangvi.methods import slang
from slangvi.out_of_memory import tensors_in
from slangvi.params import Params, ParamSpec

__all__ = ["Loss", "Rehearsal", "rehearse"]

# (output, target) → one number, or one for each example.
Loss = Callable[[Any, Any], Tensor]

# Per-example gradients are checked at the 1st and 2nd pass of a kind, then ever more rarely. The last step here is one
# of those that make up a training run: the third of the functional interface, the second of an optimizer that was told
# not to check any more.
STEPS = {"optimizer": 2, "functional": 3}
MANY = 1 << 40  # examples in the training set: a step warns when a batch is larger


@dataclass(frozen=True)
class Rehearsal:
    """What was written down.

    Args:
        ledger: every allocation.
        marks: events at which the steps begin, and the one after the last step.
        num_params: P.
        num_examples: M.
        guesses: values that the model asked for and that had to be made up.
    """

    ledger: Ledger
    marks: list[int]
    num_params: int
    num_examples: int
    guesses: int


def rehearse(model: nn.Module, batch: Any, interface: str, loss: Loss | None, options: Mapping[str, Any]) -> Rehearsal:
    """Set SLANG up and take a few steps, allocating nothing; see `slangvi.estimate_memory` for the arguments."""
    ledger, device = Ledger(), _device_of(model)
    with weightless(ledger, device) as allocations, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what there is to say is said when training
        with _explained(model):
            model, batch = (without_memory(thing, allocations.fake, device) for thing in (model, batch))
        ledger.label([*model.parameters(), *model.buffers()], "parameters")
        ledger.label([x for x in tree_leaves(batch) if isinstance(x, Tensor)], "data")
        pair = _taken_apart(batch)
        count = _num_examples(pair[0])
        step = _INTERFACES[interface](model, _losses_of(model, loss), pair, ledger, options)
        marks = [len(ledger.live)]
        for _ in range(STEPS[interface]):
            step()
            marks.append(len(ledger.live))
        size = ParamSpec.of_module(model).num_params
    return Rehearsal(ledger, marks, size, count, allocations.guesses)


def _optimizer(
    model: nn.Module, losses: Callable[..., Tensor], batch: Any, ledger: Ledger, options: Mapping[str, Any]
) -> Callable[[], None]:
    """A loop of one's own around `slangvi.SLANG`."""
    opt = slang.SLANG(model, num_data=MANY, **options)
    _label_state(ledger, opt._state, setup=True)

    def step() -> None:
        for _ in range(options["mc_samples"]):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                losses(None, batch).mean().backward()
                ledger.label([p.grad for p in model.parameters() if p.grad is not None], "gradients")
        opt.step()
        opt._capture.assembler.verify = False
        _label_state(ledger, opt._state)

    return step


def _functional(
    model: nn.Module, losses: Callable[..., Tensor], batch: Any, ledger: Ledger, options: Mapping[str, Any]
) -> Callable[[], None]:
    """`slangvi.slang.build`, with one `update` for a step."""
    vi = slang.build(lambda params, batch: -losses(params, batch), num_data=MANY, lr=0.1, model=model, **options)
    state = vi.init({name: p for name, p in model.named_parameters() if p.requires_grad})
    _label_state(ledger, state, setup=True)

    def step() -> None:
        nonlocal state
        state, _ = vi.update(state, batch)
        _label_state(ledger, state)

    return step


_INTERFACES: dict[str, Callable[..., Callable[[], None]]] = {"optimizer": _optimizer, "functional": _functional}


def _label_state(ledger: Ledger, state: Any, setup: bool = False) -> None:
    """Of what lives after a step the state's, vectors and matrices apart; after setting up, all that is new."""
    if setup:
        ledger.relabel_all("state", but=("parameters", "data"))
    tensors = list(tensors_in(state))
    ledger.label([x for x in tensors if x.ndim < 2], "state")
    ledger.label([x for x in tensors if x.ndim >= 2], "factor")


def _losses_of(model: nn.Module, loss: Loss | None) -> Callable[[Params | None, tuple[Any, Any]], Tensor]:
    """(params, (input, target)) → the loss of each example, (M,); None takes the model's own parameters."""

    def losses(params: Params | None, batch: tuple[Any, Any]) -> Tensor:
        x, target = batch
        args = () if isinstance(x, Mapping) else tuple(x) if _is_tuple(x) else (x,)
        kwargs = dict(x) if isinstance(x, Mapping) else {}
        with _explained(model):
            own = params is None
            output = model(*args, **kwargs) if own else functional_call(model, dict(params or {}), args, kwargs)
            count = _num_examples(x)
            values = _stand_ins(output, count) if loss is None else [loss(output, target)]
            torch.clear_autocast_cache()  # as at the end of a loop's own autocast block
            return torch.stack([v.flatten(1).sum(1) if v.ndim > 1 else v.expand(count) for v in values]).sum(0)

    return losses


def _stand_ins(output: Any, count: int) -> list[Tensor]:
    """What a cross-entropy over the last dimension would take, for every output of the batch or of one number."""
    leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    # The last hidden state of a recurrent layer has the batch second: no loss of each example is made of it here.
    leaves = [x for x in leaves if x.ndim == 0 or x.shape[0] == count]
    if not leaves:
        raise ValueError(
            f"no tensor with the batch (here {count}) as first dimension was found in the output "
            f"({type(output).__name__}). Give loss=."
        )
    return [F.log_softmax(x, -1).neg() if x.ndim > 1 else x for x in leaves]


def _taken_apart(batch: Any) -> tuple[Any, Any]:
    """Input and target of what a loader gives."""
    if not _is_tuple(batch):
        return batch, None
    first, *rest = batch or [None]
    return first, rest[0] if len(rest) == 1 else tuple(rest)


def _is_tuple(x: Any) -> bool:
    return isinstance(x, tuple | list)


def _num_examples(inputs: Any) -> int:
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise ValueError(
        "batch must hold the model's input with the examples as first dimension: a tensor, a dict for model(**x), or a "
        f"tuple (x, y) as a loader gives it. Its first entry is {type(inputs).__name__} and holds no tensor."
    )


def _device_of(model: nn.Module) -> torch.device:
    """Where the model is; one without values is planned for the CPU."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except UnsupportedModuleError:
        raise
    except Exception as error:
        raise RuntimeError(
            f"estimate_memory could not call {type(model).__name__} on tensors that have sizes but no values: "
            f"{type(error).__name__}: {error}\nIt is called as model(x), as model(**x) when batch (or its first entry) "
            "is a dict, as model(*x) when its first entry is a tuple. A forward that needs values (NumPy, boolean "
            "indexing, torch.compile, kernels torch does not know) cannot be planned: train one step on a small "
            "batch and read torch.cuda.max_memory_allocated()."
        ) from error
