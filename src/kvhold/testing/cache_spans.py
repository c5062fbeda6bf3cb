import time
from contextlib import ExitStack

import pytest

from kvhold.blend.spans import of_ranges, span_prompt
from kvhold.core.api import Cache
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Layout
from kvhold.core.planning import BlendReport, SpanReport
from kvhold.testing.cache import (
    FULL,
    PATIENT_S,
    CacheFixtures,
    MakeCache,
    a_prompt,
    check,
    flood,
    read,
    registered,
    store,
)

RANGES = [(0, 32), (32, 72), (80, 150)]


def spans_of(prompt: Prompt) -> list[Prompt]:
    return [span_prompt(prompt, span) for span in of_ranges(RANGES, prompt.num_tokens)]


class CacheSpans(CacheFixtures):
    @pytest.fixture
    def spans(self, cache: Cache, space: Namespace) -> list[Prompt]:
        registered(cache, space.of_spans)
        return spans_of(a_prompt(space, 160))

    def read_spans(self, cache: Cache, spans: list[Prompt]) -> dict[int, int]:
        """`{span: held tokens}`, whose bytes are right."""
        with cache.spans([span.query() for span in spans]) as held:
            for span in held:
                lease = cache.claim(span.hit.ticket)
                assert lease is not None
                with lease:
                    check(lease, spans[span.number], span.num_tokens)
            return {span.number: span.num_tokens for span in held}

    def test_the_held_spans_of_a_prompt_are_found_longest_first(
        self, cache: Cache, spans: list[Prompt]
    ) -> None:
        assert self.read_spans(cache, spans) == {}
        store(cache, spans[1])
        store(cache, spans[2])
        found = self.read_spans(cache, spans)
        assert list(found.items()) == [(2, 70), (1, 40)]
        store(cache, spans[0])
        assert list(self.read_spans(cache, spans)) == [2, 1, 0]
        assert list(self.read_spans(cache, spans[::-1])) == [0, 1, 2], "wherever they stand"

    def test_the_held_beginning_of_a_span_is_found(self, cache: Cache, spans: list[Prompt]) -> None:
        store(cache, spans[2], tail=False)
        assert self.read_spans(cache, [spans[2]]) == {0: 64}
        store(cache, spans[1].until(16))
        assert self.read_spans(cache, [spans[1]]) == {0: 16}

    def test_no_lookup_of_a_prompt_finds_a_span_and_no_span_finds_a_prompt(
        self, cache: Cache, space: Namespace, spans: list[Prompt]
    ) -> None:
        whole = a_prompt(space, 160)
        for span in spans:
            store(cache, span)
            assert read(cache, space.prompt(span.tokens)) == 0
        assert read(cache, whole) == 0
        lossy = registered(cache, space.allowing_loss(max_error=0.1))
        assert read(cache, lossy.prompt(spans[0].tokens)) == 0
        cache.clear()
        store(cache, whole)
        assert self.read_spans(cache, spans) == {}

    def test_each_span_is_pinned_until_all_are_let_go(
        self, cache: Cache, space: Namespace, spans: list[Prompt]
    ) -> None:
        for span in spans:
            store(cache, span)
        self.settle(cache)
        with cache.spans([span.query() for span in spans]) as held:
            flood(cache, space)
            for one in held:
                lease = cache.claim(one.hit.ticket)
                assert lease is not None
                with lease:
                    check(lease, spans[one.number], spans[one.number].num_tokens)
            assert cache.status()["held"]["tickets"] == 3
            tickets = [one.hit.ticket for one in held]
        assert cache.status()["held"]["tickets"] == 0
        assert [cache.claim(ticket) for ticket in tickets] == [None] * 3

    def test_a_lease_of_a_span_outlives_it(
        self, cache: Cache, space: Namespace, spans: list[Prompt]
    ) -> None:
        store(cache, spans[2])
        self.settle(cache)
        with ExitStack() as leases:
            with cache.spans([spans[2].query()]) as held:
                (span,) = held
                lease = cache.claim(span.hit.ticket)
                assert lease is not None
                leases.enter_context(lease)
            flood(cache, space)
            check(lease, spans[2], 70)

    def test_spans_come_from_lower_tiers(
        self, cache: Cache, space: Namespace, spans: list[Prompt]
    ) -> None:
        for span in spans:
            store(cache, span)
        assert cache.flush(deadline_s=PATIENT_S)
        flood(cache, space)
        assert cache.flush(deadline_s=PATIENT_S)
        if not self.lower_tiers:
            assert self.read_spans(cache, spans) == {}
            return
        with cache.spans([span.query() for span in spans], wait_s=0) as held:
            assert held.arriving
            held.wait(time.monotonic() + PATIENT_S)
            assert [(span.number, span.num_tokens) for span in held] == [(2, 70), (1, 40), (0, 32)]
            assert not any("ram" in span.hit.sources for span in held)
        flood(cache, space, seed=2_000_000)
        assert self.read_spans(cache, spans) == {0: 32, 1: 40, 2: 70}

    def test_spans_are_cleared_alone_or_with_their_namespace(
        self, cache: Cache, space: Namespace, spans: list[Prompt]
    ) -> None:
        exact, other = a_prompt(space, 48), registered(cache, space.narrowed(lora="other"))
        store(cache, exact)
        store(cache, spans[0])
        assert cache.clear(space.of_spans.digest) == 2
        assert self.read_spans(cache, spans) == {} and read(cache, exact) == 48
        registered(cache, other.of_spans)
        others = spans_of(a_prompt(other, 160))
        for span in (*spans, others[1]):
            store(cache, span)
        assert cache.flush(deadline_s=PATIENT_S)
        assert cache.clear(space.digest) == 3 + 2 + 3 + 5
        assert cache.flush(deadline_s=PATIENT_S)
        assert self.read_spans(cache, spans) == {} and read(cache, exact) == 0
        assert self.read_spans(cache, others) == {1: 40}
        store(cache, spans[0])
        assert self.read_spans(cache, spans) == {0: 32}

    def test_spans_are_counted_apart_from_prompts(
        self, cache: Cache, space: Namespace, spans: list[Prompt]
    ) -> None:
        store(cache, spans[0])
        store(cache, spans[2], tail=False)
        self.settle(cache)
        before = cache.status()["counters"]
        assert self.read_spans(cache, spans) == {0: 32, 2: 64}
        counts = {
            name: value - before.get(name, 0)
            for name, value in cache.status()["counters"].items()
            if value != before.get(name, 0) and ("lookup" in name or "hit_tokens" in name)
        }
        assert counts == {
            "kvhold_span_lookups{result=hit}": 1,
            "kvhold_span_lookups{result=partial}": 1,
            "kvhold_span_lookups{result=miss}": 1,
            "kvhold_span_lookup_tokens": 32 + 40 + 70,
            "kvhold_span_hit_tokens{source=ram}": 32 + 64,
        }

    def test_a_reported_blend_is_counted_and_explained(self, cache: Cache) -> None:
        spans = [
            SpanReport(0, 32, {"ram": 32}),
            SpanReport(32, 72, {}, missing="never_stored", is_alone=True),
        ]
        report = BlendReport("one-1", "blended", 90, 16, 50, 24, "first ratio=0.1", spans=spans)
        cache.report_blend(report)
        cache.report_blend(BlendReport("two-2", "refused", 90, 0, 0, 90, note="no permit"))
        assert [one.request for one in cache.explain()[:2]] == ["two-2", "one-1"]
        [refused], [decision] = cache.explain("two"), cache.explain("one")
        assert refused.why == "no permit"
        assert decision.blend == report and decision.found == {"ram": 32}
        assert decision.why == (
            "blended by first ratio=0.1: 16 exact, 50 reused, 24 recomputed, 1 of 2 spans were "
            "computed alone"
        )
        counters = cache.status()["counters"]
        assert {name: value for name, value in counters.items() if "blended" in name} == {
            "kvhold_blended_requests{result=blended}": 1,
            "kvhold_blended_requests{result=refused}": 1,
            "kvhold_blended_tokens{kv=exact}": 16,
            "kvhold_blended_tokens{kv=reused}": 50,
            "kvhold_blended_tokens{kv=recomputed}": 24,
        }

    def test_a_closed_client_holds_no_span(
        self, cache: Cache, make_cache: MakeCache, space: Namespace, spans: list[Prompt]
    ) -> None:
        client = make_cache()
        registered(client, space.of_spans)
        store(client, spans[2])
        held = client.spans([spans[2].query()])
        assert len(held) == 1
        client.close()
        held.close()

    def test_spans_that_make_no_sense_are_an_error_and_take_nothing(
        self, cache: Cache, space: Namespace, spans: list[Prompt]
    ) -> None:
        store(cache, spans[0])
        queries = [span.query() for span in spans]
        with pytest.raises(KVHoldError, match="257 spans; at most 256"):
            cache.spans(queries[:1] * 257)
        with pytest.raises(KVHoldError, match=r"spans\[1\] has the namespace of exact prompts"):
            cache.spans([queries[0], a_prompt(space, 32).query()])
        unknown = Namespace(model="model", layout=Layout((FULL,), tokens_per_chunk=48)).of_spans
        with pytest.raises(KVHoldError, match="not registered"):
            cache.spans([queries[0], a_prompt(unknown, 64).query()])
        assert cache.status()["held"]["tickets"] == 0
        with cache.spans([]) as none:
            assert len(none) == 0 and not none.arriving
