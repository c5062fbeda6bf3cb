"""Models over paged KV. Layers write to the blocks, then read all from there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvhold_lab.mini_engine.arithmetic import (
    MAX_TOKENS,
    MAX_WIDTH,
    attend,
    gate,
    linear,
    normalise,
    rotate,
    rotation_table,
    snap,
)
from kvhold_lab.mini_engine.config import ModelShape

_BASE = 10_000.0
Hook = Callable[[str], None]


@dataclass(frozen=True)
class Slots:
    """In blocks: int64 tensors of equal shape."""

    blocks: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True)
class ModelKeys:
    """slots: `[batch, tokens]`; mask: bool `[batch, queries, tokens]`"""

    slots: Slots
    mask: torch.Tensor


@dataclass(frozen=True)
class ModelSpan:
    """Of one request, or one query of each of several.

    rows: int64 `[batch, queries]`, into the pass's tokens; keys: by KV cache group
    """

    rows: torch.Tensor
    keys: Sequence[ModelKeys]


@dataclass(frozen=True)
class ModelBatch:
    """tokens, positions: int64 `[tokens]`
    slots: by group, `[tokens]`, to write
    last:  int64 `[requests]`, rows of the logits
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: Sequence[Slots]
    spans: Sequence[ModelSpan]
    last: torch.Tensor


class Model:
    def __init__(
        self,
        shape: ModelShape,
        weights: dict[str, torch.Tensor],
        *,
        groups: dict[str, int],
        max_tokens: int,
        device: str,
    ) -> None:
        """Raises ValueError: sums would not be exact."""
        if (
            max_tokens > MAX_TOKENS
            or max(
                shape.hidden,
                shape.intermediate,
                shape.heads * shape.head,
                shape.latent + shape.rope,
            )
            > MAX_WIDTH
        ):
            raise ValueError(
                f"a request has {MAX_TOKENS} tokens at most, and a layer {MAX_WIDTH} "
                "elements: else sums are not exact"
            )
        self._shape = shape
        self._weights = weights
        self._groups = groups
        self._layers = [
            {
                name.removeprefix(prefix): weight
                for name, weight in weights.items()
                if name.startswith(prefix)
            }
            for prefix in (f"layers.{number}." for number in range(len(shape.layers)))
        ]
        self._rotation = rotation_table(max_tokens, shape.rope or shape.head, _BASE, device)

    def forward(
        self, batch: ModelBatch, caches: dict[str, torch.Tensor], enter: Hook, leave: Hook
    ) -> torch.Tensor:
        """Return logits `[requests, vocab]`.

        caches: by layer, `[blocks, heads, tokens, elements]`
        enter, leave: called before and after a layer's blocks are read
        """
        hidden = self._weights["embed"][batch.tokens]
        for number, name in enumerate(self._shape.layer_names):
            weights = self._layers[number]
            project = self._project_latent if self._shape.latent else self._project_heads
            queries, kv = project(normalise(hidden), batch.positions, weights)
            cache, slots = caches[name], batch.slots[self._groups[name]]
            cache[slots.blocks, :, slots.offsets] = kv.to(cache.dtype)
            enter(name)
            seen = self._attend(queries, batch, cache, self._groups[name], weights)
            leave(name)
            hidden = snap(hidden + linear(seen, weights["output"]))
            inner = normalise(hidden)
            inner = snap(gate(linear(inner, weights["gate"])) * linear(inner, weights["up"]))
            hidden = snap(hidden + linear(inner, weights["down"]))
        return normalise(hidden[batch.last]) @ self._weights["logits"].T

    def _project_heads(
        self, hidden: torch.Tensor, positions: torch.Tensor, weights: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `[tokens, kv heads, heads of one, width]`, KV `[tokens, kv heads, 2 * width]`."""
        shape = self._shape
        queries = rotate(
            linear(hidden, weights["query"]).unflatten(-1, (shape.heads, shape.head)),
            positions,
            self._rotation,
        )
        keys = rotate(
            linear(hidden, weights["key"]).unflatten(-1, (shape.kv_heads, shape.head)),
            positions,
            self._rotation,
        )
        values = linear(hidden, weights["value"]).unflatten(-1, (shape.kv_heads, shape.head))
        return queries.unflatten(1, (shape.kv_heads, -1)), torch.cat([keys, values], dim=-1)

    def _project_latent(
        self, hidden: torch.Tensor, positions: torch.Tensor, weights: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `[tokens, 1, heads, latent + rope]`, KV `[tokens, 1, latent + rope]`."""
        shape = self._shape
        plain, rotated = (
            linear(hidden, weights["query"])
            .unflatten(-1, (shape.heads, -1))
            .split([shape.head, shape.rope], dim=-1)
        )
        absorbed = snap(torch.einsum("thd,hld->thl", plain, weights["key_up"]))
        queries = torch.cat([absorbed, rotate(rotated, positions, self._rotation)], dim=-1)
        latent, rotated = (
            linear(hidden, weights["latent"]).unsqueeze(1).split([shape.latent, shape.rope], dim=-1)
        )
        return queries.unsqueeze(1), torch.cat(
            [normalise(latent), rotate(rotated, positions, self._rotation)], dim=-1
        )

    def _attend(
        self,
        queries: torch.Tensor,
        batch: ModelBatch,
        cache: torch.Tensor,
        group: int,
        weights: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        shape = self._shape
        width = shape.latent or shape.head
        seen = queries.new_empty(len(batch.tokens), shape.heads, width)
        scale = (shape.head + shape.rope if shape.latent else shape.head) ** -0.5
        for span in batch.spans:
            keys = span.keys[group]
            kv = cache[keys.slots.blocks, :, keys.slots.offsets].double()
            if shape.latent:
                found = attend(queries[span.rows], kv, kv[..., :width], keys.mask, scale)
            else:
                found = attend(
                    queries[span.rows], kv[..., :width], kv[..., width:], keys.mask, scale
                )
            seen[span.rows] = found.flatten(2, 3)
        if shape.latent:
            seen = snap(torch.einsum("thl,hdl->thd", seen, weights["value_up"]))
        return seen.flatten(1)
