"""From what the hooks wrote down to per-example gradients, and the check that they are what they claim to be."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from slangvi.errors import UnsupportedModuleError, UnverifiedGradientsWarning
from slangvi.grads.blocks import Block, Formed, Settle, add, as_it_is
from slangvi.grads.calls import Backward, Call
from slangvi.grads.factored import RowGroup
from slangvi.grads.replay import Replay, call_tolerance
from slangvi.grads.rules import find_rule
from slangvi.types import Params, ParamSpec

__all__ = ["Assembler", "Engine", "Uses", "called_twice", "count_examples", "outside_frames"]

Engine = Literal["factored", "dense"]
Signature = tuple[object, ...]
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
        self.settle = settle
        self.spec = spec
        self.dtype = dtype
        self.engine = engine
        self.verify = verify
        self.memory_limit = memory_limit
        self._plans: dict[Signature, frozenset[str]] = {}
        self._seen: dict[Signature, Uses] = {}
        self._probe_source = torch.Generator().manual_seed(0)
        self.rules_sufficed = False  # whether the last pass needed nothing but rules
        self.rules_failed = False  # whether some pass needed more, since somebody looked and took this back
        self.check_next = False  # ask for a check of the next pass out of turn
        self.recent: list[Uses] = []  # of the patterns of the passes that were collected last
        self._held_in: dict[str, dict[str, str]] = {}

    def assemble(self, backward: Backward, values: Params, num_examples: int | None = None) -> RowGroup:
        """Per-example gradients of one backward pass.

        Args:
            backward: what the hooks recorded.
            values: canonical parameter name → the value the pass was made with.
            num_examples: M; read off the recorded calls when None.
        """
        count = num_examples if num_examples is not None else count_examples(backward)
        signature = _signature(backward, count)
        due = self._due(backward, signature)
        plan = self._plan(backward, values, count, due, signature)
        blocks = self._blocks(backward, values, count, plan)
        if due:
            blocks |= self._reconciled(blocks, backward, values, count)
        return RowGroup(count, blocks, {name: total.to(self.dtype) for name, total in backward.totals.items()})

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
        known = self._plans.get(signature, frozenset())
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
            better = self._by_model(backward, values, wrong, count)
        except UnsupportedModuleError:
            better = {}
        left = [name for name in wrong if name not in better or self._off({name: better[name]}, totals, backward)]
        if left:
            raise UnsupportedModuleError(
                f"the gradient of parameter(s) {_short(left)} does not come from the calls of the model alone, so it "
                "cannot be told apart by example. Usual causes: a penalty on the weights in the loss (the prior is "
                "prior_precision), a gradient penalty, a parameter used in the loss only (move it into forward), "
                "backward(inputs=...), a module whose buffers change in forward, another optimizer's step between "
                "backward and this one's (call this one's first). Remove it, or pass verify=False to go on with what "
                "was captured."
            )
        return better

    def _off(self, blocks: Mapping[str, Block], totals: Mapping[str, Tensor], backward: Backward) -> list[str]:
        """Names whose rows do not add up; rounding is relative to the rows, which may cancel in the sum."""
        expected = {name: totals[name] for name in blocks}
        sums = {name: block.sum() for name, block in blocks.items()}
        sizes = {name: (block.num_rows * block.square_sum().double().sum()).sqrt() for name, block in blocks.items()}
        return _disagreeing(sums, expected, _tolerance(backward), sizes)

    def _blocks(self, backward: Backward, values: Params, count: int, distrusted: frozenset[str]) -> dict[str, Block]:
        wanted = [name for name in backward.totals if name in self.spec.slices]
        trusted = [name for name in wanted if name not in distrusted]
        blocks, spoilt = self._by_rules(backward, set(trusted), count)
        left = [name for name in trusted if name not in blocks and name not in spoilt]
        blocks |= self._by_modules(backward, values, left, count)
        self.rules_sufficed = len(blocks) == len(wanted) and not left
        self.rules_failed |= not self.rules_sufficed
        left = [name for name in wanted if name not in blocks]
        if left:
            blocks |= self._by_model(backward, values, left, count)
        return blocks

    def _by_rules(self, backward: Backward, wanted: Collection[str], count: int) -> tuple[dict[str, Block], set[str]]:
        """Blocks of layers with a rule, and the names of parameters of which some use could not be read."""
        parts: dict[str, list[Block]] = {}
        spoilt: set[str] = set()
        for call, cotangents in backward.cotangents.items():
            rule = find_rule(call.module)
            owned = self._owned(call, wanted)
            if rule is None or not owned:
                continue
            x, delta = call.first_tensor, cotangents.get(0)
            found = None
            if x is not None and delta is not None and x.shape[0] == delta.shape[0] == count:
                with torch.no_grad():
                    found = rule(call.module, self._cast(x), self._cast(delta))
            for local, name in owned.items():
                if found is None or local not in found:
                    spoilt.add(name)
                else:
                    parts.setdefault(name, []).append(self.settle(name, found[local]))
        return {name: add(uses) for name, uses in parts.items() if name not in spoilt}, spoilt

    def _by_modules(self, backward: Backward, values: Params, wanted: list[str], count: int) -> dict[str, Block]:
        """The dense engine on the innermost recorded module without a rule that holds a parameter."""
        replayable = [c for c in backward.cotangents if c.surroundings is not None and find_rule(c.module) is None]
        holders: dict[Call, list[str]] = {}
        for name in wanted:
            holding = [call for call in replayable if name in self._held(call)]
            for call in holding:
                if not any(_inside(other.name, call.name) for other in holding):
                    holders.setdefault(call, []).append(name)
        parts: dict[str, list[Block]] = {}
        spoilt: set[str] = set()
        for call, names in holders.items():
            replay = self._replay(call, backward, values, count)
            if not replay.by_example:
                spoilt.update(names)
                continue
            for name, block in self._rows(replay, call, names).items():
                parts.setdefault(name, []).append(block)
        return {name: add(uses) for name, uses in parts.items() if name not in spoilt}

    def _by_model(self, backward: Backward, values: Params, wanted: list[str], count: int) -> dict[str, Block]:
        """The dense engine on the whole model."""
        parts: dict[str, list[Block]] = {}
        calls = [call for call in backward.cotangents if call.name == ""]
        for call in calls:
            replay = self._replay(call, backward, values, count)
            if not replay.cotangents:
                calls = []
                break
            for name, block in self._rows(replay, call, wanted, checked=True).items():
                parts.setdefault(name, []).append(block)
        if not calls:
            raise UnsupportedModuleError(
                f"no per-example gradient can be computed for parameter(s) {_short(wanted)}: they are used outside "
                "the layers that own them, and the model itself was not called, or its output does not have the "
                f"batch (here {count}) as first dimension. Call the model as model(x), batch first, and compute the "
                "loss from its output; or freeze these parameters with requires_grad_(False)."
            )
        return {name: add(uses) for name, uses in parts.items()}

    def _rows(self, replay: Replay, call: Call, names: list[str], checked: bool = False) -> dict[str, Block]:
        """Formed rows of canonical `names`; with `checked`, vmap is believed only if it meets the definition."""
        held = self._held(call)
        local = {held[name]: name for name in names}
        rows = replay.rows(list(local))
        if checked:
            examples = self._probes(replay.num_examples)
            truth = replay.rows_by_masking(list(local), examples)
            if _disagreeing({k: v[examples] for k, v in rows.items()}, truth, replay.tolerance):
                rows = replay.rows_by_masking(list(local), range(replay.num_examples))
        return {local[key]: Formed(self._cast(value)) for key, value in rows.items()}

    def _distrusted(self, backward: Backward, values: Params, count: int, known: frozenset[str]) -> frozenset[str]:
        """Parameters whose rows are not what one example's loss alone gives.

        The definition: call the model again, keep the output gradient of one example only, and go back. Done for
        two examples picked at random. It finds layers fed with something that only looks like a batch (position
        indices of a sequence as long as the batch is large), weights also used behind the layer's back, and modules
        that mix examples.
        """
        names = [name for name in backward.totals if name in self.spec.slices]
        calls = [call for call in backward.cotangents if call.name == ""]
        examples = self._probes(count)
        try:
            truths = [self._truth(call, backward, values, count, names, examples) for call in calls]
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
        return frozenset(_disagreeing(rows, truth_rows, _tolerance(backward)))

    def _truth(
        self,
        call: Call,
        backward: Backward,
        values: Params,
        count: int,
        names: list[str],
        examples: list[int],
    ) -> dict[str, Tensor] | None:
        """The rows of some examples by definition, from one call of the whole model."""
        replay = self._replay(call, backward, values, count)
        if not replay.cotangents:
            return None
        held = self._held(call)
        found = replay.rows_by_masking([held[name] for name in names], examples)
        return {name: found[held[name]] for name in names}

    def _replay(self, call: Call, backward: Backward, values: Params, count: int) -> Replay:
        params = {local: values[name] for name, local in self._held(call).items()}
        inner = backward.inner.get(call, {})
        return Replay(call, params, backward.cotangents[call], inner, count, self.memory_limit)

    def _probes(self, count: int) -> list[int]:
        """Two examples, picked from a source of its own."""
        return torch.randperm(count, generator=self._probe_source)[:2].tolist()

    def _owned(self, call: Call, wanted: Collection[str]) -> dict[str, str]:
        """Local → canonical names of the module's own parameters among the wanted."""
        names = {local: self._canonical(call, local) for local in call.module._parameters}
        return {local: name for local, name in names.items() if name is not None and name in wanted}

    def _held(self, call: Call) -> dict[str, str]:
        """Canonical → local names of all inferred parameters inside a module."""
        if call.name not in self._held_in:
            locals_ = (local for local, _ in call.module.named_parameters())
            found = {self._canonical(call, local): local for local in locals_}
            self._held_in[call.name] = {name: local for name, local in found.items() if name is not None}
        return self._held_in[call.name]

    def _canonical(self, call: Call, local: str) -> str | None:
        return self.spec.canonical.get(f"{call.name}.{local}" if call.name else local)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x


def _inside(inner: str, outer: str) -> bool:
    """Whether a module's path lies strictly below another's."""
    return inner != outer and (outer == "" or inner.startswith(f"{outer}."))


def count_examples(backward: Backward) -> int:
    """M > 0: the batch of the whole model's call, or of every recorded call when the model was called in parts."""
    whole = [call for call in backward.cotangents if call.name == ""]
    if len(whole) > 1:
        raise called_twice(len(whole))
    counts = {x.shape[0] for call in whole if (x := call.first_tensor) is not None}
    if not counts:
        counts = {g.shape[0] for grads in backward.cotangents.values() for g in grads.values() if g.ndim}
    if len(counts) != 1:
        raise UnsupportedModuleError(
            f"one backward pass must bring the gradients of one batch, got first dimensions {sorted(counts)}. Call "
            "the model on the batch as a whole with the batch as first dimension, and call backward once per batch."
        )
    count = counts.pop()
    if count == 0:
        raise ValueError("the batch is empty: a step needs at least one example. Skip empty batches.")
    return count


def called_twice(count: int) -> UnsupportedModuleError:
    """What is said when one backward pass goes through several calls of the model."""
    return UnsupportedModuleError(
        f"the model was called {count} times for one backward pass, and it cannot be told whether these are new "
        "examples or the same ones. New examples: call backward once per batch. The same ones (pairs, views): make the "
        "calls inside a module of your own and give that one to the optimizer."
    )


def _signature(backward: Backward, count: int) -> Signature:
    """What makes two passes alike: the same calls, with the batch in the same places."""

    def batched(values: Iterable[object]) -> tuple[bool, ...]:
        return tuple(isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == count for x in values)

    calls = tuple((c.name, batched(grads.values()), batched(c.leaves)) for c, grads in backward.cotangents.items())
    return calls, tuple(backward.totals)


def _tolerance(backward: Backward) -> float:
    """Relative error that rounding alone explains, by the coarsest precision that took part in the pass."""
    dtypes = {grad.dtype for grads in backward.cotangents.values() for grad in grads.values()}
    dtypes |= {total.dtype for total in backward.totals.values()}
    return max((call_tolerance(call, dtypes) for call in backward.cotangents), default=1e-7)


def _disagreeing(
    found: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    tolerance: float,
    sizes: Mapping[str, Tensor] | None = None,
) -> list[str]:
    """Names whose values differ by more than the tolerance, relative to their size and a little of everything's.

    `sizes` are those of terms that were added up, where they may be larger than their sum.
    """
    if not truth:
        return []
    norms = torch.stack([value.double().norm() for value in truth.values()])
    gaps = torch.stack(
        [
            (found[name].double().flatten() - value.double().flatten()).norm()
            if name in found
            else value.double().norm()
            for name, value in truth.items()
        ]
    )
    slack = norms + 1e-2 * norms.norm()
    if sizes is not None:
        slack = slack + 1e-2 * torch.stack([sizes[name] for name in truth])
    fine = gaps <= tolerance * slack
    return [name for name, ok in zip(truth, fine.tolist(), strict=True) if not ok]


def _unverified(reason: str) -> frozenset[str]:
    warnings.warn(
        f"per-example gradients could not be checked: {reason}. They are used as captured; pass verify=False to "
        "silence this once you trust them.",
        UnverifiedGradientsWarning,
        stacklevel=outside_frames(),
    )
    return frozenset()


def outside_frames() -> int:
    """How far up the user's own line is, so that the warning points there."""
    frame, level = sys._getframe(1), 1
    inside = (__name__.split(".")[0], "contextlib", "torch")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        frame, level = frame.f_back, level + 1
    return level


def _short(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
