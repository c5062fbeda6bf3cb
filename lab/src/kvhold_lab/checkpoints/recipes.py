"""The classes of models, as small as vLLM runs them."""

from dataclasses import dataclass, field
from typing import Any, Literal

from kvhold_lab.checkpoints.tokenizer import END_OF_TEXT_ID, IMAGE_ID, PAD_ID, VOCAB_SIZE

Kind = Literal["text", "adapters", "image"]

MAX_MODEL_LEN = 4_096
WINDOW = 64


@dataclass(frozen=True)
class Recipe:
    """kind:   "adapters": two LoRA adapters; "image": takes images
    engine: arguments of vLLM; `why` explains them
    """

    covers: str
    config: str
    settings: dict[str, Any]
    kind: Kind = "text"
    engine: dict[str, Any] = field(default_factory=dict)
    why: str = ""


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT_ID,
    "pad_token_id": PAD_ID,
}
_HEAD = {"head_dim": 32}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 2}
_GATED_DELTA = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def _of(*parts: dict[str, Any], **settings: Any) -> dict[str, Any]:
    merged = dict(_COMMON)
    for part in (*parts, settings):
        merged |= part
    return merged


RECIPES: dict[str, Recipe] = {
    "llama": Recipe("Llama (GQA)", "LlamaConfig", _of(_HEAD)),
    "qwen3": Recipe("Qwen3 (QK norm)", "Qwen3Config", _of(_HEAD)),
    "qwen3-moe": Recipe(
        "MoE (Qwen3-MoE)",
        "Qwen3MoeConfig",
        _of(_HEAD, _EXPERTS, num_experts=4, norm_topk_prob=True),
    ),
    "gemma3": Recipe(
        "sliding-window hybrid (Gemma 3)",
        "Gemma3TextConfig",
        _of(
            _HEAD,
            num_hidden_layers=6,
            sliding_window=WINDOW,
            query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        ),
    ),
    "gpt-oss": Recipe(
        "sliding-window hybrid with sinks and MoE (gpt-oss)",
        "GptOssConfig",
        _of(
            _HEAD,
            num_experts_per_tok=2,
            num_local_experts=4,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    ),
    "falcon-h1": Recipe(
        "Mamba-2 hybrid (Falcon-H1)",
        "FalconH1Config",
        _of(_HEAD, _MAMBA2, mamba_d_ssm=256),
        engine={"enable_prefix_caching": False},
        why="vLLM's CPU kernel of Mamba-2 fails with prefix caching on",
    ),
    "jamba": Recipe(
        "Mamba-1 hybrid (Jamba)",
        "JambaConfig",
        _of(
            attn_layer_offset=1,
            attn_layer_period=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=16,
            mamba_dt_rank=8,
        ),
    ),
    "lfm2": Recipe(
        "short-convolution hybrid (LFM2)",
        "Lfm2Config",
        _of(
            layer_types=["conv", "full_attention"] * 2,
            tie_word_embeddings=True,
            block_auto_adjust_ff_dim=False,
            conv_dim=128,
            conv_dim_out=128,
            block_dim=128,
            block_ff_dim=256,
            block_norm_eps=1e-5,
            block_use_swiglu=True,
        ),
    ),
    "qwen3-next": Recipe(
        "linear-attention hybrid (Qwen3-Next)",
        "Qwen3NextConfig",
        _of(
            _HEAD,
            _EXPERTS,
            _GATED_DELTA,
            num_experts=4,
            shared_expert_intermediate_size=64,
            layer_types=["linear_attention", "full_attention"] * 2,
        ),
        engine={"dtype": "bfloat16"},
        why="vLLM's CPU kernel of gated delta nets takes bfloat16 only",
    ),
    "deepseek-v2": Recipe(
        "MLA (DeepSeek-V2)",
        "DeepseekV2Config",
        _of(
            _EXPERTS,
            _LATENT,
            q_lora_rank=None,
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            topk_method="greedy",
            routed_scaling_factor=1.0,
        ),
        engine={"attention_config": {"backend": "CPU_MLA"}},
        why="vLLM's MLA for AMX, which it takes where it can, has bfloat16 only",
    ),
    "idefics3": Recipe(
        "multimodal (Idefics3)",
        "Idefics3Config",
        {
            "text_config": {"model_type": "llama", **_of(_HEAD)},
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 112,
                "patch_size": 14,
            },
            "scale_factor": 2,  # an image is (112 / 14 / 2) ** 2 = 16 tokens and 3 marks
            "image_token_id": IMAGE_ID,
            "pad_token_id": PAD_ID,
            "tie_word_embeddings": False,
        },
        kind="image",
    ),
    "llama-fp8": Recipe(
        "fp8 KV (Llama)", "LlamaConfig", _of(_HEAD), engine={"kv_cache_dtype": "fp8"}
    ),
    "llama-lora": Recipe("two LoRA adapters (Llama)", "LlamaConfig", _of(_HEAD), kind="adapters"),
}
