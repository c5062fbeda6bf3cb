"""What cannot be served goes to the model as it is, with a reason, and models that cannot be served
are refused.
"""

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    DeepseekV3Config,
    DynamicCache,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
)

from kvhold.cache import LocalCache
from kvhold.core.errors import ConfigError, LayoutError
from kvhold.integrations.transformers import Reuse
from tests.transformers.models import make_model, model_of, prompt_of, sizes, small_chunks

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def reuse(llama: Any, cache: LocalCache) -> Reuse:
    """Has stored a prompt of 50 tokens, which each test asks for again."""
    reuse = Reuse(llama, cache, config=small_chunks())
    reuse.forward(prompt_of(50))
    return reuse


def padded() -> torch.Tensor:
    """A mask for two rows of 50 tokens of which the second begins with padding."""
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, :20] = 0
    return mask


def filled(llama: Any) -> DynamicCache:
    """The KV of the first 20 tokens, as a caller may have kept it."""
    with torch.no_grad():
        past: DynamicCache = llama(prompt_of(20), use_cache=True).past_key_values
    return past


TWO = prompt_of(50, rows=2)

GENERATE = [
    pytest.param(lambda m: (TWO, {"attention_mask": padded()}), "padded", id="padding"),
    pytest.param(
        lambda m: (prompt_of(50), {"attention_mask": torch.ones(1, 51).long()}),
        "shape",
        id="a mask of another shape",
    ),
    pytest.param(
        lambda m: (prompt_of(50), {"past_key_values": filled(m)}),
        "past_key_values",
        id="a cache of the caller's",
    ),
    pytest.param(
        lambda m: (None, {"inputs_embeds": m.get_input_embeddings()(prompt_of(50))}),
        "not .rows, tokens.",
        id="embeddings",
    ),
    pytest.param(
        lambda m: (prompt_of(50), {"inputs_embeds": m.get_input_embeddings()(prompt_of(50))}),
        "inputs_embeds",
        id="embeddings and tokens",
    ),
    pytest.param(
        lambda m: (prompt_of(50), {"position_ids": torch.arange(7, 57)[None]}),
        "position_ids",
        id="positions",
    ),
    pytest.param(lambda m: (prompt_of(50), {"use_cache": False}), "use_cache", id="no cache"),
    pytest.param(
        lambda m: (prompt_of(50), {"cache_implementation": "static"}),
        "cache_implementation is static",
        id="a static cache",
    ),
    pytest.param(
        lambda m: (prompt_of(50), {"cache_implementation": "dynamic"}),
        "cache_implementation",
        id="a dynamic cache by name",
    ),
    pytest.param(
        lambda m: (prompt_of(50), {"prefill_chunk_size": 16}),
        "prefill_chunk_size",
        id="prefill in pieces",
    ),
    pytest.param(
        lambda m: (prompt_of(50), {"prompt_lookup_num_tokens": 3}),
        "assisted_generation",
        id="speculation",
    ),
    pytest.param(
        lambda m: (prompt_of(50), {"assistant_model": make_model(seed=1)}),
        "assistant_model",
        id="an assistant",
    ),
    pytest.param(
        lambda m: (prompt_of(50), {"output_hidden_states": True, "return_dict_in_generate": True}),
        "output_hidden_states",
        id="hidden",
    ),
    pytest.param(
        lambda m: (torch.cat([torch.zeros(1, 5).long(), prompt_of(45)], 1), {"pad_token_id": 0}),
        "guesses",
        id="pads without a mask",
    ),
    pytest.param(
        lambda m: (
            prompt_of(50),
            {"generation_config": GenerationConfig(use_cache=False, **GREEDY)},
        ),
        "use_cache",
        id="in generation_config",
    ),
]


class TestGenerate:
    # What transformers itself warns about in these calls.
    @pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
    @pytest.mark.parametrize(("call", "reason"), GENERATE)
    def test_passed_as_it_is(
        self, llama: Any, reuse: Reuse, caplog: pytest.LogCaptureFixture, call: Any, reason: str
    ) -> None:
        def run(generate: Any) -> Any:
            inputs, options = call(llama)
            output = generate(
                inputs, **({} if "generation_config" in options else GREEDY), **options
            )
            return output if isinstance(output, torch.Tensor) else output.sequences

        stored = reuse.cache.status()["chunks"]
        with caplog.at_level(logging.INFO, logger="kvhold"):
            assert torch.equal(run(reuse.generate), run(llama.generate))
        assert reuse.last.num_tokens == reuse.last.num_loaded == reuse.last.num_stored == 0
        assert re.search(reason, reuse.last.reason)
        assert reuse.last.reason in caplog.text
        assert reuse.cache.status()["chunks"] == stored

    def test_pads_that_are_the_end_token_are_tokens(self, llama: Any, reuse: Reuse) -> None:
        """As a conversation has them, between its turns."""
        prompt = torch.cat([prompt_of(20), torch.full((1, 1), 2), prompt_of(20, seed=1)], dim=1)
        for loaded in (16, 40):
            output = reuse.generate(prompt, pad_token_id=2, eos_token_id=2, **GREEDY)
            assert torch.equal(
                output, llama.generate(prompt, pad_token_id=2, eos_token_id=2, **GREEDY)
            )
            assert reuse.last.num_loaded == loaded

    def test_an_empty_prompt_is_the_error_that_transformers_makes_it(
        self, llama: Any, reuse: Reuse
    ) -> None:
        empty = torch.zeros(1, 0, dtype=torch.long)
        for ours, theirs in ((reuse.generate, llama.generate), (reuse.forward, llama)):
            options = GREEDY if theirs == llama.generate else {}
            with pytest.raises((RuntimeError, IndexError)) as expected:
                theirs(empty, **options)
            with pytest.raises(expected.type, match=re.escape(str(expected.value))):
                ours(empty, **options)
            assert reuse.last.reason == "the prompt is empty"

    def test_a_typing_error_is_the_error_that_transformers_makes_it(self, reuse: Reuse) -> None:
        with pytest.raises(ValueError, match="max_nev_tokens"):
            reuse.generate(prompt_of(50), max_nev_tokens=4)


FORWARD = [
    pytest.param(lambda m: {"input_ids": TWO, "attention_mask": padded()}, "padded", id="padding"),
    pytest.param(
        lambda m: {"input_ids": prompt_of(50), "past_key_values": filled(m)},
        "past_key_values",
        id="a cache of the caller's",
    ),
    pytest.param(
        lambda m: {
            "input_ids": prompt_of(50),
            "past_key_values": StaticCache(m.config, max_cache_len=60),
        },
        "past_key_values",
        id="static",
    ),
    pytest.param(
        lambda m: {"input_ids": None, "inputs_embeds": m.get_input_embeddings()(prompt_of(50))},
        "not .rows",
        id="embeddings",
    ),
    pytest.param(
        lambda m: {"input_ids": prompt_of(50), "labels": prompt_of(50)}, "labels", id="a loss"
    ),
    pytest.param(
        lambda m: {"input_ids": prompt_of(50), "use_cache": False}, "use_cache", id="no cache"
    ),
    pytest.param(
        lambda m: {"input_ids": prompt_of(50), "output_attentions": True},
        "output_attentions",
        id="attentions",
    ),
    pytest.param(
        lambda m: {"input_ids": prompt_of(50), "logits_to_keep": torch.tensor([3, 4])},
        "logits_to_keep",
        id="some logits",
    ),
    pytest.param(
        lambda m: {"input_ids": prompt_of(50), "position_ids": torch.arange(7, 57)[None]},
        "position_ids",
        id="positions",
    ),
]


class TestForward:
    @pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
    @pytest.mark.parametrize(("call", "reason"), FORWARD)
    def test_passed_as_it_is(self, llama: Any, reuse: Reuse, call: Any, reason: str) -> None:
        stored = reuse.cache.status()["chunks"]
        expected, output = llama(**call(llama)), reuse.forward(**call(llama))
        assert torch.equal(output.logits, expected.logits)
        assert output.keys() == expected.keys()
        assert reuse.last.num_tokens == reuse.last.num_loaded == reuse.last.num_stored == 0
        assert re.search(reason, reuse.last.reason)
        assert reuse.cache.status()["chunks"] == stored

    def test_autocast_makes_other_kv_and_is_passed_as_it_is(self, llama: Any, reuse: Reuse) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, output = llama(prompt_of(50)), reuse.forward(prompt_of(50))
        assert torch.equal(output.logits, expected.logits)
        assert reuse.last.reason == "autocast is on"

    def test_a_model_in_training_is_passed_as_it_is(self, cache: LocalCache) -> None:
        model = make_model("gpt2")
        reuse = Reuse(model, cache, config=small_chunks())
        model.train()
        assert reuse.forward(prompt_of(50)).logits.requires_grad
        assert reuse.last.reason == "the model is in training mode"
        model.eval()
        reuse.forward(prompt_of(50))
        assert reuse.last.num_stored == 50

    def test_the_same_reason_is_told_once(
        self, reuse: Reuse, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, logger="kvhold"):
            for _ in range(3):
                reuse.forward(prompt_of(50), use_cache=False)
        assert caplog.text.count("use_cache is off") == 1


REFUSED = [
    pytest.param(
        lambda: model_of(MistralConfig(**sizes(), sliding_window=64)),
        "DynamicSlidingWindowLayer",
        id="sliding window",
    ),
    pytest.param(
        lambda: model_of(Qwen2Config(**sizes(), use_sliding_window=True, max_window_layers=1)),
        "DynamicSlidingWindowLayer",
        id="a window in some layers",
    ),
    pytest.param(
        lambda: model_of(Gemma3TextConfig(**sizes(head_dim=8))),
        "DynamicSlidingWindowLayer",
        id="hybrid",
    ),
    pytest.param(
        lambda: model_of(GptOssConfig(**sizes(head_dim=8), num_local_experts=2)),
        "DynamicSlidingWindowLayer",
        id="hybrid experts",
    ),
    pytest.param(
        lambda: model_of(MambaConfig(vocab_size=211, hidden_size=32, num_hidden_layers=2)),
        "LinearAttentionLayer|does not store",
        id="a state",
    ),
    pytest.param(
        lambda: model_of(
            DeepseekV3Config(
                **sizes(num_key_value_heads=4),
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=8,
                n_routed_experts=2,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                moe_intermediate_size=32,
            )
        ),
        "shape of the values of layer 0",
        id="keys wider than values",
    ),
    pytest.param(
        lambda: model_of(
            LlamaConfig(
                **sizes(),
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            )
        ),
        "dynamic.* depends on the prompt's length",
        id="rotary by length",
    ),
    pytest.param(
        lambda: model_of(BertConfig(**sizes(), max_position_embeddings=64)),
        "depends on the tokens after it",
        id="looks ahead",
    ),
    pytest.param(
        lambda: model_of(XLNetConfig(vocab_size=211, d_model=32, n_layer=2, n_head=4, d_inner=32)),
        "does not store",
        id="another cache",
    ),
    pytest.param(
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=211, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        ).eval(),
        "encoder",
        id="encoder and decoder",
    ),
    pytest.param(lambda: make_model("llama").train(), "training mode", id="in training"),
]


class TestRefusedModels:
    @pytest.mark.parametrize(("make", "reason"), REFUSED)
    def test_at_the_start_with_a_reason(self, cache: LocalCache, make: Any, reason: str) -> None:
        with pytest.raises(LayoutError, match=reason):
            Reuse(make(), cache, config=small_chunks())

    def test_a_codec_of_memory_is_not_for_these_models(self, cache: LocalCache) -> None:
        with pytest.raises(
            ConfigError, match="memory_codec = 'int8': the KV of transformers is kept as it is"
        ):
            Reuse(make_model("llama"), cache, config=replace(small_chunks(), memory_codec="int8"))
