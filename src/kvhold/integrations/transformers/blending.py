"""Prefill with stored KV of spans, by the model's own modules.

blender = Blender(model)
blended = blender.prefill(input_ids, kv, plan, make_selector("query", ratio=0.1))
"""

from dataclasses import dataclass
from typing import Any

import torch

from kvhold.blend.prefill import Narrowing, decoder_layers, narrowed_layers, prefill
from kvhold.blend.proof import TOKENS, prove
from kvhold.blend.rows import FlowingRows, PromptKV
from kvhold.blend.selection import BlendPlan, Selector
from kvhold.core.errors import ConfigError, LayoutError
from kvhold.integrations.transformers.geometry import CacheGeometry, geometry_of
from kvhold.integrations.transformers.rows import flowing, row_cache
from kvhold.kernels.rope import Rope


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
        try:
            self._layers = decoder_layers(model, self.geometry.layout.groups[0].layers)
            self._rope = Rope.of(self.geometry.config.to_dict())
            self._prove()
        except (ConfigError, LayoutError) as error:
            raise _refused(model, error) from error

    def prefill(self, input_ids: Any, kv: Any, plan: BlendPlan, selector: Selector) -> Blended:
        """Complete `kv` in place.

        input_ids: [1, tokens]
        kv:        [1, heads, tokens, head_dim] in each of `layers`; see `kvhold.blend.prefill`

        Raises ConfigError: a check layer that the model lacks; ValueError: shapes.
        """
        shapes = {tuple(layer.keys.shape[:3:2]) for layer in kv.layers}
        if tuple(input_ids.shape) != (1, plan.num_tokens) or shapes != {(1, plan.num_tokens)}:
            raise ValueError(
                f"input_ids are {tuple(input_ids.shape)}, KV (rows, tokens) {sorted(shapes)}; "
                f"both must be one row of {plan.num_tokens} tokens"
            )

        def compute(rows: FlowingRows, narrowing: Narrowing | None) -> Any:
            positions = rows.positions
            with (
                narrowed_layers(self._layers, rows, narrowing, axis=1),
                flowing(self.model.config, rows),
            ):
                return self.model(
                    input_ids=input_ids[:, positions],
                    position_ids=positions[None],
                    past_key_values=row_cache(rows),
                    use_cache=True,
                    logits_to_keep=1,
                )

        with torch.no_grad(), torch.autocast(self.model.device.type, enabled=False):
            output, recomputed = prefill(compute, kv, plan, selector, self._rope)
        return Blended(
            output.logits,
            recomputed,
            plan.num_exact,
            plan.num_tokens - plan.num_exact - len(recomputed),
        )

    def _prove(self) -> None:
        tokens = torch.tensor(TOKENS, device=self.model.device)[None]

        def fill(shift: int) -> Any:
            kv = self.geometry.empty()
            positions = torch.arange(shift, shift + len(TOKENS), device=tokens.device)[None]
            with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
                self.model(
                    input_ids=tokens, position_ids=positions, past_key_values=kv, use_cache=True
                )
            return kv

        def blend(kv: PromptKV, plan: BlendPlan, selector: Selector) -> None:
            self.prefill(tokens, kv, plan, selector)

        prove(fill, blend)


def _refused(model: Any, reason: object) -> LayoutError:
    return LayoutError(f"kvhold does not blend with this {type(model).__name__}: {reason}")
