"""Architectures of transformers with which reuse is shown to change no token, beside those that
every test here uses.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from kvhold.cache import LocalCache
from kvhold.integrations.transformers import Reuse
from tests.transformers.models import model_of, prompt_of, sizes, small_chunks

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 1e4,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FIXED_HEADS = {name: size for name, size in sizes().items() if name != "num_key_value_heads"}
OLD_NAMES = {
    "vocab_size": 211,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "Llama, YaRN": lambda: hf.LlamaConfig(**sizes(), rope_parameters=YARN),
    "Llama, llama3 rotary": lambda: hf.LlamaConfig(**sizes(), rope_parameters=LLAMA3),
    "Mistral without a window": lambda: hf.MistralConfig(**sizes(), sliding_window=None),
    "Mixtral": lambda: hf.MixtralConfig(**sizes(), num_local_experts=4),
    "Qwen3": lambda: hf.Qwen3Config(**sizes(head_dim=8)),
    "Qwen3-MoE": lambda: hf.Qwen3MoeConfig(**sizes(head_dim=8), num_experts=4, **EXPERTS),
    "Gemma": lambda: hf.GemmaConfig(**sizes(head_dim=8)),
    "Phi": lambda: hf.PhiConfig(**sizes()),
    "Phi-3": lambda: hf.Phi3Config(**sizes()),
    "OLMo-2": lambda: hf.Olmo2Config(**sizes()),
    "Granite": lambda: hf.GraniteConfig(**sizes()),
    "GLM-4": lambda: hf.Glm4Config(**sizes(head_dim=8)),
    "SmolLM3": lambda: hf.SmolLM3Config(**sizes()),
    "StableLM": lambda: hf.StableLmConfig(**sizes()),
    "Starcoder2": lambda: hf.Starcoder2Config(**sizes()),
    "Nemotron": lambda: hf.NemotronConfig(**sizes()),
    "Cohere": lambda: hf.CohereConfig(**sizes()),
    "GPT-NeoX": lambda: hf.GPTNeoXConfig(**FIXED_HEADS),
    "GPT-J": lambda: hf.GPTJConfig(**OLD_NAMES, rotary_dim=4),
    "GPT-BigCode": lambda: hf.GPTBigCodeConfig(**OLD_NAMES),
    "GPT-Neo": lambda: hf.GPTNeoConfig(
        vocab_size=211,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        bos_token_id=1,
        eos_token_id=2,
    ),
    "OPT": lambda: hf.OPTConfig(**FIXED_HEADS, ffn_dim=48, word_embed_proj_dim=32),
    "BLOOM": lambda: hf.BloomConfig(vocab_size=211, hidden_size=32, n_layer=2, n_head=4),
    "Falcon": lambda: hf.FalconConfig(**FIXED_HEADS),
    "Falcon, ALiBi": lambda: hf.FalconConfig(**FIXED_HEADS, alibi=True),
}


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # GPT-BigCode
@pytest.mark.parametrize("make", CONFIGS.values(), ids=CONFIGS.keys())
def test_generates_the_same_tokens_from_part_of_a_prompt_and_from_all_of_it(
    cache: LocalCache, make: Callable[[], Any]
) -> None:
    model = model_of(make())
    reuse = Reuse(model, cache, config=small_chunks())
    options = {"max_new_tokens": 3, "do_sample": False}
    longer = prompt_of(50)
    expected = model.generate(longer, **options)
    with torch.no_grad():
        logits = model(longer).logits[:, -1]
    reuse.forward(prompt_of(33))
    for loaded in (32, 49):
        assert torch.equal(reuse.generate(longer, **options), expected)
        assert reuse.last.num_loaded == loaded and not reuse.last.reason
    torch.testing.assert_close(reuse.forward(longer).logits[:, -1], logits, rtol=1e-4, atol=1e-4)
