"""A real engine blends: its KV and its tokens, and what makes it compute a request in full."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.core.planning import BlendReport
from kvhold.node import NodeClient, end_node
from kvhold_lab.checkpoints import make_checkpoint
from kvhold_lab.engines.process import LoggedProcess
from kvhold_lab.engines.stepped import environment_for
from tests.blend.permits import grant
from tests.vllm.blend_engine import BLOCK, engine_arguments

pytestmark = pytest.mark.vllm

WITHIN_S, REPORTED_S = 400.0, 60.0
SEPARATOR = [3, 4]
ALL = ("first ratio=1.0", "query ratio=1.0", "deviation check_layer=1 ratio=1.0")
SOME = (
    "none",
    "first ratio=0.2",
    "query ratio=0.3",
    "deviation check_layer=1 ratio=0.3",
)
WATCHED = "first ratio=0.25"


class BlendingEngine:
    def __init__(self, folder: Path) -> None:
        self.socket, self.permits = folder / "node.sock", folder / "permits"
        for selector in {*ALL, *SOME, WATCHED}:
            grant(self.permits, model="blended", selector=selector, kl_usual=0.0)
        blend = {
            "selector": "none",
            "permits": str(self.permits),
            "canary_share": 0.0,
            "separator": SEPARATOR,
        }
        given = engine_arguments(make_checkpoint("llama").path, self.socket, blend=blend)
        command = [sys.executable, "-m", "tests.vllm.blend_engine", json.dumps(given)]
        self._process = LoggedProcess(
            "the engine", command, log_path=None, environment=environment_for(1), pipes=True
        )

    def call(self, name: str, **given: Any) -> Any:
        line = json.dumps([name, given]).encode()
        return json.loads(self._process.ask(line, name, WITHIN_S))

    def ask(self, *requests: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.call("ask", requests=requests)
        return answer

    def exact(self, tokens: list[int]) -> list[int]:
        """As vLLM alone answers."""
        answer = self.ask({"tokens": tokens, "rules": {"load": False, "store": False}})
        found: list[int] = answer["tokens"][0]
        return found

    def report(self, answer: dict[str, Any]) -> BlendReport:
        """Of the first request. It comes after its spans are stored."""
        deadline = time.monotonic() + REPORTED_S
        with NodeClient(self.socket, name="test") as client:
            while time.monotonic() < deadline:
                for decision in client.explain(answer["names"][0]):
                    if decision.blend is not None:
                        return decision.blend
                time.sleep(0.01)
        raise AssertionError("the engine has reported no blend")

    def close(self) -> None:
        self._process.kill()
        end_node(self.socket)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendingEngine]:
    engine = BlendingEngine(tmp_path_factory.mktemp("blend"))
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def plain(engine: BlendingEngine) -> None:
    engine.call("select", selector="none")
    engine.call("canary", share=0.0, bound=0.0)
    engine.call("lose_claims", lose=False)


def document(seed: int, count: int) -> list[int]:
    return [7 + (seed * 131 + 17 * at * at + 29 * at) % 400 for at in range(count)]


def prompt(*parts: list[int]) -> dict[str, Any]:
    """The last part is the question."""
    tokens: list[int] = []
    spans = []
    for part in parts:
        spans.append((len(tokens), len(tokens) + len(part)))
        tokens = tokens + part
    return {"tokens": tokens, "spans": spans[:-1]}


QUESTION = document(99, 20)


def test_the_engine_s_model_is_not_refused(engine: BlendingEngine) -> None:
    assert engine.call("refusal") == ""


@pytest.mark.parametrize("selector", ALL)
def test_recomputing_everything_gives_vllm_s_tokens(engine: BlendingEngine, selector: str) -> None:
    engine.call("select", selector=selector)
    for order in ((1, 2, 3), (3, 1, 2)):
        asked = prompt(*(document(one, 50 + 40 * one) for one in order), QUESTION)
        blended = engine.ask(asked)
        assert blended["counts"]["loads"] == 1
        assert blended["tokens"] == [engine.exact(asked["tokens"])]


def test_a_span_without_text_before_it_gives_vllm_s_tokens(engine: BlendingEngine) -> None:
    asked = prompt(document(4, 3 * BLOCK), QUESTION)
    for _ in range(2):
        answer = engine.ask(asked)
        assert answer["tokens"] == [engine.exact(asked["tokens"])]
        assert engine.report(answer).result == "blended"


@pytest.mark.parametrize("selector", SOME)
def test_the_kv_in_the_blocks_is_that_of_transformers(
    engine: BlendingEngine, selector: str
) -> None:
    engine.call("select", selector=selector)
    for order in ((5, 6, 7), (7, 5, 6)):
        asked = prompt(*(document(one, 10 + 25 * one) for one in order), QUESTION)
        assert engine.call("compare", tokens=asked["tokens"], spans=asked["spans"]) < 1e-4


def test_spans_are_stored_once_and_reused_wherever_they_stand(engine: BlendingEngine) -> None:
    one, other = document(8, 2 * BLOCK + 5), document(9, 3 * BLOCK)
    report = engine.report(engine.ask(prompt(one, other, QUESTION)))
    assert [span.is_alone for span in report.spans] == [True, True]
    report = engine.report(engine.ask(prompt(other, QUESTION, one, QUESTION)))
    assert [span.is_alone for span in report.spans] == [False, False]  # a short one is none
    assert (report.exact_tokens, report.reused_tokens) == (0, 5 * BLOCK)
    assert report.num_tokens == report.reused_tokens + report.recomputed_tokens


def test_an_exact_beginning_stays_exact(engine: BlendingEngine) -> None:
    begin, one = document(10, 2 * BLOCK), document(11, 2 * BLOCK)
    engine.ask({"tokens": begin + QUESTION})
    report = engine.report(engine.ask(prompt(begin, one, QUESTION)))
    assert (report.exact_tokens, report.reused_tokens) == (2 * BLOCK, 2 * BLOCK)


def test_separators_mark_spans(engine: BlendingEngine) -> None:
    parts = document(12, 2 * BLOCK), document(13, 2 * BLOCK)
    tokens = [*parts[0], *SEPARATOR, *parts[1], *SEPARATOR, *QUESTION]
    report = engine.report(engine.ask({"tokens": tokens}))
    assert [(span.start, span.end) for span in report.spans] == [(0, 64), (66, 130)]
    assert report.reused_tokens == 4 * BLOCK


class TestServedExactly:
    def test_without_a_permit(self, engine: BlendingEngine) -> None:
        engine.call("select", selector="first ratio=0.6")
        asked = prompt(document(14, 64), document(15, 64), QUESTION)
        answer = engine.ask(asked)
        assert "loads" not in answer["counts"]
        assert answer["tokens"] == [engine.exact(asked["tokens"])]
        report = engine.report(answer)
        assert report.result == "refused"
        assert "there is no permit for 'first ratio=0.6'" in report.note

    @pytest.mark.parametrize(
        ("seed", "spans", "note"),
        [
            (16, [[0, 999]], "kvhold.spans[0] is 0 to 999"),
            (26, [[0, 20]], "shorter than 32 tokens"),
        ],
    )
    def test_with_spans_that_cannot_be_reused(
        self, engine: BlendingEngine, seed: int, spans: list[list[int]], note: str
    ) -> None:
        tokens = document(seed, 70)
        answer = engine.ask({"tokens": tokens, "spans": spans})
        assert answer["tokens"] == [engine.exact(tokens)]
        assert note in engine.report(answer).note

    def test_after_a_fault(self, engine: BlendingEngine) -> None:
        asked = prompt(document(17, 64), document(18, 96), QUESTION)
        engine.report(engine.ask(asked))
        engine.call("lose_claims", lose=True)
        answer = engine.ask(asked)
        assert answer["counts"]["failed_loads"] == 1
        assert answer["tokens"] == [engine.exact(asked["tokens"])]

    def test_as_a_canary_whose_drift_withdraws_the_permit(self, engine: BlendingEngine) -> None:
        engine.call("select", selector=WATCHED)
        engine.call("canary", share=1.0, bound=0.0)
        asked = prompt(document(19, 64), document(20, 96), QUESTION)
        reports: list[BlendReport] = []
        while len(reports) < 6 and (not reports or reports[-1].result == "canary"):
            answer = engine.ask(asked)
            assert answer["tokens"] == [engine.exact(asked["tokens"])]
            reports.append(engine.report(answer))
        assert reports[0].result == "canary"
        assert reports[-1].result == "refused"
        assert "the permit was withdrawn" in reports[-1].note


def test_what_follows_a_span_is_never_found_by_an_exact_lookup(engine: BlendingEngine) -> None:
    asked = prompt(document(21, 64), document(22, 64), document(23, 64), QUESTION)
    assert engine.ask(asked | {"max_tokens": 40})["counts"]["loads"] == 1
    exact = engine.ask({"tokens": asked["tokens"]})
    assert exact["tokens"] == [engine.exact(asked["tokens"])]
    assert "loads" not in exact["counts"]
