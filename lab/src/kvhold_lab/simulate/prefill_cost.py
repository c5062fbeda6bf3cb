"""The time to compute a prompt's KV.

Defaults: Llama-3.1-8B on one H100 SXM in bfloat16. A token takes 2 FLOPs for each of the layers'
7.0 billion parameters: 25,000 tokens/s at 350 TFLOP/s. For each earlier token, attention takes
4 * 4,096 FLOPs per layer: as much after 27,000 tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvhold.core.planning import ComputeCost


@dataclass(frozen=True)
class PrefillCost:
    """tokens_per_s:     at a prompt's beginning
    attention_tokens: where attention takes as long as all else; infinite: no attention
    """

    tokens_per_s: float = 25_000.0
    attention_tokens: float = 27_000.0

    def seconds(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        tokens = num_tokens.astype(np.float64)
        pairs = tokens * (tokens - 1.0) / 2.0
        seconds: npt.NDArray[np.float64] = (
            tokens + pairs / self.attention_tokens
        ) / self.tokens_per_s
        return seconds

    def compute_cost(self, chunk_tokens: int = 1) -> ComputeCost:
        """A chunk of `chunk_tokens` counts as one token."""
        token_s = 1.0 / self.tokens_per_s
        return ComputeCost(
            "simulated",
            0,
            token_s=token_s * chunk_tokens,
            pair_s=token_s / self.attention_tokens * chunk_tokens**2,
        )
