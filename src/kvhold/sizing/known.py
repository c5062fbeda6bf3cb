from typing import Any


def _gqa(
    layers: int, heads: int, kv_heads: int, hidden: int, head_dim: int = 0, **more: Any
) -> dict[str, Any]:
    fields = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "dtype": "bfloat16",
    }
    return fields | ({"head_dim": head_dim} if head_dim else {}) | more


def _mla(layers: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "dtype": "bfloat16",
    }


KNOWN: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": _gqa(32, 32, 32, 4096, dtype="float16"),
    "meta-llama/Llama-2-13b-hf": _gqa(40, 40, 40, 5120, dtype="float16"),
    "meta-llama/Llama-2-70b-hf": _gqa(80, 64, 8, 8192, dtype="float16"),
    "meta-llama/Llama-3.1-8B": _gqa(32, 32, 8, 4096),
    "meta-llama/Llama-3.1-8B-Instruct": _gqa(32, 32, 8, 4096),
    "meta-llama/Llama-3.1-70B": _gqa(80, 64, 8, 8192),
    "meta-llama/Llama-3.1-70B-Instruct": _gqa(80, 64, 8, 8192),
    "meta-llama/Llama-3.1-405B": _gqa(126, 128, 8, 16384),
    "meta-llama/Llama-3.2-1B": _gqa(16, 32, 8, 2048, 64),
    "meta-llama/Llama-3.2-1B-Instruct": _gqa(16, 32, 8, 2048, 64),
    "meta-llama/Llama-3.2-3B": _gqa(28, 24, 8, 3072, 128),
    "meta-llama/Llama-3.2-3B-Instruct": _gqa(28, 24, 8, 3072, 128),
    "meta-llama/Llama-3.3-70B-Instruct": _gqa(80, 64, 8, 8192),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": _gqa(
        48, 40, 8, 5120, 128, attention_chunk_size=8192
    ),
    "mistralai/Mistral-7B-v0.1": _gqa(32, 32, 8, 4096, sliding_window=4096, model_type="mistral"),
    "mistralai/Mistral-7B-Instruct-v0.2": _gqa(32, 32, 8, 4096),
    "mistralai/Mistral-7B-Instruct-v0.3": _gqa(32, 32, 8, 4096),
    "mistralai/Mistral-Large-Instruct-2407": _gqa(88, 96, 8, 12288, 128),
    "mistralai/Mistral-Nemo-Instruct-2407": _gqa(40, 32, 8, 5120, 128),
    "mistralai/Mistral-Small-24B-Instruct-2501": _gqa(40, 32, 8, 5120, 128),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _gqa(32, 32, 8, 4096),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": _gqa(56, 48, 8, 6144),
    "Qwen/Qwen-7B": _gqa(32, 32, 32, 4096),
    "Qwen/Qwen2.5-0.5B": _gqa(24, 14, 2, 896),
    "Qwen/Qwen2.5-3B-Instruct": _gqa(36, 16, 2, 2048),
    "Qwen/Qwen2.5-7B-Instruct": _gqa(28, 28, 4, 3584),
    "Qwen/Qwen2.5-14B-Instruct": _gqa(48, 40, 8, 5120),
    "Qwen/Qwen2.5-32B-Instruct": _gqa(64, 40, 8, 5120),
    "Qwen/Qwen2.5-72B-Instruct": _gqa(80, 64, 8, 8192),
    "Qwen/Qwen3-0.6B": _gqa(28, 16, 8, 1024, 128),
    "Qwen/Qwen3-4B": _gqa(36, 32, 8, 2560, 128),
    "Qwen/Qwen3-8B": _gqa(36, 32, 8, 4096, 128),
    "Qwen/Qwen3-14B": _gqa(40, 40, 8, 5120, 128),
    "Qwen/Qwen3-32B": _gqa(64, 64, 8, 5120, 128),
    "Qwen/Qwen3-30B-A3B": _gqa(48, 32, 4, 2048, 128),
    "Qwen/Qwen3-235B-A22B": _gqa(94, 64, 4, 4096, 128),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _gqa(48, 16, 2, 2048, 256, full_attention_interval=4),
    "deepseek-ai/DeepSeek-V2-Lite": _mla(27),
    "deepseek-ai/DeepSeek-V2": _mla(60),
    "deepseek-ai/DeepSeek-V3": _mla(61),
    "deepseek-ai/DeepSeek-R1": _mla(61),
    "moonshotai/Kimi-K2-Instruct": _mla(61),
    "google/gemma-2-9b-it": _gqa(42, 16, 8, 3584, 256, sliding_window=4096, model_type="gemma2"),
    "google/gemma-2-27b-it": _gqa(46, 32, 16, 4608, 128, sliding_window=4096, model_type="gemma2"),
    "google/gemma-3-1b-it": _gqa(26, 4, 1, 1152, 256, sliding_window=512, sliding_window_pattern=6),
    "google/gemma-3-4b-it": _gqa(
        34, 8, 4, 2560, 256, sliding_window=1024, sliding_window_pattern=6
    ),
    "google/gemma-3-12b-it": _gqa(
        48, 16, 8, 3840, 256, sliding_window=1024, sliding_window_pattern=6
    ),
    "google/gemma-3-27b-it": _gqa(
        62, 32, 16, 5376, 128, sliding_window=1024, sliding_window_pattern=6
    ),
    "openai/gpt-oss-20b": _gqa(24, 64, 8, 2880, 64, sliding_window=128, sliding_window_pattern=2),
    "openai/gpt-oss-120b": _gqa(36, 64, 8, 2880, 64, sliding_window=128, sliding_window_pattern=2),
    "microsoft/phi-4": _gqa(40, 40, 10, 5120),
    "zai-org/GLM-4.5": _gqa(92, 96, 8, 5120, 128),
    "zai-org/GLM-4.6": _gqa(92, 96, 8, 5120, 128),
    "lmsys/longchat-7b-16k": _gqa(32, 32, 32, 4096, dtype="float16"),
    "Sao10K/L3-8B-Lunaris-v1": _gqa(32, 32, 8, 4096),
    "01-ai/Yi-34B": _gqa(60, 56, 8, 7168),
    "tiiuae/falcon-7b": _gqa(32, 71, 1, 4544),
    "ai21labs/Jamba-v0.1": _gqa(32, 32, 8, 4096, attn_layer_period=8, attn_layer_offset=4),
}
