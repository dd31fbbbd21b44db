"""Three ways to a parameter's per-example gradients: its layer's rule, its module again, the whole model again."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from slangvi.errors import UnsupportedModuleError
from slangvi.grads.agreement import disagreeing
from slangvi.grads.blocks import Block, Formed, Settle, add, as_it_is
from slangvi.grads.calls import Backward, Call
from slangvi.grads.replay import Replay
from slangvi.grads.rules import find_rule
from slangvi.params import Params, ParamSpec

__all__ = ["Ways", "listed"]


class Ways:
    """Blocks of the parameters of one backward pass, by each of the ways.

    Args:
        spec: the parameters to infer.
        dtype: dtype of the rows.
        memory_limit: bytes that rows in the making may take when a module is called again.
        settle: (name, block) → the same gradients in the form they are to be kept in.
    """

    def __init__(
        self, spec: ParamSpec, dtype: torch.dtype, memory_limit: int | None = None, settle: Settle = as_it_is
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.memory_limit = memory_limit
        self.settle = settle
        self._probe_source = torch.Generator().manual_seed(0)
        self._held_in: dict[str, dict[str, str]] = {}

    def by_rules(self, backward: Backward, wanted: Collection[str], count: int) -> tuple[dict[str, Block], set[str]]:
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
                x = x if x.layout is torch.strided else x.to_dense()
                with torch.no_grad():
                    found = rule(call.module, self._cast(x), self._cast(delta))
            for local, name in owned.items():
                if found is None or local not in found:
                    spoilt.add(name)
                else:
                    parts.setdefault(name, []).append(self.settle(name, found[local]))
        return {name: add(uses) for name, uses in parts.items() if name not in spoilt}, spoilt

    def by_modules(self, backward: Backward, values: Params, wanted: list[str], count: int) -> dict[str, Block]:
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

    def by_model(self, backward: Backward, values: Params, wanted: list[str], count: int) -> dict[str, Block]:
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
                f"no per-example gradient can be computed for parameter(s) {listed(wanted)}: they are used outside "
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
            examples = self.probes(replay.num_examples)
            truth = replay.rows_by_masking(list(local), examples)
            if disagreeing({k: v[examples] for k, v in rows.items()}, truth, replay.tolerance):
                rows = replay.rows_by_masking(list(local), range(replay.num_examples))
        return {local[key]: Formed(self._cast(value)) for key, value in rows.items()}

    def truth(
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

    def probes(self, count: int) -> list[int]:
        """Two examples, picked from a source of its own."""
        return torch.randperm(count, generator=self._probe_source, device="cpu")[:2].tolist()

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


def listed(names: list[str]) -> str:
    """Three names at most, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
