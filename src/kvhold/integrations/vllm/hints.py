"""Carry out the hints of requests, and answer each (docs/hints.md).

On the lookup thread; `demote` after the request, `fetch` and `share` on threads of their own. A
hint never fails or delays a request.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvhold.core.api import RetainedPrompt
from kvhold.core.config import Config
from kvhold.core.errors import KVHoldError
from kvhold.core.hints import (
    Hint,
    HintAction,
    HintAnswer,
    HintOutcome,
    RequestHints,
    read_hints,
)
from kvhold.core.keys import HASH_BYTES, Prompt, Query
from kvhold.integrations.vllm.hinted_moves import NOWHERE, TOO_MANY, HintedMoves
from kvhold.integrations.vllm.sessions import Sessions, SessionTurn
from kvhold.integrations.vllm.stats import Tally
from kvhold.integrations.vllm.timed_retains import TimedRetains
from kvhold.node import NodeClient

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

ANSWERED = "kvhold_hints"
"""The field of the answer's `kv_transfer_params`: a list of answers."""

_MOVES = (HintAction.SHARE, HintAction.FETCH)
_UNKNOWN = "unknown"  # the action of a hint that cannot be read
_COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(frozen=True)
class _Move:
    """whole: tokens that can be stored"""

    hint: Hint
    query: Query
    whole: int
    work: "Future[HintAnswer]"


@dataclass(eq=False)
class _HintedRequest:
    """pending:  to be carried out by `work`
    shares:   to be carried out again when the request's chunks are stored
    is_late:  `work` was not done at the request's end
    prompt:   set by `work`; None: not named
    """

    read: RequestHints
    stores: bool
    answered: list[HintAnswer] = field(default_factory=list)
    pending: list[Hint] = field(default_factory=list)
    moves: list[_Move] = field(default_factory=list)
    shares: list[_Move] = field(default_factory=list)
    is_late: bool = False
    work: "Future[list[HintAnswer]] | None" = None
    prompt: Prompt | None = None
    turn: SessionTurn | None = None


class HintedRequests:
    """All but calls to the cache, `_sessions` and `_timed` runs on the scheduler's thread."""

    def __init__(
        self, config: Config, cache: NodeClient, thread: ThreadPoolExecutor, tally: Tally
    ) -> None:
        self._config = config
        self._cache = cache
        self._thread = thread
        self._tally = tally
        self._requests: dict[str, _HintedRequest] = {}
        self._sessions = Sessions()
        self._timed = TimedRetains()
        self._moves = HintedMoves(cache)
        self.refusal = ""
        """Why no hint can be carried out; empty: they can."""

    def __len__(self) -> int:
        return len(self._requests)

    def arrived(
        self, request: "Request", naming: "Future[Prompt | None] | None", *, stores: bool
    ) -> None:
        """naming: None: the request is not cached. stores: it may be stored"""
        read = read_hints(
            getattr(request, "kv_hints", None),
            request.kv_transfer_params,
            getattr(request, "session_id", None),
        )
        if not read:
            return
        hinted = _HintedRequest(read, stores, [self._count(one) for one in read.refused])
        for hint in read.hints:
            reason = self._why_not(hint, naming)
            if reason:
                hinted.answered.append(self._count(hint.answer(HintOutcome.REJECTED, reason)))
            else:
                hinted.pending.append(hint)
        if naming is not None and (hinted.pending or self._is_turn(read)):
            hinted.work = self._thread.submit(self._carry_out, hinted, naming)
        if hinted.work is not None or hinted.answered:
            self._requests[request.request_id] = hinted

    def finished(self, request: "Request") -> dict[str, Any]:
        """The answers, for `kv_transfer_params`."""
        hinted = self._requests.pop(request.request_id, None)
        if hinted is None:
            return {}
        answers = list(hinted.answered)
        if hinted.work is not None:
            hinted.stores = hinted.stores and request.status in _COMPLETE
            if hinted.work.done():
                answers += hinted.work.result()
                answers += [self._count(self._moved(move, hinted)) for move in hinted.moves]
            else:
                hinted.is_late = hinted.stores
                answers += [
                    hint.answer(HintOutcome.DEFERRED, "the node has not answered yet")
                    for hint in hinted.pending
                ]
            self._follow_up(hinted, request)
        return {ANSWERED: [answer.as_json() for answer in answers]} if answers else {}

    def close(self) -> None:
        self._moves.close()

    def _moved(self, move: _Move, hinted: _HintedRequest) -> HintAnswer:
        hint, answer = move.hint, None
        if move.work.done():
            try:
                answer = move.work.result()
            except Exception:
                log.exception("kvhold: hint %s", hint.field)
                answer = hint.answer(HintOutcome.REJECTED, "an error in kvhold")
        is_short = answer is None or answer.num_tokens < move.whole
        is_again = answer is None or answer.outcome is not HintOutcome.REJECTED
        if hint.action is HintAction.SHARE and hinted.stores and is_short and is_again:
            if not self._moves.reserve():
                return hint.answer(HintOutcome.REJECTED, TOO_MANY)
            hinted.shares.append(move)
            return hint.answer(HintOutcome.DEFERRED, "at the request's end", move.whole)
        return answer or hint.answer(HintOutcome.DEFERRED, "begun", move.whole)

    def _why_not(self, hint: Hint, naming: "Future[Prompt | None] | None") -> str:
        if str(hint.action) not in self._config.hints.actions:
            return "the engine's setting hints.actions does not allow this action"
        if hint.needs_session and not self._config.hints.sessions:
            return "a hint about a session needs the engine's setting hints.sessions"
        if naming is None:
            return "the request is not cached"
        return self.refusal

    def _is_turn(self, read: RequestHints) -> bool:
        return bool(read.session_id) and self._config.hints.sessions and not self.refusal

    def _carry_out(
        self, hinted: _HintedRequest, naming: "Future[Prompt | None]"
    ) -> list[HintAnswer]:
        """Raises nothing: the scheduler would raise it again."""
        reason = "its KV cannot be named"
        try:
            prompt = hinted.prompt = None if naming.cancelled() else naming.result()
            if prompt is not None:
                return self._carry_out_on(prompt, hinted)
        except Exception:
            log.exception("kvhold: the hints of a request")
            reason = "an error in kvhold"
        return [self._count(hint.answer(HintOutcome.REJECTED, reason)) for hint in hinted.pending]

    def _carry_out_on(self, prompt: Prompt, hinted: _HintedRequest) -> list[HintAnswer]:
        read, query = hinted.read, prompt.query()
        superseded = None
        if self._is_turn(read) and prompt.num_whole:
            hinted.turn, superseded = self._sessions.begin(read.session_id, query)
        done = [self._do(hint, hinted, prompt, query) for hint in hinted.pending]
        answers = [answer for answer in done if answer is not None]
        if superseded is not None:
            for retained in superseded.retains:
                self._close(retained)
            if superseded.has_chunks:
                self._demote(superseded.query, superseded.first_chunk)
        return [self._count(answer) for answer in answers]

    def _do(
        self, hint: Hint, hinted: _HintedRequest, prompt: Prompt, query: Query
    ) -> HintAnswer | None:
        """None: its answer is that of a move."""
        try:
            if hint.action in _MOVES:
                return self._move(hint, hinted, prompt, query)
            if hint.of_session:
                return self._do_for_session(hint, hinted.read.session_id, query)
            if hint.action is HintAction.DEMOTE:
                return hint.answer(HintOutcome.DEFERRED, "at the request's end", prompt.num_tokens)
            if hint.action is HintAction.PREFETCH:
                self._cache.prefetch(query)
                return hint.answer(HintOutcome.DEFERRED, "begun", prompt.num_tokens)
            return self._retain(hint, hinted, prompt, query)
        except KVHoldError as error:
            log.debug("kvhold: hint %s: %s", hint.field, error)
            return hint.answer(HintOutcome.REJECTED, "the node did not carry it out")

    def _do_for_session(self, hint: Hint, session_id: str, query: Query) -> HintAnswer:
        turns = self._sessions.latest(session_id, query.namespace)
        # the request's own turn is not idle
        turns = [turn for turn in turns if turn != query]
        if not turns:
            return hint.answer(HintOutcome.MISSING, "the session is not known")
        if hint.action is HintAction.PREFETCH:
            for turn in turns:
                self._cache.prefetch(turn)
            return hint.answer(HintOutcome.DEFERRED, "begun")
        if not sum(self._cache.demote(turn).num_chunks for turn in turns):
            return hint.answer(HintOutcome.MISSING, "no idle chunk of it is in memory")
        return hint.answer(HintOutcome.ACCEPTED)

    def _move(
        self, hint: Hint, hinted: _HintedRequest, prompt: Prompt, query: Query
    ) -> HintAnswer | None:
        asked = _first_tokens(hint, prompt, query)
        if isinstance(asked, HintAnswer):
            return asked
        if hint.action is HintAction.SHARE and not self._moves.can_share():
            return hint.answer(HintOutcome.REJECTED, NOWHERE)
        if hint.tier and not self._moves.has_tier(hint.tier):
            return hint.answer(HintOutcome.REJECTED, f"tier: the node has no tier {hint.tier!r}")
        if not self._moves.reserve():
            return hint.answer(HintOutcome.REJECTED, TOO_MANY)
        whole = _whole_tokens(asked, prompt.namespace.layout.tokens_per_chunk)
        begin = self._moves.fetch if hint.action is HintAction.FETCH else self._moves.share
        hinted.moves.append(_Move(hint, asked, whole, begin(hint, asked, whole)))
        return None

    def _retain(
        self, hint: Hint, hinted: _HintedRequest, prompt: Prompt, query: Query
    ) -> HintAnswer:
        most_s = self._config.hints.max_ttl_s
        ttl_s = most_s if hint.ttl_s is None else min(hint.ttl_s, most_s)
        size = prompt.namespace.layout.tokens_per_chunk
        asked = _first_tokens(hint, prompt, query)
        if isinstance(asked, HintAnswer):
            return asked
        query = asked
        retained = self._cache.retain(query, ttl_s)
        if not retained.num_tokens:
            return hint.answer(HintOutcome.REJECTED, "the limits of hints are reached")
        if not hinted.stores and not retained.present_tokens:
            retained.close()
            return hint.answer(
                HintOutcome.MISSING, "none of it is in memory, and the request stores nothing"
            )
        if hinted.turn is not None and hint.action is HintAction.RETAIN:
            hinted.turn.retains.append(retained)
        else:
            for needless in self._timed.add(query, retained, ttl_s, size):
                self._close(needless)
        if retained.present_tokens < retained.num_tokens:
            self._load_missing(query)
        whole = _whole_tokens(query, size)
        reasons = []
        if retained.num_tokens < whole:
            reasons.append(f"only {retained.num_tokens} tokens fit the memory for hints")
        if hint.ttl_s is not None and ttl_s < hint.ttl_s:
            reasons.append(f"for {ttl_s:g} s, the most that hints.max_ttl_s allows")
        return hint.answer(
            HintOutcome.CLIPPED if reasons else HintOutcome.ACCEPTED,
            "; ".join(reasons),
            retained.num_tokens,
        )

    def _load_missing(self, query: Query) -> None:
        try:
            self._cache.prefetch(query)
        except KVHoldError as error:
            log.debug("kvhold: prefetch: %s", error)

    def _follow_up(self, hinted: _HintedRequest, request: "Request") -> None:
        is_complete = request.status in _COMPLETE
        is_turn = self._is_turn(hinted.read)
        demotes = is_complete and any(
            hint.action is HintAction.DEMOTE and not hint.of_session for hint in hinted.pending
        )
        ends_turn = is_turn and (is_complete or hinted.read.ends_session)
        if not (demotes or hinted.shares or hinted.is_late or ends_turn):
            return
        generated: list[int] = []
        if is_complete and self._config.save_decode and not request.resumable:
            first = max(0, request.num_prompt_tokens - self._config.skip_last_n_tokens)
            generated = list(request.all_token_ids[first:-1])  # the last token has no KV
        self._thread.submit(self._after, hinted, generated, demotes)

    def _after(self, hinted: _HintedRequest, generated: list[int], demotes: bool) -> None:
        prompt, read = hinted.prompt, hinted.read
        if hinted.is_late:
            shares = [move for move in hinted.moves if move.hint.action is HintAction.SHARE]
            hinted.shares = [move for move in shares if self._moves.reserve()]
        for move in hinted.shares:
            self._moves.share_stored(move.hint, move.query, move.whole)
        if prompt is None:
            return
        try:
            query = (prompt.followed_by(generated) if generated else prompt).query()
            if hinted.turn is not None and generated:
                self._sessions.extend(read.session_id, hinted.turn, query)
            if self._is_turn(read) and read.ends_session:
                for retained in self._sessions.end(read.session_id, query.namespace):
                    self._close(retained)
            if demotes:
                self._demote(query)
        except Exception:
            log.exception("kvhold: the end of a request with hints")

    def _demote(self, query: Query, first_chunk: int = 0) -> None:
        try:
            self._cache.demote(query, first_chunk=first_chunk)
        except KVHoldError as error:
            log.debug("kvhold: demote: %s", error)

    def _close(self, retained: RetainedPrompt) -> None:
        try:
            retained.close()
        except KVHoldError as error:
            log.debug("kvhold: end of a retain: %s", error)

    def _count(self, answer: HintAnswer) -> HintAnswer:
        self._tally.add("hints", 1, answer.action or _UNKNOWN, str(answer.outcome))
        return answer


def _first_tokens(hint: Hint, prompt: Prompt, query: Query) -> Query | HintAnswer:
    """The query of the chunks that the hint is about, or its rejection."""
    size = prompt.namespace.layout.tokens_per_chunk
    if not prompt.num_whole:
        reason = f"the prompt is shorter than a chunk of {size} tokens"
        return hint.answer(HintOutcome.REJECTED, reason)
    if hint.num_tokens is None or hint.num_tokens >= prompt.num_tokens:
        return query
    if hint.num_tokens < size:
        reason = f"num_tokens is less than a chunk of {size} tokens"
        return hint.answer(HintOutcome.REJECTED, reason)
    return query.first_chunks(hint.num_tokens // size)


def _whole_tokens(query: Query, size: int) -> int:
    tail = query.tail_lengths[-1] if query.tail_lengths else 0
    return len(query.hashes) // HASH_BYTES * size + tail
