from typing import Any

import torch
from transformers import DynamicCache

from kvhold.blend.canary import Canary, Drift, drift_of
from kvhold.blend.permits import BlendRefusal, Permit, Permits, permit_model, permit_options
from kvhold.blend.selection import Selector, selector_text
from kvhold.core.blend_config import BlendConfig
from kvhold.core.keys import Namespace
from kvhold.integrations.transformers.geometry import CacheGeometry


class BlendGate:
    """The permit of each request, and its canary."""

    def __init__(self, config: BlendConfig, selector: Selector) -> None:
        self._permits = Permits.of(config)
        self._canary = Canary.of(config, self._permits)
        self._selector = selector_text(selector)

    def find(self, namespace: Namespace) -> Permit | BlendRefusal:
        return self._permits.find(
            permit_model(namespace), self._selector, options=permit_options(namespace)
        )

    def is_due(self, permit: Permit) -> bool:
        return self._canary.is_due(permit)

    def record(self, namespace: Namespace, permit: Permit, drift: Drift) -> str:
        """Return the refusal if the permit is withdrawn."""
        return str(self.find(namespace)) if self._canary.record(permit, drift) else ""


def compute_in_full(
    model: Any, geometry: CacheGeometry, input_ids: Any, blended: DynamicCache
) -> tuple[DynamicCache, Drift]:
    """KV of as many tokens, sharing none, and the drift after the last token.

    input_ids: [1, tokens], more than `blended` has, which is longer afterwards
    """
    num_tokens = blended.get_seq_length()
    full = geometry.empty()
    with torch.no_grad():
        ours, theirs = (
            model(input_ids=ids, past_key_values=kv, use_cache=True, logits_to_keep=1).logits[0, -1]
            for ids, kv in ((input_ids, full), (input_ids[:, num_tokens:], blended))
        )
    full.crop(num_tokens - input_ids.shape[1])
    return full, drift_of(ours, theirs)
