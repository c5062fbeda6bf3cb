"""A prompt with stored KV of its parts: the chosen tokens, and only they, are computed as the model
itself would.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers as hf

from kvhold.blend.rows import attend_rows
from kvhold.blend.selection import (
    BlendPlan,
    Budget,
    DeviationSelector,
    Flow,
    LayerState,
    Selector,
    StoredSpan,
    make_selector,
)
from kvhold.core.errors import ConfigError, LayoutError
from kvhold.integrations.transformers.blending import Blender
from tests.transformers.models import model_of, prompt_of, sizes

LAYERS = 4
CONFIGS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: hf.LlamaConfig(**sizes(num_hidden_layers=LAYERS)),
    "Llama, YaRN": lambda: hf.LlamaConfig(
        **sizes(num_hidden_layers=LAYERS),
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        },
    ),
    "Llama, eager": lambda: hf.LlamaConfig(
        **sizes(num_hidden_layers=LAYERS), attn_implementation="eager"
    ),
    "Qwen2": lambda: hf.Qwen2Config(**sizes(num_hidden_layers=LAYERS)),
    "Qwen3": lambda: hf.Qwen3Config(**sizes(num_hidden_layers=LAYERS, head_dim=8)),
    "Mistral": lambda: hf.MistralConfig(**sizes(num_hidden_layers=LAYERS), sliding_window=None),
    "Mixtral": lambda: hf.MixtralConfig(**sizes(num_hidden_layers=LAYERS), num_local_experts=4),
    "Granite": lambda: hf.GraniteConfig(
        **sizes(num_hidden_layers=LAYERS), embedding_multiplier=3.0, residual_multiplier=0.5
    ),
    "Cohere": lambda: hf.CohereConfig(**sizes(num_hidden_layers=LAYERS)),
    "Phi": lambda: hf.PhiConfig(**sizes(num_hidden_layers=LAYERS)),
    "GPT-NeoX": lambda: hf.GPTNeoXConfig(
        vocab_size=211,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
    ),
}
LENGTH = 300  # more than a block of rows
PLAN = BlendPlan(LENGTH, (StoredSpan(10, 150, 3), StoredSpan(160, 290, 0)))


class Chosen:
    """A selector of given tokens."""

    name = "chosen"
    flow: Flow = "none"
    check_layer = 0
    budgets = (Budget(ratio=0.0),)

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = positions

    def select(self, plan: BlendPlan, layers: Sequence[LayerState], budget: Budget) -> Any:
        return torch.tensor(self.positions, dtype=torch.int64)


class Lowest:
    """Lets all tokens flow to a layer, and then the first ones of each choice."""

    name = "lowest"
    flow: Flow = "all"
    budgets = (Budget(ratio=0.5), Budget(ratio=0.25))
    check_layer = 1

    def select(self, plan: BlendPlan, layers: Sequence[LayerState], budget: Budget) -> Any:
        (layer,) = layers
        positions = layer.positions[torch.from_numpy(plan.held())[layer.positions]]
        return budget.choose(-positions.float(), positions, plan.num_held)


@pytest.fixture(scope="module", params=CONFIGS)
def blender(request: pytest.FixtureRequest) -> Blender:
    return Blender(model_of(CONFIGS[request.param]()))


@pytest.fixture(scope="module")
def llama() -> Blender:
    return Blender(model_of(CONFIGS["Llama"]()))


def full(blender: Blender, prompt: torch.Tensor) -> Any:
    with torch.no_grad():
        return blender.model(prompt, use_cache=True)


def stored(blender: Blender, prompt: torch.Tensor, plan: BlendPlan) -> Any:
    """KV as a cache would load it: each span computed alone, noise elsewhere."""
    kv = blender.geometry.allocated(1, plan.num_tokens)
    for layer in kv.layers:
        layer.keys.normal_()
        layer.values.normal_()
    for span in plan.spans:
        filled = blender.geometry.empty()
        places = torch.arange(span.end - span.start)[None] + span.stored_from
        with torch.no_grad():
            blender.model(
                prompt[:, span.start : span.end],
                position_ids=places,
                past_key_values=filled,
                use_cache=True,
            )
        for ours, theirs in zip(kv.layers, filled.layers, strict=True):
            ours.keys[:, :, span.start : span.end] = theirs.keys
            ours.values[:, :, span.start : span.end] = theirs.values
    return kv


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def kv_of(kv: Any, positions: Any = slice(None)) -> list[torch.Tensor]:
    return [tensor[:, :, positions] for layer in kv.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("name", ["deviation", "first", "query"])
def test_recomputing_everything_is_a_full_prefill(blender: Blender, name: str) -> None:
    prompt = prompt_of(LENGTH)
    expected, kv = full(blender, prompt), stored(blender, prompt, PLAN)
    blended = blender.prefill(prompt, kv, PLAN, make_selector(name, ratio=1.0))
    assert blended.num_recomputed == LENGTH and blended.num_reused == 0
    close(blended.logits[0, -1], expected.logits[0, -1])
    for ours, theirs in zip(kv_of(kv), kv_of(expected.past_key_values), strict=True):
        close(ours, theirs)


def test_spans_at_their_own_places_give_the_model_s_logits_with_nothing_chosen(
    blender: Blender,
) -> None:
    """KV computed within this prompt, moved away and back."""
    prompt = prompt_of(LENGTH)
    with torch.no_grad():
        moved = blender.model(
            prompt, position_ids=torch.arange(LENGTH)[None] + 50, use_cache=True
        ).past_key_values
    plan = BlendPlan(LENGTH, (StoredSpan(0, 120, 50), StoredSpan(130, 299, 180)))
    expected = full(blender, prompt)
    blended = blender.prefill(prompt, moved, plan, make_selector("none"))
    assert blended.recomputed.tolist() == [*range(120, 130), 299]
    close(blended.logits[0, -1], expected.logits[0, -1])
    for ours, theirs in zip(kv_of(moved), kv_of(expected.past_key_values), strict=True):
        close(ours, theirs)


def test_a_chosen_token_never_sees_a_later_key(blender: Blender) -> None:
    prompt, border = prompt_of(LENGTH), 140
    expected = full(blender, prompt)
    plan = BlendPlan(LENGTH, (StoredSpan(0, LENGTH),))
    kv = blender.geometry.allocated(1, LENGTH)
    for ours, theirs in zip(kv_of(kv), kv_of(expected.past_key_values), strict=True):
        ours.copy_(theirs)
        ours[:, :, border:] = 1e4 * torch.randn(ours[:, :, border:].shape)
    chosen = [0, 1, 17, 64, 138, 139, 200]
    blender.prefill(prompt, kv, plan, Chosen(chosen))
    for ours, theirs in zip(kv_of(kv), kv_of(expected.past_key_values), strict=True):
        close(ours[:, :, :border], theirs[:, :, :border])


def test_reused_tokens_keep_their_kv_and_the_others_get_new_one(llama: Blender) -> None:
    prompt = prompt_of(LENGTH)
    kv, before = stored(llama, prompt, PLAN), stored(llama, prompt, PLAN)
    blended = llama.prefill(prompt, kv, PLAN, make_selector("first", ratio=0.1))
    reused = sorted(set(range(LENGTH)) - set(blended.recomputed.tolist()))
    assert len(reused) == blended.num_reused == 270 - 27
    for ours, theirs in zip(kv_of(kv, reused)[1::2], kv_of(before, reused)[1::2], strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(
        kv_of(kv, blended.recomputed)[3::2],  # those of layer 0 depend on the token alone
        kv_of(before, blended.recomputed)[3::2],
        strict=True,
    ):
        assert (ours != theirs).any(-1).any(1).all()


def test_exact_tokens_are_neither_computed_nor_turned(llama: Blender) -> None:
    prompt = prompt_of(LENGTH)
    expected = full(llama, prompt)
    plan = BlendPlan(LENGTH, (StoredSpan(100, 200),), num_exact=64)
    kv = stored(llama, prompt, plan)
    for ours, theirs in zip(kv_of(kv), kv_of(expected.past_key_values), strict=True):
        ours[:, :, :64] = theirs[:, :, :64]
    for selector in (make_selector("deviation", ratio=1.0), make_selector("first", ratio=1.0)):
        blended = llama.prefill(prompt, kv, plan, selector)
        assert blended.recomputed.tolist() == list(range(64, LENGTH))
        assert (blended.num_exact, blended.num_reused) == (64, 0)
        close(blended.logits[0, -1], expected.logits[0, -1])


def test_gaps_are_always_recomputed(llama: Blender) -> None:
    prompt = prompt_of(LENGTH)
    for selector in (make_selector("none"), make_selector("deviation", ratio=0.0)):
        blended = llama.prefill(prompt, stored(llama, prompt, PLAN), PLAN, selector)
        assert blended.recomputed.tolist() == [*range(10), *range(150, 160), *range(290, 300)]


def test_fewer_tokens_flow_layer_by_layer(llama: Blender) -> None:
    prompt, rows = prompt_of(LENGTH), []
    kv = stored(llama, prompt, PLAN)
    hooks = [
        layer.self_attn.o_proj.register_forward_hook(
            lambda _, args, output: rows.append(output.shape[1])
        )
        for layer in llama.model.model.layers
    ]
    llama.prefill(prompt, kv, PLAN, Lowest())
    for hook in hooks:
        hook.remove()
    # layers: all, half of the 270 held, a quarter, the same
    assert rows == [300, 30 + 135, 30 + 68, 30 + 68]


def test_a_budget_by_layer_is_as_good_as_the_rows_it_ends_with(llama: Blender) -> None:
    """A token that leaves the flow keeps what it had in the layers above."""
    prompt = prompt_of(LENGTH)
    kv, before = stored(llama, prompt, PLAN), stored(llama, prompt, PLAN)
    blended = llama.prefill(prompt, kv, PLAN, Lowest())
    last = len(kv.layers) - 1
    left = [at for at in range(LENGTH) if at not in set(blended.recomputed.tolist())]
    assert torch.equal(kv.layers[last].values[:, :, left], before.layers[last].values[:, :, left])
    close(kv.layers[0].keys, full(llama, prompt).past_key_values.layers[0].keys)


@pytest.mark.parametrize("name", ["deviation", "query"])
def test_more_recomputation_is_nearer_to_the_full_prefill(llama: Blender, name: str) -> None:
    prompt = prompt_of(LENGTH)
    target = full(llama, prompt).logits[0, -1].log_softmax(-1)

    def divergence(ratio: float) -> float:
        kv = stored(llama, prompt, PLAN)
        logits = llama.prefill(prompt, kv, PLAN, make_selector(name, ratio=ratio)).logits[0, -1]
        return float((target.exp() * (target - logits.log_softmax(-1))).sum())

    assert divergence(0.0) > 3 * divergence(0.9)


@pytest.mark.parametrize("rows", [[0], [3, 4, 5], [0, 199], range(0, 200, 3), range(200)])
def test_rows_attend_as_a_full_causal_attention_does(rows: Sequence[int]) -> None:
    positions = torch.tensor(list(rows))
    query, key, value = (torch.randn(1, heads, 200, 16, dtype=torch.float64) for heads in (6, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    found = attend_rows(query[:, :, positions], key, value, positions, 0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2)[:, positions])


@pytest.mark.parametrize("rows", [[3], [5, 70], range(5, 200, 2), range(60, 200)])
def test_rows_do_not_see_hidden_keys(rows: Sequence[int]) -> None:
    positions, hidden = torch.tensor(list(rows)), torch.tensor([0, 1, 40, 41, 42, 199])
    query, key, value = (torch.randn(1, heads, 200, 16, dtype=torch.float64) for heads in (6, 2, 2))
    seen = torch.ones(200, 200, dtype=torch.bool).tril()
    seen[:, hidden] = False
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True
    )
    found = attend_rows(query[:, :, positions], key, value, positions, 0.3, hidden=hidden)
    torch.testing.assert_close(found, expected.transpose(1, 2)[:, positions])


def test_tails_do_not_change_the_choice_and_are_computed(llama: Blender) -> None:
    prompt = prompt_of(LENGTH)
    spans = (StoredSpan(10, 150, 3, text_end=160), StoredSpan(160, 280, text_end=290))
    plan, selector = BlendPlan(LENGTH, spans), make_selector("query", ratio=0.2)
    kv, other = stored(llama, prompt, plan), stored(llama, prompt, plan)
    for tensor in kv_of(other):
        tensor[:, :, plan.tails()] = torch.nan
    blended, again = (llama.prefill(prompt, one, plan, selector) for one in (kv, other))
    assert set(plan.tails()) < set(blended.recomputed.tolist()) == set(again.recomputed.tolist())
    for ours, theirs in zip(kv_of(kv), kv_of(other), strict=True):
        assert torch.equal(ours, theirs)
    # with nothing chosen, too
    kv = stored(llama, prompt, plan)
    before = llama.prefill(prompt, kv, plan, make_selector("query", ratio=0.0))
    assert before.recomputed.tolist() == plan.unheld().tolist()
    assert not torch.isnan(before.logits).any()


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            pytest.param(
                lambda: hf.Gemma3TextConfig(**sizes(head_dim=8, num_hidden_layers=6)),
                "every layer must have full attention",
                id="sliding windows",
            ),
            pytest.param(
                lambda: hf.MistralConfig(**sizes(), sliding_window=64),
                "every layer must have full attention",
                id="a window in all layers",
            ),
            pytest.param(
                lambda: hf.GPT2Config(
                    vocab_size=211, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
                ),
                "config.model_type is 'gpt2'; keys cannot be turned",
                id="learned positions",
            ),
            pytest.param(
                lambda: hf.BloomConfig(vocab_size=211, hidden_size=32, n_layer=2, n_head=4),
                "its layers are called otherwise",
                id="ALiBi",
            ),
            pytest.param(
                lambda: hf.GPTJConfig(
                    vocab_size=211,
                    n_embd=32,
                    n_layer=2,
                    n_head=4,
                    rotary_dim=4,
                    bos_token_id=1,
                    eos_token_id=2,
                ),
                "not each layer attends once",
                id="an attention of its own",
            ),
            pytest.param(
                lambda: hf.SmolLM3Config(**sizes(num_hidden_layers=4)),
                "no_rope_layers",
                id="layers without rotation",
            ),
            pytest.param(
                lambda: hf.GptOssConfig(
                    **sizes(head_dim=8, num_local_experts=4, layer_types=["full_attention"] * 2)
                ),
                "cannot apply to single tokens",
                id="attention sinks",
            ),
        ],
    )
    def test_names_the_reason(self, config: Callable[[], Any], reason: str) -> None:
        model = model_of(config())
        before = model.config._attn_implementation
        with pytest.raises(LayoutError, match=re.escape(reason)):
            Blender(model)
        assert model.config._attn_implementation == before

    def test_a_model_whose_keys_do_not_turn_as_its_config_says(self) -> None:
        model = model_of(CONFIGS["Llama"]())
        model.model.rotary_emb.inv_freq.mul_(0.9)
        with pytest.raises(LayoutError, match="keys at other positions are not turned keys"):
            Blender(model)

    def test_a_check_layer_that_the_model_lacks(self, llama: Blender) -> None:
        prompt = prompt_of(LENGTH)
        selector = make_selector("deviation", ratio=0.1, check_layer=LAYERS)
        with pytest.raises(ConfigError, match="check_layer is 4; the model has 4 layers"):
            llama.prefill(prompt, stored(llama, prompt, PLAN), PLAN, selector)

    def test_kv_of_another_length(self, llama: Blender) -> None:
        kv = llama.geometry.allocated(1, 20)
        with pytest.raises(ValueError, match="must be one row of 300 tokens"):
            llama.prefill(prompt_of(LENGTH), kv, PLAN, make_selector("none"))


def test_the_model_is_left_as_it_was_after_a_fault(llama: Blender) -> None:
    class Broken(Lowest):
        def select(self, plan: BlendPlan, layers: Sequence[LayerState], budget: Budget) -> Any:
            raise KeyError("broken")

    prompt, selector = prompt_of(LENGTH), Broken()
    expected = full(llama, prompt).logits
    with pytest.raises(KeyError):
        llama.prefill(prompt, stored(llama, prompt, PLAN), PLAN, selector)
    assert torch.equal(full(llama, prompt).logits, expected)
    assert not any(layer._forward_pre_hooks for layer in llama.model.model.layers)


def _is_selector(found: Selector) -> Selector:
    return found


def test_the_tests_selectors_keep_the_contract() -> None:
    assert [_is_selector(found).flow for found in (Chosen([]), Lowest())] == ["none", "all"]
    assert DeviationSelector((Budget(ratio=0.1),)).flow == "all"
