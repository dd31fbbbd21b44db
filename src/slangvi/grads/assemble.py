"""From what the hooks wrote down to per-example gradients, and the check that they are what they claim to be."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from slangvi.errors import UnsupportedModuleError, UnverifiedGradientsWarning, user_stacklevel
from slangvi.grads.agreement import disagreeing, pass_tolerance
from slangvi.grads.blocks import Block, Settle, as_it_is
from slangvi.grads.calls import Backward, Signature, count_examples, signature_of
from slangvi.grads.factored import RowGroup
from slangvi.grads.ways import Ways, listed
from slangvi.params import Params, ParamSpec

__all__ = ["Assembler", "Engine", "Uses"]

Engine = Literal["factored", "dense"]
# Models that take another path every time would fill the memory with patterns.
_MOST_PATTERNS = 512


@dataclass
class Uses:
    """How often a pattern of calls was seen."""

    count: int = 0

    @property
    def due(self) -> bool:
        """Whether the next one is the 1st, the 2nd, the 4th and so on."""
        return self.count & (self.count + 1) == 0


class Assembler:
    """Turns a `Backward` into a `RowGroup`.

    Every parameter is served by the first of these that holds for it: the rule of the layer that owns it; the dense
    engine on the innermost recorded module that holds it; the dense engine on the whole model. The 1st, 2nd, 4th, …
    time a pattern of calls is seen, two examples are checked against the definition (see `_distrusted`), and
    parameters whose rows differ are served by the whole model from then on. Rows must also add up to what autograd
    computed.

    Args:
        model: the model whose calls were recorded.
        spec: the parameters to infer.
        dtype: dtype of the rows.
        engine: "factored", or "dense" to serve every parameter by the dense engine on the whole model.
        verify: whether to check.
        memory_limit: bytes that rows in the making may take when a module is called again.
        settle: (name, block) → the same gradients in the form they are to be kept in.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ParamSpec,
        dtype: torch.dtype,
        engine: Engine,
        verify: bool,
        memory_limit: int | None = None,
        settle: Settle = as_it_is,
    ) -> None:
        self.model = model
        self.spec = spec
        self.dtype = dtype
        self.engine = engine
        self.verify = verify
        self._ways = Ways(spec, dtype, memory_limit, settle)
        self._plans: dict[Signature, frozenset[str]] = {}
        self._seen: dict[Signature, Uses] = {}
        self._hidden: set[str] = set()  # parameters of calls that could not be recorded
        self.rules_sufficed = False  # whether the last pass needed nothing but rules
        self.rules_failed = False  # whether some pass needed more, since somebody looked and took this back
        self.check_next = False  # ask for a check of the next pass out of turn
        self.recent: list[Uses] = []  # of the patterns of the passes that were collected last

    def assemble(self, backward: Backward, values: Params, num_examples: int | None = None) -> RowGroup:
        """Per-example gradients of one backward pass.

        Args:
            backward: what the hooks recorded.
            values: canonical parameter name → the value the pass was made with.
            num_examples: M; read off the recorded calls when None.
        """
        count = num_examples if num_examples is not None else count_examples(backward)
        signature = signature_of(backward, count)
        due = self._due(backward, signature)
        plan = self._plan(backward, values, count, due, signature)
        blocks = self._blocks(backward, values, count, plan)
        if due:
            blocks |= self._reconciled(blocks, backward, values, count)
        return RowGroup(count, blocks, {name: total.to(self.dtype) for name, total in backward.totals.items()})

    def leave_to_the_model(self, name: str, module: nn.Module) -> None:
        """Serve a module's own parameters by the whole model from now on: calls of it cannot be recorded."""
        owned = (self.spec.canonical.get(f"{name}.{local}" if name else local) for local in module._parameters)
        self._hidden.update(found for found in owned if found is not None)

    def unchecked(self, uses: Uses) -> bool:
        """Count a pass that is recorded elsewhere, unless a check is due and it has to be recorded here.

        Args:
            uses: what `recent` had after a pass of its pattern that was recorded here.
        """
        if self.verify and (self.check_next or uses.due):
            return False
        uses.count += 1
        return True

    def _due(self, backward: Backward, signature: Signature) -> bool:
        """Whether this pass is to be checked: it is finite, and the 1st, 2nd, 4th, … of its pattern."""
        if len(self._seen) > _MOST_PATTERNS:
            self._seen.clear()
            self._plans.clear()
        uses = self._seen.setdefault(signature, Uses())
        self.recent.append(uses)
        if not self.verify:
            return False
        due = self.check_next or uses.due
        self.check_next = False
        if due and not all(bool(torch.isfinite(total).all()) for total in backward.totals.values()):
            return False  # NaN proves nothing; the step will refuse it, and the next pass is checked
        uses.count += 1
        return due

    def _plan(self, backward: Backward, values: Params, count: int, due: bool, signature: Signature) -> frozenset[str]:
        """Parameters to be served by the whole model: all for the dense engine, else what the checks found."""
        if self.engine == "dense":
            return frozenset(self.spec.names)
        known = self._plans.get(signature, frozenset()) | self._hidden
        if due:
            known |= self._distrusted(backward, values, count, known)
            self._plans[signature] = known
        return known

    def _reconciled(
        self, blocks: Mapping[str, Block], backward: Backward, values: Params, count: int
    ) -> dict[str, Block]:
        """Better blocks for parameters whose rows do not add up to autograd's gradient, or an error that names them."""
        totals = {name: backward.totals[name] for name in blocks}
        wrong = self._off(blocks, totals, backward)
        if not wrong:
            return {}
        try:
            better = self._ways.by_model(backward, values, wrong, count)
        except UnsupportedModuleError:
            better = {}
        left = [name for name in wrong if name not in better or self._off({name: better[name]}, totals, backward)]
        if left:
            raise UnsupportedModuleError(
                f"the gradient of parameter(s) {listed(left)} does not come from the calls of the model alone, so it "
                "cannot be told apart by example. Usual causes: a penalty on the weights in the loss (the prior is "
                "prior_precision), a gradient penalty, a parameter used in the loss only (move it into forward), "
                "backward(inputs=...), a module whose buffers change in forward, a forward pre-hook that changes the "
                "input, activation checkpointing in a functional_call, another optimizer's step between backward and "
                "this one's (call this one's first), blocks of two of slangvi's optimizers around one backward pass "
                "(give one optimizer several groups instead). "
                "Remove it, or pass verify=False to go on with what was captured."
            )
        return better

    def _off(self, blocks: Mapping[str, Block], totals: Mapping[str, Tensor], backward: Backward) -> list[str]:
        """Names whose rows do not add up; rounding is relative to the rows, which may cancel in the sum."""
        expected = {name: totals[name] for name in blocks}
        sums = {name: block.sum() for name, block in blocks.items()}
        sizes = {name: (block.num_rows * block.square_sum().double().sum()).sqrt() for name, block in blocks.items()}
        return disagreeing(sums, expected, pass_tolerance(backward, self.dtype), sizes)

    def _blocks(self, backward: Backward, values: Params, count: int, distrusted: frozenset[str]) -> dict[str, Block]:
        wanted = [name for name in backward.totals if name in self.spec.slices]
        trusted = [name for name in wanted if name not in distrusted]
        blocks, spoilt = self._ways.by_rules(backward, set(trusted), count)
        left = [name for name in trusted if name not in blocks and name not in spoilt]
        blocks |= self._ways.by_modules(backward, values, left, count)
        self.rules_sufficed = len(blocks) == len(wanted) and not left
        self.rules_failed |= not self.rules_sufficed
        left = [name for name in wanted if name not in blocks]
        if left:
            blocks |= self._ways.by_model(backward, values, left, count)
        return blocks

    def _distrusted(self, backward: Backward, values: Params, count: int, known: frozenset[str]) -> frozenset[str]:
        """Parameters whose rows are not what one example's loss alone gives.

        The definition: call the model again, keep the output gradient of one example only, and go back. Done for
        two examples picked at random. It finds layers fed with something that only looks like a batch (position
        indices of a sequence as long as the batch is large), weights also used behind the layer's back, and modules
        that mix examples.
        """
        names = [name for name in backward.totals if name in self.spec.slices]
        calls = [call for call in backward.cotangents if call.name == ""]
        examples = self._ways.probes(count)
        try:
            truths = [self._ways.truth(call, backward, values, count, names, examples) for call in calls]
        except (RuntimeError, ValueError, TypeError, UnsupportedModuleError) as error:
            return _unverified(f"calling the model again failed ({type(error).__name__}: {error})")
        if not truths or any(truth is None for truth in truths):
            return _unverified("the model was not called as a whole, or its output does not have the batch first")
        found = [truth for truth in truths if truth is not None]
        truth_rows = {name: torch.stack([t[name] for t in found]).sum(0) for name in names}
        blocks = self._blocks(backward, values, count, known)
        picked = torch.zeros(count, len(examples), dtype=self.dtype, device=next(iter(values.values())).device)
        picked[examples, range(len(examples))] = 1.0
        rows = {name: block.t_mm(picked) for name, block in blocks.items()}
        return frozenset(disagreeing(rows, truth_rows, pass_tolerance(backward, self.dtype)))


def _unverified(reason: str) -> frozenset[str]:
    warnings.warn(
        f"per-example gradients could not be checked: {reason}. They are used as captured; pass verify=False to "
        "silence this once you trust them.",
        UnverifiedGradientsWarning,
        stacklevel=user_stacklevel(),
    )
    return frozenset()
