"""What a user of `Reuse` gets: the same output, less computed, and everything given back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from kvhold.cache import LocalCache, open_cache
from kvhold.integrations.transformers import Reuse, ReuseResult
from tests.transformers.models import (
    SMALLEST_TOKEN,
    TOKENS_PER_CHUNK,
    VOCABULARY,
    make_model,
    model_of,
    prompt_of,
    sizes,
    small_chunks,
)

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
LENGTHS = [1, 15, 16, 17, 18, 32, 33, 50]


def reuse_of(model: Any, cache: Any, **options: Any) -> Reuse:
    return Reuse(model, cache, config=small_chunks(), **options)


@contextmanager
def tokens_computed(model: Any) -> Iterator[list[int]]:
    """How many tokens each pass through the model has computed, over its rows."""
    passes: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(
            (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel()
        ),
        with_kwargs=True,
    )
    try:
        yield passes
    finally:
        handle.remove()


def kv_of(past: Any, num_tokens: int) -> list[torch.Tensor]:
    """Keys and values of each layer, `[rows, heads, num_tokens, head_dim]`."""
    return [
        tensor[:, :, :num_tokens] for layer in past.layers for tensor in (layer.keys, layer.values)
    ]


class TestOnePrompt:
    @pytest.mark.parametrize("length", LENGTHS)
    def test_generates_the_same_tokens_before_and_after_it_is_stored(
        self, any_model: Any, cache: LocalCache, length: int
    ) -> None:
        reuse, prompt = reuse_of(any_model, cache), prompt_of(length)
        expected = any_model.generate(prompt, **GREEDY)
        # a tail of one token would never be read
        worth_storing = length - (length % TOKENS_PER_CHUNK == 1)
        assert torch.equal(reuse.generate(prompt, **GREEDY), expected)
        assert reuse.last == ReuseResult(num_tokens=length, num_loaded=0, num_stored=worth_storing)
        assert torch.equal(reuse.generate(prompt, **GREEDY), expected)
        assert reuse.last == ReuseResult(num_tokens=length, num_loaded=length - 1, num_stored=0)
        assert reuse.last.num_computed == 1

    @pytest.mark.parametrize("length", LENGTHS)
    def test_forward_gives_the_same_logits_and_a_full_cache(
        self, any_model: Any, cache: LocalCache, length: int
    ) -> None:
        reuse, prompt = reuse_of(any_model, cache), prompt_of(length)
        with torch.no_grad():
            expected = any_model(prompt, use_cache=True)
        for loaded in (0, length - 1):
            output = reuse.forward(prompt)
            assert reuse.last.num_loaded == loaded
            assert output.logits.shape == (1, length - loaded, VOCABULARY)
            torch.testing.assert_close(
                output.logits, expected.logits[:, loaded:], rtol=1e-4, atol=1e-4
            )
            for ours, theirs in zip(
                kv_of(output.past_key_values, length),
                kv_of(expected.past_key_values, length),
                strict=True,
            ):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    def test_loaded_kv_is_equal_to_the_stored_in_every_bit(
        self, any_model: Any, cache: LocalCache
    ) -> None:
        reuse, prompt = reuse_of(any_model, cache), prompt_of(50)
        stored = kv_of(reuse.forward(prompt).past_key_values, 49)
        loaded = kv_of(reuse.forward(prompt).past_key_values, 49)
        assert reuse.last.num_loaded == 49
        assert all(map(torch.equal, stored, loaded))

    def test_a_full_hit_computes_one_token(self, llama: Any, cache: LocalCache) -> None:
        reuse, prompt = reuse_of(llama, cache), prompt_of(50)
        reuse.generate(prompt, **GREEDY)
        with tokens_computed(llama) as passes:
            reuse.generate(prompt, **GREEDY)
        assert passes == [1] * GREEDY["max_new_tokens"]

    def test_a_shared_beginning_is_loaded_in_whole_chunks(
        self, llama: Any, cache: LocalCache
    ) -> None:
        reuse = reuse_of(llama, cache)
        first = prompt_of(50)
        second = torch.cat([first[:, :40], prompt_of(30, seed=1)], dim=1)
        reuse.generate(first, **GREEDY)
        with tokens_computed(llama) as passes:
            output = reuse.generate(second, **GREEDY)
        assert reuse.last == ReuseResult(num_tokens=70, num_loaded=32, num_stored=38)
        assert passes[0] == 38
        assert torch.equal(output, llama.generate(second, **GREEDY))

    def test_a_longer_prompt_starts_from_the_whole_chunks_of_a_shorter_one(
        self, llama: Any, cache: LocalCache
    ) -> None:
        reuse = reuse_of(llama, cache)
        reuse.forward(prompt_of(40))
        reuse.forward(prompt_of(90))
        assert reuse.last == ReuseResult(num_tokens=90, num_loaded=32, num_stored=58)

    def test_fifty_prompts_that_share_beginnings_generate_the_same_tokens(
        self, llama: Any, cache: LocalCache
    ) -> None:
        reuse = reuse_of(llama, cache)
        generator = torch.Generator().manual_seed(7)
        loaded = 0
        for number in range(50):
            shared, own = torch.randint(0, 60, (2,), generator=generator).tolist()
            prompt = torch.cat(
                [prompt_of(shared, seed=number % 3), prompt_of(own + 1, seed=100 + number)], dim=1
            )
            assert torch.equal(reuse.generate(prompt, **GREEDY), llama.generate(prompt, **GREEDY))
            assert reuse.last.reason == ""
            loaded += reuse.last.num_loaded
        assert loaded > 500

    def test_what_forward_stored_generate_loads_and_the_other_way_round(
        self, llama: Any, cache: LocalCache
    ) -> None:
        reuse = reuse_of(llama, cache)
        reuse.forward(prompt_of(50))
        reuse.generate(prompt_of(50), **GREEDY)
        assert reuse.last.num_loaded == 49
        reuse.generate(prompt_of(50, seed=1), **GREEDY)
        reuse.forward(prompt_of(50, seed=1))
        assert reuse.last.num_loaded == 49

    def test_bfloat16_comes_back_exactly(self, cache: LocalCache) -> None:
        model = make_model("llama").to(torch.bfloat16)
        reuse, prompt = reuse_of(model, cache), prompt_of(50)
        stored = kv_of(reuse.forward(prompt).past_key_values, 49)
        loaded = kv_of(reuse.forward(prompt).past_key_values, 49)
        assert reuse.last.num_loaded == 49
        assert stored[0].dtype == torch.bfloat16
        assert all(map(torch.equal, stored, loaded))

    def test_forward_computes_as_many_tokens_as_logits_are_asked_for(
        self, llama: Any, cache: LocalCache
    ) -> None:
        reuse, prompt = reuse_of(llama, cache), prompt_of(50)
        expected = llama(prompt).logits.detach()
        reuse.forward(prompt)
        for keep, loaded in ((1, 49), (5, 45), (50, 0), (0, 0), (90, 0)):
            logits = reuse.forward(prompt, logits_to_keep=keep).logits
            assert reuse.last.num_loaded == loaded
            torch.testing.assert_close(logits, expected[:, -keep:], rtol=1e-4, atol=1e-4)

    def test_forward_takes_a_mask_without_padding_and_a_tuple_for_an_answer(
        self, llama: Any, cache: LocalCache
    ) -> None:
        reuse, prompt = reuse_of(llama, cache), prompt_of(50)
        expected = llama(prompt).logits[:, -1].detach()
        for loaded in (0, 49):
            logits, *_ = reuse.forward(
                prompt, attention_mask=torch.ones_like(prompt), return_dict=False
            )
            assert reuse.last.num_loaded == loaded
            torch.testing.assert_close(logits[:, -1], expected, rtol=1e-4, atol=1e-4)

    def test_gradients_are_never_half_there(self, llama: Any, cache: LocalCache) -> None:
        output = reuse_of(llama, cache).forward(prompt_of(20))
        assert not output.logits.requires_grad


class TestBatches:
    def test_each_row_is_a_prompt_of_its_own_and_the_shortest_hit_counts(
        self, any_model: Any, cache: LocalCache
    ) -> None:
        reuse = reuse_of(any_model, cache)
        reuse.forward(prompt_of(50, seed=0))
        reuse.forward(prompt_of(35, seed=1))
        batch = torch.cat([prompt_of(50, seed=0), prompt_of(50, seed=1), prompt_of(50, seed=0)])
        expected = any_model.generate(batch, **GREEDY)
        assert torch.equal(reuse.generate(batch, **GREEDY), expected)
        # row 1: its third chunk and its tail
        assert reuse.last == ReuseResult(num_tokens=150, num_loaded=3 * 32, num_stored=18)
        assert torch.equal(reuse.generate(batch, **GREEDY), expected)
        assert reuse.last == ReuseResult(num_tokens=150, num_loaded=3 * 49, num_stored=0)

    def test_a_row_without_a_hit_leaves_nothing_to_load_but_all_is_stored(
        self, llama: Any, cache: LocalCache
    ) -> None:
        reuse = reuse_of(llama, cache)
        reuse.forward(prompt_of(50, seed=0))
        batch = torch.cat([prompt_of(50, seed=0), prompt_of(50, seed=1)])
        assert torch.equal(reuse.generate(batch, **GREEDY), llama.generate(batch, **GREEDY))
        assert reuse.last == ReuseResult(num_tokens=100, num_loaded=0, num_stored=50)

    def test_rows_stored_together_load_apart_with_every_bit(
        self, llama: Any, cache: LocalCache
    ) -> None:
        reuse, batch = reuse_of(llama, cache), prompt_of(50, rows=3)
        together = kv_of(reuse.forward(batch).past_key_values, 49)
        for row in range(3):
            alone = kv_of(reuse.forward(batch[row : row + 1]).past_key_values, 49)
            assert reuse.last.num_loaded == 49
            assert all(
                torch.equal(ours[0], theirs[row])
                for ours, theirs in zip(alone, together, strict=True)
            )


class Ban(LogitsProcessor):
    """Forbids one token, and counts how often it was asked."""

    def __init__(self, token: int) -> None:
        self.token, self.calls = token, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.tensor([self.token]), float("-inf"))


class Collected(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.reshape(-1))

    def end(self) -> None:
        self.ended = True


class TestArgumentsOfGenerate:
    @pytest.fixture
    def warm(self, llama: Any, cache: LocalCache) -> Reuse:
        """Has stored the prompts of 50 tokens of seeds 0 and 1."""
        reuse = reuse_of(llama, cache)
        reuse.forward(torch.cat([prompt_of(50), prompt_of(50, seed=1)]))
        return reuse

    @pytest.mark.parametrize(
        "options",
        [
            pytest.param(
                {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}, id="sampling"
            ),
            pytest.param(
                {"do_sample": True, "num_return_sequences": 3}, id="several samples a prompt"
            ),
            pytest.param({"num_beams": 3, "do_sample": False}, id="beams"),
            pytest.param(
                {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
                id="several beams a prompt",
            ),
            pytest.param({"num_beams": 2, "do_sample": True}, id="sampled beams"),
            pytest.param(
                {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
                id="penalties over the prompt",
            ),
            pytest.param({"do_sample": False, "min_new_tokens": 3}, id="least length"),
            pytest.param({"do_sample": False, "guidance_scale": 1.5}, id="guidance"),
            pytest.param(
                {
                    "do_sample": False,
                    "prefix_allowed_tokens_fn": lambda row, ids: [5 + row, 9, len(ids) % 50 + 3],
                },
                id="a function",
            ),
            pytest.param(
                {"generation_config": GenerationConfig(max_new_tokens=5, do_sample=True, top_k=5)},
                id="a GenerationConfig",
            ),
        ],
    )
    def test_pass_through(self, llama: Any, warm: Reuse, options: dict[str, Any]) -> None:
        batch = torch.cat([prompt_of(50), prompt_of(50, seed=1)])
        options = options if "generation_config" in options else {"max_new_tokens": 4, **options}
        with torch.random.fork_rng():
            torch.manual_seed(3)
            expected = llama.generate(batch, **options)
            torch.manual_seed(3)
            output = warm.generate(batch, **options)
        assert torch.equal(output, expected)
        assert warm.last == ReuseResult(num_tokens=100, num_loaded=98, num_stored=0)

    @pytest.mark.parametrize(
        "options",
        [{"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3, "do_sample": False}],
    )
    def test_several_sequences_of_a_prompt_leave_its_kv_once(
        self, llama: Any, cache: LocalCache, options: dict[str, Any]
    ) -> None:
        reuse, batch = reuse_of(llama, cache), prompt_of(50, rows=2)
        with torch.random.fork_rng():
            reuse.generate(batch, max_new_tokens=4, **options)
        assert reuse.last == ReuseResult(num_tokens=100, num_loaded=0, num_stored=100)
        for row in batch.split(1):
            logits = reuse.forward(row).logits[:, -1]
            assert reuse.last.num_loaded == 49
            torch.testing.assert_close(
                logits, llama(row).logits[:, -1].detach(), rtol=1e-4, atol=1e-4
            )

    def test_a_streamer_sees_the_whole_prompt_and_each_token(self, llama: Any, warm: Reuse) -> None:
        streamer = Collected()
        output = warm.generate(prompt_of(50), streamer=streamer, **GREEDY)
        assert warm.last.num_loaded == 49
        assert torch.equal(torch.cat(streamer.values), output[0])
        assert len(streamer.values) == 1 + GREEDY["max_new_tokens"] and streamer.ended

    def test_a_logits_processor_is_asked_for_each_token(self, llama: Any, warm: Reuse) -> None:
        favourite = int(llama.generate(prompt_of(50), **GREEDY)[0, 50])
        expected = llama.generate(
            prompt_of(50), logits_processor=LogitsProcessorList([Ban(favourite)]), **GREEDY
        )
        ban = Ban(favourite)
        assert torch.equal(
            warm.generate(prompt_of(50), logits_processor=LogitsProcessorList([ban]), **GREEDY),
            expected,
        )
        assert ban.calls == GREEDY["max_new_tokens"]

    def test_scores_and_the_filled_cache_are_returned_where_asked_for(
        self, llama: Any, warm: Reuse
    ) -> None:
        options = {
            **GREEDY,
            "return_dict_in_generate": True,
            "output_scores": True,
            "output_logits": True,
        }
        expected, output = (
            llama.generate(prompt_of(50), **options),
            warm.generate(input_ids=prompt_of(50), **options),
        )
        assert warm.last.num_loaded == 49
        assert torch.equal(output.sequences, expected.sequences)
        for name in ("scores", "logits"):
            torch.testing.assert_close(
                torch.stack(output[name]), torch.stack(expected[name]), rtol=1e-4, atol=1e-4
            )
        assert (
            output.past_key_values.get_seq_length()
            == expected.past_key_values.get_seq_length()
            == 53
        )

    def test_an_end_token_ends_a_row(self, llama: Any, warm: Reuse) -> None:
        batch = torch.cat([prompt_of(50), prompt_of(50, seed=1)])
        free = llama.generate(batch, **GREEDY)
        options = {**GREEDY, "eos_token_id": int(free[0, 51]), "pad_token_id": 0}
        expected = llama.generate(batch, **options)
        assert torch.equal(warm.generate(batch, **options), expected)
        assert (expected[0, 52:] == 0).all()
        assert warm.last.num_loaded == 98

    def test_an_error_of_the_model_reaches_the_caller_and_holds_nothing(
        self, llama: Any, warm: Reuse
    ) -> None:
        class Broken(Collected):
            def put(self, value: torch.Tensor) -> None:
                raise BrokenPipeError("nobody listens")

        with pytest.raises(BrokenPipeError):
            warm.generate(prompt_of(50), streamer=Broken(), **GREEDY)
        with pytest.raises(IndexError):
            warm.generate(torch.full((1, 20), VOCABULARY + 5), **GREEDY)


class TestGeneratedText:
    def test_the_next_turn_of_a_conversation_finds_it_if_asked_to(
        self, llama: Any, cache: LocalCache
    ) -> None:
        reuse = reuse_of(llama, cache, store_generated=True)
        options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}
        answer = reuse.generate(prompt_of(40), **options)
        # chunks 2 and 3 end in the 69 tokens that have KV
        assert reuse.last == ReuseResult(num_tokens=40, num_loaded=0, num_stored=40 + 32)
        turn = torch.cat([answer, prompt_of(10, seed=1)], dim=1)
        output = reuse.generate(turn, **GREEDY)
        assert reuse.last.num_loaded == 64
        assert torch.equal(output, llama.generate(turn, **GREEDY))

    def test_it_is_not_stored_otherwise(self, llama: Any, cache: LocalCache) -> None:
        reuse = reuse_of(llama, cache)
        answer = reuse.generate(
            prompt_of(40), max_new_tokens=30, min_new_tokens=30, do_sample=False
        )
        reuse.forward(answer)
        assert reuse.last.num_loaded == 32

    def test_each_sample_of_a_prompt_is_stored(self, llama: Any, cache: LocalCache) -> None:
        reuse = reuse_of(llama, cache, store_generated=True)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            samples = reuse.generate(
                prompt_of(40),
                max_new_tokens=24,
                min_new_tokens=24,
                do_sample=True,
                num_return_sequences=3,
            )
        for sample in samples.split(1):
            logits = reuse.forward(sample).logits
            assert reuse.last.num_loaded == 48
            torch.testing.assert_close(
                logits[:, -1], llama(sample).logits[:, -1].detach(), rtol=1e-4, atol=1e-4
            )

    def test_beams_leave_only_the_prompt(self, llama: Any, cache: LocalCache) -> None:
        reuse = reuse_of(llama, cache, store_generated=True)
        reuse.generate(prompt_of(40), max_new_tokens=24, num_beams=3, do_sample=False)
        assert reuse.last.num_stored == 40


@pytest.fixture(scope="module")
def wide() -> Any:
    return model_of(LlamaConfig(**sizes(num_key_value_heads=4, head_dim=128)))


class TestSmallArena:
    """The smallest arena has 2 MiB, and the KV of `wide` 8 KiB a token: room for 16 chunks."""

    def test_what_was_evicted_is_computed_again_and_the_tokens_stay_the_same(
        self, wide: Any
    ) -> None:
        with open_cache(ram_bytes="2MiB", huge_pages="never") as cache:
            reuse = reuse_of(wide, cache)
            prompts = [prompt_of(72 + seed, seed=seed) for seed in range(6)]
            expected = [wide.generate(prompt, **GREEDY) for prompt in prompts]
            loaded, stored = [], []
            for number in torch.randint(
                0, 6, (30,), generator=torch.Generator().manual_seed(5)
            ).tolist():
                assert torch.equal(reuse.generate(prompts[number], **GREEDY), expected[number])
                assert reuse.last.reason == ""
                loaded.append(reuse.last.num_loaded)
                stored.append(reuse.last.num_stored)
            # both happened, and often
            assert max(loaded) >= 71 and sum(stored) > 2 * sum(
                prompt.shape[1] for prompt in prompts
            )
            status = cache.status()
            assert (
                status["held"] == {"tickets": 0, "leases": 0, "reservations": 0}
                and status["pinned_chunks"] == 0
            )

    def test_a_prompt_larger_than_the_arena_is_generated_all_the_same(self, wide: Any) -> None:
        with open_cache(ram_bytes="2MiB", huge_pages="never") as cache:
            reuse, prompt = reuse_of(wide, cache), prompt_of(400)
            for _ in range(2):
                assert torch.equal(
                    reuse.generate(prompt, **GREEDY), wide.generate(prompt, **GREEDY)
                )
            assert reuse.last.num_loaded < 300


def test_prompts_use_no_special_tokens() -> None:
    assert int(prompt_of(512, rows=4).min()) >= SMALLEST_TOKEN
