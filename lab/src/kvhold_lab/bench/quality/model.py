"""A model whose KV can be replaced between context and questions.

It computes in float32; KV is bfloat16 as uint16. Full attention only.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import ConfigError
from kvhold.core.layout import Layout

Bits = npt.NDArray[np.uint16]
Tokens = npt.NDArray[np.int64]

RECALL_MARK, RECALL_VERSION = (
    "kvhold_recall",
    1,
)
WEIGHTS = Path(__file__).resolve().parents[5] / "benchmarks" / "quality" / "model"


def find_weights() -> Path | None:
    return WEIGHTS if (WEIGHTS / "model.safetensors").is_file() else None


@dataclass(frozen=True)
class QualitySubject:
    """tokenizer: None for a model of `tasks.py`"""

    name: str
    model: Any
    layout: Layout
    tokenizer: Any
    recalls: bool
    _config: Any

    def prefill(self, contexts: Tokens) -> Bits:
        """`[exams, tokens]` -> KV `[exams, layers, 2, tokens, heads, head_dim]`."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self._config)
        with torch.no_grad():
            self.model(
                input_ids=torch.from_numpy(contexts),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        layers = [torch.stack([layer.keys, layer.values], dim=1) for layer in cache.layers]
        stacked = torch.stack(layers, dim=1).transpose(3, 4).to(torch.bfloat16).contiguous()
        bits: Bits = stacked.view(torch.int16).numpy().view(np.uint16)
        return bits

    def answer(self, kv: Bits, questions: Tokens) -> Any:
        """Return logits, float32 `[exams, question tokens, vocabulary]`."""
        import torch
        from transformers import DynamicCache

        values = torch.from_numpy(kv.view(np.int16)).view(torch.bfloat16).float().transpose(3, 4)
        cache = DynamicCache(config=self._config)
        for layer in range(kv.shape[1]):
            cache.update(values[:, layer, 0].contiguous(), values[:, layer, 1].contiguous(), layer)
        with torch.no_grad():
            return self.model(
                input_ids=torch.from_numpy(questions), past_key_values=cache, use_cache=True
            ).logits


def load_subject(model: str | Path, *, tokens_per_chunk: int) -> QualitySubject:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from kvhold.integrations.transformers.geometry import geometry_of

    try:
        config: Any = AutoConfig.from_pretrained(model)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {str(model)!r} cannot be loaded: {error}") from error
    loaded.eval()
    geometry = geometry_of(loaded, tokens_per_chunk=tokens_per_chunk)
    layout = replace(
        geometry.layout, groups=(replace(geometry.layout.groups[0], dtype="bfloat16"),)
    )
    recalls = getattr(config, RECALL_MARK, None)
    if recalls not in (None, RECALL_VERSION):
        raise ConfigError(
            f"model {str(model)!r} was trained on version {recalls} of the questions; "
            f"these are version {RECALL_VERSION}"
        )
    tokenizer: Any = None
    if recalls is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model {str(model)!r} has no tokenizer that can be loaded: {error}"
            ) from error
    return QualitySubject(
        Path(model).name, loaded, layout, tokenizer, recalls is not None, geometry.config
    )
