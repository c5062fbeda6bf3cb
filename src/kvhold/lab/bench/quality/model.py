"""A model whose KV can be taken out after the context, and put back before the questions.

    subject = load_subject(find_weights(), tokens_per_chunk=128)
    kv = subject.prefill(contexts)  # [exams, layers, 2, tokens, heads, head_dim], bfloat16 as
    uint16
    logits = subject.answer(kv, questions)              # [exams, question tokens, vocabulary]

The model computes in float32; what stands in the cache between the two is bfloat16, as engines hold
it. Which models can be asked is what kvhold's integration with transformers decides: full attention
in every layer. Needs torch and transformers; torch's own threads.
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
)  # in the configuration of a model that was trained on `tasks.py`
WEIGHTS = (
    Path(__file__).resolve().parents[5] / "benchmarks" / "quality" / "model"
)  # there is one in a checkout


def find_weights() -> Path | None:
    """The folder of the small trained model, if this is a checkout."""
    return WEIGHTS if (WEIGHTS / "model.safetensors").is_file() else None


@dataclass(frozen=True)
class Subject:
    """A loaded model. layout: of its KV, in bfloat16. tokenizer: None for the model of `tasks.py`,
    which has no text.
    """

    name: str
    model: Any
    layout: Layout
    tokenizer: Any
    recalls: bool
    _config: Any

    def prefill(self, contexts: Tokens) -> Bits:
        """The KV of contexts of one length, `[exams, tokens]`: `[exams, layers, 2, tokens, heads,
        head_dim]`, bfloat16 as uint16.
        """
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
        layers = [
            torch.stack([layer.keys, layer.values], dim=1) for layer in cache.layers
        ]  # [exams, 2, heads, tokens, head_dim]
        stacked = torch.stack(layers, dim=1).transpose(3, 4).to(torch.bfloat16).contiguous()
        bits: Bits = stacked.view(torch.int16).numpy().view(np.uint16)
        return bits

    def answer(self, kv: Bits, questions: Tokens) -> Any:
        """Logits after each token of the questions, on top of that KV: a tensor `[exams, question
        tokens, vocabulary]`, float32.
        """
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


def load_subject(model: str | Path, *, tokens_per_chunk: int) -> Subject:
    """Load a folder, or what transformers finds by that name. Weights are read from safetensors
    only.

    Raises ConfigError for what is not there or no causal language model, LayoutError for one whose
    KV kvhold does not serve.
    """
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
    return Subject(
        Path(model).name, loaded, layout, tokenizer, recalls is not None, geometry.config
    )
