"""KV of one model is never taken for another's: what the namespace depends on, and what it does
not.
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvhold.cache import LocalCache
from kvhold.core.errors import ConfigError, LayoutError
from kvhold.core.keys import Namespace
from kvhold.integrations.machine import device_facts
from kvhold.integrations.transformers import Reuse, identity, reuse
from kvhold.integrations.transformers.geometry import geometry_of
from kvhold.integrations.transformers.identity import Identity
from kvhold.integrations.transformers.weights import Weights
from tests.transformers.models import make_model, model_of, prompt_of, sizes, small_chunks


def namespace_of(model: Any, **options: Any) -> Namespace:
    return Identity(model, **options).namespace(geometry_of(model, tokens_per_chunk=16).layout)


@pytest.fixture
def model() -> Any:
    """A model that a test may change."""
    return make_model("llama")


class TestEqual:
    def test_for_another_object_with_the_same_weights(self, model: Any) -> None:
        assert (
            namespace_of(model)
            == namespace_of(make_model("llama"))
            == namespace_of(copy.deepcopy(model))
        )

    def test_for_a_copy_loaded_from_a_folder(self, model: Any, tmp_path: Path) -> None:
        model.save_pretrained(tmp_path / "here")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "here")
        # its folder, its architectures, its dtype
        assert loaded.config.to_dict() != model.config.to_dict()
        assert namespace_of(loaded).digest == namespace_of(model).digest

    def test_after_changes_that_leave_kv_as_it_is(self, model: Any) -> None:
        before = namespace_of(model)
        model.config.pad_token_id = 0
        model.config.id2label = {0: "bad", 1: "good"}
        model.generation_config.temperature = 0.3
        assert namespace_of(model) == before


CHANGES: dict[str, Callable[[Any], Any]] = {
    "one weight": lambda m: m.lm_head.weight.data.view(-1)[777].add_(1e-3),
    "the attention": lambda m: m.set_attn_implementation("eager"),
    "the base of the rotary embedding": lambda m: m.config.rope_parameters.update(rope_theta=5e5),
    "the rotary frequencies themselves": lambda m: m.model.rotary_emb.inv_freq.mul_(0.5),
    "the type": lambda m: m.to(torch.float64),
    "the epsilon of its norms": lambda m: setattr(m.config, "rms_norm_eps", 1e-5),
}


class TestDifferent:
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
    def test_after_a_change_of(self, model: Any, change: Callable[[Any], Any]) -> None:
        before = namespace_of(model)
        with torch.no_grad():
            change(model)
        assert namespace_of(model).digest != before.digest

    def test_for_other_weights_and_for_another_width(self) -> None:
        models = [
            make_model(seed=0),
            make_model(seed=1),
            model_of(LlamaConfig(**sizes(intermediate_size=64))),
        ]
        assert len({namespace_of(model).digest for model in models}) == 3

    @pytest.mark.parametrize(
        "key", ["dtype", "torch_dtype", "model_type", "use_cache", "architectures"]
    )
    def test_for_another_quantization_whose_key_has_the_name_of_a_harmless_field(
        self, model: Any, key: str
    ) -> None:
        """Harmless are fields of the model's own configuration, not what has their names in a
        mapping inside it.
        """

        def quantized(value: str) -> Namespace:
            model.config.quantization_config = {
                "quant_method": "other",
                "global_quant_config": {"inputs": {key: value}},
            }
            return namespace_of(model)

        one, other = quantized("fp8_e4m3"), quantized("int8")
        assert one.quantization != other.quantization
        assert one.facts.digest != other.facts.digest

    def test_for_another_salt_and_another_name(self, model: Any) -> None:
        spaces = [
            namespace_of(model, cache_salt=salt, model_id=name)
            for salt in ("", "a")
            for name in ("", "m", "n")
        ]
        assert len({space.digest for space in spaces}) == 6

    def test_for_other_precisions_of_products(self, model: Any) -> None:
        before = namespace_of(model)
        precision = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("high" if precision == "highest" else "highest")
            assert namespace_of(model) != before
        finally:
            torch.set_float32_matmul_precision(precision)


def train_one_step(model: Any) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(prompt_of(20), labels=prompt_of(20)).loss.backward()
    optimizer.step()
    model.eval()


def swap_in_averages(model: Any) -> None:
    """As trainers do that keep averaged weights: through `.data`, which no version counter sees."""
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def train_one_embedding(model: Any) -> None:
    """As when a new special token is taught: all other weights stay."""
    with torch.no_grad():
        model.get_input_embeddings().weight[101] += 0.5


class TestModelsThatChangeWhileTheyAreUsed:
    @pytest.mark.parametrize("change", [train_one_step, swap_in_averages, train_one_embedding])
    def test_are_never_given_their_former_kv(
        self, cache: LocalCache, change: Callable[[Any], None]
    ) -> None:
        model = make_model("llama")
        reuse = Reuse(model, cache, config=small_chunks())
        prompt = prompt_of(50)
        prompt[0, 3] = 101
        reuse.forward(prompt)
        change(model)
        output = reuse.forward(prompt)
        assert reuse.last.num_loaded == 0 and reuse.last.num_stored == 50
        with torch.no_grad():
            assert torch.equal(output.logits, model(prompt).logits)
        reuse.forward(prompt)
        assert reuse.last.num_loaded == 49

    def test_find_it_again_when_the_weights_are_back(self, cache: LocalCache) -> None:
        model = make_model("llama")
        before = copy.deepcopy(model.state_dict())
        reuse = Reuse(model, cache, config=small_chunks())
        reuse.forward(prompt_of(50))
        train_one_step(model)
        reuse.forward(prompt_of(50))
        model.load_state_dict(before)
        reuse.forward(prompt_of(50))
        assert reuse.last.num_loaded == 49

    def test_may_be_converted_to_another_type(self, cache: LocalCache) -> None:
        model = make_model("llama")
        reuse = Reuse(model, cache, config=small_chunks())
        reuse.forward(prompt_of(50))
        model.to(torch.float64)
        for loaded in (0, 49):
            output = reuse.forward(prompt_of(50))
            assert reuse.last.num_loaded == loaded and output.logits.dtype == torch.float64


class TestWeights:
    def test_only_what_has_changed_is_read_again(
        self, model: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        weights = Weights(model)
        with caplog.at_level(logging.INFO, logger="kvhold"):
            first = weights.digest()
            assert weights.digest() == first
            assert len(caplog.messages) == 1
            train_one_embedding(model)
            assert weights.digest() != first
        total = len([*model.named_parameters(), *model.named_buffers()])
        assert f"read {total} of {total} tensors" in caplog.messages[0]
        assert f"read 1 of {total} tensors" in caplog.messages[1]
        assert weights.digest() == Weights(model).digest()

    @pytest.mark.parametrize("shape", [(), (1,), (0, 4), (7,), (16, 1), (3, 1000), (5, 2, 3, 2)])
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
    )
    def test_every_element_counts(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        module = torch.nn.Module()
        module.register_buffer("it", torch.zeros(shape).to(dtype))
        digests = {Weights(module).digest()}
        raw = module.it.view(-1).view(torch.uint8)
        places = range(0, raw.numel(), max(1, raw.numel() // 7))
        for place in places:
            raw[place] += 1
            digests.add(Weights(module).digest())
        assert len(digests) == len(places) + 1

    def test_strides_do_not_count(self) -> None:
        plain, transposed = torch.nn.Module(), torch.nn.Module()
        plain.register_buffer("it", torch.arange(12.0).reshape(3, 4))
        transposed.register_buffer("it", torch.arange(12.0).reshape(3, 4).T.contiguous().T)
        assert Weights(plain).digest() == Weights(transposed).digest()

    def test_a_change_is_seen_in_tensors_without_a_version(self) -> None:
        module = torch.nn.Module()
        with torch.inference_mode():
            module.register_buffer("it", torch.zeros(100))
        weights = Weights(module)
        before = weights.digest()
        with torch.inference_mode():
            module.it.fill_(1)
        assert weights.digest() != before

    def test_weights_that_are_not_in_memory_need_a_name(self) -> None:
        with pytest.raises(ConfigError, match=r"model_id must be given: .* is not in memory"):
            Weights(make_model("llama").to("meta")).digest()

    def test_weights_without_plain_bytes_need_a_name(self) -> None:
        module = torch.nn.Module()
        module.register_buffer("it", torch.eye(3).to_sparse())
        with pytest.raises(ConfigError, match="model_id must be given"):
            Weights(module).digest()

    def test_a_name_spares_the_reading(
        self, model: Any, cache: LocalCache, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, logger="kvhold"):
            first = Reuse(model, cache, config=small_chunks(), model_id="ours/tiny@7")
            second = Reuse(
                make_model("llama"), cache, config=small_chunks(), model_id="ours/tiny@7"
            )
        assert "tensors" not in caplog.text
        first.forward(prompt_of(50))
        second.forward(prompt_of(50))
        assert second.last.num_loaded == 49


class TestSalt:
    def test_callers_with_different_salts_share_nothing(
        self, model: Any, cache: LocalCache
    ) -> None:
        first, second = (
            Reuse(model, cache, config=small_chunks(), cache_salt=salt) for salt in ("one", "two")
        )
        first.forward(prompt_of(50))
        second.forward(prompt_of(50))
        assert second.last.num_loaded == 0


class TestAdapters:
    """With PEFT, where it is installed."""

    @pytest.fixture
    def peft(self) -> Any:
        return pytest.importorskip("peft", reason="no PEFT in this environment")

    @pytest.fixture
    def adapted(self, peft: Any) -> Any:
        """A PeftModel with the adapters "first" and "second", whose B is not zero, so that they
        count.
        """
        with torch.random.fork_rng():
            torch.manual_seed(2)
            settings = peft.LoraConfig(
                r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
            )
            model = peft.get_peft_model(make_model("llama"), settings, adapter_name="first").eval()
            model.add_adapter("second", settings)
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(parameter, std=0.5)
        return model.eval()

    def test_each_state_of_the_adapters_has_kv_of_its_own(
        self, adapted: Any, cache: LocalCache
    ) -> None:
        reuse = Reuse(adapted, cache, config=small_chunks())
        states: list[Callable[[], Any]] = [
            lambda: adapted.set_adapter("first"),
            lambda: adapted.set_adapter("second"),
            lambda: adapted.base_model.disable_adapter_layers(),
            lambda: (adapted.base_model.enable_adapter_layers(), adapted.merge_adapter()),
        ]
        for change in states:
            change()
            with torch.no_grad():
                expected = adapted(input_ids=prompt_of(50)).logits[:, -1]
            for loaded in (0, 49):
                output = reuse.forward(prompt_of(50))
                assert reuse.last.num_loaded == loaded and not reuse.last.reason
                torch.testing.assert_close(output.logits[:, -1], expected, rtol=1e-4, atol=1e-4)
        adapted.unmerge_adapter()

    def test_generate_through_the_wrapper(self, adapted: Any, cache: LocalCache) -> None:
        reuse = Reuse(adapted, cache, config=small_chunks())
        options = {"max_new_tokens": 4, "do_sample": False}
        for loaded in (0, 49):
            output = reuse.generate(prompt_of(50), **options)
            assert reuse.last.num_loaded == loaded
            assert torch.equal(output, adapted.generate(input_ids=prompt_of(50), **options))

    @pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
    def test_a_prefix_that_is_learnt_is_refused(
        self, peft: Any, cache: LocalCache, kind: str
    ) -> None:
        settings = getattr(peft, kind)(num_virtual_tokens=4, task_type="CAUSAL_LM")
        model = peft.get_peft_model(make_model("llama"), settings).eval()
        with pytest.raises(LayoutError, match="before the prompt"):
            Reuse(model, cache, config=small_chunks())

    def test_an_adapter_of_transformers_own_counts_from_the_moment_it_is_there(
        self, peft: Any, cache: LocalCache
    ) -> None:
        model = make_model("llama")
        reuse = Reuse(model, cache, config=small_chunks())
        reuse.forward(prompt_of(50))
        model.add_adapter(
            peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False),
            adapter_name="first",
        )
        expected = model(prompt_of(50)).logits[:, -1].detach()
        for loaded in (0, 49):
            output = reuse.forward(prompt_of(50))
            assert reuse.last.num_loaded == loaded and not reuse.last.reason
            torch.testing.assert_close(output.logits[:, -1], expected, rtol=1e-4, atol=1e-4)


class TestWhatIsNamed:
    def test_a_field_that_nobody_knows_and_a_nested_one_are_named(self, model: Any) -> None:
        found = {namespace_of(model).digest}
        model.config.from_the_future = {"a": 1}
        found.add(namespace_of(model).digest)
        model.config.from_the_future["a"] = 2
        found.add(namespace_of(model).digest)
        assert len(found) == 3

    def test_what_is_no_plain_value_is_refused_by_its_name(self, model: Any) -> None:
        """Its text may say less than it holds, or differ from process to process."""
        model.config.hook = object()
        with pytest.raises(LayoutError, match=r"config\.hook.*no plain value"):
            namespace_of(model)

    def test_versions_and_the_processor_count(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = {namespace_of(model).digest}
        for name in ("version_facts", "processor_facts"):
            monkeypatch.setattr(identity, name, lambda *_: {"cpu.maker": "'another'"})
            found.add(namespace_of(model).digest)
        assert len(found) == 3

    def test_variables_that_choose_kernels_count(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = namespace_of(model).digest
        monkeypatch.setenv("HOME", "/elsewhere")
        assert namespace_of(model).digest == before
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        assert namespace_of(model).digest != before


def test_each_kind_of_gpu_has_a_name_of_its_own(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for name, capability in (("A100", (8, 0)), ("L40S", (8, 9)), ("H100", (9, 0))):
        gpu = SimpleNamespace(
            get_device_name=lambda place, name=name: name,
            get_device_capability=lambda place, capability=capability: capability,
        )
        monkeypatch.setattr(torch, "get_device_module", lambda place, gpu=gpu: gpu)
        facts = device_facts("cuda:1")
        assert facts["device.name"] == repr(name)
        monkeypatch.setattr(identity, "device_facts", lambda device, facts=facts: facts)
        digests.add(namespace_of(model).digest)
    assert len(digests) == 3
    assert device_facts("cpu") == device_facts("no device") == {}


def test_a_model_that_moved_to_a_refused_device_is_never_served_with_the_old_geometry(
    model: Any, cache: LocalCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Reuse(model, cache, config=small_chunks())
    one.forward(prompt_of(40))
    assert one.last.num_stored
    monkeypatch.setattr(
        reuse,
        "geometry_of",
        lambda *args, **kwargs: replace(geometry_of(*args, **kwargs), device=torch.device("xpu:0")),
    )
    one._looked_at = (torch.device("xpu:0"), torch.float16)  # as after `model.to("xpu")`
    for _ in range(3):
        one.forward(prompt_of(40))
        assert (one.last.num_loaded, one.last.num_stored) == (0, 0), one.last
        assert "xpu:0" in one.last.reason
