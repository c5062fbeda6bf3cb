"""The guess that a decode engine has a prompt's KV."""

import json
from typing import Any

from kvhold.proxy import answered
from kvhold.proxy.answered import AnsweredPrompts
from kvhold.proxy.prompts import Inference, read_fields, read_inference


def ids(count: int, first: int = 0) -> Inference:
    return completion(prompt=[first, *range(1, count)])


def completion(**fields: Any) -> Inference:
    return read_inference("/v1/completions", read_fields(json.dumps(fields).encode())[0])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_tokens_after_the_answered_beginning_are_new() -> None:
    prompts = AnsweredPrompts(10.0, Clock())
    assert prompts.new_tokens(ids(5_000)) is None
    prompts.add(ids(5_000))
    assert prompts.new_tokens(ids(5_000)) == 0
    assert 0 <= (prompts.new_tokens(ids(4_000)) or 0) < 256
    assert 1_000 <= (prompts.new_tokens(ids(6_000)) or 0) < 1_256
    assert prompts.new_tokens(ids(5_000, first=7)) is None


def test_an_answer_is_forgotten_after_its_time() -> None:
    clock = Clock()
    prompts = AnsweredPrompts(10.0, clock)
    prompts.add(ids(1_000))
    clock.now = 9.0
    assert prompts.new_tokens(ids(1_000)) == 0
    prompts.add(ids(1_000))
    clock.now = 18.0
    assert prompts.new_tokens(ids(1_000)) == 0
    clock.now = 20.0
    assert prompts.new_tokens(ids(1_000)) is None


def test_without_a_time_nothing_is_kept() -> None:
    prompts = AnsweredPrompts(0.0)
    prompts.add(ids(1_000))
    assert prompts.new_tokens(ids(1_000)) is None


def test_the_oldest_go_first_and_memory_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(answered, "_MOST_HELD", 8)
    prompts = AnsweredPrompts(10.0, Clock())
    for first in range(5):
        prompts.add(ids(500, first))
    assert len(prompts._until) <= 8
    assert prompts.new_tokens(ids(500, 4)) == 0
    assert prompts.new_tokens(ids(500, 0)) is None


def test_a_prompt_beyond_the_bound_is_not_all_known(monkeypatch: Any) -> None:
    monkeypatch.setattr(answered, "_MOST_PIECES", 2)
    prompts = AnsweredPrompts(10.0, Clock())
    prompts.add(ids(5_000))
    assert (prompts.new_tokens(ids(5_000)) or 0) > 4_000
