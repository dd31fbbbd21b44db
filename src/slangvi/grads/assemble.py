"""From what the hooks wrote down to per-example gradients, and the check that they are what they claim to be."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from slangvi.errors import UnsupportedModuleError, UnverifiedGradientsWarning
from slangvi.grads.blocks import Block, Formed, add
from slangvi.grads.calls import Backward, Call
from slangvi.grads.factored import RowGroup
from slangvi.grads.replay import Replay
from slangvi.grads.rules import find_rule
from slangvi.types import Params, ParamSpec

__all__ = ["Assembler", "Engine"]

Engine = Literal["factored", "dense"]
Signature = tuple[object, ...]


class Assembler:
    """Turns a `Backward` into a `RowGroup`.

    Every parameter is served by the first of these that holds for it: the rule of the layer that owns it; the dense
    engine on the innermost recorded module that holds it; the dense engine on the whole model. The first time a
    pattern of calls is seen, two examples are checked against the definition (see `_distrusted`), and parameters
    whose rows differ are served by the whole model from then on.

    Args:
        model: the model whose calls were recorded.
        spec: the parameters to infer.
        dtype: dtype of the rows.
        engine: "factored", or "dense" to serve every parameter by the dense engine on the whole model.
        verify: whether to check patterns of calls not seen before.
    """

    def __init__(self, model: nn.Module, spec: ParamSpec, dtype: torch.dtype, engine: Engine, verify: bool) -> None:
        self.model = model
        self.spec = spec
        self.dtype = dtype
        self.engine = engine
        self.verify = verify
        self._plans: dict[Signature, frozenset[str]] = {}
        self._held_in: dict[str, dict[str, str]] = {}

    def assemble(self, backward: Backward, values: Params, num_examples: int | None = None) -> RowGroup:
        """Per-example gradients of one backward pass.

        Args:
            backward: what the hooks recorded.
            values: canonical parameter name → the value the pass was made with.
            num_examples: M; read off the recorded calls when None.
        """
        count = num_examples if num_examples is not None else _count_examples(backward)
        if count == 0:
            raise ValueError("the batch is empty: a step needs at least one example. Skip empty batches.")
        blocks = self._blocks(backward, values, count, self._plan(backward, values, count))
        return RowGroup(count, blocks, {name: total.to(self.dtype) for name, total in backward.totals.items()})

    def _plan(self, backward: Backward, values: Params, count: int) -> frozenset[str]:
        """Parameters to be served by the whole model: all for the dense engine, else what the check found."""
        if self.engine == "dense":
            return frozenset(self.spec.names)
        signature = _signature(backward, count)
        if self.verify and signature not in self._plans:
            if not all(bool(torch.isfinite(total).all()) for total in backward.totals.values()):
                return frozenset()  # NaN proves nothing; the step will refuse it, and the next batch is checked
            self._plans[signature] = self._distrusted(backward, values, count)
        return self._plans.get(signature, frozenset())

    def _blocks(self, backward: Backward, values: Params, count: int, distrusted: frozenset[str]) -> dict[str, Block]:
        wanted = [name for name in backward.totals if name in self.spec.slices]
        trusted = [name for name in wanted if name not in distrusted]
        blocks, spoilt = self._by_rules(backward, set(trusted), count)
        left = [name for name in trusted if name not in blocks and name not in spoilt]
        blocks |= self._by_modules(backward, values, left, count)
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
                    parts.setdefault(name, []).append(found[local])
        return {name: add(uses) for name, uses in parts.items() if name not in spoilt}, spoilt

    def _by_modules(self, backward: Backward, values: Params, wanted: list[str], count: int) -> dict[str, Block]:
        """The dense engine on the innermost recorded module without a rule that holds a parameter."""
        holders: dict[Call, list[str]] = {}
        for name in wanted:
            depth = -1
            chosen: list[Call] = []
            for call in backward.cotangents:
                if call.surroundings is None or find_rule(call.module) or name not in self._held(call):
                    continue
                level = len(call.name)
                if level > depth:
                    depth, chosen = level, [call]
                elif level == depth:
                    chosen.append(call)
            for call in chosen:
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
            examples = _probes(replay.num_examples)
            truth = replay.rows_by_masking(list(local), examples)
            wrong = _disagreeing({k: v[examples] for k, v in rows.items()}, truth)
            if wrong:
                rows = replay.rows_by_masking(list(local), range(replay.num_examples))
        return {local[key]: Formed(self._cast(value)) for key, value in rows.items()}

    def _distrusted(self, backward: Backward, values: Params, count: int) -> frozenset[str]:
        """Parameters whose rows are not what one example's loss alone gives.

        The definition: call the model again, keep the output gradient of one example only, and go back. Done for
        the first and the last example. It finds layers fed with something that only looks like a batch (position
        indices of a sequence as long as the batch is large), weights also used behind the layer's back, and modules
        that mix examples.
        """
        names = [name for name in backward.totals if name in self.spec.slices]
        calls = [call for call in backward.cotangents if call.name == ""]
        examples = _probes(count)
        try:
            truths = [self._truth(call, backward, values, count, names, examples) for call in calls]
        except (RuntimeError, ValueError, TypeError, UnsupportedModuleError) as error:
            return _unverified(f"calling the model again failed ({type(error).__name__}: {error})")
        if not truths or any(truth is None for truth in truths):
            return _unverified("the model was not called as a whole, or its output does not have the batch first")
        found = [truth for truth in truths if truth is not None]
        total = {name: torch.stack([t[0][name] for t in found]).sum(0) for name in names}
        if _disagreeing(total, {name: backward.totals[name] for name in names}):
            return _unverified("part of the loss does not pass through the model's output (a penalty on the weights?)")
        truth_rows = {name: torch.stack([t[1][name] for t in found]).sum(0) for name in names}
        blocks = self._blocks(backward, values, count, frozenset())
        picked = torch.zeros(count, len(examples), dtype=self.dtype, device=next(iter(values.values())).device)
        picked[examples, range(len(examples))] = 1.0
        rows = {name: block.t_mm(picked) for name, block in blocks.items()}
        return frozenset(_disagreeing(rows, truth_rows))

    def _truth(
        self,
        call: Call,
        backward: Backward,
        values: Params,
        count: int,
        names: list[str],
        examples: list[int],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Totals and the rows of some examples by definition, from one call of the whole model."""
        replay = self._replay(call, backward, values, count)
        if not replay.cotangents:
            return None
        held = self._held(call)
        local = [held[name] for name in names]
        back = {held[name]: name for name in names}
        totals = {back[k]: v for k, v in replay.totals(local).items()}
        return totals, {back[k]: v for k, v in replay.rows_by_masking(local, examples).items()}

    def _replay(self, call: Call, backward: Backward, values: Params, count: int) -> Replay:
        params = {local: values[name] for name, local in self._held(call).items()}
        return Replay(call, params, backward.cotangents[call], count)

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


def _count_examples(backward: Backward) -> int:
    """M: the batch of the whole model's call, or of every recorded call when the model was called in parts."""
    whole = [call for call in backward.cotangents if call.name == ""]
    counts = {x.shape[0] for call in whole if (x := call.first_tensor) is not None}
    if not counts:
        counts = {g.shape[0] for grads in backward.cotangents.values() for g in grads.values() if g.ndim}
    if len(counts) != 1:
        raise UnsupportedModuleError(
            f"one backward pass must bring the gradients of one batch, got first dimensions {sorted(counts)}. Call "
            "the model on the batch as a whole with the batch as first dimension, and call backward once per batch."
        )
    return counts.pop()


def _signature(backward: Backward, count: int) -> Signature:
    """What makes two passes alike: the same calls, with the batch in the same places."""
    calls = tuple(
        (call.name, tuple(g.ndim > 0 and g.shape[0] == count for g in grads.values()))
        for call, grads in backward.cotangents.items()
    )
    return calls, tuple(backward.totals)


def _probes(count: int) -> list[int]:
    return sorted({0, count - 1})


def _disagreeing(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> list[str]:
    """Names whose values differ by more than rounding at the coarser of the two precisions."""
    scale = sum(float(value.double().square().sum()) for value in truth.values()) ** 0.5
    wrong = []
    for name, expected in truth.items():
        # Half precision rounds every product; what must be caught are errors of order one.
        tolerance = min(0.05, max(1e-7, 1e3 * torch.finfo(expected.dtype).eps))
        got = found.get(name, torch.zeros_like(expected)).double().flatten()
        gap = float((got - expected.double().flatten()).norm())
        allowed = tolerance * (float(expected.double().norm()) + 1e-2 * scale)
        if not gap <= allowed:
            wrong.append(name)
    return wrong


def _unverified(reason: str) -> frozenset[str]:
    warnings.warn(
        f"per-example gradients could not be checked: {reason}. They are used as captured; pass verify=False to "
        "silence this once you trust them.",
        UnverifiedGradientsWarning,
        stacklevel=2,
    )
    return frozenset()


def _short(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
