"""Prefill of a prompt with stored KV of its spans, by the model's own modules.

    blender = Blender(model)
    blended = blender.prefill(input_ids, kv, plan, make_selector("query", ratio=0.1))

Hooks on the decoder layers drop tokens that are not recomputed; `rows` does the attention. One
thread at a time; no other one may use the model then.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvhold.blend.selection import BlendPlan, LayerState, Selector
from kvhold.core.errors import ConfigError, LayoutError
from kvhold.integrations.transformers.blend_proof import prove
from kvhold.integrations.transformers.geometry import CacheGeometry, geometry_of
from kvhold.integrations.transformers.rows import FlowingRows, ProbedLayer, flowing
from kvhold.kernels.rope import Rope, rotate


@dataclass(frozen=True)
class Blended:
    """logits:    of the last token, [1, 1, vocabulary]
    recomputed: positions computed in the last layer, [n] int64, ascending; the spans' and others
    """

    logits: Any
    recomputed: Any
    num_exact: int
    num_reused: int

    @property
    def num_recomputed(self) -> int:
        return len(self.recomputed)


class Blender:
    """A model that can compute some tokens of a prompt over stored KV of the others."""

    def __init__(self, model: Any, geometry: CacheGeometry | None = None) -> None:
        """Tries the model. Raises LayoutError with the reason for a refusal."""
        self.model = model
        self.geometry = geometry or geometry_of(model, tokens_per_chunk=16)
        self._layers = _decoder_layers(model, self.geometry.layout.groups[0].layers)
        try:
            self._rope = Rope.of(self.geometry.config.to_dict())
        except ConfigError as error:
            raise _refused(model, str(error)) from error
        prove(self)

    def prefill(
        self, input_ids: Any, kv: DynamicCache, plan: BlendPlan, selector: Selector
    ) -> Blended:
        """Complete `kv` in place.

        input_ids: [1, tokens]
        kv:        [1, heads, tokens, head_dim] per layer; holds the exact tokens and the spans,
                   whose keys are at their old positions; the rest may be anything

        Raises ConfigError: a check layer that the model lacks; ValueError: shapes.
        """
        self._check(input_ids, kv, plan, selector)
        with torch.no_grad(), torch.autocast(self.model.device.type, enabled=False):
            self._turn(kv, plan, selector)
            unheld = _to(plan.unheld(), kv)
            if selector.flow == "all":
                return self._run(input_ids, kv, plan, _Narrowing(self, plan, selector))
            if selector.flow == "none":
                chosen = selector.select(plan, [], selector.budgets[0])
                return self._run(input_ids, kv, plan, _with(unheld, chosen))
            rows = FlowingRows(kv, unheld, is_recorded=True)
            scouted = self._run(input_ids, kv, plan, rows)
            states = [_state(rows, number) for number in range(len(self._layers))]
            chosen = selector.select(plan, states, selector.budgets[0])
            if not len(chosen):
                return scouted
            return self._run(input_ids, kv, plan, _with(unheld, chosen))

    def _check(self, input_ids: Any, kv: DynamicCache, plan: BlendPlan, selector: Selector) -> None:
        num_layers = len(self._layers)
        if not 0 <= selector.check_layer < num_layers:
            raise ConfigError(
                f"check_layer is {selector.check_layer}; the model has {num_layers} layers"
            )
        shapes = {tuple(layer.keys.shape[:3:2]) for layer in kv.layers}
        if tuple(input_ids.shape) != (1, plan.num_tokens) or shapes != {(1, plan.num_tokens)}:
            raise ValueError(
                f"input_ids are {tuple(input_ids.shape)}, KV (rows, tokens) {sorted(shapes)}; "
                f"both must be one row of {plan.num_tokens} tokens"
            )

    def _turn(self, kv: DynamicCache, plan: BlendPlan, selector: Selector) -> None:
        first = selector.check_layer if selector.flow == "all" else 0
        for span in plan.spans:
            if span.stored_from == span.start:
                continue
            new = np.arange(span.start, span.end)
            old = new - span.start + span.stored_from
            for layer in kv.layers[first:]:
                keys = layer.keys[0, :, span.start : span.end].transpose(0, 1)
                rotate(keys, old, new, self._rope, out=keys)

    def _run(self, input_ids: Any, kv: DynamicCache, plan: BlendPlan, flow: Any) -> Blended:
        narrowing = flow if isinstance(flow, _Narrowing) else None
        if narrowing is not None:
            flow = torch.arange(plan.num_exact, plan.num_tokens, device=input_ids.device)
        rows = flow if isinstance(flow, FlowingRows) else FlowingRows(kv, flow)
        positions = rows.positions
        with ExitStack() as held:
            for number, layer in enumerate(self._layers):
                hook = _Entry(rows, number, narrowing, positions)
                held.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            held.enter_context(flowing(self.model.config, rows))
            output = self.model(
                input_ids=input_ids[:, positions],
                position_ids=positions[None],
                past_key_values=rows.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        if rows.attended != list(range(len(self._layers))):
            raise _refused(self.model, "not each layer attends once, by transformers' functions")
        recomputed = rows.positions
        return Blended(
            output.logits,
            recomputed,
            plan.num_exact,
            plan.num_tokens - plan.num_exact - len(recomputed),
        )


class _Narrowing:
    """All tokens flow up to the check layer, fewer from there on."""

    def __init__(self, blender: Blender, plan: BlendPlan, selector: Selector) -> None:
        self.plan = plan
        self.selector = selector

    def narrow(self, rows: FlowingRows, layer: Any, args: Any, kwargs: Any) -> Any:
        """Return the index of the remaining rows, or None for all."""
        step = rows.layer - self.selector.check_layer
        if not 0 <= step < len(self.selector.budgets):
            return None
        rows.is_probing = True
        try:
            layer.forward(*args, **kwargs)
        except ProbedLayer as probed:
            state = _state(rows, rows.layer, (probed.queries, probed.scaling), rows.probed)
        else:
            raise LayoutError(f"{type(layer).__name__} does not use transformers' attention")
        finally:
            rows.is_probing = False
        chosen = self.selector.select(self.plan, [state], self.selector.budgets[step])
        kept = _with(_to(self.plan.unheld(), rows.kv), chosen)
        return torch.isin(rows.positions, kept).nonzero()[:, 0]


class _Entry:
    def __init__(
        self, rows: FlowingRows, number: int, narrowing: _Narrowing | None, positions: Any
    ) -> None:
        self._rows, self._number, self._narrowing = rows, number, narrowing
        self._all = positions

    def __call__(self, layer: Any, args: Any, kwargs: Any) -> Any:
        rows = self._rows
        rows.layer = self._number
        if self._narrowing is None:
            return None
        kwargs = self._narrowed(kwargs, len(self._all))
        kept = self._narrowing.narrow(rows, layer, args, kwargs)
        if kept is not None:
            before = len(rows.positions)
            rows.positions = rows.positions[kept]
            args = tuple(_take(value, kept, before) for value in args)
            kwargs = {name: _take(value, kept, before) for name, value in kwargs.items()}
        return args, kwargs

    def _narrowed(self, kwargs: dict[str, Any], count: int) -> dict[str, Any]:
        """The model gives each layer the positions of all tokens."""
        if len(self._rows.positions) == count:
            return kwargs
        kept = torch.searchsorted(self._all, self._rows.positions)
        return {
            name: value if name == "hidden_states" else _take(value, kept, count)
            for name, value in kwargs.items()
        }


def _take(value: Any, kept: Any, count: int) -> Any:
    """value: [1, count, ...] tensors"""
    if isinstance(value, tuple):
        return tuple(_take(part, kept, count) for part in value)
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == count:
        return value[:, kept]
    return value


def _state(rows: FlowingRows, number: int, queries: Any = None, computed: Any = None) -> LayerState:
    layer = rows.kv.layers[number]
    query, scaling = queries or rows.queries[number]
    old_keys, old_values = (part[0].transpose(0, 1) for part in (layer.keys, layer.values))
    keys, values = (
        (part[0].transpose(0, 1) for part in computed)
        if computed is not None
        else (old_keys[rows.positions], old_values[rows.positions])
    )
    return LayerState(
        number,
        rows.positions,
        query[0].transpose(0, 1),
        keys,
        values,
        old_keys,
        old_values,
        scaling,
    )


def _with(unheld: Any, chosen: Any) -> Any:
    return torch.cat([unheld, chosen.to(unheld.device)]).unique()


def _to(positions: Any, kv: DynamicCache) -> Any:
    return torch.from_numpy(positions).to(kv.layers[0].keys.device)


def _decoder_layers(model: Any, count: int) -> Sequence[Any]:
    lists = sorted(
        (len(name.split(".")), name)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    )
    if not lists:
        raise _refused(model, f"it has no list of its {count} layers")
    found: Sequence[Any] = model.get_submodule(lists[0][1])
    return found


def _refused(model: Any, reason: str) -> LayoutError:
    return LayoutError(f"kvhold does not blend with this {type(model).__name__}: {reason}")
