"""`kvhold bench pd --faults` without engines: how answers are judged, and what a client notices."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from kvhold.core.errors import KVHoldError
from kvhold_lab.bench.command import command
from kvhold_lab.bench.pd.faults import (
    FAULTS,
    KVHOLD,
    NIXL,
    USUAL,
    PdAnswer,
    PdFaultRow,
    by_conditions,
    count_held,
    failed_rows,
    judge,
)
from kvhold_lab.bench.pd.pair import wait_until
from kvhold_lab.bench.pd.requests import PdRequest, count_sure, send, send_prefill, time_answer
from kvhold_lab.bench.pd.trials import TRIALS
from kvhold_lab.engines.process import EngineFailed

EXPECTED = {0: [1, 2, 3], 1: [4, 5, 6]}
RIGHT = [PdAnswer(0, [1, 2, 3], 1.0), PdAnswer(1, [4, 5, 6], 2.0)]


def judged(*answers: PdAnswer, held: dict[str, int] | None = None) -> PdFaultRow:
    return judge("none", KVHOLD, [*RIGHT, *answers], EXPECTED, deadline_s=10.0, held=held or {})


class TestJudge:
    def test_right_answers(self) -> None:
        row = judged()
        assert row == PdFaultRow("none", KVHOLD, 2, 0, 0, 0, 0)
        assert row.is_right

    @pytest.mark.parametrize("tokens", [[1, 2, 4], [1, 2], [1, 2, 3, 4], []])
    def test_other_tokens_are_wrong_also_fewer_and_more(self, tokens: list[int]) -> None:
        row = judged(PdAnswer(0, tokens, 1.0))
        assert (row.requests, row.wrong, row.errors) == (3, 1, 0)
        assert not row.is_right
        assert f"request 0: {tokens} is not [1, 2, 3]" in row.detail

    def test_a_broken_answer_is_an_error_and_wrong_only_if_its_tokens_are(self) -> None:
        row = judged(PdAnswer(0, [1, 2], 1.0, "cut short"), PdAnswer(1, [4, 6], 1.0, "cut short"))
        assert (row.wrong, row.errors, row.errors_allowed) == (1, 2, 0)

    def test_errors_are_allowed_where_the_engine_is_gone_and_wrong_tokens_are_not(self) -> None:
        gone = PdAnswer(0, [], 1.0, "http 502", may_fail=True)
        row = judged(gone)
        assert (row.errors, row.errors_allowed) == (1, 1)
        assert row.is_right
        assert not judged(gone, PdAnswer(0, [], 1.0, "http 502")).is_right
        assert not judged(PdAnswer(0, [9], 1.0, may_fail=True)).is_right

    def test_late_answers_and_late_errors_miss_the_deadline(self) -> None:
        late = PdAnswer(0, [1, 2, 3], 10.1)
        error = PdAnswer(1, [], 11.0, "timeout", may_fail=True)
        assert judged(late, error, PdAnswer(0, [1, 2, 3], 10.0)).deadline_missed == 2
        assert not judged(late).is_right

    def test_what_is_held_at_the_end_is_leaked(self) -> None:
        row = judged(held={"leases": 2, "pinned_chunks": 3})
        assert not row.is_clean
        assert row.leaked == 5
        assert row.detail == "2 leases; 3 pinned_chunks"
        assert not row.is_right

    def test_a_fault_that_did_not_come_proves_nothing(self) -> None:
        row = judge("none", KVHOLD, RIGHT, EXPECTED, deadline_s=9, held={}, notes=["too late"])
        assert row.is_clean and not row.was_made and not row.is_right
        assert row.detail == "too late"

    def test_only_rows_of_kvhold_can_fail(self) -> None:
        bad = judged(held={"leases": 1})
        other = PdFaultRow("none", NIXL, 2, 2, 0, 0, 0)
        assert failed_rows([bad, other, judged()]) == [bad]


def test_what_nodes_hold_is_counted_by_kind() -> None:
    nothing = {"tickets": 0, "leases": 0, "reservations": 0}
    chunks = {
        "pinned_chunks": 0,
        "arriving_chunks": 0,
        "clearing_chunks": 0,
        "announced_chunks": 0,
        "chunks": 7,
    }
    assert count_held([{"held": nothing, **chunks}]) == {}
    held = {"held": nothing | {"tickets": 1}, **chunks, "announced_chunks": 4}
    assert count_held([held]) == {"tickets": 1, "announced_chunks": 4}
    assert count_held([held, held]) == {"tickets": 2, "announced_chunks": 8}


class TestFaults:
    def test_each_fault_has_a_trial(self) -> None:
        assert list(FAULTS) == list(TRIALS)

    def test_faults_are_grouped_so_that_engines_start_once_for_each_condition(self) -> None:
        groups = list(by_conditions(FAULTS, KVHOLD))
        conditions = [conditions for conditions, _ in groups]
        assert len(set(conditions)) == len(conditions) == 4
        assert conditions[0] == USUAL
        assert [fault.name for _, faults in groups for fault in faults] == list(FAULTS)

    def test_only_chosen_faults_are_tried_and_nixl_only_with_what_it_has(self) -> None:
        [(_, faults)] = by_conditions(["node killed", "stale legs"], KVHOLD)
        assert [fault.name for fault in faults] == ["stale legs", "node killed"]
        [(_, faults)] = by_conditions(["node killed", "stale legs"], NIXL)
        assert [fault.name for fault in faults] == ["stale legs"]
        assert list(by_conditions(["node killed"], NIXL)) == []


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ([{"a": -0.1, "b": -2.0}, {"c": -1.0, "d": -1.1}], 2),
        ([{"a": -0.1, "b": -2.0}, {"c": -1.0, "d": -1.0005}, {"a": -0.1, "b": -2.0}], 1),
        ([{"b": -1.0005, "a": -3.0, "c": -1.0}], 0),
        ([{"a": -0.1}], 0),
        ([None], 0),
    ],
)
def test_tokens_are_sure_before_the_first_near_tie(
    top: list[dict[str, float] | None], expected: int
) -> None:
    assert count_sure(top) == expected


def test_an_error_while_waiting_counts_as_not_yet() -> None:
    calls = iter([KVHoldError("gone"), OSError("gone"), None])

    def condition() -> bool:
        if (error := next(calls)) is not None:
            raise error
        return True

    assert wait_until(condition, 60.0)
    assert not wait_until(lambda: False, 0.0)


Answer = Callable[[BaseHTTPRequestHandler], None]


class _Scripted(ThreadingHTTPServer):
    """A server that answers every request alike, and remembers the bodies."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _ScriptedHandler)
        self.answer = answer
        self.bodies: list[dict[str, object]] = []
        self.ids: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _ScriptedHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, _Scripted)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(json.loads(body))
        self.server.ids.append(self.headers["X-Request-Id"])
        self.server.answer(self)

    def log_message(self, format: str, *args: object) -> None:
        pass


def answering(content: str, status: int = 200) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(content.encode())

    return answer


def events(*parts: object) -> str:
    return "".join(
        f"data: {part if isinstance(part, str) else json.dumps(part)}\n\n" for part in parts
    )


def of_tokens(*tokens: int) -> dict[str, object]:
    return {"choices": [{"token_ids": list(tokens)}]}


STREAMED = PdRequest(0, [7, 8], [1, 2, 3])
WHOLE = PdRequest(1, [7, 8], [1, 2, 3])


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], _Scripted]]:
    servers: list[_Scripted] = []

    def start(answer: Answer) -> _Scripted:
        servers.append(server := _Scripted(answer))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


Serve = Callable[[Answer], _Scripted]


class TestSend:
    def send(self, server: _Scripted, request: PdRequest) -> PdAnswer:
        return send(server.url, request, "salt", deadline_s=30.0)

    def test_a_stream(self, serve: Serve) -> None:
        server = serve(answering(events(of_tokens(1), of_tokens(2, 3), "[DONE]")))
        answer = self.send(server, STREAMED)
        assert (answer.number, answer.tokens, answer.error) == (0, [1, 2, 3], "")
        [body] = server.bodies
        assert (body["stream"], body["prompt"], body["cache_salt"]) == (True, [7, 8], "salt")
        assert "kv_transfer_params" not in body

    def test_a_whole_answer(self, serve: Serve) -> None:
        answer = self.send(serve(answering(json.dumps(of_tokens(1, 2)))), WHOLE)
        assert (answer.number, answer.tokens, answer.error) == (1, [1, 2], "")

    def test_a_stream_that_is_cut_keeps_its_tokens(self, serve: Serve) -> None:
        answer = self.send(serve(answering(events(of_tokens(1)))), STREAMED)
        assert (answer.tokens, answer.error) == ([1], "cut short")

    def test_a_client_that_leaves_has_the_tokens_until_then(self, serve: Serve) -> None:
        server = serve(answering(events(of_tokens(1), of_tokens(2), of_tokens(3), "[DONE]")))
        answer = send(server.url, WHOLE, "salt", deadline_s=30.0, leave_after=2)
        assert (answer.tokens, answer.error) == ([1, 2], "")
        assert server.bodies[0]["stream"]

    def test_an_error_in_a_stream_stays_one(self, serve: Serve) -> None:
        text = events(of_tokens(1), {"error": {"message": "gone"}}, "[DONE]")
        answer = self.send(serve(answering(text)), STREAMED)
        assert answer.tokens == [1]
        assert "gone" in answer.error

    @pytest.mark.parametrize("content", ["", "{}", "[1]", "{", '{"choices": []}'])
    def test_no_answer_is_an_error(self, serve: Serve, content: str) -> None:
        assert self.send(serve(answering(content)), WHOLE).error

    def test_a_status_is_an_error(self, serve: Serve) -> None:
        answer = self.send(serve(answering("busy", 503)), STREAMED)
        assert (answer.tokens, answer.error) == ([], "http 503: busy")

    def test_nobody_listens(self) -> None:
        server = _Scripted(answering(""))
        server.server_close()
        url = server.url
        assert "ConnectionRefusedError" in send(url, WHOLE, "salt", deadline_s=30.0).error


class TestLegs:
    def test_the_prefill_part_asks_for_one_token_and_returns_the_parameters(
        self, serve: Serve
    ) -> None:
        server = serve(answering(json.dumps({"kv_transfer_params": {"do_remote_prefill": True}})))
        params = send_prefill(
            server.url,
            STREAMED,
            "salt",
            {"do_remote_decode": True},
            timeout_s=30.0,
            request_id="id",
        )
        assert params == {"do_remote_prefill": True}
        [body] = server.bodies
        assert (body["max_tokens"], body["stream"]) == (1, False)
        assert body["kv_transfer_params"] == {"do_remote_decode": True}
        assert server.ids == ["id"]

    @pytest.mark.parametrize(("content", "status"), [("", 500), ("{", 200)])
    def test_a_prefill_that_fails_raises(self, serve: Serve, content: str, status: int) -> None:
        server = serve(answering(content, status))
        with pytest.raises(EngineFailed, match="prefill engine"):
            send_prefill(server.url, WHOLE, "salt", {}, timeout_s=30.0)

    def test_timed_answers(self, serve: Serve) -> None:
        server = serve(answering(events(of_tokens(1), of_tokens(2), of_tokens(3), "[DONE]")))
        timed = time_answer(server.url, [7], "salt", max_tokens=3, timeout_s=30.0)
        assert timed.tokens == [1, 2, 3]
        assert len(timed.gaps_s) == 2
        url = serve(answering(events(of_tokens(1)))).url
        with pytest.raises(EngineFailed, match="cut short"):
            time_answer(url, [7], "salt", max_tokens=3, timeout_s=30.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "none"], "add --faults"),
        (["--faults", "--fault", "flood"], "'flood' is not one of"),
        (["--faults", "--requests", "1"], "--requests"),
        (["--faults", "--deadline-s", "nan"], "--deadline-s"),
        (["--reuse", "100"], "--reuse"),
        (["--shape", "2P2D"], "add --faults"),
        (["--wire-mbit-s", "9"], "add --two-hosts"),
        (["--faults", "--shape", "3P1D"], "'3P1D' is not one of"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, ["pd", *arguments])
    assert result.exit_code == 2
    assert message in result.output
