"""How large KV is, from settings alone: numbers that are known, agreement with what models keep,
and refusals that name the field.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvhold.codecs import codec_names
from kvhold.core.errors import ConfigError
from kvhold.core.layout import Group, Layout
from kvhold.sizing.fits import RATIOS, fits, ratio_of
from kvhold.sizing.known import KNOWN
from kvhold.sizing.model import kv_of, read_settings
from kvhold_lab.checkpoints.recipes import RECIPES

LLAMA = read_settings("meta-llama/Llama-3.1-8B")
QUALITY_PAGE = Path(__file__).parents[2] / "docs" / "quality.md"


@pytest.mark.parametrize(
    ("model", "token_bytes"),
    [
        ("meta-llama/Llama-3.1-8B", 131_072),
        ("meta-llama/Llama-3.1-70B", 327_680),
        ("meta-llama/Llama-2-7b-hf", 524_288),
        ("Qwen/Qwen2.5-7B-Instruct", 57_344),
        ("Qwen/Qwen3-32B", 262_144),
        ("deepseek-ai/DeepSeek-V3", 70_272),
        ("tiiuae/falcon-7b", 8_192),
        ("google/gemma-3-27b-it", 507_904),
        # the models of the calculator that users of LMCache know
        ("meta-llama/Llama-3.1-8B-Instruct", 131_072),
        ("meta-llama/Llama-3.1-70B-Instruct", 327_680),
        ("meta-llama/Llama-3.1-405B", 516_096),
        ("meta-llama/Llama-3.2-1B-Instruct", 32_768),
        ("meta-llama/Llama-3.2-3B-Instruct", 114_688),
        ("mistralai/Mistral-7B-Instruct-v0.2", 131_072),
        ("mistralai/Mistral-Large-Instruct-2407", 360_448),
        ("lmsys/longchat-7b-16k", 524_288),
        ("Sao10K/L3-8B-Lunaris-v1", 131_072),
        ("deepseek-ai/DeepSeek-R1", 70_272),
        ("Qwen/Qwen3-14B", 163_840),
        ("Qwen/Qwen3-8B", 147_456),
        ("Qwen/Qwen3-4B", 147_456),
        ("Qwen/Qwen3-0.6B", 114_688),
        ("Qwen/Qwen2.5-3B-Instruct", 36_864),
        ("Qwen/Qwen2.5-0.5B", 12_288),
        ("Qwen/Qwen-7B", 524_288),
        ("zai-org/GLM-4.5", 376_832),
        ("zai-org/GLM-4.6", 376_832),
    ],
)
def test_a_token_of_a_known_model(model: str, token_bytes: int) -> None:
    assert kv_of(read_settings(model)).stored_bytes(1) == token_bytes


@pytest.mark.parametrize("model", KNOWN)
def test_every_known_model_is_understood(model: str) -> None:
    kv = kv_of(read_settings(model))
    layout = Layout(kv.groups, tokens_per_chunk=128)
    assert kv.stored_bytes(128) == sum(
        layout.chunk_bytes(number, 128) for number in range(len(kv.groups))
    )
    assert (
        sum(group.layers for group in kv.groups) + kv.state_layers
        == KNOWN[model]["num_hidden_layers"]
    )


def test_a_name_needs_neither_its_owner_nor_its_case() -> None:
    assert read_settings("llama-3.1-8b") == LLAMA
    with pytest.raises(ConfigError, match=re.escape("did you mean meta-llama/Llama-3.1-8B?")):
        read_settings("Llama-3-1-8B")


def test_settings_are_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_settings(str(tmp_path)) == read_settings(str(tmp_path / "config.json")) == LLAMA


@pytest.mark.parametrize(
    ("dtype", "token_bytes"),
    [
        ("auto", 131_072),
        ("bf16", 131_072),
        ("fp16", 131_072),
        ("fp32", 262_144),
        ("fp8", 65_536),
        ("int8", 65_536),
        ("torch.half", 131_072),
    ],
)
def test_types_have_the_names_that_people_use(dtype: str, token_bytes: int) -> None:
    assert kv_of(LLAMA, dtype=dtype).stored_bytes(1) == token_bytes


def test_workers_divide_heads_and_then_hold_the_same() -> None:
    kv = kv_of(LLAMA)
    assert [kv.rank_bytes(1, tp) for tp in (1, 2, 8, 16)] == [131_072, 65_536, 16_384, 16_384]
    with pytest.raises(ConfigError, match="tp is 3; it must divide the 8 KV heads"):
        kv.rank_bytes(1, 3)
    latent = kv_of(read_settings("deepseek-ai/DeepSeek-V3"))
    assert latent.rank_bytes(1, 8) == latent.stored_bytes(1)


def test_of_a_window_all_is_stored_and_its_end_is_loaded() -> None:
    kv = kv_of(read_settings("google/gemma-3-27b-it"))
    a_layer = 2 * 16 * 128 * 2
    assert kv.groups[1].window == 1_024
    assert kv.stored_bytes(5_000) == 62 * 5_000 * a_layer
    assert kv.kept_bytes(5_000) == (10 * 5_000 + 52 * 1_024) * a_layer
    assert kv.kept_bytes(100) == kv.stored_bytes(100)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        (
            "google/gemma-3-4b-it",
            {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
        ),
        (
            "google/gemma-3-12b-it",
            {
                "hidden_size": 3840,
                "num_attention_heads": 16,
                "num_hidden_layers": 48,
                "num_key_value_heads": 8,
                "sliding_window": 1024,
            },
        ),
    ],
)
def test_fields_that_a_published_config_leaves_out_are_those_of_its_model_type(
    name: str, written: dict[str, Any]
) -> None:
    published = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **written},
        "torch_dtype": "bfloat16",
    }
    assert kv_of(published) == kv_of(read_settings(name))


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({"sliding_window": 4_096, "model_type": "mistral"}, 32),
        ({"sliding_window": 4_096, "model_type": "qwen2"}, 0),
        ({"sliding_window": 4_096, "use_sliding_window": False}, 0),
        ({"sliding_window": 4_096, "use_sliding_window": True, "max_window_layers": 28}, 4),
        ({"sliding_window": 4_096, "sliding_window_pattern": 4}, 24),
        ({"sliding_window": 4_096, "model_type": "gemma2"}, 16),
        ({"sliding_window": 4_096, "model_type": "cohere2"}, 24),
        ({"sliding_window": None}, 0),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}, 16),
        ({"attention_chunk_size": 8_192}, 24),
    ],
)
def test_layers_with_windows_are_told_as_settings_tell_them(
    changes: dict[str, Any], windowed: int
) -> None:
    groups = kv_of(LLAMA | changes).groups
    assert sum(group.layers for group in groups) == 32
    assert sum(group.layers for group in groups if group.attention == "sliding") == windowed


@pytest.mark.parametrize(
    ("changes", "states", "attention"),
    [
        ({"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}, 24, 8),
        ({"full_attention_interval": 4}, 24, 8),
        ({"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16}, 28, 4),
        ({"attn_layer_indices": [9, 18, 27], "mamba_d_state": 256}, 29, 3),
        ({"hybrid_override_pattern": "M-*-" * 8}, 8, 8),
        ({"attn_type_list": [0, 0, 0, 1] * 8}, 24, 8),
        ({"model_type": "falcon_h1", "mamba_d_state": 256}, 32, 32),
    ],
)
def test_states_are_counted_and_said_not_to_be_measured(
    changes: dict[str, Any], states: int, attention: int
) -> None:
    kv = kv_of(LLAMA | changes)
    assert (kv.state_layers, kv.groups[0].layers) == (states, attention)
    assert kv.notes[0].startswith(f"{states} layers keep a state, whose size is not known")


def test_layers_that_use_the_kv_of_others_have_none() -> None:
    assert kv_of(LLAMA | {"num_kv_shared_layers": 10}).stored_bytes(1) == 22 * 4_096


def test_a_model_that_takes_more_than_text_has_its_kv_in_its_text_part() -> None:
    text = {name: value for name, value in LLAMA.items() if name != "dtype"}
    assert (
        kv_of({"text_config": text, "vision_config": {}, "torch_dtype": "float16"}).stored_bytes(1)
        == 131_072
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        (
            {"num_hidden_layers": "32"},
            "num_hidden_layers is '32'; it must be a whole number, 1 or more",
        ),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 4096"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": [8, 4]}, r"num_key_value_heads is \[8, 4\]"),
        ({"hidden_size": 4_097}, "head_dim is missing, and hidden_size 4097 is no multiple"),
        ({"dtype": None}, "dtype is missing from the settings; give it, such as --dtype bfloat16"),
        ({"dtype": "float4"}, "dtype is 'float4'; it must be one of"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 32 kinds"),
        (
            {"layer_types": ["new_attention"] * 32},
            "layer_types: 'new_attention' is an unknown kind of layer",
        ),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        (
            {"sliding_window": 4_096},
            "sliding_window is set, but it is not known which layers have it",
        ),
        (
            {"sliding_window": 4_096, "model_type": "of-tomorrow"},
            "sliding_window is set, but it is not known which layers have it",
        ),
        ({"layer_types": ["mamba"] * 32}, "none of its layers has attention"),
        (
            {"mamba_d_state": 16},
            "mamba_d_state is set, so some layers keep a state, but it is not known which",
        ),
        ({"attn_layer_indices": [40]}, "attn_layer_indices must be a list of layers' numbers"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"v_head_dim": 64}, "v_head_dim is 64, but keys have 128"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is true"),
        ({"global_head_dim": 512}, "global_head_dim is set"),
    ],
)
def test_what_is_missing_or_not_understood_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_of(LLAMA | changes)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json is no config\.json"):
        read_settings(str(tmp_path))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ConfigError, match=r"config\.json is no config\.json"):
        read_settings(str(tmp_path))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * (17 << 20))
    with pytest.raises(ConfigError, match="has more than 16 MiB"):
        read_settings(str(tmp_path))


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3-moe", "gemma3", "gpt-oss"])
def test_a_model_keeps_as_many_bytes_as_its_settings_say(name: str) -> None:
    """The checkpoints that recipes make, in transformers; a prompt that no window cuts."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, RECIPES[name].config)(**RECIPES[name].settings)
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    kept = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.arange(20)[None], past_key_values=kept, use_cache=True)
    nbytes = sum(tensor.nbytes for layer in kept.layers for tensor in (layer.keys, layer.values))
    kv = kv_of(json.loads(config.to_json_string()), dtype="float32")
    assert kv.stored_bytes(20) == kv.kept_bytes(20) == nbytes


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_understood(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, RECIPES[name].config)(**RECIPES[name].settings)
    kv = kv_of(json.loads(config.to_json_string()), dtype="float32")
    num_layers = config.get_text_config().num_hidden_layers
    attention = sum(group.layers for group in kv.groups)
    assert attention + kv.state_layers == num_layers or (name, attention, kv.state_layers) == (
        "falcon-h1",
        num_layers,
        num_layers,
    )


def test_ratios_are_those_of_the_page_on_quality() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| ([\d.]+) \| [\d.]+ \| ", QUALITY_PAGE.read_text(), re.MULTILINE
    )
    assert {name: float(ratio) for name, ratio in rows if name != "raw"} == {
        name: r for name, r in RATIOS.items() if name != "raw"
    }
    assert set(RATIOS) <= set(codec_names())


def test_whole_chunks_fit_and_a_codec_lets_more_of_them() -> None:
    [raw, int8] = fits("disk", 1 << 20, 300_000, 128, "bfloat16", ["raw", "int8"])
    assert (raw.tokens, int8.tokens) == (3 * 128, 6 * 128)
    assert fits("disk", 10, 300_000, 128, "bfloat16", ["raw"])[0].tokens == 0


def test_a_ratio_that_nobody_measured_is_not_made_up() -> None:
    assert ratio_of("raw", "float8_e4m3fn") == 1
    with pytest.raises(
        ConfigError,
        match=r"codec is 'int8', whose ratio was measured on 16-bit KV; for float32 use raw",
    ):
        ratio_of("int8", "float32")
    with pytest.raises(ConfigError, match="codec is 'zip'; measured are raw"):
        ratio_of("zip", "bfloat16")


def test_groups_are_those_of_the_layout() -> None:
    assert kv_of(LLAMA).groups == (
        Group(layers=32, planes=2, heads=8, head_dim=128, dtype="bfloat16"),
    )
