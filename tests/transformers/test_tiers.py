"""What a user of `Reuse` gets from tiers below RAM, and from rules: the same output, and what was
asked for.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvhold.cache import LocalCache, open_cache
from kvhold.core.config import RulesConfig
from kvhold.core.errors import ConfigError
from kvhold.core.rules import RequestRules
from kvhold.core.store_options import StoreOptions
from kvhold.integrations.transformers import Reuse, ReuseResult
from kvhold.tiers.policies import LearnedPolicy
from tests.transformers.models import prompt_of, small_chunks

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


@pytest.mark.parametrize("kind", ["disk", "fs", "faults+disk"])
def test_a_new_process_finds_on_disk_what_another_stored(
    llama: Any, tmp_path: Path, kind: str
) -> None:
    """With faults injected, fewer tokens are loaded, and the output is the same."""
    prompt = prompt_of(50)
    expected = llama.generate(prompt, **GREEDY)
    options = "&faults=get:corrupt:0.5&faults_seed=1" if "faults" in kind else ""
    url = f"{kind}://{tmp_path}/kv?probe_timeout_s=60&get_timeout_s=60&put_timeout_s=60{options}"
    for _ in range(3):
        with open_cache(ram_bytes="4MiB", tiers=[url], client={"arrival_timeout_s": 60}) as cache:
            reuse = Reuse(llama, cache, config=small_chunks())
            assert torch.equal(reuse.generate(prompt, **GREEDY), expected)
            assert cache.flush()
    assert reuse.last.num_loaded == 49 or "faults" in kind


class TestRules:
    def test_a_request_that_does_not_want_to_be_stored_is_not(
        self, llama: Any, cache: LocalCache
    ) -> None:
        reuse = Reuse(llama, cache, config=small_chunks())
        reuse.rules = RequestRules(store=False)
        reuse.generate(prompt_of(50), **GREEDY)
        assert reuse.last == ReuseResult(num_tokens=50)
        assert cache.status()["chunks"] == 0

    def test_a_request_that_is_not_stored_uses_known_chunks_alone(self, llama: Any) -> None:
        with open_cache(policy="learned") as cache:
            policy = cache._state.ram.policy
            assert isinstance(policy, LearnedPolicy)
            reuse = Reuse(llama, cache, config=small_chunks())
            reuse.rules = RequestRules(store=False)
            reuse.generate(prompt_of(50), **GREEDY)
            assert policy.ghosts.num == 0
            reuse.rules = RequestRules()
            reuse.generate(prompt_of(50), **GREEDY)
            before = [chunk.uses for chunk in policy._chunks.values()]
            reuse.rules = RequestRules(store=False)
            reuse.generate(prompt_of(50), **GREEDY)
            assert [chunk.uses for chunk in policy._chunks.values()] == [n + 1 for n in before]

    def test_a_request_that_does_not_want_to_load_computes(
        self, llama: Any, cache: LocalCache
    ) -> None:
        reuse = Reuse(llama, cache, config=small_chunks())
        expected = reuse.generate(prompt_of(50), **GREEDY)
        reuse.rules = RequestRules(load=False)
        assert torch.equal(reuse.generate(prompt_of(50), **GREEDY), expected)
        assert reuse.last == ReuseResult(num_tokens=50, num_loaded=0, num_stored=0)

    def test_what_has_outlived_its_time_is_not_found(
        self, llama: Any, cache: LocalCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reuse = Reuse(llama, cache, config=small_chunks())
        reuse.rules = RequestRules(store_options=StoreOptions(ttl_s=60))
        reuse.generate(prompt_of(50), **GREEDY)
        reuse.generate(prompt_of(50), **GREEDY)
        assert reuse.last.num_loaded == 49
        now = cache._state.ram.now()
        monkeypatch.setattr(cache._state.ram, "_clock", lambda: now + 61)
        reuse.generate(prompt_of(50), **GREEDY)
        assert (reuse.last.num_loaded, reuse.last.num_stored) == (0, 50)

    def test_a_configured_tenant_is_final(self, llama: Any, cache: LocalCache) -> None:
        reuse = Reuse(
            llama, cache, config=replace(small_chunks(), rules=RulesConfig(tenant="acme"))
        )
        assert dict(reuse.rules.tags) == {"tenant": "acme"}
        for tags in ((), (("tenant", "victim"),)):
            with pytest.raises(ConfigError, match=r"rules\.tenant"):
                reuse.rules = RequestRules(tags=tags)
        assert dict(reuse.rules.tags) == {"tenant": "acme"}

    def test_other_tags_other_kv(self, llama: Any, cache: LocalCache) -> None:
        reuse = Reuse(llama, cache, config=small_chunks())
        reuse.rules = RequestRules(tags=(("tenant", "a"),))
        reuse.generate(prompt_of(50), **GREEDY)
        reuse.rules = RequestRules(tags=(("tenant", "b"),))
        reuse.generate(prompt_of(50), **GREEDY)
        assert reuse.last.num_loaded == 0
        reuse.rules = RequestRules(tags=(("tenant", "a"),))
        reuse.generate(prompt_of(50), **GREEDY)
        assert reuse.last.num_loaded == 49
