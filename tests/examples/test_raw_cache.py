"""The example without an engine stores an array and reads the same bytes back."""

from tests.examples.running import run_example


def test_the_array_comes_back_and_is_stored_once() -> None:
    assert run_example("raw_cache.py").splitlines() == [
        "before: 0 of 300 tokens are in the cache",
        "stored: 3 chunks",
        "stored again: 0 chunks, because none is missing",
        "loaded: 300 tokens, the same bytes: True",
        "another prompt: 128 tokens",
    ]
