"""Prefill of a prompt with stored KV of its spans, by an engine's own modules.

Hooks on the decoder layers drop tokens that are not recomputed. No other thread may use the model
then.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from kvhold.blend.rows import FlowingRows, ProbedLayer
from kvhold.blend.selection import BlendPlan, LayerState, Selector
from kvhold.core.errors import ConfigError, LayoutError
from kvhold.kernels.rope import Rope, rotate


class Pass(Protocol):
    def __call__(self, rows: FlowingRows, narrowing: "Narrowing | None") -> Any:
        """Compute `rows` in all layers. Only the last row of the output counts."""


def prefill(
    compute: Pass, kv: Any, plan: BlendPlan, selector: Selector, rope: Rope
) -> tuple[Any, Any]:
    """Complete `kv` in place.

    kv: holds the exact tokens and the spans, whose keys are at their old positions; the rest may
        be anything

    Returns the output of `compute`, and the positions computed in the last layer.

    Raises ConfigError: a check layer that the model lacks.
    """
    num_layers = len(kv.layers)
    if not 0 <= selector.check_layer < num_layers:
        raise ConfigError(
            f"check_layer is {selector.check_layer}; the model has {num_layers} layers"
        )
    _turn(kv, plan, selector, rope)
    unheld = _to(plan.unheld(), kv)
    if selector.flow == "all":
        rows = FlowingRows(kv, _to(np.arange(plan.num_exact, plan.num_tokens), kv))
        return compute(rows, Narrowing(plan, selector)), rows.positions
    if selector.flow == "none":
        chosen = selector.select(plan, [], selector.budgets[0])
        rows = FlowingRows(kv, _with(unheld, chosen))
        return compute(rows, None), rows.positions
    tails = _to(plan.tails(), kv)
    for layer in kv.layers if len(tails) else ():
        layer.keys.index_fill_(2, tails, 0)
        layer.values.index_fill_(2, tails, 0)
    first = unheld[torch.isin(unheld, tails, invert=True)]
    rows = FlowingRows(kv, first, hidden=tails if len(tails) else None, is_recorded=True)
    output = compute(rows, None)
    states = [_state(rows, number) for number in range(num_layers)]
    chosen = selector.select(plan, states, selector.budgets[0])
    if len(chosen) or len(tails):
        rows = FlowingRows(kv, _with(unheld, chosen))
        output = compute(rows, None)
    return output, rows.positions


class Narrowing:
    def __init__(self, plan: BlendPlan, selector: Selector) -> None:
        self._plan = plan
        self._selector = selector

    def narrow(self, rows: FlowingRows, probe: Callable[[], Any]) -> Any:
        """The remaining rows' index, or None for all. probe: runs the layer"""
        step = rows.layer - self._selector.check_layer
        if not 0 <= step < len(self._selector.budgets):
            return None
        rows.is_probing = True
        try:
            probe()
        except ProbedLayer as probed:
            state = _state(rows, rows.layer, (probed.queries, probed.scaling), rows.probed)
        else:
            raise LayoutError(f"layer {rows.layer} does not use the attention that kvhold replaces")
        finally:
            rows.is_probing = False
        chosen = self._selector.select(self._plan, [state], self._selector.budgets[step])
        kept = _with(_to(self._plan.unheld(), rows.kv), chosen)
        return torch.isin(rows.positions, kept).nonzero()[:, 0]


@contextmanager
def narrowed_layers(
    layers: Sequence[Any], rows: FlowingRows, narrowing: Narrowing | None, *, axis: int
) -> Iterator[None]:
    """axis: of tokens, in what the layers are called with"""
    positions = rows.positions
    with ExitStack() as held:
        for number, layer in enumerate(layers):
            hook = _Entry(rows, number, narrowing, positions, axis)
            held.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield
    if rows.attended != list(range(len(layers))):
        raise LayoutError("not each layer attends once, by the attention that kvhold replaces")


def decoder_layers(model: Any, count: int) -> Sequence[Any]:
    """Raises LayoutError."""
    lists = sorted(
        (len(name.split(".")), name)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    )
    if not lists:
        raise LayoutError(f"it has no list of its {count} layers")
    found: Sequence[Any] = model.get_submodule(lists[0][1])
    return found


class _Entry:
    def __init__(
        self,
        rows: FlowingRows,
        number: int,
        narrowing: Narrowing | None,
        positions: Any,
        axis: int,
    ) -> None:
        self._rows, self._number, self._narrowing = rows, number, narrowing
        self._all, self._axis = positions, axis

    def __call__(self, layer: Any, args: Any, kwargs: Any) -> Any:
        rows = self._rows
        rows.layer = self._number
        if self._narrowing is None:
            return None
        if len(rows.positions) < len(self._all):
            # the model gives each layer the positions of all tokens
            kept = torch.searchsorted(self._all, rows.positions)
            args, kwargs = self._take((args, kwargs), kept, len(self._all))
        kept = self._narrowing.narrow(rows, lambda: self._probe(layer, args, kwargs))
        if kept is not None:
            before = len(rows.positions)
            rows.positions = rows.positions[kept]
            args, kwargs = self._take((args, kwargs), kept, before)
        return args, kwargs

    def _probe(self, layer: Any, args: Any, kwargs: Any) -> Any:
        # layers may change their inputs in place
        args, kwargs = _mapped((args, kwargs), torch.clone)
        return layer.forward(*args, **kwargs)

    def _take(self, value: Any, kept: Any, count: int) -> Any:
        axis = self._axis

        def take(tensor: Any) -> Any:
            if tensor.ndim > axis and tensor.shape[axis] == count:
                return tensor.index_select(axis, kept)
            return tensor

        return _mapped(value, take)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is tuple:
        return tuple(_mapped(part, change) for part in value)
    if type(value) is dict:
        return {name: _mapped(part, change) for name, part in value.items()}
    return value


def _turn(kv: Any, plan: BlendPlan, selector: Selector, rope: Rope) -> None:
    first = selector.check_layer if selector.flow == "all" else 0
    for span in plan.spans:
        if span.stored_from == span.start:
            continue
        new = np.arange(span.start, span.end)
        old = new - span.start + span.stored_from
        for layer in kv.layers[first:]:
            keys = layer.keys[0, :, span.start : span.end].transpose(0, 1)
            rotate(keys, old, new, rope, out=keys)


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


def _to(positions: Any, kv: Any) -> Any:
    return torch.from_numpy(positions).to(kv.layers[0].keys.device)
