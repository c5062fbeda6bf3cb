import json
from pathlib import Path
from typing import Any

_RANK = 8
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
_ADAPTER_STD = 0.5  # makes each adapter's output distinct


def save_adapter(folder: Path, settings: dict[str, Any], seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    hidden = settings["hidden_size"]
    heads = {
        "q_proj": settings["num_attention_heads"],
        "k_proj": settings["num_key_value_heads"],
        "v_proj": settings["num_key_value_heads"],
    }
    weights = {}
    for layer in range(settings["num_hidden_layers"]):
        for target in _TARGETS:
            size_in = (
                settings["num_attention_heads"] * settings["head_dim"]
                if target == "o_proj"
                else hidden
            )
            size_out = heads[target] * settings["head_dim"] if target in heads else hidden
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            weights[f"{name}.lora_A.weight"] = (
                torch.randn((_RANK, size_in), generator=generator) * size_in**-0.5
            )
            weights[f"{name}.lora_B.weight"] = (
                torch.randn((size_out, _RANK), generator=generator) * _ADAPTER_STD * _RANK**-0.5
            )
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": _RANK,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "r": _RANK,
        "target_modules": list(_TARGETS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_image_processor(folder: Path, settings: dict[str, Any], tokenizer: Any) -> None:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    vision = settings["vision_config"]
    side = {"longest_edge": vision["image_size"]}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    image_tokens = patches // settings["scale_factor"] ** 2
    processor = Idefics3Processor(
        images, tokenizer, image_seq_len=image_tokens, chat_template=tokenizer.chat_template
    )
    processor.save_pretrained(folder)
